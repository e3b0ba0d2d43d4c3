"""The memory that a rank holds, counted, against the memory that it has to hold, calculated from sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import smp_core.torch as smp
from smp_core.torch.memory.recorder import Recorder, Sample

RANKS = 8
WIDTH, LENGTH, CHARACTERS, BLOCKS = 32, 16, 50, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.second = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(self.norm(x))))


class GPT(nn.Module):
    """Without attention, which adds nothing to what is counted; embedding and head are one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, CHARACTERS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@smp.step
def train_step(model, x):
    loss = nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    model.backward(loss)
    return loss


def train(config: dict, steps: int = 2, recompute: bool = False, **options) -> list[Sample]:
    """The samples of the last step."""
    smp.init({"ddp": True, "sdp_gradient_clipping": 1e30, **config})
    module = GPT()
    if recompute:
        for block in module.blocks:
            smp.set_activation_checkpointing(block)
    model = smp.DistributedModel(module, **options)
    optimizer = smp.DistributedOptimizer(
        torch.optim.Adam(model.parameters()), dynamic_loss_args={"init_scale": 16.0}
    )
    generator = torch.Generator().manual_seed(smp.rank())
    for step in range(steps):
        x = torch.randint(CHARACTERS, (4, LENGTH + 1), generator=generator)
        with Recorder() as recorder:
            if step % options.get("backward_passes_per_step", 1) == 0:
                optimizer.zero_grad()
            train_step(model, x)
            if (step + 1) % options.get("backward_passes_per_step", 1) == 0:
                optimizer.step()
    return recorder.samples


def config_of(degree: int, **more) -> dict:
    return {"sharded_data_parallel_degree": degree, "sdp_param_persistence_threshold": 100, **more}


def sizes() -> list[int]:
    return [parameter.numel() for parameter in GPT().parameters()]


def last(samples: list[Sample], event: str) -> Sample:
    return [each for each in samples if each.event == event][-1]


@pytest.mark.parametrize("degree", [1, 4])
@pytest.mark.parametrize("half", [False, True])
def test_after_an_update_there_is_the_state_and_nothing_else(smp_world, degree, half):
    """Of what is split a degree-th, padding included, which neither masters nor Adam have."""
    kept = sum(size if size < 100 else -(-size // degree) for size in sizes())
    own = sum(size if size < 100 else size / degree for size in sizes())  # of all ranks the mean
    steps = 4 * len(sizes())  # Adam counts them for each parameter
    samples = smp_world.run(train, config_of(degree, fp16=half), ranks=4)
    updated = [last(each, "update").bytes for each in samples]
    assert {each["parameters"] for each in updated} == {(2 if half else 4) * kept}
    assert sum(each["optimizer"] for each in updated) == 4 * (8 * own + steps)
    assert sum(each["masters"] for each in updated) == (4 * 4 * own if half else 0)
    for each in updated:
        assert 4 * kept <= each["gradients"] <= 4 * kept * 1.02
        assert not each["gathered"] + each["activations"] + each["exchanged"]


def test_between_its_uses_a_unit_is_held_by_nobody(smp_world):
    """The storages never hold more than the embedding, which is used last, too, and one block."""
    config = config_of(4, sdp_param_persistence_threshold=1, sdp_max_live_parameters=10_000)
    block = sum(parameter.numel() for parameter in Block().parameters())
    shared = CHARACTERS * WIDTH
    for samples in smp_world.run(train, config, ranks=4):
        gathered = [each for each in samples if each.event == "gathered"]
        assert len(gathered) >= 2 * BLOCKS
        # The embedding, which its module holds through the forward pass, and one block at a time.
        assert max(each.bytes["gathered"] for each in samples) <= 4 * (shared + block)
        assert min(each.bytes["gathered"] for each in gathered) > 0
        assert last(samples, "reduced").bytes["gathered"] == 0


def test_activations_are_those_that_backward_has_yet_to_come_to(smp_world):
    (kept,) = smp_world.run(train, {}, ranks=1)
    forward = [each for each in kept if each.event == "call"]
    assert [each.phase for each in forward] == ["F"] * len(forward)
    held = [each.bytes["activations"] for each in forward]
    assert held == sorted(held)
    backward = [each.bytes["activations"] for each in kept if each.phase == "B"]
    assert backward == sorted(backward, reverse=True)
    assert backward[-1] < held[-1]
    # Of a block: the normed input, what relu gives, once, and the norm's statistics; by 4 lines.
    rows = 4 * LENGTH
    of_block = 4 * rows * (WIDTH + WIDTH + 4 * WIDTH + 2)
    blocks = [each for each in forward if each.what in {f"blocks.{n}" for n in range(BLOCKS)}]
    assert [
        later.bytes["activations"] - earlier.bytes["activations"]
        for earlier, later in itertools.pairwise(blocks)
    ] == [of_block] * (BLOCKS - 1)


@pytest.mark.parametrize("degree", [1, 2])
def test_checkpointed_activations_are_the_inputs_alone(smp_world, degree):
    (samples, *_) = smp_world.run(train, config_of(degree), 2, True, ranks=2)
    calls = [each for each in samples if each.event == "call" and each.phase == "F"]
    first, second, third = (
        next(each for each in calls if each.what == f"blocks.{number}") for number in range(3)
    )
    for earlier, later in ((first, second), (second, third)):
        grown = later.bytes["activations"] - earlier.bytes["activations"]
        assert grown == 4 * 4 * LENGTH * WIDTH


def test_a_bucket_that_has_been_exchanged_is_given_back_before_the_step_is_over(smp_world):
    """Whole gradients of a bucket, and what the others sent, wait at most until the next one is launched."""
    bucket = 4000  # elements: less than a block has
    config = config_of(8, sdp_reduce_bucket_size=bucket)
    for samples in smp_world.run(train, config, ranks=RANKS):
        sent = [each for each in samples if each.event == "sent"]
        assert len(sent) >= 4
        largest = max(bucket, max(sizes()))
        gathered = 2 * sum(parameter.numel() for parameter in Block().parameters())
        for each in sent:
            assert each.bytes["exchanged"] <= 4 * (2 * 2 * largest + gathered) * 1.02


def test_between_the_steps_of_a_window_a_rank_keeps_parts_of_sums(smp_world):
    def run():
        return train(config_of(4), 1, backward_passes_per_step=2)

    parts = sum(
        -(-size // 4) for size in sizes()
    )  # of persistent ones, too, until the window's end
    for samples in smp_world.run(run, ranks=4):
        assert last(samples, "end").bytes["gradients"] == 4 * parts
        assert "reduced" not in {each.event for each in samples}
