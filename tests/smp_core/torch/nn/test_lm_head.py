"""``smp.nn.DistributedTransformerLMHead`` trains as a plain language model, over pipelines, replicas and shards.

Both compute in float64. The bound of their difference is the error of the plain model in float32, which is greater than
that of sums in another order by orders of magnitude.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import smp_core.torch as api
from tests.smp_core.torch.nn.test_transformer import state_of

LAYERS, HEADS, SIZE, INNER, WORDS, LENGTH, TYPES = 3, 8, 2, 32, 24, 6, 2
HIDDEN, STEPS, MICROBATCHES, RATE = HEADS * SIZE, 2, 2, 0.5


class Plain(nn.Module):
    """The model of torch's own modules: encoder layers, and a head that is tied to the word embedding."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.words = nn.Embedding(WORDS, HIDDEN)
        self.positions = nn.Embedding(LENGTH, HIDDEN)
        self.types = nn.Embedding(TYPES, HIDDEN)
        options = {"batch_first": True, "norm_first": causal, "dropout": 0.0, "activation": "gelu"}
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(HIDDEN, HEADS, INNER, **options) for _ in range(LAYERS)
        )
        self.norm = nn.LayerNorm(HIDDEN) if causal else None

    def loss(self, ids, padding, types, labels):
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if self.causal else None
        x = self.words(ids) + self.positions(torch.arange(LENGTH)) + self.types(types)
        for layer in self.layers:
            x = layer(x, src_mask=mask, src_key_padding_mask=padding)
        scores = (self.norm(x) if self.norm is not None else x) @ self.words.weight.t()
        if self.causal:
            scores, labels = scores[:, :-1], labels[:, 1:]
        return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

    def state(self):
        """The state under the names of the distributed model."""
        names = {"words": "word", "positions": "position", "types": "token_type"}
        state = {
            f"{ours}_embedding.weight": getattr(self, name).weight for name, ours in names.items()
        }
        for number, layer in enumerate(self.layers):
            found = state_of(layer)
            state |= {
                f"transformer.seq_layers.{number}.{name}": each for name, each in found.items()
            }
        if self.norm is not None:
            state |= {f"layernorm.{name}": each for name, each in self.norm.named_parameters()}
        return {name: each.detach().clone() for name, each in state.items()}


@api.step
def train_step(model, ids, padding, types, labels):
    loss, scores = model((ids, padding, types, None, labels))
    model.backward(loss)
    return loss, scores


def batch(number: int):
    generator = torch.Generator().manual_seed(number)
    ids, labels = (
        torch.randint(WORDS, (2 * MICROBATCHES, LENGTH), generator=generator) for _ in range(2)
    )
    types = torch.randint(TYPES, ids.shape, generator=generator)
    padding = torch.arange(LENGTH) >= torch.tensor([LENGTH, LENGTH - 1, LENGTH - 2, LENGTH]).view(
        -1, 1
    )
    return ids, padding, types, labels


def body(causal: bool, distribute: bool) -> None:
    torch.set_default_dtype(torch.float64)
    config = api.state.cfg
    torch.manual_seed(0)
    truth = Plain(causal)
    coarse = copy.deepcopy(truth).float()
    model = api.DistributedModel(
        api.nn.DistributedTransformerLMHead(
            num_layers=LAYERS,
            num_attention_heads=HEADS,
            attention_head_size=SIZE,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            vocab_size=WORDS,
            num_positions=LENGTH,
            num_token_types=TYPES,
            attention_dropout_prob=0.0,
            hidden_dropout_prob=0.0,
            causal_mask_size=LENGTH if causal else None,
            pre_layernorm=causal,
            post_layernorm=not causal,
            distribute_embedding=distribute,
        )
    )
    model.load_state_dict(truth.state())
    optimizer = api.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=RATE))
    share = api.rdp_rank() if config.prescaled_batch else api.dp_rank()
    shares = api.rdp_size() if config.prescaled_batch else api.dp_size()
    for step in range(STEPS):
        batches = [batch(step * shares + number) for number in range(shares)]
        loss, _ = train_step(model, *batches[share])
        optimizer.step()
        optimizer.zero_grad()
        losses = []
        for plain in (truth, coarse):
            sgd = torch.optim.SGD(plain.parameters(), lr=RATE)
            found = [
                sum(plain.loss(*part) for part in zip(*(x.chunk(2) for x in each), strict=True)) / 2
                for each in batches
            ]
            (sum(found) / shares).backward()
            sgd.step()
            sgd.zero_grad()
            losses.append(found[share].detach())
        difference, bound = (abs(each - losses[0]) for each in (loss.reduce_mean(), losses[1]))
        assert difference <= bound, (step, loss.reduce_mean(), losses)
    state = model.state_dict()
    expected, near = truth.state(), coarse.state()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        bound = (near[name] - value).abs().max()
        assert (state[name] - value).abs().max() <= bound, name


@pytest.mark.parametrize(
    ("pp", "tp", "sdp", "prescaled", "optimize", "causal", "distribute"),
    [
        (1, 2, 1, False, "speed", True, False),
        (2, 2, 1, False, "memory", True, True),
        (2, 4, 1, True, "speed", False, True),
        (4, 2, 1, False, "speed", False, False),
        (1, 8, 1, True, "memory", True, True),
        (1, 4, 2, True, "memory", False, False),
        (1, 2, 4, True, "speed", True, False),
    ],
)
def test_it_trains_as_a_plain_model(
    smp_world, pp, tp, sdp, prescaled, optimize, causal, distribute
):
    config = {
        "pipeline_parallel_degree": pp,
        "tensor_parallel_degree": tp,
        "sharded_data_parallel_degree": sdp,
        "sdp_param_persistence_threshold": 20,
        "sdp_gradient_clipping": 1e30,
        "prescaled_batch": prescaled,
        "microbatches": MICROBATCHES,
        "optimize": optimize,
        "ddp": True,
    }
    smp_world.run(body, causal, distribute, ranks=8, config=config)


@pytest.mark.parametrize(
    ("tp", "sdp", "given", "distributed"),
    [(2, 1, False, False), (2, 1, True, True), (2, 2, False, True), (1, 2, False, False)],
)
def test_sharding_distributes_the_embeddings_whatever_is_given(
    smp_world, caplog, tp, sdp, given, distributed
):
    """API 3.5: with both, distribute_embedding is forced to True. The log says so where it was not given."""
    config = {
        "tensor_parallel_degree": tp,
        "sharded_data_parallel_degree": sdp,
        "prescaled_batch": True,
        "ddp": True,
    }

    def built():
        made = api.nn.DistributedTransformerLMHead(
            num_layers=1,
            num_attention_heads=2,
            attention_head_size=2,
            hidden_size=4,
            intermediate_size=4,
            vocab_size=6,
            num_positions=4,
            distribute_embedding=given,
        )
        return tuple(made.word_embedding.weight.shape), tuple(made.position_embedding.weight.shape)

    caplog.set_level("INFO", "smp_core.torch.nn.lm_head")
    width = 4 // tp if distributed else 4
    assert smp_world.run(built, ranks=4, config=config) == [((6, width), (4, width))] * 4
    told = "distribute_embedding is True" in caplog.text
    assert told == (distributed and not given)
