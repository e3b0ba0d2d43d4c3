"""Models of plain torch: convolutions, recurrence, attention, experts, shared weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear, relu, softmax
from torch.nn.utils.parametrizations import weight_norm

WORDS, WIDTH, HEADS = 24, 8, 2


def convolutional() -> nn.Module:
    """Convolutions, batch normalisation and pooling, as of digits."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Add the shortcut to two convolutions."""
        hidden = relu(self.first_norm(self.first(x)))
        return relu(self.second_norm(self.second(hidden)) + self.shortcut(x))


def residual() -> nn.Module:
    """A residual network."""
    blocks = [Residual(6, 6, 1), Residual(6, 8, 2), Residual(8, 8, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), *blocks, *head)


def separable() -> nn.Module:
    """Depthwise separable convolutions with inverted bottlenecks, as of MobileNet."""

    def block() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(6, 12, 1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU6(),
            nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU6(),
            nn.Conv2d(12, 6, 1),
        )

    parts = [nn.Conv2d(3, 6, 3, stride=2), block(), block(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(6, 5))


class Dense(nn.Module):
    """Dense connections: each layer reads the outputs of all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 + 4 * n, 4, 3, padding=1) for n in range(3))
        self.head = nn.Linear(15, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Concatenate, and pool."""
        for layer in self.layers:
            x = torch.cat([x, relu(layer(x))], 1)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


class UNet(nn.Module):
    """Downwards and upwards, with a connection between layers of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.SiLU())
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of two channels."""
        down = self.down(x)
        out: Tensor = self.out(torch.cat([down, self.up(self.deep(down))], 1))
        return out


def temporal() -> nn.Module:
    """Dilated convolutions with normalised weights, as of a temporal convolutional network."""
    layers: list[nn.Module] = []
    for number, channels in enumerate((3, 6, 6)):
        gap = 2**number
        layers += [weight_norm(nn.Conv1d(channels, 6, 3, padding=gap, dilation=gap)), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 5))


class Recurrent(nn.Module):
    """Words through an LSTM or a GRU."""

    def __init__(self, kind: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, batch_first=True, **options)
        self.head = nn.Linear(2 * WIDTH if self.recurrent.bidirectional else WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of all words at each position."""
        out: Tensor = self.head(self.recurrent(self.words(ids))[0])
        return out


class Cell(nn.Module):
    """One LSTM cell in a loop over positions, the state of which crosses its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of all words at each position."""
        state, scores = None, []
        for word in self.words(ids).unbind(1):
            state = self.cell(word, state)
            scores.append(self.head(state[0]))
        return torch.stack(scores, 1)


class Sequences(nn.Module):
    """An encoder and a decoder of GRUs with attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.attention = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of all words at each position."""
        words = self.words(ids)
        seen, last = self.encoder(words)
        made, _ = self.decoder(words.flip(1), last)
        found = softmax(self.attention(made) @ seen.mT, -1) @ seen
        out: Tensor = self.head(torch.cat([made, found], -1))
        return out


class Transformer(nn.Module):
    """Words through ``torch.nn.Transformer``, or through its encoder alone."""

    def __init__(self, decoder: bool, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        how = {"dropout": 0.0, "batch_first": True, "dim_feedforward": 12, **options}
        self.layers: nn.Module
        if decoder:
            self.layers = nn.Transformer(WIDTH, HEADS, 2, 2, **how)
        else:
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, **how)
            self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of all words at each position."""
        words = self.words(ids)
        given = (words, words.flip(1)) if isinstance(self.layers, nn.Transformer) else (words,)
        out: Tensor = self.head(self.layers(*given))
        return out


class Mixer(nn.Module):
    """One block of an MLP-Mixer: across positions, then across channels."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.across = nn.Sequential(nn.Linear(length, 6), nn.GELU(), nn.Linear(6, length))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Add both parts."""
        x = x + self.across(self.norms[0](x).mT).mT
        out: Tensor = x + self.channels(self.norms[1](x))
        return out


def mixer() -> nn.Module:
    """Patches of an image through an MLP-Mixer."""
    first = [nn.Conv2d(3, WIDTH, 4, stride=4), nn.Flatten(2), _Swap(), Mixer(4), Mixer(4)]
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(4 * WIDTH, 5))


class _Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        """Exchange the last two axes."""
        return x.mT


def _expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))


class Experts(nn.Module):
    """Experts behind a gate: each position goes to the best ``count``, or all count for each position."""

    def __init__(self, count: int | None) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(_expert() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.count = count

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of all words at each position."""
        x = self.words(ids)
        shares = softmax(self.gate(x), -1)
        if self.count is None:
            made = torch.stack([expert(x) for expert in self.experts], -1)
            out: Tensor = self.head(x + (made * shares[..., None, :]).sum(-1))
            return out
        shares, chosen = shares.topk(self.count)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            *where, place = (chosen == number).nonzero(as_tuple=True)
            if len(place):  # the data decide which experts are called
                made = expert(x[tuple(where)]) * shares[*where, place].unsqueeze(-1)
                total = total.index_put(tuple(where), made, accumulate=True)
        routed: Tensor = self.head(x + total)
        return routed


class TiedWords(nn.Module):
    """A language model whose head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of all words at each position."""
        x = self.words(ids)
        for layer in self.hidden:
            x = x + gelu(layer(x))
        out: Tensor = self.head(x)
        return out


class Autoencoder(nn.Module):
    """A decoder that reads the encoder's weights, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(48, 12), nn.Linear(12, 6)])

    def forward(self, x: Tensor) -> Tensor:
        """Return the image again."""
        x = x[..., :4, :4].flatten(1)
        for layer in self.encoder:
            x = torch.tanh(layer(x))
        for layer in reversed(self.encoder):
            x = torch.tanh(linear(x, layer.get_parameter("weight").T))
        return x


class Siamese(nn.Module):
    """Two views through one network. In a pipeline running statistics would see the views of several microbatches in
    another order than a loop (docs/pipelines.md), so there are none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2),
            nn.GroupNorm(2, 6),
            nn.SiLU(),
            nn.Conv2d(6, 8, 3, stride=2),
            nn.Flatten(),
            nn.Linear(8, 5),
        )
        self.head = nn.Bilinear(5, 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of a pair."""
        out: Tensor = self.head(self.network(x), self.network(x.flip(3)))
        return out


class Universal(nn.Module):
    """One transformer layer, four times."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the scores of all words at each position."""
        x = self.words(ids)
        for _ in range(4):
            x = self.layer(x)
        out: Tensor = self.head(x)
        return out


def normalised() -> nn.Module:
    """Layers by name, one of them with frozen weights, one without parameters."""
    layers = nn.Sequential(
        OrderedDict(
            flat=nn.Flatten(),
            first=nn.Linear(192, 16),
            norm=nn.BatchNorm1d(16, momentum=None),
            act=nn.PReLU(16),
            frozen=nn.Linear(16, 16),
            last=nn.Linear(16, 5),
        )
    )
    layers.get_submodule("frozen").requires_grad_(False)
    return layers
