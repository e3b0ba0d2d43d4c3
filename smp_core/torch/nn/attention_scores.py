"""Attention of given queries, keys and values: masks, windows, ALiBi, rotary positions, by torch's
scaled-dot-product attention.

Pure functions of one rank: shapes are ``(G, heads, S, size)``, with the heads of this rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn import functional

from smp_core.errors import ArgumentError

Tensor = torch.Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    slopes: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """``softmax(query key^T scale + bias) value``, of the shape of ``query``.

    Args:
        query: ``(G, heads, S, size)``.
        key, value: ``(G, heads, T, size)``.
        mask: broadcast to ``(G, heads, S, T)``: floating-point values are added to the scores; of integers and
            booleans, 1 masks a position. The weights of a row that is masked everywhere mean nothing.
        causal: a position attends to itself and to those before it.
        window: with ``causal``, to the last ``window`` positions only.
        slopes: ``(heads,)``, the slopes of ALiBi: scores fall by the slope for each position of distance.
        scale: the factor of the scores; None for ``size ** -0.5``.
        dropout: the probability with which an attention weight is zeroed.
    """
    if mask is None and window is None and slopes is None:
        return functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=causal, scale=scale
        )
    device, (queries, keys) = query.device, (query.shape[-2], key.shape[-2])
    bias = torch.zeros(1, 1, queries, keys, dtype=query.dtype, device=device)
    masked = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    if slopes is not None or causal or window is not None:
        distance = torch.arange(queries, device=device).unsqueeze(1)
        distance = distance - torch.arange(keys, device=device)
        if slopes is not None:
            falls = slopes.to(device, query.dtype).view(1, -1, 1, 1)
            bias = bias - falls * distance.abs()
        if causal:
            masked = masked | (distance < 0)
        if window is not None:
            masked = masked | (distance >= window)
    if mask is not None and mask.is_floating_point():
        bias = bias + mask.to(query.dtype)
    elif mask is not None:
        masked = masked | mask.bool()
    # The least number, not minus infinity: a row of minus infinities would be NaN. Autocast would round that of float32
    # to minus infinity.
    cast = torch.is_autocast_enabled("cpu") and query.dtype is torch.float32
    least = torch.finfo(torch.get_autocast_dtype("cpu") if cast else query.dtype).min
    bias = bias.masked_fill(masked, least).clamp(min=least)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, scale=scale
    )


def alibi_slopes(heads: int, bias_max: float = 8) -> Tensor:
    """The slopes of ALiBi for ``heads`` heads: ``(heads,)``, float64.

    Of a power of two they are ``2 ** (-bias_max * i / heads)`` for i from 1. Otherwise the slopes of the next lower
    power of two come first, and then every second one of the next higher power.
    """
    lower = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-bias_max * i / lower) for i in range(1, lower + 1)]
    between = [2 ** (-bias_max * i / (2 * lower)) for i in range(1, 2 * lower + 1, 2)]
    return torch.tensor((slopes + between)[:heads], dtype=torch.float64)


class Rotation(NamedTuple):
    """The angles of rotary positions: sine and cosine for each position and channel, ``(S, rotary_dim)``."""

    sine: Tensor
    cosine: Tensor


def rotation(query: Tensor, rotary_dim: int) -> Rotation:
    """The rotation of the first ``rotary_dim`` channels of queries and keys by angles that grow with the position, as
    in GPT-J. ``query`` is ``(G, heads, S, size)``, and gives length, dtype and device.
    """
    # In float32, as models with published weights compute them.
    positions = torch.arange(query.shape[-2], dtype=torch.float32, device=query.device)
    pairs = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=query.device)
    frequencies = 1.0 / 10000 ** (pairs / rotary_dim)
    angles = positions.unsqueeze(1) * frequencies
    sine, cosine = (
        each.repeat_interleave(2, dim=1).to(query.dtype) for each in (angles.sin(), angles.cos())
    )
    return Rotation(sine, cosine)


def rotated(x: Tensor, by: Rotation) -> Tensor:
    """``x``, ``(G, heads, S, size)``, with its first channels rotated in pairs (0, 1), (2, 3), ..."""
    channels = by.sine.shape[-1]
    turned, rest = x[..., :channels], x[..., channels:]
    swapped = torch.stack((-turned[..., 1::2], turned[..., ::2]), dim=-1).flatten(-2)
    return torch.cat((turned * by.cosine + swapped * by.sine, rest), dim=-1)


def as_scores(name: str, mask: Tensor, batch: int) -> Tensor:
    """A mask with four axes, for a batch of this size.

    ``(B, T)`` masks keys, ``(B, S, T)`` masks keys for each query, ``(B, heads or 1, S or 1, T)`` is as attention
    takes it. A batch of 1 stands for every sample. Raises ArgumentError for another shape, with the mask's ``name``.
    """
    shape = list(mask.shape)
    if mask.dim() == 2:
        mask = mask[:, None, None, :]
    elif mask.dim() == 3:
        mask = mask[:, None]
    if mask.dim() != 4 or mask.shape[0] not in (1, batch):
        raise ArgumentError(
            f"{name} is {shape}: it must be (B, T), (B, S, T) or (B, heads or 1, S or 1, T), and B is {batch}"
        )
    return mask.expand(batch, -1, -1, -1)
