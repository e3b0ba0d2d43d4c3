"""Checkpoints of Hugging Face models with tensor parallelism: training goes on bit for bit, and full files are those of
the plain model, whose own state loads at every degree.
"""

from __future__ import annotations

import warnings

import pytest
import torch

import smp_core.torch as smp
from smp_core.torch.exceptions import CheckpointError
from tests.smp_core.torch.checkpoint.tensor_runs import world
from tests.smp_core.torch.sharding.checkpoint_models import equal, snapshot

transformers = pytest.importorskip("transformers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # old versions use names that torch has deprecated
    GPT2 = transformers.GPT2LMHeadModel

SIZES = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8, "vocab_size": 12}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def plain(seed):
    torch.manual_seed(seed)
    return GPT2(transformers.GPT2Config(**SIZES, **NO_DROPOUT))


def batch(number):
    replica = smp.rdp_rank() if smp.state.cfg.prescaled_batch else smp.dp_rank()
    generator = torch.Generator().manual_seed(100 * number + replica)
    return torch.randint(0, 12, (4, 6), generator=generator)


@smp.step
def train_step(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


class Run:
    """Training on this rank."""

    def __init__(self, seed=1, delayed=False):
        with smp.tensor_parallelism(), smp.delay_param_initialization(delayed):
            net = plain(seed)
        torch.manual_seed(seed)
        self.model = smp.DistributedModel(net)
        made = torch.optim.AdamW(self.model.parameters(), lr=0.03)
        self.optimizer = smp.DistributedOptimizer(made)

    def step(self, number):
        self.optimizer.zero_grad()
        loss = train_step(self.model, batch(number)).reduce_mean()
        self.optimizer.step()
        return loss.detach().clone()

    def state(self):
        return snapshot([self.model.local_state_dict(), self.optimizer.local_state_dict(False)])


def language_world(name):
    return world(name, **({"auto_partition": True} if "pp" in name else {}))


@pytest.mark.parametrize("name", ["tp2sdp2", "pp2tp2fp16"])
def test_training_goes_on_and_full_files_are_hugging_faces(smp_world, tmp_path, name):
    how = language_world(name)

    def saves():
        run = Run()
        losses = [run.step(0)]
        smp.save_checkpoint(tmp_path, "parts", model=run.model, optimizer=run.optimizer)
        smp.save_checkpoint(tmp_path, "whole", False, model=run.model)
        whole = snapshot(run.model.state_dict())
        losses += [run.step(1), run.step(2)]
        return whole, losses[1:], run.state()

    def goes_on():
        run = Run(seed=9)
        smp.resume_from_checkpoint(tmp_path, "parts")
        return [run.step(1), run.step(2)], run.state()

    def loads(tag):
        run = Run(seed=9)
        run.optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
        smp.resume_from_checkpoint(tmp_path, tag, partial=False, load_optimizer=False)
        if not run.model.partitioned:
            run.step(0)
        return snapshot(run.model.state_dict())

    saved = smp_world.run(saves, **how)
    whole = saved[0][0]
    for (_, *went_on), goes in zip(saved, smp_world.run(goes_on, **how), strict=True):
        equal(list(goes), went_on)
    theirs = plain(5)
    if "fp16" in name:
        theirs.half()
    theirs.load_state_dict(torch.load(tmp_path / "whole", weights_only=True))
    for loaded in smp_world.run(loads, "whole", **how):
        equal(loaded, whole)
    torch.save(theirs.state_dict(), tmp_path / "theirs")
    for loaded in smp_world.run(loads, "theirs", **how):
        equal(loaded, whole)


def test_the_optimizers_state_of_the_plain_model_is_refused(smp_world, tmp_path):
    def saves():
        run = Run()
        run.step(0)
        smp.save_checkpoint(tmp_path, "one", False, model=run.model, optimizer=run.optimizer)

    def loads():
        run = Run(seed=9)
        run.step(0)
        before = run.state()
        with pytest.raises(CheckpointError, match=r"has other parameters|number of parameter"):
            smp.resume_from_checkpoint(tmp_path, "one", partial=False)
        equal(run.state(), before)
        smp.resume_from_checkpoint(tmp_path, "one", partial=False, load_optimizer=False)
        run.step(1)

    smp_world.run(saves, ranks=1)
    smp_world.run(loads, **language_world("tp2"))


def test_delayed_models_start_as_others_and_are_whole_on_the_cpu(smp_world):
    def body(delayed):
        run = Run(delayed=delayed)
        run.step(0)
        whole = snapshot(run.model.state_dict())
        run.model.cpu()
        equal(snapshot(dict(run.model.module.state_dict())), whole)
        run.step(1)
        return run.state()

    how = language_world("pp2tp2")
    equal(smp_world.run(body, True, **how), smp_world.run(body, False, **how))
