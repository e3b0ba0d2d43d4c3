"""No name that the engine uses is in the way of a user's: as an argument of a module or of a step function, a module,
a parameter, a buffer, or an attribute of one.
"""

from __future__ import annotations

import ast
import keyword
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import smp_core.torch as package
from smp_core.torch.patches.checkpoint import checkpoint

WIDTH = 4
#: Names that the API gives a meaning, and the prefix of what is ours.
DOCUMENTED = {"_orig_forward", "ds_shape", "ds_numel", "ds_tensor"}


def engine_names() -> list[str]:
    """Every parameter name of every function of the engine, and every attribute that it reads or sets."""
    found: set[str] = set()
    for path in Path(package.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                found.add(str(node.slice.value))
    own = {name for name in found if name.startswith("_smp_")} | DOCUMENTED
    return sorted(
        name for name in found - own if name.isidentifier() and not keyword.iskeyword(name)
    )


NAMES = engine_names()
#: The names that torch itself leaves to a user: nn.Module.__call__ has a parameter ``self``.
ARGUMENTS = [name for name in NAMES if name not in ("self", "preserve_rng_state")]
MEMBERS = [name for name in NAMES if not hasattr(nn.ModuleDict(), name)]
TAGS = [name for name in NAMES if not hasattr(nn.Parameter(torch.zeros(1)), name)]


def some(names: list[str], least: int, most: int = 40) -> st.SearchStrategy[list[str]]:
    return st.lists(st.sampled_from(names), min_size=least, max_size=most, unique=True)


class Leaf(nn.Module):
    """Adds its arguments, whatever their names, times its parameters, plus its buffers times an attribute."""

    def __init__(self, members: list[str], tags: list[str]) -> None:
        super().__init__()
        vars(self)[" names"] = members[::3], members[1::3], members[2::3], tags
        for number, name in enumerate(members[::3]):
            values = torch.arange(WIDTH * WIDTH, dtype=torch.float64).view(WIDTH, WIDTH)
            parameter = nn.Parameter((values + number) % 3 - 1)
            self.register_parameter(name, parameter)
            for tag in tags if not number else ():
                setattr(parameter, tag, tag)
        for name in members[1::3]:
            self.register_buffer(name, torch.arange(WIDTH, dtype=torch.float64))
        for name in members[2::3]:
            setattr(self, name, 2.0)

    def forward(self, /, **tensors: torch.Tensor) -> torch.Tensor:
        parameters, buffers, attributes, tags = vars(self)[" names"]
        total = torch.stack(list(tensors.values())).sum(0)
        result = torch.zeros_like(total)
        for name in parameters:
            result = result + total @ getattr(self, name)
        first = getattr(self, parameters[0])
        assert all(getattr(first, tag) == tag for tag in tags)
        for name in buffers:
            result = result + getattr(self, name)
        return result * (sum(getattr(self, name) for name in attributes) / len(attributes))


class Tree(nn.Module):
    """A leaf under an attribute, and leaves in a ModuleDict; perhaps they are checkpointed."""

    def __init__(self, drawn: dict[str, Any]) -> None:
        super().__init__()
        vars(self)[" drawn"] = drawn
        first, box, *others = drawn["children"]
        setattr(self, first, Leaf(drawn["members"], drawn["tags"]))
        leaves = {name: Leaf(drawn["members"][:3], []) for name in others}
        setattr(self, box, nn.ModuleDict(leaves))

    def forward(self, /, **tensors: torch.Tensor) -> torch.Tensor:
        drawn = vars(self)[" drawn"]
        first, box, *others = drawn["children"]
        call: Any = checkpoint if drawn["checkpointed"] else (lambda module, /, **k: module(**k))
        result = call(getattr(self, first), **tensors)
        few = dict(list(tensors.items())[:3])
        for name in others:
            result = result + call(getattr(self, box)[name], **few)
        return result


drawings = st.fixed_dictionaries(
    {
        "arguments": some(ARGUMENTS, 2),
        "children": some(MEMBERS, 3, 8),
        "members": some(MEMBERS, 3),
        "tags": some(TAGS, 1),
        "step": some(NAMES, 3, 3),
        "checkpointed": st.booleans(),
    }
)
#: All of them at once, but of modules a few: each is a call of its own.
EVERYTHING = {
    "arguments": ARGUMENTS,
    "children": MEMBERS[::50],
    "members": MEMBERS,
    "tags": TAGS,
    "step": ["self", "step", "args"],
    "checkpointed": True,
}

X = torch.arange(-4.0, 12.0, dtype=torch.float64).view(4, WIDTH)
Y = X.flip(0) - 3


def arguments(drawn: dict[str, Any], x: Any, y: Any) -> dict[str, Any]:
    return {name: (x, y)[number % 2] for number, name in enumerate(drawn["arguments"])}


def plain(drawn: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Two updates of plain PyTorch, on numbers whose sums are exact in any order."""
    module = Tree({**drawn, "checkpointed": False})
    optimizer = torch.optim.SGD(module.parameters(), lr=2**-8)
    for _ in range(2):
        optimizer.zero_grad()
        for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
            (module(**arguments(drawn, x, y)).sum() / 2).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def check(smp: Any, drawn: dict[str, Any]) -> None:
    module = Tree(drawn)
    if smp.pp_size() > 1:
        smp.set_partition(getattr(module, drawn["children"][0]), 1)
    model = smp.DistributedModel(module)
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=2**-8))

    @smp.step
    def step(**given: Any) -> Any:
        given_model, x, y = given.values()
        loss = given_model(**arguments(drawn, x, y)).sum()
        given_model.backward(loss)
        return loss.detach()

    for _ in range(2):
        optimizer.zero_grad()
        step(**dict(zip(drawn["step"], (model, X, Y), strict=True)))
        optimizer.step()
    found, expected = model.state_dict(), plain(drawn)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.smp(ranks=1, microbatches=2)
@given(drawn=drawings)
@example(drawn=EVERYTHING)
@settings(max_examples=25, deadline=None)
def test_any_name_on_one_rank(smp, drawn):
    check(smp, drawn)


@pytest.mark.smp(
    ranks=2, microbatches=2, pipeline_parallel_degree=2, auto_partition=False, default_partition=0
)
@given(drawn=drawings)
@example(drawn=EVERYTHING)
@settings(max_examples=25, deadline=None)
def test_any_name_in_a_pipeline(smp, drawn):
    check(smp, drawn)


@pytest.mark.smp(
    ranks=2,
    microbatches=2,
    ddp=True,
    sharded_data_parallel_degree=2,
    sdp_param_persistence_threshold=0,
    sdp_gradient_clipping=1e300,
)
@given(drawn=drawings)
@example(drawn=EVERYTHING)
@settings(max_examples=25, deadline=None)
def test_any_name_in_a_sharded_model(smp, drawn):
    check(smp, drawn)


@pytest.mark.parametrize("degree", [1, 2])
def test_attention_called_by_the_names_of_its_arguments(smp_world, degree):
    smp_world.run(_attention, degree, ranks=degree)


def _attention(degree):
    smp = package
    smp.shutdown()
    smp.init({"pipeline_parallel_degree": degree, "auto_partition": False, "default_partition": 0})
    torch.manual_seed(0)

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=torch.float64)

        def forward(self, x):
            return self.attention(query=x, key=x, value=x)[0]

    module, x = Attends(), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    expected = module(x)
    smp.set_partition(module.attention, degree - 1)
    model = smp.DistributedModel(module)

    @smp.step
    def step(model, key):
        output = model(key)
        model.backward(output.sum())
        return output

    assert torch.equal(step(model, x).concat(), expected.detach())
