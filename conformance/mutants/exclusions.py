"""The generated mutants that no property can kill, and those that none kills yet, with the reasons.

tests/conformance/mutants/test_generated.py refuses an entry that fits no site.
"""

from __future__ import annotations

from collections.abc import Mapping

from conformance.mutants.generated import MutationSite

_WORDS = "changes the text of a verdict or hint, which no requirement is about"
_REFUSED_BEFORE = "changes a second check: the configuration is refused before a topology is made"
_OWN_RANK = "changes a second check: a rank asks about itself only"
_LATER = "no call of the levels L0 to L2 uses the result"
_CULPRIT = "changes the text of an error alone: the part of an object that cannot be pickled"
_GIVEN_UP = "changes the end of a wait on the simulated clock, which no requirement asks for"
_UNDOCUMENTED = "changes a getter that no source documents"

#: Functions whose results no requirement promises, with the reason and their number of sites. Tests of
#: smp_core cover them. The number makes new code in them fail a test until a person has looked at it.
FUNCTIONS: Mapping[str, tuple[str, int]] = {
    "_Message.describe": (_WORDS, 1),
    "_Message.missing": (_WORDS, 1),
    "_Message.hint": (_WORDS, 10),
    "_Receive.describe": (_WORDS, 1),
    "_Receive.missing": (_WORDS, 2),
    "Call.text": (_WORDS, 3),
    "Meeting.describe": (_WORDS, 4),
    "Meeting.missing": (_WORDS, 5),
    "Meeting.issued": (_WORDS, 4),
    "Channel._agrees": (_WORDS, 4),
    "Channel.unfinished": (_WORDS, 1),
    "Meeting.give_up": (_GIVEN_UP, 3),
    "Channel.note_lines": (_WORDS, 8),
    "Mismatch.__init__": (_WORDS, 1),
    "Mismatch.describe": (_WORDS, 2),
    "Mismatch.missing": (_WORDS, 2),
    "Mismatch.ripe": (_WORDS, 2),
    "Mismatch.verdict": (_WORDS, 32),
    "Topology.__post_init__": (_REFUSED_BEFORE, 25),
    "Topology._check": (_OWN_RANK, 9),
    "Topology.coordinates": (_LATER, 5),
    "Topology.rank_of": (_LATER, 22),
    "Topology.groups": (_LATER, 2),
    "Topology.global_batch": (_LATER, 5),
    "allgather_alike": (_LATER, 6),
    "get_pp_group": (_UNDOCUMENTED, 3),
    "get_rdp_group": (_UNDOCUMENTED, 3),
    "_short": (_CULPRIT, 9),
    "_parts": (_CULPRIT, 13),
    "_culprit": (_CULPRIT, 10),
}

_TEXT = "changes the text of an error alone"
_KEY = "changes a key that is made and compared in one place"
_OVER = "drops a check of the harness for a run that has ended, or for a call of another thread"
_RECORDED = f"{_OVER}, or changes the record of calls for tests"
_NODES = "changes nodes that count as several, which no configuration of the suite asks for"
_DIFFER = "changes the verdict on calls that differ, which no requirement is about"
_OURS = (
    "changes the handling of a bug in the harness: a collective that raises when all have called"
)
_COPIED = "the result is copied into an output of the right dtype"
_UNDEFINED = "torch does not define the result, and smp_core refuses the call"
_MODULO = "2**63 and -2**63 are equal modulo 2**64"
_WAKING = "no requirement promises an order of waking"
_NUMBER = "a meeting's number is only compared with those of other ranks"

#: Parts of lines on which every change is excluded, with the reason and the number of changes.
LINES: Mapping[str, tuple[str, int]] = {
    "self._check(call, ": (_RECORDED, 10),
    'self._check("smp': (_RECORDED, 11),
    "context.check(call)": (_OVER, 1),
    "context.job.records_calls": (_RECORDED, 1),
    "context.record_call": (_RECORDED, 2),
    "call_lines.": (_WORDS, 13),
    "stack_frames.user_line(": (_WORDS, 3),
    "line != meeting.first.line": (_WORDS, 1),
    "meeting.parted": (_WORDS, 1),
    "self.note_lines": (_WORDS, 3),
    "min(per_node, ": (_NODES, 6),
}

#: Changes whose effect no requirement is about, by :attr:`MutationSite.text`.
EQUIVALENT: Mapping[str, str] = {
    "local_rank: runtime.rank % per_node -> runtime.rank // per_node": _NODES,
    "local_rank: runtime.rank -> 0": _NODES,
    "send: _peer(runtime, 'smp.send', 'dest_rank', dest_rank, rank_type) -> "
    "_peer(runtime, 'dest_rank', 'smp.send', dest_rank, rank_type)": _TEXT,
    "recv_from: _peer(runtime, 'smp.recv_from', 'src_rank', src_rank, rank_type) -> "
    "_peer(runtime, 'src_rank', 'smp.recv_from', src_rank, rank_type)": _TEXT,
    "_SHARED: (at.tp_rank, at.rdp_rank) -> (at.rdp_rank, at.tp_rank)": _KEY,
    "_SHARED: (at.pp_rank, at.rdp_rank) -> (at.rdp_rank, at.pp_rank)": _KEY,
    "_SHARED: (at.pp_rank, at.tp_rank) -> (at.tp_rank, at.pp_rank)": _KEY,
    "_SHARED: at.rdp_rank // sharding -> at.rdp_rank % sharding": _LATER,
    "_SHARED: at.rdp_rank % sharding -> at.rdp_rank // sharding": _LATER,
    "Topology.group: self._check(rank) -> pass": _OWN_RANK,
    "Topology.group: rank -> 0": _OWN_RANK,
    "Topology.position: self._check(rank) -> pass": _OWN_RANK,
    "Topology.position: rank -> 0": _OWN_RANK,
    "Topology.group_size: 0 -> -1": "all groups of a kind have one size",
    "fold: raise ValueError('fold needs at least one value') -> pass": "no group has no rank",
    "fold: combine(level[i], level[i + 1]) -> combine(level[i + 1], level[i])": "every reduction "
    "of torch is commutative, but for the sign of a zero and the bits of a NaN",
    "fold: 0 -> -1 (2)": "one value is left",
    'why_not: return f"reduce op {op} is not supported; supported are '
    "{', '.join(sorted(REDUCE_OPS))}\" -> return None": _UNDEFINED,
    "why_not: return f'reduce op {op} needs an integer or boolean tensor, not {dtype}' -> "
    "return None": _UNDEFINED,
    "why_not: return f'reduce op {op} needs ordered values, not {dtype}' -> return None": _UNDEFINED,
    "why_not: return f'reduce op AVG divides, so it needs a floating-point tensor, not {dtype}' -> "
    "return None": _UNDEFINED,
    "reduce_tensors: 0 -> -1": "all have one dtype",
    "reduce_tensors: fold([tensor.contiguous().view(torch.int64) + shift for tensor in tensors], "
    "combine) - shift -> fold([tensor.contiguous().view(torch.int64) + shift for tensor in tensors]"
    ", combine) + shift": _MODULO,
    "reduce_tensors: tensor.contiguous().view(torch.int64) + shift -> "
    "tensor.contiguous().view(torch.int64) - shift": _MODULO,
    "reduce_tensors: result.dtype is not dtype -> result.dtype is dtype": _COPIED,
    "reduce_tensors: len(tensors) > 1 -> len(tensors) <= 1": _COPIED,
    "reduce_tensors: len(tensors) > 1 -> len(tensors) >= 1": _COPIED,
    "reduce_tensors: 1 -> 2": _COPIED,
    "reduce_tensors: 1 -> 0": _COPIED,
    "_Message.__init__: (context.rank, context.scheduler.thread_states) -> "
    "(context.scheduler.thread_states, context.rank)": _WORDS,
    "_Message.__init__: context.rank -> 0": _WORDS,
    "_Message.__init__: not dests -> dests": "SimObjects._post sets the same value again",
    "_Receive.__init__: src -> 0": _WORDS,
    "SimObjects.recv_from: src -> 0 (5)": _WORDS,
    "SimObjects.allgather: Call('smp.allgather', (), Payload(obj, 'smp.allgather')) -> "
    "Call((), 'smp.allgather', Payload(obj, 'smp.allgather'))": _WORDS,
    "SimObjects.barrier: Call('smp.barrier', (), None) -> Call((), 'smp.barrier', None)": _WORDS,
    "SimObjects.barrier: Call('smp.barrier', (), None) -> Call('smp.barrier', None, ())": _WORDS,
    "Meeting.__init__: (channel, number) -> (number, channel)": _WORDS,
    "Channel.__init__: 0 -> 1": _NUMBER,
    "Channel.__init__: 0 -> -1": _NUMBER,
    "Channel.__init__: group.ranks -> group.ranks[::-1]": _WORDS,
    "Channel.join: 1 -> 2 (2)": _NUMBER,
    "Channel.join: context.scheduler.check(context.thread_state) -> pass": _OVER,
    "Channel.join: meeting.differs or not self._agrees(meeting.first, call) -> "
    "meeting.differs and (not self._agrees(meeting.first, call))": _DIFFER,
    "Channel.join: context.rank -> 0 (2)": _WORDS,
    "Channel.join: self._counts[position] + 1 -> self._counts[position] - 1": _NUMBER,
    "Channel.join: position -> 0 (3)": _DIFFER,
    "Channel.join: self._agrees(meeting.first, call) -> self._agrees(call, meeting.first)": _DIFFER,
    "Channel.join: Mismatch(meeting, context) -> Mismatch(context, meeting)": _DIFFER,
    "Channel.join: context.scheduler.judge(context.thread_state, Mismatch(meeting, context)) -> pass": _DIFFER,
    "Channel.join: context.scheduler.judge(context.thread_state, Mismatch(meeting, context)) -> "
    "context.scheduler.judge(Mismatch(meeting, context), context.thread_state)": _DIFFER,
    "Channel.join: context.scheduler.fail(context.thread_state, error) -> pass": _OURS,
    "Channel.join: context.scheduler.fail(context.thread_state, error) -> "
    "context.scheduler.fail(error, context.thread_state)": _OURS,
    "Channel.join: raise -> pass": _OURS,
    "Channel.join: self.group.ranks -> self.group.ranks[::-1]": _WAKING,
    "_pickled: len(path) > 200 -> len(path) <= 200": _TEXT,
    "_pickled: len(path) > 200 -> len(path) >= 200": _TEXT,
    "_pickled: 200 -> 201": _TEXT,
    "_pickled: 200 -> 199": _TEXT,
    "_pickled: _culprit(obj, dumps) -> _culprit(dumps, obj)": _TEXT,
    "Payload.is_atom: return self._data is None -> return None": (
        "each rank thaws atoms, which are never copied, instead of copying a list of them"
    ),
    "plain_dumps: return pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL) -> return None": (
        "runs only without torch, which the suite always loads"
    ),
    "_peer: rank -> 0 (2)": "operator.index raises the same TypeError two lines below",
}


def reason(site: MutationSite) -> str | None:
    """The reason for which a site is excluded, or None if the site is tried as a mutant."""
    if site.function in FUNCTIONS:
        return FUNCTIONS[site.function][0]
    line = site.source_line
    for part, (why, _) in LINES.items():
        if part in line:
            return why
    return EQUIVALENT.get(site.text)
