"""The ledger of what would be offloaded: which bytes, when, and that no number changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch import session as sessions
from smp_core.torch.memory import offload

CONFIG = {"microbatches": 4, "pipeline": "simple", "offload_activations": True}
WIDTH, BATCH = 6, 8  # of two rows a microbatch
INPUT = BATCH // 4 * WIDTH * 4  # bytes of one layer's input


class Net(nn.Module):
    def __init__(self, layers):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def forward(self, x):
        return self.layers(x)


def _train(layers, checkpointed=True, steps=1):
    model = smp.DistributedModel(Net(layers))
    if checkpointed:
        smp.set_activation_checkpointing(model.module.layers)

    @smp.step
    def train(model, x):
        loss = model(x).sum()
        model.backward(loss)
        return loss

    torch.manual_seed(2)
    for _ in range(steps):
        train(model, torch.randn(BATCH, WIDTH))
    session = sessions.current("test")
    kept = offload.ledger(session)
    grads = [p.grad for p in model.parameters()]
    if kept is None:
        return None, grads
    moved = [
        (each.step, each.microbatch, each.path, each.nbytes, each.left, each.back, each.needed)
        for each in kept.entries
    ]
    return (
        moved,
        kept.tasks,
        kept.offloaded_bytes,
        kept.peak(),
        kept.peak(offloading=False),
    ), grads


def test_what_would_move_and_when(smp_world):
    ((moved, tasks, size, peak, plain), _) = smp_world.run(_train, 2, ranks=1, config=CONFIG)[0]
    assert tasks == 16  # 2 layers, 4 microbatches, forward and again
    # All forwards, then all backwards: of the first microbatch first, its last layer first.
    left = [(microbatch, layer) for microbatch in range(4) for layer in (0, 1)]
    needed = [(microbatch, layer) for microbatch in range(4) for layer in (1, 0)]
    expected = []
    for at, (microbatch, layer) in enumerate(left, 1):
        again = 9 + needed.index((microbatch, layer))
        back = again - 4 if again - at > 4 else None
        expected.append((1, microbatch, f"layers.{layer}", INPUT, at, back, again))
    assert moved == expected
    assert size == 8 * INPUT
    assert plain == 8 * INPUT
    # Each is there in the task after which it leaves, and in the five up to that which needs it.
    assert (
        peak
        == max(
            sum(at == task or again - 4 <= task <= again for *_, at, _, again in expected)
            for task in range(1, 17)
        )
        * INPUT
    )


@pytest.mark.parametrize("horizon", [1, 4, 7, 100])
def test_what_is_needed_within_the_horizon_stays(smp_world, horizon):
    config = {**CONFIG, "activation_loading_horizon": horizon}
    ((moved, _, size, peak, plain), _) = smp_world.run(_train, 2, ranks=1, config=config)[0]
    away = [each for each in moved if each[-1] - each[-3] > horizon]
    assert [each for each in moved if each[-2] is not None] == away
    assert all(again - back == horizon for *_, back, again in away)
    assert size == len(away) * INPUT
    assert peak <= plain
    assert (peak < plain) == (horizon < 7)


@pytest.mark.parametrize(
    ("changed", "checkpointed"),
    [({"offload_activations": False}, True), ({"microbatches": 1}, True), ({}, False)],
    ids=["off", "one microbatch", "nothing is checkpointed"],
)
def test_it_has_no_effect_without_checkpointing_and_microbatches(smp_world, changed, checkpointed):
    report, _ = smp_world.run(_train, 2, checkpointed, ranks=1, config={**CONFIG, **changed})[0]
    assert report in (None, ([], 0, 0, 0, 0))
    assert (report is None) == bool(changed)


def test_no_number_changes_and_each_rank_has_its_own(smp_world):
    world = {**CONFIG, "pipeline_parallel_degree": 2, "pipeline": "interleaved"}
    plain = smp_world.run(_train, 4, ranks=2, config={**world, "offload_activations": False})
    moved = smp_world.run(_train, 4, True, 2, ranks=2, config=world)
    once = smp_world.run(_train, 4, ranks=2, config=world)
    for (_, one), (report, two), ((entries, *_), _) in zip(plain, once, moved, strict=True):
        for a, b in zip(one, two, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        assert len(entries) == 2 * len(report[0])
        assert {each[0] for each in entries} == {1, 2}
    paths = [{each[2] for each in entries} for (entries, *_), _ in moved]
    assert paths[0] | paths[1] == {f"layers.{index}" for index in range(4)}
    assert not paths[0] & paths[1]
