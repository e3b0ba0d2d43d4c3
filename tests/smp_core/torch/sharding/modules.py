"""Every kind of module and parameter: models for test_sharded_models.py, each with the data that it takes."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import nn

import smp_core.torch as smp


class Linear(nn.Module):
    """A model with one layer, which most models here begin with."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.more()

    def more(self):
        pass


class Frozen(Linear):
    """A part of a unit, and all of one."""

    def more(self):
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[0].bias.requires_grad_(False)
        self.layers[1].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).sin()
        return self.linear(x)


class Sizes(Linear):
    """Without dimensions, of one element, of none; and the gathered units have several of them."""

    def more(self):
        self.no_dimensions = nn.Parameter(torch.tensor(2.0))
        self.another = nn.Parameter(torch.tensor(3.0))
        self.one = nn.Parameter(torch.tensor([1.5]))
        self.one_by_one = nn.Parameter(torch.tensor([[0.5]]))
        self.three = nn.Parameter(torch.ones(3))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.none_either = nn.Parameter(torch.zeros(3, 0))

    def forward(self, x):
        x = self.linear(x) * self.no_dimensions * self.another.sin() * self.one * self.one_by_one
        return x + self.three.prod() + self.none.sum() + self.none_either.sum()


class Strides(Linear):
    """Transposed, with gaps, expanded, channels last."""

    def more(self):
        self.transposed = nn.Parameter(torch.randn(4, 5).t())
        self.gaps = nn.Parameter(torch.randn(4, 8)[:, ::2])
        # torch cannot update one whose elements share memory.
        self.expanded = nn.Parameter(torch.randn(4, 1).expand(4, 4), requires_grad=False)
        self.last = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))

    def forward(self, x):
        y = (self.linear(x) @ self.transposed.t()).sum() * self.expanded + self.gaps * x
        return y + self.last.square().sum()


class Dtypes(Linear):
    """float64 and complex64 beside float32; conjugated, and negated, views are saved for backward."""

    def more(self):
        self.wide = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.imaginary = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x):
        y, c = self.linear(x).double() @ self.wide, self.imaginary
        z = torch.view_as_real(c).sin().sum() + (c.conj() @ y.to(c.dtype)).abs().pow(2).sum()
        return y * (z + (c.conj().imag * y).pow(2).sum() + (c * c.conj().imag).real.sum())


class Norm(Linear):
    """Buffers."""

    def more(self):
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.linear(x))


class Again(Linear):
    """A module that calls itself."""

    def forward(self, x, depth=0):
        y = torch.tanh(self.linear(x))
        return y if depth == 2 else self(y, depth + 1) * y


class Tied(Linear):
    """One weight in three modules of three units, and one module in two places."""

    def more(self):
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)
        )
        self.layers[1][0].weight = self.layers[0][1].weight
        self.linear.weight = self.layers[0][1].weight
        self.again = self.layers[0][0]

    def forward(self, x):
        for layer in [self.linear, *self.layers, self.again]:
            x = layer(x)
        return x


class Unused(Linear):
    """A layer that is not called, and one whose result is not used."""

    def more(self):
        self.not_called, self.not_used = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        self.not_used(x)
        return self.linear(x)


class Read(Linear):
    """Parameters of other modules, as attributes and in lists of modules; all of them at once."""

    def more(self):
        self.inner = ReadInner(self.linear)

    def forward(self, x):
        y = F.linear(self.inner(x), self.linear.weight.t())
        return y + sum((each * each).sum() for each in self.parameters())


class ReadInner(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.others, self.own = [other], nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.own(x), self.others[0].weight, self.others[0].bias)


class Registered(Linear):
    """Parameters in a list and in a closure."""

    def more(self):
        self.layers = nn.ModuleList([RegisteredInner(self.linear)])
        for parameter in self.linear.parameters():
            smp.register_parameter(self.layers[0], parameter)

    def forward(self, x):
        return self.layers[0](x)


class RegisteredInner(nn.Module):
    def __init__(self, other):
        super().__init__()
        weight = other.weight
        self.held = [other.weight, other.bias]
        self.closure = lambda x: x @ weight * weight.shape[0] + weight.t().mean()

    def forward(self, x):
        return F.linear(x, *self.held) + self.closure(x)


class Returned(Linear):
    """Parameters as outputs, as views of them, and as arguments."""

    def more(self):
        self.gives, self.positions, self.takes = Gives(), Positions(), Takes()

    def forward(self, x):
        weight, view, nest = self.gives()
        y = F.linear(self.linear(x), weight) + view + self.positions(4)
        return self.takes(y, weight) + self.takes(y, self.linear.weight) + nest["weight"].sum()


class Gives(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.vector = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self):
        return self.weight, self.vector.view(2, 2).reshape(4), {"weight": self.weight}


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 4))

    def forward(self, length):
        return self.table[:length]


class Takes(nn.Module):
    def forward(self, x, weight):
        return (x @ weight).sin()


class Attention(nn.Module):
    """Reads its child's weights, and leaves Python in eval."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Encoder(nn.Module):
    """Dropout; a fast path in eval."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x):
        return self.encoder(x)


class Recurrent(nn.Module):
    """Weights in a list of the module's."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True)
        self.gru, self.cell = nn.GRU(12, 8, batch_first=True), nn.LSTMCell(8, 8)

    def forward(self, x):
        with torch.no_grad():
            start = self.gru(torch.ones(1, 2, 12))[0].mean()
        return self.cell(self.gru(self.lstm(x)[0])[0][:, 0])[0] + start


class Parametrized(Linear):
    def more(self):
        parametrizations = nn.utils.parametrizations
        parametrizations.weight_norm(self.linear)
        self.spectral = parametrizations.spectral_norm(nn.Linear(4, 4))
        self.orthogonal = parametrizations.orthogonal(nn.Linear(4, 4))

    def forward(self, x):
        return self.orthogonal(self.spectral(self.linear(x)))


class Hooked(Linear):
    """The older functions, which set the weight before each call."""

    def more(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.weight = nn.utils.weight_norm(nn.Linear(4, 4))
        self.spectral = nn.utils.spectral_norm(nn.Linear(4, 4))

    def forward(self, x):
        return self.spectral(self.weight(self.linear(x)))


class Functional(Linear):
    def more(self):
        self.delta = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.func.functional_call(
            self.linear, {"weight": self.linear.weight + self.delta}, (x,)
        )


class Sparse(nn.Module):
    """Gradients that are sparse where parameters are whole."""

    def __init__(self):
        super().__init__()
        self.embed, self.linear = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.embed(x))


class Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Kept(torch.autograd.Function):
    """Past ``save_for_backward``, where no hook of torch's sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight.t(), ctx.x.t() @ gradient


class Functions(Linear):
    """Functions of the user's that keep weights; and the user's hooks, which keep what is saved."""

    def more(self):
        self.saved, self.kept = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        x = Kept.apply(Saved.apply(self.linear(x), self.saved), self.kept)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: (tensor,), lambda kept: kept[0]
        ):
            x = self.linear(x) @ self.saved
        with torch.autograd.graph.save_on_cpu():
            return self.linear(x) @ self.kept


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 4)) for _ in range(3))
        )
        smp.set_activation_checkpointing(self.layers)

    def forward(self, x):
        return self.layers(x)


class Modes(Linear):
    """Gradients are not recorded for a while."""

    def forward(self, x):
        with torch.inference_mode():
            one = self.linear(torch.ones(4, 4)).sum()
        with torch.no_grad():
            two = self.linear(torch.ones(4, 4)).sum()
        return self.linear(x) * float(one) + two


class Lists(Linear):
    def more(self):
        self.list = nn.ParameterList([torch.randn(4) for _ in range(3)])
        self.dict = nn.ParameterDict({"a": torch.randn(4, 4)})

    def forward(self, x):
        for each in self.list:
            x = x * each
        return self.linear(x) @ self.dict["a"]


class Various(Linear):
    def more(self):
        self.conv, self.bilinear = nn.Conv1d(4, 4, 1), nn.Bilinear(4, 4, 4)
        self.prelu, self.norm, self.bag = nn.PReLU(), nn.LayerNorm(4), nn.EmbeddingBag(5, 4)

    def forward(self, x):
        y = self.bilinear(self.prelu(self.norm(self.linear(x))), x)
        y = self.conv(y[..., None])[..., 0]
        return y + self.bag(torch.tensor([[0, 1], [2, 3], [1, 1], [4, 0]]))


MODELS = {
    **{
        model.__name__: (model, lambda generator: torch.randn(4, 4, generator=generator))
        for model in (
            Frozen, Sizes, Strides, Dtypes, Norm, Again, Tied, Unused, Read, Registered, Returned, Parametrized,
            Hooked, Functional, Functions, Checkpointed, Modes, Lists, Various,
        )
    },
    **{
        model.__name__: (model, lambda generator: torch.randn(3, 5, 8, generator=generator))
        for model in (Attention, Encoder, Recurrent)
    },
    "Sparse": (Sparse, lambda generator: torch.randint(0, 7, (4, 3), generator=generator)),
}  # fmt: skip
