"""Drawn transformer layers, and the same layers by their definition, in one process.

The definition uses products, sums and exponentials alone. An engine's layer computes in float64, and its error is at
most four times that of the definition in float32 (ENGINES 2.2, the ratio rule).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import hypothesis.strategies as st
import torch
from torch import Tensor

State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class LayerCase:
    """A transformer layer, its batches, and the configuration that it is trained with.

    Attributes:
        ranks, degree: the size of the world, and of a TP group.
        prescaled: whether the ranks of a TP group share a batch.
        optimize: "speed" or "memory".
        heads, size, channels, inner: the number of heads and their size, of hidden and of intermediate channels.
        rows, length: the samples of a batch, and their positions.
        others: the positions of cross states; 0 without cross-attention.
        before, after: whether layer normalisation stands before, and after, each block.
        causal, padded, alibi, parallel: the options of attention.
        seed: of weights and batches.
    """

    ranks: int
    degree: int
    prescaled: bool
    optimize: str
    heads: int
    size: int
    channels: int
    inner: int
    rows: int
    length: int
    others: int
    before: bool
    after: bool
    causal: bool
    padded: bool
    alibi: bool
    parallel: bool
    seed: int

    @property
    def config(self) -> dict[str, object]:
        """The configuration for ``smp.init``."""
        return {
            "tensor_parallel_degree": self.degree,
            "ddp": True,
            "prescaled_batch": self.prescaled,
            "optimize": self.optimize,
        }

    @property
    def options(self) -> dict[str, object]:
        """The arguments of the layer's class (API 1.10)."""
        return {
            "num_attention_heads": self.heads,
            "attention_head_size": self.size,
            "hidden_size": self.channels,
            "intermediate_size": self.inner,
            "attention_dropout_prob": 0.0,
            "hidden_dropout_prob": 0.0,
            "activation": "relu",
            "causal_mask_size": self.length if self.causal else None,
            "add_cross_attention": bool(self.others),
            "pre_layernorm": self.before,
            "post_layernorm": self.after,
            "use_alibi": self.alibi,
            "parallel_attn_output": self.parallel,
        }

    @property
    def shares(self) -> int:
        """The number of different batches."""
        return self.ranks // self.degree if self.prescaled else self.ranks

    def batch(self, share: int) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, cross states, and which positions are masked, of one share."""
        generator = torch.Generator().manual_seed(self.seed + 1 + share)
        hidden = torch.randn(
            self.rows, self.length, self.channels, generator=generator, dtype=torch.float64
        )
        cross = torch.randn(
            self.rows, self.others, self.channels, generator=generator, dtype=torch.float64
        )
        kept = torch.randint(1, self.length + 1, (self.rows, 1), generator=generator)
        return hidden, cross, torch.arange(self.length) >= kept

    def state(self) -> State:
        """The whole weights, by the names of a DistributedTransformerLayer."""
        generator = torch.Generator().manual_seed(self.seed)
        width, found = self.heads * self.size, State()
        blocks = ("attention", "cross_attention") if self.others else ("attention",)
        sizes = {
            f"{block}.{name}": (width, self.channels)
            for block in blocks
            for name in ("query", "key", "value")
        }
        sizes |= {f"{block}.dense": (self.channels, width) for block in blocks}
        sizes |= {"output.dense1": (self.inner, self.channels)}
        sizes |= {"output.dense2": (self.channels, self.inner)}
        for name, size in sizes.items():
            shapes = (("weight", size), ("bias", size[:1]))
            for kind, shape in shapes:
                found[f"{name}.{kind}"] = torch.randn(
                    shape, generator=generator, dtype=torch.float64
                )
        for block in (*blocks, "output"):
            for name, has in (("pre_layernorm", self.before), ("layernorm", self.after)):
                if has and not (self.parallel and block == "output"):
                    for kind in ("weight", "bias"):
                        found[f"{block}.{name}.{kind}"] = torch.randn(
                            self.channels, generator=generator, dtype=torch.float64
                        )
        return found


@st.composite
def layers(draw: st.DrawFn, ranks: int) -> LayerCase:
    """Draw a layer for at most ``ranks`` ranks."""
    flag = st.booleans()
    degree = draw(st.sampled_from([each for each in (2, 4) if each <= ranks]))
    before = draw(flag)
    parallel = before and draw(flag)
    return LayerCase(
        ranks=degree * draw(st.integers(1, max(1, min(2, ranks // degree)))),
        degree=degree,
        prescaled=draw(flag),
        optimize=draw(st.sampled_from(["speed", "memory"])),
        heads=degree * draw(st.integers(1, 2)),
        size=draw(st.integers(1, 3)),
        channels=degree * draw(st.integers(1, 3)),
        inner=degree * draw(st.integers(1, 3)),
        rows=draw(st.integers(1, 2)),
        length=draw(st.integers(1, 4)),
        others=0 if parallel else draw(st.sampled_from([0, 0, 1, 3])),
        before=before,
        after=not before or (not parallel and draw(flag)),
        causal=draw(flag),
        padded=draw(flag),
        alibi=draw(flag),
        parallel=parallel,
        seed=draw(st.integers(0, 2**31)),
    )


# ---- The layer by its definition -----------------------------------------------------------------


def loss_of(output: Tensor) -> Tensor:
    """A loss to which each element of the output counts in its own way."""
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return (output * weights).sum() + output.square().sum()


def expected(case: LayerCase, dtype: torch.dtype) -> tuple[list[Tensor], State]:
    """The outputs of all shares, and the gradients of the mean of their losses."""
    state = {name: value.to(dtype).requires_grad_() for name, value in case.state().items()}
    outputs = [_layer(case, state, share, dtype) for share in range(case.shares)]
    total: Tensor = sum((loss_of(each) for each in outputs), torch.zeros((), dtype=dtype))
    gradients = torch.autograd.grad(total / case.shares, list(state.values()))
    return [each.detach() for each in outputs], dict(zip(state, gradients, strict=True))


def _layer(case: LayerCase, state: State, share: int, dtype: torch.dtype) -> Tensor:
    hidden, cross, masked = case.batch(share)
    x, cross = hidden.to(dtype), cross.to(dtype)
    blocks: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("attention", lambda h: _attention(case, state, "attention", h, h, masked))
    ]
    if case.others:
        name = "cross_attention"
        blocks.append((name, lambda h: _attention(case, state, name, h, cross, None)))
    blocks.append(("output", lambda h: _linears(state, h)))
    if case.parallel:
        h = _normalised(state, "attention.pre_layernorm", x)
        return x + blocks[0][1](h) + blocks[-1][1](h)
    for name, block in blocks:
        h = _normalised(state, f"{name}.pre_layernorm", x) if case.before else x
        x = x + block(h)
        x = _normalised(state, f"{name}.layernorm", x) if case.after else x
    return x


def _linear(state: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def _linears(state: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return _linear(state, "output.dense2", _linear(state, "output.dense1", x).clamp(min=0))


def _normalised(state: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return centred / scale * state[f"{name}.weight"] + state[f"{name}.bias"]


def _attention(
    case: LayerCase,
    state: Mapping[str, Tensor],
    name: str,
    x: Tensor,
    other: Tensor,
    masked: Tensor | None,
) -> Tensor:
    found = []
    itself = masked is not None
    query = _linear(state, f"{name}.query", x)
    key, value = (_linear(state, f"{name}.{which}", other) for which in ("key", "value"))
    positions = torch.arange(x.shape[1]).unsqueeze(1) - torch.arange(other.shape[1])
    for head in range(case.heads):
        part = slice(head * case.size, (head + 1) * case.size)
        scores = query[..., part] @ key[..., part].transpose(1, 2) / math.sqrt(case.size)
        if itself and case.alibi:
            scores = scores - _slope(head, case.heads) * positions.abs()
        if itself and case.causal:
            scores = scores.masked_fill(positions < 0, torch.finfo(x.dtype).min)
        if masked is not None and case.padded:
            scores = scores.masked_fill(masked.unsqueeze(1), torch.finfo(x.dtype).min)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        found.append(weights / weights.sum(-1, keepdim=True) @ value[..., part])
    return _linear(state, f"{name}.dense", torch.cat(found, -1))


def _slope(head: int, heads: int) -> float:
    """The slope of a head: those of the next lower power of two, then every second one of the next higher one."""
    power = 1 << heads.bit_length() - 1
    if head < power:
        return float(2 ** (-8 * (head + 1) / power))
    return float(2 ** (-8 * (2 * (head - power) + 1) / (2 * power)))
