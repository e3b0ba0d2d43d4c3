"""The counters of what was sent: by kind, since a mark, and every call on request."""

from __future__ import annotations

import torch

from smp_core.topology import GroupKind
from smp_core.torch.reduction.traffic import Sent, Sum, Traffic, TrafficKind

GATHER = Sent("all_gather", GroupKind.SHARDING, 8, torch.float32, 24, 16)
REDUCE = Sent("reduce_scatter", GroupKind.SHARDING, 6, torch.float64, 40, 0)
ACROSS = Sent("all_reduce", GroupKind.REPLICATION, 4, torch.float32, 8, 8)


def kind(sent: Sent) -> TrafficKind:
    return TrafficKind(sent.operation, sent.group, sent.dtype)


def test_exchanges_are_summed_by_kind() -> None:
    traffic = Traffic()
    narrow = GATHER._replace(dtype=torch.bfloat16, bytes=12)
    for sent in (GATHER, REDUCE, GATHER, narrow, ACROSS):
        traffic.add(sent)
    assert traffic.since() == {
        kind(GATHER): Sum(calls=2, elements=16, bytes=48, between_nodes=32),
        kind(REDUCE): Sum(calls=1, elements=6, bytes=40, between_nodes=0),
        kind(narrow): Sum(calls=1, elements=8, bytes=12, between_nodes=16),
        kind(ACROSS): Sum(calls=1, elements=4, bytes=8, between_nodes=8),
    }
    assert traffic.bytes() == 48 + 40 + 12 + 8
    assert traffic.calls(None, "all_gather") == 3


def test_what_was_before_a_mark_is_not_counted_after_it() -> None:
    traffic = Traffic()
    traffic.add(GATHER)
    traffic.add(REDUCE)
    mark = traffic.mark()
    assert traffic.since(mark) == {}
    assert traffic.bytes(mark) == 0
    traffic.add(GATHER)
    traffic.add(ACROSS)
    assert traffic.since(mark) == {kind(GATHER): Sum(1, 8, 24, 16), kind(ACROSS): Sum(1, 4, 8, 8)}
    assert traffic.bytes(mark) == 32
    assert [traffic.calls(mark, each.operation) for each in (GATHER, REDUCE)] == [1, 0]


def test_an_exchange_that_sends_nothing_is_a_call_all_the_same() -> None:
    traffic = Traffic()
    traffic.add(ACROSS._replace(bytes=0, between_nodes=0))
    assert traffic.since() == {kind(ACROSS): Sum(1, 4, 0, 0)}


def test_every_exchange_is_kept_while_asked_for() -> None:
    traffic = Traffic()
    traffic.add(REDUCE)
    with traffic.recorded() as outer:
        with traffic.recorded() as inner:
            traffic.add(GATHER)
        traffic.add(ACROSS)
        with traffic.recorded() as last:
            pass
    traffic.add(REDUCE)
    assert (outer, inner, last) == ([GATHER, ACROSS], [GATHER], [])
