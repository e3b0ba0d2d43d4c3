"""Invalid programs: a valid one with exactly one fault put in, and the verdict that it must get.

The verdict follows from the model of matching alone (:mod:`matching`), never from a run. A fault
that leaves a program valid, or of which the model cannot tell how it ends, is not used.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import DrawFn, SearchStrategy

from pytest_smp.ranks.capabilities import EVERYTHING, Capabilities
from pytest_smp.ranks.protocols import Report, VerdictKind
from pytest_smp.strategies.communication import code
from pytest_smp.strategies.communication.coverage import claimed, claimed_dtypes, reduce_ops
from pytest_smp.strategies.communication.drawing import (
    MOST_RANKS,
    Choose,
    _chooser,
    check_arguments,
    draw_program,
    sample,
)
from pytest_smp.strategies.communication.matching import ending
from pytest_smp.strategies.communication.operations import OPERATIONS
from pytest_smp.strategies.communication.program import Program, Runnable
from pytest_smp.strategies.communication.steps import Action, Plans, Step


@dataclass(frozen=True)
class ProgramFault:
    """One deviation of one rank from its program.

    Attributes:
        kind: a key of FAULTS.
        rank: the deviating rank.
        number: the number of the step.
        step: the step that the rank calls instead, or also.
        other: in a swap, the number of the other step.
    """

    kind: str
    rank: int
    number: int
    step: Step | None = None
    other: int = -1


class Truth(NamedTuple):
    """The required end of an invalid program.

    Attributes:
        verdict: the verdict of the run.
        rank: the rank at fault, which the message must name.
        lines: lines of the code, each of which the message must show.
        others: lines of the code, one of which the message must show, if there are any.
        ranks: all ranks that have to do with the fault; another rank in the message is noise.
    """

    verdict: VerdictKind
    rank: int
    lines: tuple[int, ...]
    others: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()


class Score(NamedTuple):
    """The agreement of a report with the truth.

    Attributes:
        verdict: whether the class of the verdict is right.
        rank: whether the rank at fault is named; of a deadlock, in the chain or cycle of waits.
        lines: whether the message shows the user's lines that matter.
    """

    verdict: bool
    rank: bool
    lines: bool


# ---- Kinds of faults -----------------------------------------------------------------------------

Candidates = Callable[[Program, Capabilities], Iterator[ProgramFault]]


def _calls(program: Program) -> Iterator[tuple[int, Action]]:
    for rank, plan in enumerate(program.plans):
        for action in plan:
            if action.what == "call":
                yield rank, action


def _altered(
    kind: str, changes: Callable[[Program, Capabilities, int, Step], Iterator[Step]]
) -> Candidates:
    """Faults by which a rank calls another step instead of its own."""

    def candidates(program: Program, capabilities: Capabilities) -> Iterator[ProgramFault]:
        for rank, action in _calls(program):
            for step in changes(program, capabilities, rank, action.step):
                yield ProgramFault(kind, rank, action.step.number, step)

    return candidates


def _missing_call(program: Program, capabilities: Capabilities) -> Iterator[ProgramFault]:
    for rank, action in _calls(program):
        yield ProgramFault("missing call", rank, action.step.number)


def _early_return(program: Program, capabilities: Capabilities) -> Iterator[ProgramFault]:
    for rank, action in _calls(program):
        yield ProgramFault("early return", rank, action.step.number)


def _asynchronous(program: Program) -> Iterator[tuple[int, Action]]:
    return ((rank, action) for rank, action in _calls(program) if not action.waits)


def _missing_wait(program: Program, capabilities: Capabilities) -> Iterator[ProgramFault]:
    for rank, action in _asynchronous(program):
        yield ProgramFault("missing wait", rank, action.step.number)


def _swap(program: Program, capabilities: Capabilities) -> Iterator[ProgramFault]:
    for rank, plan in enumerate(program.plans):
        before: dict[str, int] = {}
        for action in plan:
            if action.what == "call":
                group, number = action.step.group, action.step.number
                if group in before:
                    yield ProgramFault("swap", rank, before[group], other=number)
                before[group] = number


def _wrong_root(
    program: Program, capabilities: Capabilities, rank: int, step: Step
) -> Iterator[Step]:
    if OPERATIONS[step.operation].rooted:
        yield from (replace(step, root=root) for root in step.members if root != step.root)


def _wrong_reduce_op(
    program: Program, capabilities: Capabilities, rank: int, step: Step
) -> Iterator[Step]:
    if OPERATIONS[step.operation].reduces:
        for op in reduce_ops(step.operation, step.dtype, capabilities):
            if op != step.reduce_op:
                yield replace(step, reduce_op=op)


_COUSINS = {  # take the same tensors
    "all_reduce": ("broadcast", "reduce"),
    "broadcast": ("all_reduce",),
    "reduce": ("all_reduce",),
    "all_gather": ("all_to_all",),
    "all_gather_single": ("all_gather",),
    "gather": ("all_gather",),
    "reduce_scatter": ("scatter",),
    "barrier": ("all_reduce",),
    "smp.allgather": ("smp.barrier",),
    "smp.barrier": ("smp.allgather",),
}


def _wrong_operation(
    program: Program, capabilities: Capabilities, rank: int, step: Step
) -> Iterator[Step]:
    for name in _COUSINS.get(step.operation, ()):
        operation = OPERATIONS[name]
        if name not in claimed(capabilities):
            continue
        dtypes = claimed_dtypes(name, capabilities)
        dtype = step.dtype if step.dtype in dtypes else dtypes[0]
        size = len(step.members)
        yield replace(
            step,
            operation=name,
            dtype=dtype,
            reduce_op=reduce_ops(name, dtype, capabilities)[0] if operation.reduces else "",
            root=step.members[0] if operation.rooted else -1,
            shape=step.shape if step.shape or name != "all_to_all" else (1,),
            rows=((1,) * size,) * size if name == "all_to_all" else (),
        )


def _wrong_dtype(
    program: Program, capabilities: Capabilities, rank: int, step: Step
) -> Iterator[Step]:
    if OPERATIONS[step.operation].has_tensors:
        dtypes = claimed_dtypes(step.operation, capabilities)
        for dtype in dtypes:
            defined = not step.reduce_op or step.reduce_op in reduce_ops(
                step.operation, dtype, capabilities
            )
            if dtype != step.dtype and defined:
                yield replace(step, dtype=dtype)


def _wrong_shape(
    program: Program, capabilities: Capabilities, rank: int, step: Step
) -> Iterator[Step]:
    if not OPERATIONS[step.operation].has_tensors:
        return
    if not step.rows:
        yield replace(step, shape=(step.shape[0] + 1, *step.shape[1:]) if step.shape else (2,))
        return
    at = step.position(rank)
    for to in range(len(step.members)):
        if to != at:
            rows = [[*row] for row in step.rows]
            rows[at][to] += 1
            yield replace(step, rows=tuple(map(tuple, rows)))


def _wrong_peer(
    program: Program, capabilities: Capabilities, rank: int, step: Step
) -> Iterator[Step]:
    if step.operation == "batch_isend_irecv":
        for shift in range(1, len(step.members)):
            if shift != step.shift:
                yield replace(step, shift=shift)
    elif step.operation in ("send", "smp.send"):
        for other in step.members:
            if other not in (step.root, step.peer):
                yield replace(step, peer=other) if rank == step.root else replace(step, root=other)
    elif step.operation == "smp.broadcast" and rank != step.root:
        for other in step.members:
            if other not in (step.root, rank):
                yield replace(step, root=other)


def _wrong_tag(
    program: Program, capabilities: Capabilities, rank: int, step: Step
) -> Iterator[Step]:
    if step.operation in ("send", "batch_isend_irecv"):
        yield replace(step, tag=step.tag + 1)


def _wrong_group(
    program: Program, capabilities: Capabilities, rank: int, step: Step
) -> Iterator[Step]:
    if step.operation.startswith("smp."):
        return  # a position in another group of the API is another rank: that is a wrong peer
    groups = {"": tuple(range(program.ranks)), **program.groups}
    for group, members in groups.items():
        size = len(members)
        needed = {rank} | ({step.root} if OPERATIONS[step.operation].rooted else set())
        if step.peer >= 0:
            needed |= {step.root, step.peer}
        alone = size == 1 and not OPERATIONS[step.operation].alone
        if group != step.group and needed <= {*members} and not alone:
            rows = ((1,) * size,) * size if step.rows else ()
            shift = 1 + (step.shift - 1) % (size - 1) if step.shift else 0
            yield replace(step, group=group, members=members, rows=rows, shift=shift)


def _unmatched_send(program: Program, capabilities: Capabilities) -> Iterator[ProgramFault]:
    everybody = tuple(range(program.ranks))
    for rank, action in _calls(program):
        peer = (rank + 1) % program.ranks
        step = Step(len(program.steps), "send", "", everybody, rank, peer, shape=(2,), lags=(0, 0))
        now = replace(step, lags=(None, None))
        sends = []
        if "send" in claimed(capabilities):
            sends += [step, now]
        if "smp.send" in claimed(capabilities):
            sends.append(replace(now, operation="smp.send", group="WORLD"))
        yield from (
            ProgramFault("unmatched send", rank, action.step.number, send) for send in sends
        )


def _changed(target: str) -> Candidates:
    """Faults by which a rank writes to a tensor of its own while a call has it."""
    kind = "changed input" if target == "x" else "changed output"

    def candidates(program: Program, capabilities: Capabilities) -> Iterator[ProgramFault]:
        for rank, action in _asynchronous(program):
            step, operation = action.step, OPERATIONS[action.step.operation]
            shapes = operation.inputs if target == "x" else operation.outputs
            lie = step.input if target == "x" else step.output
            some = any(0 not in shape for shape in shapes(step, rank))
            # In place there is one tensor, which counts as an output. torch refuses to write to an
            # expanded one.
            if some and lie.layout != "expanded" and not (operation.in_place and target == "x"):
                yield ProgramFault(kind, rank, step.number)

    return candidates


#: Every kind of fault, simplest first, and where a program can have it.
FAULTS: Mapping[str, Candidates] = {
    "missing call": _missing_call,
    "early return": _early_return,
    "swap": _swap,
    "wrong operation": _altered("wrong operation", _wrong_operation),
    "wrong root": _altered("wrong root", _wrong_root),
    "wrong reduce op": _altered("wrong reduce op", _wrong_reduce_op),
    "wrong dtype": _altered("wrong dtype", _wrong_dtype),
    "wrong shape": _altered("wrong shape", _wrong_shape),
    "wrong peer": _altered("wrong peer", _wrong_peer),
    "wrong tag": _altered("wrong tag", _wrong_tag),
    "wrong group": _altered("wrong group", _wrong_group),
    "missing wait": _missing_wait,
    "unmatched send": _unmatched_send,
    "changed input": _changed("x"),
    "changed output": _changed("y"),
}
#: Those that only a memory model of asynchronous work detects.
RACES = ("changed input", "changed output")


# ---- Putting a fault in --------------------------------------------------------------------------


def faulty(plans: Plans, fault: ProgramFault) -> Plans:
    """The plans with the fault in them."""
    plan = [*plans[fault.rank]]
    own = [action for action in plan if action.step.number == fault.number]
    call = next(action for action in own if action.what == "call")
    at = plan.index(call)
    if fault.kind == "missing call":
        plan = [action for action in plan if action not in own]
    elif fault.kind == "missing wait":
        plan = [action for action in plan if action not in own or action.what == "call"]
    elif fault.kind == "early return":
        plan[at:] = [Action((call.slot[0], 0, -1, 0), "return", call.step)]
    elif fault.kind == "unmatched send":
        assert fault.step is not None
        waits = fault.step.lags[0] is None
        plan.insert(at, Action((call.slot[0], 0, -1, 0), "call", fault.step, waits))
    elif fault.kind in RACES:
        target = "x" if fault.kind == "changed input" or _in_place(call.step) else "y"
        write = Action((call.slot[0], 0, 1, 0), "write", call.step, target=target)
        plan.insert(at + 1, write)
    elif fault.kind == "swap":
        plan = _swapped(plan, call, fault.other)
    else:
        assert fault.step is not None
        plan = [replace(action, step=fault.step) if action in own else action for action in plan]
    return (*plans[: fault.rank], tuple(plan), *plans[fault.rank + 1 :])


def _in_place(step: Step) -> bool:
    return OPERATIONS[step.operation].in_place


def _swapped(plan: list[Action], first: Action, other: int) -> list[Action]:
    second = next(a for a in plan if a.what == "call" and a.step.number == other)
    moved = {first: replace(first, slot=second.slot), second: replace(second, slot=first.slot)}
    swapped = [moved.get(action, action) for action in plan]
    waits_behind = second.slot[0], 1, 0, first.slot[3]
    swapped = [
        replace(action, slot=max(action.slot, waits_behind))
        if action.what == "wait" and action.step is first.step
        else action
        for action in swapped
    ]
    return sorted(swapped, key=lambda action: action.slot)


# ---- The program ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class InvalidProgram(Runnable):
    """A program with one fault, and how it must end: see :func:`invalid_programs`.

    Attributes:
        program: the valid one.
        fault: what was put in.
    """

    program: Program
    fault: ProgramFault

    @property
    def ranks(self) -> int:  # type: ignore[override]
        """The size of the world."""
        return self.program.ranks

    @property
    def verdict(self) -> VerdictKind:
        """The verdict that the run must get."""
        return self.truth.verdict

    @functools.cached_property
    def plans(self) -> Plans:
        """The actions of each rank, in order."""
        return faulty(self.program.plans, self.fault)

    @functools.cached_property
    def _printed(self) -> code.Printed:
        fault, program = self.fault, self.program
        sentence = f"Invalid: {fault.kind} (rank {fault.rank}, step {fault.number})."
        return code.printed(
            program.ranks, program.groups, program.degrees, self.plans, sentence, False
        )

    @functools.cached_property
    def truth(self) -> Truth:
        """The end that the run must have.

        Raises InvalidArgument if the fault leaves the program valid, or its end in doubt.
        """
        verdict, rank, lines, others = self._end()
        where = self._printed.lines
        shown, one_of = (
            tuple(dict.fromkeys(where[each, action.slot] for each, action in actions))
            for actions in (lines, others)
        )
        ranks = {rank, *(each for each, _ in (*lines, *others))}
        return Truth(verdict, rank, shown, one_of, tuple(sorted(ranks)))

    def _end(self) -> tuple[VerdictKind, int, list[tuple[int, Action]], list[tuple[int, Action]]]:
        rank, end = self.fault.rank, ending(self.plans)
        if end.doubtful or len(end.mismatches) > 1:
            raise InvalidArgument(f"{self.fault}: how the program ends is in doubt")
        if end.mismatches:
            calls = end.mismatches[0].calls
            if rank not in calls:
                raise InvalidArgument(f"{self.fault}: others than rank {rank} differ")
            others = [(each, action) for each, (action, _) in calls.items() if each != rank]
            return VerdictKind.MISMATCH, rank, [(rank, calls[rank][0])], others
        if end.blocked:
            return VerdictKind.DEADLOCK, rank, [*end.blocked.items()], []
        if end.left:
            return VerdictKind.LEAK, rank, end.left, []
        if self.fault.kind in RACES:
            call = next(
                action
                for action in self.plans[rank]
                if action.what == "call" and action.step.number == self.fault.number
            )
            return VerdictKind.RACE, rank, [(rank, call)], []
        raise InvalidArgument(f"{self.fault}: leaves the program valid")

    def score(self, report: Report) -> Score:
        """Compare a report with the truth."""
        truth, message = self.truth, str(report.error)
        chain = message
        if truth.verdict is VerdictKind.DEADLOCK:
            chain = "\n".join(re.findall(r"^wait-for.*$", message, re.MULTILINE))
        shown = _shown(message)
        return Score(
            report.verdict is truth.verdict,
            truth.rank in named(chain),
            shown.issuperset(truth.lines) and (not truth.others or bool(shown & {*truth.others})),
        )

    def noise(self, report: Report) -> int:
        """The number of ranks and lines in the message that have nothing to do with the fault.

        A rank is named where a line of the message begins with it, or in the chain of waits; in the
        words of a call it is a partner.
        """
        truth, message = self.truth, str(report.error)
        heads = re.findall(r"^ *(?:\w+: )?(ranks? [\d, -]+)|^(wait-for.*)$", message, re.MULTILINE)
        spoken = named("\n".join(text for head in heads for text in head))
        lines = _shown(message) - {*truth.lines, *truth.others}
        return len(spoken - {*truth.ranks}) + len(lines)


def _shown(message: str) -> set[int]:
    """The lines of the program's code that a message shows."""
    return {int(number) for number in re.findall(rf"{re.escape(code.FILENAME)}:(\d+) in", message)}


def named(message: str) -> set[int]:
    """The ranks that a message names: ``rank 3``, ``ranks 0-2, 5``."""
    ranks: set[int] = set()
    for listed in re.findall(r"\branks? (\d+(?:-\d+)?(?:, \d+(?:-\d+)?)*)", message):
        for part in listed.split(", "):
            first, _, last = part.partition("-")
            ranks |= {*range(int(first), int(last or first) + 1)}
    return ranks


# ---- Drawing -------------------------------------------------------------------------------------


#: By kind of fault and reason, how many were tried and not used: "in doubt", or "still valid".
Unused = collections.Counter[tuple[str, str]]


def draw_fault(
    choose: Choose,
    program: Program,
    capabilities: Capabilities,
    kinds: tuple[str, ...],
    unused: Unused | None = None,
) -> InvalidProgram | None:
    """The program with a fault of one of these kinds, or None if it can have none."""
    first = choose(len(kinds))
    for kind in (*kinds[first:], *kinds[:first]):
        candidates = [*FAULTS[kind](program, capabilities)]
        if not candidates:
            continue
        at = choose(len(candidates))
        for fault in (*candidates[at:], *candidates[:at]):
            invalid = InvalidProgram(program, fault)
            try:
                invalid._end()
            except InvalidArgument as error:
                if unused is not None:
                    why = "still valid" if "leaves the program valid" in str(error) else "in doubt"
                    unused[kind, why] += 1
                continue
            return invalid
    return None


def sample_invalid(
    choose: Choose,
    *,
    most_ranks: int = MOST_RANKS,
    max_calls: int = 8,
    capabilities: Capabilities = EVERYTHING,
    kinds: tuple[str, ...] = tuple(FAULTS),
    unused: Unused | None = None,
) -> InvalidProgram:
    """An invalid program drawn without Hypothesis: see :func:`sample`.

    ``unused`` counts the faults that were drawn and not used.
    """
    while True:
        program = sample(
            choose,
            fewest_ranks=2,
            most_ranks=most_ranks,
            max_calls=max_calls,
            capabilities=capabilities,
        )
        invalid = draw_fault(choose, program, capabilities, kinds, unused)
        if invalid is not None:
            return invalid


@st.composite
def _invalid(
    draw: DrawFn, valid: SearchStrategy[Program], capabilities: Capabilities, kinds: tuple[str, ...]
) -> InvalidProgram:
    program = draw(valid)
    return draw_fault(_chooser(draw), program, capabilities, kinds)  # type: ignore[return-value]


def invalid_programs(
    *,
    ranks: int | None = None,
    max_ranks: int = MOST_RANKS,
    max_calls: int = 8,
    capabilities: Capabilities = EVERYTHING,
    faults: tuple[str, ...] = tuple(FAULTS),
) -> SearchStrategy[InvalidProgram]:
    """Draw programs with exactly one fault, and the truth about it: see :class:`InvalidProgram`.

    A run of ``program.run`` on ``program.ranks`` ranks must get ``program.verdict``: DEADLOCK,
    MISMATCH, LEAK or RACE. ``program.truth`` also says who is at fault and which lines of
    ``program.code()`` the message must show; ``program.score(report)`` compares. Shrinks towards a
    call that one of few ranks leaves out.

    Args:
        ranks: in the world of every program, at least 2; None draws from 2 to ``max_ranks``.
        max_ranks: most ranks, up to 8.
        max_calls: most communications in a program.
        capabilities: of the backend: nothing else is drawn.
        faults: the kinds to draw from, keys of ``FAULTS``.

    Raises:
        InvalidArgument: an argument is not as above, or nothing that communicates is claimed.
    """
    arguments = check_arguments(ranks, max_ranks, max_calls, capabilities, 2)
    if not isinstance(faults, tuple | list) or not faults:
        raise InvalidArgument(f"faults={faults!r}: must list some of {', '.join(FAULTS)}")
    for kind in faults:
        if kind not in FAULTS:
            raise InvalidArgument(f"faults: {kind!r} is none of {', '.join(FAULTS)}")
    programs = draw_program(*arguments)
    drawn = _invalid(programs, capabilities, tuple(faults))
    return drawn.filter(lambda invalid: invalid is not None)
