"""Models as data: a :class:`Model` prints as code, and one plain function builds the ``nn.Module``.

Every block maps the last dimension of its input, ``width`` features, to as many; so blocks nest in
any way, and any dimension before the last may be the batch's. Values that stay whole numbers stay
so in every kind but ``dropout`` and ``norm``: sums, products, ReLU and choices only.

``magnitudes=True`` builds the shadow of a model, for the certificate of :mod:`training_oracle`: each
operation is replaced by a bound of its magnitude, so that given absolute values it yields bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True, repr=False)
class Block:
    """One module of a model, with the blocks below.

    Attributes:
        kind: a key of :data:`KINDS`.
        children: the blocks below, as many as the kind takes.
        size: the hidden width of ``mlp``, the number of calls of ``repeat``, the number of the model's
            module or parameter that ``shared`` or ``tied`` stands for.
        bias: whether the block's linear map has a bias.
        frozen: whether the block's own parameters need no gradient.
    """

    kind: str
    children: tuple[Block, ...] = ()
    size: int = 1
    bias: bool = True
    frozen: bool = False

    def __repr__(self) -> str:
        return _code(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # as Hypothesis prints it, too

    def walk(self) -> Iterator[Block]:
        """Yield this block and all below, as often as they occur."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclasses.dataclass(frozen=True, repr=False)
class Model:
    """A whole model: a stem, a body of blocks, and a head, which is used, and trained, always.

    Attributes:
        body: from ``width`` features to as many.
        inputs: features of the input; 0 if it holds tokens and the stem is an embedding.
        width: features inside.
        outputs: features of the output; tokens, if the stem is an embedding.
        tied: whether the head's weight is the embedding's.
        frozen: whether the stem needs no gradient.
    """

    body: Block = Block("chain")
    inputs: int = 1
    width: int = 1
    outputs: int = 1
    tied: bool = False
    frozen: bool = False

    def __repr__(self) -> str:
        return _code(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # as Hypothesis prints it, too

    def kinds(self) -> set[str]:
        """The kinds of its blocks."""
        return {each.kind for each in self.body.walk()}


def _code(value: Any) -> str:
    """The call that makes a dataclass, without the fields that have their defaults."""
    fields = dataclasses.fields(value)
    said = [
        f"{field.name}={given!r}" if place else repr(given)
        for place, field in enumerate(fields)
        if (given := getattr(value, field.name)) != field.default
    ]
    return f"{type(value).__name__}({', '.join(said)})"


def build(model: Model, *, magnitudes: bool = False) -> Root:
    """The module of this model, float32; its values are whatever torch draws, set them by a state dict."""
    return Root(model, _Making(model.width, magnitudes))


class _Making:
    """The state that the blocks of one model share while they are made."""

    def __init__(self, width: int, magnitudes: bool) -> None:
        self.width = width
        self.magnitudes = magnitudes
        self.modules: dict[int, nn.Module] = {}
        self.weights: dict[int, nn.Parameter] = {}

    def linear(self, inputs: int, outputs: int, block: Block) -> nn.Linear:
        made = nn.Linear(inputs, outputs, bias=block.bias)
        return made.requires_grad_(not block.frozen)

    def block(self, block: Block) -> nn.Module:
        return KINDS[block.kind](self, block)

    def children(self, block: Block) -> list[nn.Module]:
        return [self.block(child) for child in block.children]


class Root(nn.Module):
    """The whole: ``model(x)``, with ``x`` of shape ``(..., inputs)`` or of tokens ``(...)``."""

    def __init__(self, model: Model, making: _Making) -> None:
        super().__init__()
        stem = Block("linear", frozen=model.frozen)
        self.stem: nn.Module
        if model.inputs:
            self.stem = making.linear(model.inputs, model.width, stem)
        else:
            self.stem = nn.Embedding(model.outputs, model.width).requires_grad_(not model.frozen)
        self.body = making.block(model.body)
        self.head = nn.Linear(model.width, model.outputs, bias=True)
        if model.tied:
            self.head.weight = self.stem.weight  # the same parameter

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.stem(x)))
        return out


# ---- Blocks --------------------------------------------------------------------------------------


class Many(nn.Module):
    """A block that has children."""

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__()
        self.magnitudes = making.magnitudes
        self.parts = nn.ModuleList(making.children(block))
        self.times = block.size


class Residual(Many):
    """The sum of the input and the child's output."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.parts[0](x)
        return out


class Branches(Many):
    """The sum of what its children make of one input."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = sum((part(x) for part in self.parts[1:]), self.parts[0](x))
        return out


class Skip(Many):
    """A chain whose last child also gets what its first made."""

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.parts[0](x)
        for part in self.parts[1:-1]:
            h = part(h)
        out: Tensor = self.parts[-1](h + first)
        return out


class Repeat(Many):
    """Calls one child several times, one call behind the other."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.parts[0](x)
        return x


class Nested(Many):
    """A linear map around a child, so that a module with parameters calls another."""

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__(making, block)
        self.own = nn.Parameter(torch.zeros(making.width, making.width))
        self.own.requires_grad_(not block.frozen)

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts[0](nn.functional.linear(x, self.own))
        out: Tensor = h + x
        return out


class Direct(Many):
    """Calls its child's ``forward``, not the child."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts[0].forward(x)
        return out


class Unused(Many):
    """Calls the first child; the others are never called."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parts[0](x)
        return out


class Router(Many):
    """Calls one of two children, chosen by the input's values, so that microbatches use different ones."""

    def forward(self, x: Tensor) -> Tensor:
        if self.magnitudes:
            both: Tensor = self.parts[0](x) + self.parts[1](x)
            return both
        chosen: Tensor = self.parts[0 if float(x.detach().sum()) > 0 else 1](x)
        return chosen


class Scale(nn.Module):
    """Multiplies by a buffer."""

    factor: Tensor

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(making.width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Gain(nn.Module):
    """Multiplies by a parameter without dimensions."""

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()), requires_grad=not block.frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Empty(nn.Module):
    """Adds the sum of a parameter without elements."""

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.ones(0, making.width), requires_grad=not block.frozen)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum(0)


class Transposed(nn.Module):
    """A linear map whose weight, of shape ``(width + 1, width)``, lies in memory column by column."""

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__()
        made = torch.zeros(making.width, making.width + 1).t()
        self.weight = nn.Parameter(made, requires_grad=not block.frozen)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.linear(x, self.weight)
        return h[..., :-1] + h[..., 1:]


class Borrower(nn.Module):
    """A linear map with the weight of another module, which is none of its children.

    ``held``: this module has the parameter itself, and not the module that the parameter belongs to.
    """

    def __init__(self, lender: nn.Linear, held: bool) -> None:
        super().__init__()
        self.lenders = [] if held else [lender]  # not registered: no children
        self.weights = [lender.weight] if held else []

    @property
    def borrowed(self) -> nn.Parameter:
        """The other module's weight, which this module uses."""
        weight = self.weights[0] if self.weights else self.lenders[0].weight
        return weight  # type: ignore[return-value]  # torch says Tensor

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.borrowed)


class Borrow(nn.Module):
    """A linear map, and a module that uses its weight, too."""

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__()
        self.lender = making.linear(making.width, making.width, block)
        self.borrower = Borrower(self.lender, held=block.kind == "hold")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.borrower(self.lender(x))
        return out


class Norm(nn.Module):
    """Batch normalisation over all dimensions but the last; a row of zeros keeps one row company."""

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(making.width)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = self.norm(torch.cat([rows, torch.zeros_like(rows[:1])]))[:-1]
        return out.reshape(x.shape)


class Pick(nn.Module):
    """Takes and gives a tuple in a tuple, with None, and an output that needs no gradient."""

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__()
        self.map = making.linear(making.width, making.width, block)

    def forward(self, pair: tuple[Tensor, tuple[Tensor, None]], times: int) -> Any:
        first, (second, nothing) = pair
        assert nothing is None
        if times != 2:
            raise AssertionError(f"times is {times!r}, not 2")
        out = self.map(first) + second
        return out, (second + out, None), (out.detach() > 0)


class Tuples(Many):
    """Calls a module with a tuple, None and an int, and its child with what comes back."""

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__(making, block)
        self.pick = Pick(making, block)

    def forward(self, x: Tensor) -> Tensor:
        out, (other, nothing), positive = self.pick((x, (x, None)), times=2)
        if nothing is not None or positive.dtype != torch.bool or positive.requires_grad:
            raise AssertionError(f"not what Pick returned: {nothing!r}, {positive!r}")
        h: Tensor = self.parts[0](out) + other
        return h


class Mapping(nn.Module):
    """Takes and gives a dict, with a string and None in it, by keyword."""

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__()
        self.map = making.linear(making.width, making.width, block)

    def forward(self, *, given: dict[str, Any], mode: str = "wrong") -> dict[str, Any]:
        if mode != "right" or given["none"] is not None:
            raise AssertionError(f"called with mode={mode!r}, none={given['none']!r}")
        states = given["states"]
        return {"out": self.map(states[0]) + states[1], "mode": mode, "none": None}


class Dicts(Many):
    """Calls a module with a dict that holds a list, and its child with what comes back."""

    def __init__(self, making: _Making, block: Block) -> None:
        super().__init__(making, block)
        self.mapping = Mapping(making, block)

    def forward(self, x: Tensor) -> Tensor:
        back = self.mapping(given={"states": [x, x], "none": None}, mode="right")
        if (back["mode"], back["none"]) != ("right", None):
            raise AssertionError(f"not what Mapping returned: {back!r}")
        out: Tensor = self.parts[0](back["out"])
        return out


def _linear(making: _Making, block: Block) -> nn.Module:
    return making.linear(making.width, making.width, block)


def _mlp(making: _Making, block: Block) -> nn.Module:
    return nn.Sequential(
        making.linear(making.width, block.size, block),
        nn.Identity() if making.magnitudes else nn.ReLU(),
        making.linear(block.size, making.width, block),
    )


def _shared(making: _Making, block: Block) -> nn.Module:
    return making.modules.setdefault(block.size, _linear(making, Block("linear")))


def _tied(making: _Making, block: Block) -> nn.Module:
    made = making.linear(making.width, making.width, Block("linear", bias=block.bias))
    weight: nn.Parameter = made.weight  # type: ignore[assignment]  # torch says Tensor
    made.weight = making.weights.setdefault(block.size, weight)
    return made


#: Every kind of block, with the function that makes it.
KINDS: dict[str, Callable[[_Making, Block], nn.Module]] = {
    "linear": _linear,
    "mlp": _mlp,
    "relu": lambda making, block: nn.Identity() if making.magnitudes else nn.ReLU(),
    "scale": Scale,
    "gain": Gain,
    "empty": Empty,
    "transposed": Transposed,
    "borrow": Borrow,
    "hold": Borrow,
    "norm": Norm,
    "dropout": lambda making, block: nn.Dropout(0.5),
    "shared": _shared,
    "tied": _tied,
    "chain": lambda making, block: nn.Sequential(*making.children(block)),
    "residual": Residual,
    "branches": Branches,
    "skip": Skip,
    "repeat": Repeat,
    "nested": Nested,
    "direct": Direct,
    "unused": Unused,
    "route": Router,
    "tuple": Tuples,
    "dict": Dicts,
}
