"""Attention of given queries, keys and values, against sums that are written out for each position."""

from __future__ import annotations

import math

import pytest
import torch

from smp_core.errors import ArgumentError
from smp_core.torch.nn.attention_scores import (
    alibi_slopes,
    as_scores,
    attend,
    rotated,
    rotation,
)

GROUP, HEADS, LENGTH, SIZE = 2, 3, 4, 6


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def written_out(query, key, value, scale, score_of):
    """Attention by its definition: ``score_of(b, h, i, j)`` is added to a score; None masks the position."""
    result = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                weights = {}
                for j in range(key.shape[2]):
                    more = score_of(b, h, i, j)
                    if more is not None:
                        dot = sum(
                            float(x) * float(y)
                            for x, y in zip(query[b, h, i], key[b, h, j], strict=True)
                        )
                        weights[j] = math.exp(dot * scale + more)
                for j, weight in weights.items():
                    result[b, h, i] += weight / sum(weights.values()) * value[b, h, j]
    return result


def scale_of(given):
    """The factor of the scores: None for that of the definition."""
    return SIZE**-0.5 if given is None else given


PADDING = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]])
SLOPES = torch.tensor([0.5, 0.25, 2.0])
ADDED = drawn(GROUP, HEADS, LENGTH, LENGTH, seed=9)


@pytest.mark.parametrize(
    ("options", "score_of"),
    [
        ({}, lambda b, h, i, j: 0.0),
        ({"causal": True}, lambda b, h, i, j: 0.0 if j <= i else None),
        ({"causal": True, "window": 2}, lambda b, h, i, j: 0.0 if i - 2 < j <= i else None),
        ({"mask": PADDING[:, None, None]}, lambda b, h, i, j: None if PADDING[b, j] else 0.0),
        ({"mask": PADDING.bool()[:, None, None]}, lambda b, h, i, j: None if PADDING[b, j] else 0.0),
        (
            {"mask": PADDING[:, None, None], "causal": True},
            lambda b, h, i, j: None if PADDING[b, j] or j > i else 0.0,
        ),
        ({"mask": ADDED}, lambda b, h, i, j: float(ADDED[b, h, i, j])),
        (
            {"mask": ADDED, "causal": True, "slopes": SLOPES},
            lambda b, h, i, j: float(ADDED[b, h, i, j] - SLOPES[h] * abs(i - j)) if j <= i else None,
        ),
        ({"slopes": SLOPES}, lambda b, h, i, j: -float(SLOPES[h]) * abs(i - j)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("scale", [None, 1.0])
def test_it_is_attention_by_its_definition(options, score_of, scale):
    query, key, value = (drawn(GROUP, HEADS, LENGTH, SIZE, seed=n) for n in range(3))
    expected = written_out(query, key, value, scale_of(scale), score_of)
    found = attend(query, key, value, scale=scale, **options)
    # A score is SIZE products, their sum, a factor and a summand, each rounded once; its error is a relative one of
    # the weight, as is that of the exponential. A weight is divided by a sum of LENGTH, and LENGTH products are summed.
    # Both sides round.
    score = float((query.abs() @ key.abs().transpose(2, 3)).max()) * scale_of(scale) + 6
    roundings = 2 * ((SIZE + 2) * score + 1 + LENGTH) + LENGTH + 1
    bound = 2 * roundings * torch.finfo(torch.float64).eps / 2 * float(value.abs().max())
    assert (found - expected).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cast", [False, True], ids=["", "autocast"])
def test_a_row_that_is_masked_everywhere_is_finite(dtype, cast):
    query, key, value = (drawn(1, 1, LENGTH, SIZE, seed=n).to(dtype) for n in range(3))
    mask = torch.ones(1, 1, 1, LENGTH, dtype=torch.bool)
    with torch.autocast("cpu", enabled=cast):
        assert attend(query, key, value, mask, causal=True).isfinite().all()


def test_slopes_are_those_of_the_publication():
    assert alibi_slopes(8).tolist() == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(4, 8).tolist() == [2.0 ** (-2 * i) for i in range(1, 5)]
    # Of six heads: those of four, then the first and third of eight.
    assert alibi_slopes(6).tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert alibi_slopes(1).tolist() == [2.0**-8]


def test_a_rotation_turns_each_pair_by_an_angle_that_grows_with_the_position():
    x, turned = drawn(1, 1, LENGTH, SIZE), 4
    found = rotated(x, rotation(x, turned))
    for position in range(LENGTH):
        for pair in range(turned // 2):
            a, b = (float(x[0, 0, position, 2 * pair + k]) for k in (0, 1))
            angle = position / 10000 ** (2 * pair / turned)
            expected = (
                a * math.cos(angle) - b * math.sin(angle),
                b * math.cos(angle) + a * math.sin(angle),
            )
            for k in (0, 1):
                # Angles are of float32.
                error = float(found[0, 0, position, 2 * pair + k]) - expected[k]
                assert abs(error) < 8 * LENGTH * torch.finfo(torch.float32).eps
    assert torch.equal(found[..., turned:], x[..., turned:])
    assert torch.equal(found[:, :, 0], x[:, :, 0])


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((2, 5), (2, 1, 1, 5)), ((2, 4, 5), (2, 1, 4, 5)), ((1, 3, 1, 5), (2, 3, 1, 5)), ((1, 5), (2, 1, 1, 5))],
)  # fmt: skip
def test_a_mask_is_brought_to_four_axes_of_the_batch(shape, expected):
    assert as_scores("mask", torch.zeros(shape), 2).shape == expected


@pytest.mark.parametrize("shape", [(5,), (3, 5), (3, 1, 1, 5), (2, 1, 1, 1, 5)])
def test_a_mask_of_another_batch_is_refused(shape):
    with pytest.raises(ArgumentError, match=r"^Layer: cross_mask is .* and B is 2"):
        as_scores("Layer: cross_mask", torch.zeros(shape), 2)


def test_everything_is_made_on_the_device_of_the_query():
    """The device ``meta`` refuses tensors of the CPU beside its own."""
    query, key, value = (torch.empty(GROUP, HEADS, LENGTH, SIZE, device="meta") for _ in range(3))
    mask = torch.empty(GROUP, 1, 1, LENGTH, dtype=torch.bool, device="meta")
    options = {"causal": True, "window": 2, "slopes": alibi_slopes(HEADS)}
    assert attend(query, key, value, mask, **options).is_meta
    assert rotated(key, rotation(query, 4)).is_meta
