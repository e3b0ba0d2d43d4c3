"""Programs as Python code that runs alone: a readable test file with a line for every call.

The printed text itself runs: it is compiled under a name of its own, so that tracebacks and verdicts
show its lines.
"""

from __future__ import annotations

import functools
import linecache
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pytest_smp.strategies.communication.operations import (
    OPERATIONS,
    Held,
    expected,
    given,
    neighbour,
    payload,
)
from pytest_smp.strategies.communication.steps import Action, Lie, Plans, Shape, Slot, Step
from pytest_smp.strategies.recipes import LAYOUTS
from smp_core.errors import SmpError, VerdictError

#: The first lines of every program. They are always the same, because Hypothesis tells failures apart by
#: the line that raised, and one bug of a backend is one failure.
_HEAD = '''\
import pytest
import torch
import torch.distributed as dist

import smp_core.torch as smp


def laid(values, dtype, shape, strides=None, offset=0):
    """A tensor of these values (None: of nothing yet) between guards: bytes 0x80."""
    strides = strides or torch.empty(shape).stride()
    last = sum((side - 1) * stride for side, stride in zip(shape, strides)) if 0 not in shape else -1
    storage = torch.full(((offset + last + 4) * dtype.itemsize,), 0x80, dtype=torch.uint8)
    tensor = storage.view(dtype).as_strided(shape, strides, offset)
    if values is not None:
        once = tensor[:1] if 0 in strides else tensor  # rows that share memory are written once
        once.copy_(torch.tensor(values, dtype=dtype).reshape(once.shape))
    return tensor


def check(tensor, values):
    """It holds these values, bit by bit (None: whatever), and no guard was written."""
    if isinstance(tensor, list):
        for each, part in zip(tensor, values, strict=True):
            check(each, part)
        return
    wanted = laid(values, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
    if values is None:
        wanted.copy_(tensor)
    was, wanted_bytes = (
        torch.empty(0, dtype=torch.uint8).set_(each.untyped_storage()) for each in (tensor, wanted)
    )
    assert torch.equal(was, wanted_bytes), f"{tensor} in {was.tolist()}: expected {values}"


def check_object(got, wanted):
    """What came is what was sent."""
    assert got == wanted, f"{got!r}: expected {wanted!r}"


'''


class Printed(NamedTuple):
    """A program's text, and the line of each action of each rank."""

    text: str
    lines: Mapping[tuple[int, Slot], int]  #: by rank and slot; lines count from 1


_VALUES, _INPUT, _OUTPUT, _CALL, _RESULT, _INPUT_AFTER = range(6)  # the lines of an action


class Texts:
    """The lines of a program's steps on ``world`` ranks."""

    def __init__(self, world: int, checks: bool) -> None:
        self._world, self._checks = world, checks
        self._known: dict[Step, tuple[Mapping[int, Any], Held]] = {}

    def lines(self, action: Action, rank: int) -> Iterator[tuple[int, str]]:
        """The code of ``rank`` for this action: pairs of a part's number and its line, in order."""
        step, number = action.step, action.step.number
        if action.what == "return":
            yield _CALL, "return"
        elif action.what == "write":
            yield _CALL, _write(step, action.target)
        elif action.what == "wait":
            many = step.operation == "batch_isend_irecv"
            wait = f"for work in w{number}: work.wait()" if many else f"w{number}.wait()"
            yield _CALL, wait
            yield from self._check(step, rank)
        elif step.operation.startswith("smp."):
            yield from self._object(step, rank)
        else:
            yield from self._tensors(step, rank)
            call = _call(step, rank, action.waits)
            yield _CALL, call if action.waits else f"w{number} = {call}"
            if action.waits:
                yield from self._check(step, rank)

    def _model(self, step: Step) -> tuple[Mapping[int, Any], Held]:
        """The inputs and the expected results of a step, by rank."""
        known = self._known.get(step)
        if known is None:
            inputs = {rank: given(step, rank, self._world) for rank in step.participants}
            results = expected(step, inputs) if self._checks else {}
            operation = OPERATIONS[step.operation]
            known = self._known[step] = (
                _plain({rank: held for rank, held in inputs.items() if held}, operation.x_list),
                _plain(results, operation.y_list),
            )
        return known

    def _tensors(self, step: Step, rank: int) -> Iterator[tuple[int, str]]:
        operation, number = OPERATIONS[step.operation], step.number
        shapes, outputs = operation.inputs(step, rank), operation.outputs(step, rank)
        inputs, _ = self._model(step)
        lie = step.output if operation.in_place else step.input
        if shapes:
            yield _VALUES, f"v{number} = {_by_rank(inputs)}"
            yield (
                _INPUT,
                f"x{number} = {_laid(f'v{number}', step.dtype, shapes, lie, operation.x_list)}",
            )
        elif operation.in_place:
            yield _INPUT, f"x{number} = {_laid('None', step.dtype, outputs, lie, False)}"
        if outputs and not operation.in_place:
            text = _laid("None", step.dtype, outputs, step.output, operation.y_list)
            yield _OUTPUT, f"y{number} = {text}"

    def _check(self, step: Step, rank: int) -> Iterator[tuple[int, str]]:
        operation, number = OPERATIONS[step.operation], step.number
        _, results = self._model(step)
        if not self._checks or not operation.has_tensors:
            return
        if rank in results:
            name = f"x{number}" if operation.in_place else f"y{number}"
            defined = {each: values for each, values in results.items() if values is not None}
            wanted = _by_rank(defined) if results[rank] is not None else "None"
            zero = f"{name} += 0; " if _signed_zeros(step) else ""
            yield _RESULT, f"{zero}check({name}, {wanted})"
        if operation.inputs(step, rank) and not operation.in_place:
            yield _INPUT_AFTER, f"check(x{number}, v{number})"

    def _object(self, step: Step, rank: int) -> Iterator[tuple[int, str]]:
        name, group = step.operation, _api_group(step.group)
        sends = step.operation == "smp.allgather" or (
            rank == step.root and step.operation != "smp.barrier"
        )
        objects = {each: payload(step, each) for each in step.participants}
        if step.operation != "smp.allgather":
            objects = {step.root: objects.get(step.root)}
        variable = f"v{step.number}"
        if sends:
            yield _VALUES, f"{variable} = {_by_rank(objects)}"
        rank_type = f"smp.RankType.{step.group}_RANK"
        if name == "smp.barrier":
            yield _CALL, f"{name}({group})"
        elif name == "smp.allgather":
            yield _CALL, f"y{step.number} = {name}({variable}, {group})"
            if self._checks:
                yield _RESULT, f"check_object(y{step.number}, {[*objects.values()]!r})"
        elif sends:
            to = group if name == "smp.broadcast" else f"{step.position(step.peer)}, {rank_type}"
            yield _CALL, f"{name}({variable}, {to})"
        else:
            yield _CALL, f"y{step.number} = smp.recv_from({step.position(step.root)}, {rank_type})"
            if self._checks:
                yield _RESULT, f"check_object(y{step.number}, {objects[step.root]!r})"


def _plain(held: Mapping[int, Any], as_list: bool) -> dict[int, Any]:
    """Each rank's list of tensors, or its one tensor, by rank."""
    return {
        rank: tensors if as_list else tensors[0]
        for rank, tensors in held.items()
        if as_list or tensors
    }


def _by_rank(table: Mapping[int, Any]) -> str:
    """A value, chosen by rank where the ranks' differ."""
    texts = {rank: _text(value) for rank, value in table.items()}
    if len(set(texts.values())) <= 1:
        return next(iter(texts.values()), "None")
    return f"{{{', '.join(f'{rank}: {texts[rank]}' for rank in sorted(texts))}}}[rank]"


def _text(value: Any) -> str:
    """``repr``, but of a complex number what has its value: ``-1j`` is read as ``-0.0-1.0j``."""
    if isinstance(value, complex):
        return f"({value.real!r}{value.imag:+}j)"
    if isinstance(value, list) and value and isinstance(value[0], list | complex):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value)


def _laid(values: str, dtype: str, shapes: Sequence[Shape], lie: Lie, as_list: bool) -> str:
    geometries = [f"torch.{dtype}, {_geometry(shape, lie)}" for shape in shapes]
    if not as_list:
        return f"laid({values}, {geometries[0]})"
    if len(set(geometries)) == 1:
        each, over = ("None", f"range({len(shapes)})") if values == "None" else ("v", values)
        return f"[laid({each}, {geometries[0]}) for {'_' if each == 'None' else 'v'} in {over}]"
    parts = (
        f"laid({'None' if values == 'None' else f'{values}[{at}]'}, {geometry})"
        for at, geometry in enumerate(geometries)
    )
    return f"[{', '.join(parts)}]"


def _geometry(shape: Shape, lie: Lie) -> str:
    text = repr(shape)
    if lie.layout != "contiguous":
        text += f", {LAYOUTS[lie.layout].strides(shape)}"
    if lie.offset:
        text += f", offset={lie.offset}"
    return text


def _signed_zeros(step: Step) -> bool:
    """Return whether the sign of a zero depends on the order of reduction, so that any sign is right."""
    return step.dtype.startswith("complex") and step.reduce_op in ("PRODUCT", "AVG")


def _call(step: Step, rank: int, waits: bool) -> str:
    operation, number = OPERATIONS[step.operation], step.number
    group = [f"group={step.group}"] if step.group else []
    tag = [f"tag={step.tag}"] if step.tag else []
    if step.operation == "send":
        verb, tensor, peer = (
            ("send", f"x{number}", step.peer)
            if rank == step.root
            else ("recv", f"y{number}", step.root)
        )
        arguments = [tensor, str(peer), *group, *tag]
        return f"dist.{'' if waits else 'i'}{verb}({', '.join(arguments)})"
    if step.operation == "batch_isend_irecv":
        posts = [
            f"dist.P2POp({', '.join([verb, tensor, str(neighbour(step, rank, shift)), *group, *tag])})"
            for verb, tensor, shift in (
                ("dist.isend", f"x{number}", step.shift),
                ("dist.irecv", f"y{number}", -step.shift),
            )
        ]
        return f"dist.batch_isend_irecv([{', '.join(posts)}])"
    x = f"x{number}" if operation.in_place or operation.inputs(step, rank) else "None"
    y = f"y{number}" if operation.outputs(step, rank) else "None"
    arguments = [
        argument.format(x=x, y=y, root=step.root, op=step.reduce_op)
        for argument in operation.arguments
    ]
    if step.operation == "all_to_all_single" and not even(step):
        at = step.position(rank)
        arguments += [f"{[rows[at] for rows in step.rows]}", f"{[*step.rows[at]]}"]
    later = [] if waits else ["async_op=True"]
    return f"dist.{step.operation}({', '.join([*arguments, *group, *later])})"


def even(step: Step) -> bool:
    """Return whether all members of an all-to-all send equally many rows to each other."""
    return len({count for rows in step.rows for count in rows}) == 1


def _write(step: Step, target: str) -> str:
    """Change every element of a tensor, or of the first that has any."""
    operation = OPERATIONS[step.operation]
    name = f"{target}{step.number}"
    if (target == "x" and operation.x_list) or (target == "y" and operation.y_list):
        name = f"next(each for each in {name} if each.numel())"
    return f"{name}.{'logical_not_' if step.dtype == 'bool' else 'zero_'}()"


def _api_group(kind: str) -> str:
    return "smp.WORLD" if kind == "WORLD" else f"smp.{kind}_GROUP"


# ---- The whole text ------------------------------------------------------------------------------


def printed(
    ranks: int,
    groups: Mapping[str, tuple[int, ...]],
    degrees: tuple[int, int],
    plans: Plans,
    sentence: str,
    checks: bool,
) -> Printed:
    """The program as a test file.

    Args:
        ranks: the size of the world.
        groups: the members of each group by its variable, in the order in which the groups are made.
        degrees: the degrees of pipeline and tensor parallelism.
        plans: the actions of each rank.
        sentence: the docstring of the test.
        checks: whether values are checked.
    """
    body, where = _body(plans, Texts(ranks, checks), ranks)
    everybody = tuple(range(ranks))
    start = []
    if degrees != (1, 1):
        keys = zip(("pipeline", "tensor"), degrees, strict=True)
        parameters = [f'"{key}_parallel_degree": {value}' for key, value in keys if value > 1]
        start.append(f'    smp.init({{{", ".join(parameters)}, "ddp": True}})')
    end = [""] if groups else []
    for name, members in groups.items():
        how = "" if sorted(members) == [*members] else ", sort_ranks=False"
        start.append(f"    {name} = dist.new_group({[*members]}{how})")
        end += _block(tuple(sorted(members)), everybody, f"dist.destroy_process_group({name})")
    head = [
        *_HEAD.splitlines(),
        f"@pytest.mark.smp(ranks={ranks})",
        "def test_program():",
        f'    """{sentence}"""',
        "    rank = dist.get_rank()",
        *start,
    ]
    text = "\n".join([*head, *body, *end]) + "\n"
    return Printed(text, {key: len(head) + line for key, line in where.items()})


def _body(plans: Plans, texts: Texts, world: int) -> tuple[list[str], dict[tuple[int, Slot], int]]:
    """The lines of all actions, and the line of each action by rank and slot."""
    text: list[str] = []
    where: dict[tuple[int, Slot], int] = {}
    everybody = tuple(range(world))
    step, block = -1, everybody
    for (slot, part), ranks, line in _merged(plans, texts):
        if slot[0] != step:
            step, block = slot[0], everybody
            text.append("")
        text += _block(ranks, everybody, line)[1 if ranks == block and ranks != everybody else 0 :]
        block = ranks
        if part == _CALL:
            where.update({(rank, slot): len(text) for rank in ranks})
    return text, where


def _block(ranks: tuple[int, ...], everybody: tuple[int, ...], line: str) -> list[str]:
    """A line that these ranks run."""
    if ranks == everybody:
        return [f"    {line}"]
    return [f"    if {_whether(ranks)}:", f"        {line}"]


def _whether(ranks: tuple[int, ...]) -> str:
    return f"rank == {ranks[0]}" if len(ranks) == 1 else f"rank in {ranks}"


def _merged(plans: Plans, texts: Texts) -> Iterator[tuple[tuple[Slot, int], tuple[int, ...], str]]:
    """The ranks' lines in one order; a line that several ranks have stands once."""
    slots: dict[Slot, dict[tuple[int, str], list[int]]] = {}
    for rank, plan in enumerate(plans):
        for action in plan:
            lines = slots.setdefault(action.slot, {})
            for part, line in texts.lines(action, rank):
                lines.setdefault((part, line), []).append(rank)
    for slot in sorted(slots):
        entries = [(part, tuple(ranks), line) for (part, line), ranks in slots[slot].items()]
        blocks = {ranks for _, ranks, _ in entries}
        if sum(map(len, blocks)) == len(set().union(*blocks)):  # no rank is in two: block by block
            entries.sort(key=lambda entry: (entry[1], entry[0]))
        else:
            entries.sort(key=lambda entry: (entry[0], entry[1]))
        for part, ranks, line in entries:
            yield (slot, part), ranks, line


# ---- Running it ----------------------------------------------------------------------------------

#: The file name of a program's text in tracebacks and verdicts. All programs have one name, for the reason
#: given above; the lines shown under it are those of the program that ran last.
FILENAME = "<program>"


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> Callable[[], None]:
    """The function ``test_program`` of a program's text."""
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(text, FILENAME, "exec"), namespace)
    function: Callable[[], None] = namespace["test_program"]
    return function


def run(text: str) -> None:
    """Run a program's text on this rank."""
    shown = linecache.cache.get(FILENAME)
    if shown is None or shown[0] != len(text) or "".join(shown[2]) != text:
        linecache.cache[FILENAME] = (len(text), None, text.splitlines(keepends=True), FILENAME)
    function = _compiled(text)
    try:
        function()
    except SmpError as error:
        # A verdict shows its lines itself. Where it was raised depends on the program: see above.
        lines = [
            f"in {FILENAME}:{frame.lineno}:  {frame.line}"
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == FILENAME
        ]
        if lines and not isinstance(error, VerdictError):
            error.add_note(lines[-1])
        raise error.with_traceback(None) from error.__cause__
