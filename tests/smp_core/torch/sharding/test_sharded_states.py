"""States of sharded models and optimizers, without files: whole ones are plain torch's, shards load back."""

from __future__ import annotations

import pytest

import smp_core.torch as smp
from smp_core.torch.exceptions import CheckpointError, ShardingError
from smp_core.torch.optimizer import state as optimizer_state
from tests.smp_core.torch.sharding.checkpoint_models import (
    OPTIMIZERS,
    Plain,
    Run,
    config,
    equal,
    expected,
    own_part,
    snapshot,
)

HUGE = 10**9


def states(optimizer):
    run = Run(optimizer)
    run.steps(0, 1)
    return run.state()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("degree", "threshold"), [(2, 0), (4, 0), (4, 8), (2, HUGE)])
def test_whole_states_are_those_of_plain_torch(smp_world, optimizer, degree, threshold):
    _, wanted = expected(optimizer, 4, 4)
    for model, state in smp_world.run(states, optimizer, ranks=4, config=config(degree, threshold)):
        equal(dict(model), dict(wanted[1][0]))
        equal(state, wanted[1][1])


def local_states():
    """A part is saved and loaded by another run; then a whole state is."""
    run = Run("adamw")
    run.steps(0, 1)
    part = snapshot(own_part(run.optimizer))
    whole = snapshot(run.optimizer.state_dict())
    run.steps(2)
    found = []
    for state in (part, whole):
        run.optimizer.load_state_dict(state)
        found.append(snapshot(run.optimizer.state_dict()))
    return part, whole, found


def test_parts_are_shards_and_load_back(smp_world):
    for rank, (part, whole, found) in enumerate(
        smp_world.run(local_states, ranks=2, config=config(2))
    ):
        assert part["_smp_is_partial"]
        assert tuple(part["_smp_shard"]) == (rank, 2)
        # The gain is on the first rank alone; of the embedding each has half.
        assert part["state"][0]["exp_avg"].shape == ((1,) if rank == 0 else (0,))
        assert part["state"][0]["step"].shape == ()
        assert part["state"][3]["exp_avg"].shape == (21,)
        for each in found:
            equal(each, whole)


def test_shards_of_the_model_load_back(smp_world):
    def body():
        run = Run("momentum")
        run.steps(0)
        part, whole = snapshot(run.model.local_state_dict()), snapshot(run.model.state_dict())
        run.steps(1)
        run.model.load_state_dict(part)
        equal(snapshot(run.model.state_dict()), whole)
        return part

    for rank, part in enumerate(smp_world.run(body, ranks=2, config=config(2))):
        assert part["_smp_is_partial"]
        assert part["embed.weight"].shape == (21,)
        assert part["gain"].shape == ((1,) if rank == 0 else (0,))


def test_the_shard_of_another_rank_is_refused(smp_world):
    def body():
        run = Run("momentum")
        run.steps(0)
        parts = smp.allgather(own_part(run.optimizer), smp.WORLD)
        before = run.state()
        with pytest.raises(CheckpointError, match=r"state is of shard \d of 2, and here this rank"):
            run.optimizer.load_state_dict(parts[1 - smp.rank()])
        equal(run.state(), before)
        return parts[0]

    part = smp_world.run(body, ranks=2, config=config(2))[0]

    def unsharded():
        with pytest.raises(CheckpointError, match="of shard 0 of 2, and here nothing is split"):
            Run("momentum").optimizer.load_state_dict(part)

    smp_world.run(unsharded, ranks=1)


def test_a_rank_without_elements_needs_no_state_and_others_do(smp_world):
    def body():
        run = Run("adamw")
        run.steps(0)
        state = run.optimizer.optimizer.state
        before = snapshot(run.optimizer.state_dict())
        if smp.rank() == 1:
            del state[run.model.module.gain]
        equal(snapshot(run.optimizer.state_dict()), before)
        if smp.rank() == 1:
            del state[run.model.module.embed.weight]
        with pytest.raises(
            ShardingError, match=r"rank 0 .* has a state 'exp_avg' .*rank 1 has none"
        ):
            run.optimizer.state_dict()
        smp.barrier()

    smp_world.run(body, ranks=2, config=config(2))


def test_a_state_from_before_the_model_is_wrapped_is_cut(smp_world):
    _, wanted = expected("adamw", 4, 4, 4)

    def body():
        plain = Plain("adamw")
        for number in range(2):
            plain.step(4, number)
        run = Run("adamw", plain=plain)
        equal(run.state(), wanted[1])
        run.step(2)
        equal(run.state(), wanted[2])

    smp_world.run(body, ranks=4, config=config(4, 2))


def test_only_rank_0_holds_what_is_gathered_for_it(smp_world):
    """Counted in bytes of memory, while all are gathered."""

    def body():
        run = Run("adamw")
        run.steps(0)
        weights_of = run.model.state_dict
        held = []

        def hook(module, state, prefix, metadata):
            held.append(sum(each.untyped_storage().nbytes() for each in state.values()))

        run.model.module.register_state_dict_post_hook(hook)
        whole = weights_of(gather_to_rank0=True)
        state = optimizer_state.state_dict(run.optimizer._parameters, keep=smp.rank() == 0)["state"]
        sizes = [each.numel() for values in state.values() for each in values.values()]
        return held[0], len(whole), sum(sizes)

    (here, names, elements), (there, none, others) = smp_world.run(body, ranks=2, config=config(2))
    parameters = sum(each.numel() for each in Plain("adamw").model.parameters())
    assert here > 4 * parameters
    assert names
    assert there < 200  # the buffer, and a number for each parameter
    assert not none
    assert others * 10 < elements
