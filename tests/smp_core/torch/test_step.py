"""smp.step at pipeline degree 1: its forms, what it looks like, its errors, and StepOutput."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pickle
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch

import smp_core.torch as smp
from smp_core.errors import ArgumentError, ArgumentTypeError, NotInitializedError
from smp_core.torch.exceptions import (
    BatchSizeError,
    OutsideStepError,
    StructureError,
    UnsupportedTrainingError,
)

four = pytest.mark.smp(ranks=1, microbatches=4)
two = pytest.mark.smp(ranks=1, microbatches=2)


@smp.step
def module_level(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    """Its docstring."""
    return x * scale


@dataclasses.dataclass
class Output(OrderedDict):
    loss: Any
    logits: Any = None

    def __post_init__(self) -> None:
        for name in ("loss", "logits"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


# ---- Forms


def bare(f):
    return smp.step(f)


def called(f):
    return smp.step()(f)


def with_keywords(f):
    return smp.step(non_split_inputs=None, input_split_axes={"x": 0}, detach_outputs=True)(f)


def by_position(f):
    return smp.step([], {"x": 0}, True)(f)


def at_once(f):
    return smp.step(f, non_split_inputs=[], detach_outputs=True)


@four
@pytest.mark.parametrize("form", [bare, called, with_keywords, by_position, at_once])
def test_all_forms(smp, form):
    seen = []

    def body(x):
        seen.append(x.tolist())
        return x.sum()

    out = form(body)(torch.arange(8.0))
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [each.item() for each in out.outputs] == [1, 5, 9, 13]


@two
def test_names_by_position(smp):
    @smp.step(["whole"], {"x": 1})
    def body(x, whole):
        return x, whole

    x, whole = body(torch.zeros(3, 4), torch.zeros(5))
    assert [tuple(each.shape) for each in x.outputs] == [(3, 2)] * 2
    assert [tuple(each.shape) for each in whole.outputs] == [(5,)] * 2


@pytest.mark.parametrize(
    ("arguments", "keywords", "error", "message"),
    [
        ((), {"detach_outputs": 1}, ArgumentTypeError, "detach_outputs=1 is no bool"),
        ((["x"],), {"non_split_inputs": ["x"]}, ArgumentTypeError, "given twice"),
        ((), {"non_split_inputs": ["y"]}, ArgumentError, "names 'y', which is no parameter"),
        ((), {"input_split_axes": {"y": 0}}, ArgumentError, "names 'y', which is no parameter"),
        (("x",), {}, ArgumentTypeError, "no list of names"),
    ],
)
def test_bad_arguments_of_the_decorator(arguments, keywords, error, message):
    with pytest.raises(error, match=message):
        smp.step(*arguments, **keywords)(lambda x: x)


def test_a_step_is_decorated_once():
    with pytest.raises(ArgumentTypeError, match="decorated already"):
        smp.step(module_level)


# ---- What it looks like


def test_it_looks_like_the_function():
    assert module_level.__name__ == module_level.__qualname__ == "module_level"
    assert module_level.__doc__ == "Its docstring."
    assert module_level.__module__ == __name__
    assert list(inspect.signature(module_level).parameters) == ["x", "scale"]
    assert module_level.__wrapped__(torch.ones(1)).item() == 2
    assert "module_level" in repr(module_level)
    assert pickle.loads(pickle.dumps(module_level)) is module_level


@two
def test_it_does_not_bind_self(smp):
    class Trainer:
        @smp.step
        def train_step(model, x, self=None):
            return model, x, self

        def run(self, x):
            return self.train_step("model", x, self="any keyword")

    model, x, other = Trainer().run(torch.zeros(2))
    assert model == ["model"] * 2
    assert len(x.outputs) == 2
    assert other == ["any keyword"] * 2


@two
def test_methods_partials_and_objects_can_be_steps(smp):
    class Model:
        def forward(self, x, y=1):
            return x + y

        __call__ = forward

    x = torch.zeros(2)
    for function in (Model().forward, Model(), functools.partial(Model().forward, y=1)):
        assert smp.step(function)(x).reduce_sum().tolist() == [2.0]


# ---- Arguments


@two
def test_defaults_are_python_s_own(smp):
    whole = torch.zeros(3)

    @smp.step
    def body(x, default=whole, *, key=whole):
        assert default is whole
        assert key is whole
        return None

    assert body(torch.zeros(2)) == [None, None]


@two
def test_keyword_only_arguments_are_split(smp):
    @smp.step(input_split_axes={"y": -1})
    def body(*x, y):
        return len(x), *x, y

    count, first, second, y = body(torch.zeros(2), torch.zeros(4), y=torch.zeros(3, 2))
    assert count == [2, 2]
    assert [len(out.outputs[1]) for out in (first, second)] == [1, 2]
    assert y.outputs[0].shape == (3, 1)


@two
def test_wrong_arguments(smp):
    with pytest.raises(ArgumentTypeError, match=r"module_level.*unexpected keyword argument 'y'"):
        module_level(torch.zeros(2), y=1)


@four
def test_batches_that_cannot_be_split(smp):
    for bad, message in (
        (torch.zeros(6), "batch of 6 .*microbatches=4"),
        (torch.tensor(1.0), "no axis 0"),
    ):
        with pytest.raises(BatchSizeError, match=message):
            module_level(bad)
    assert module_level(torch.zeros(0, 3)).concat().shape == (0, 3)  # and it still works


@two
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24.0).view(4, 6)[:, ::2],
        lambda: torch.arange(12.0).view(3, 4).t(),
        lambda: torch.tensor([[1.0, 2.0]]).expand(4, 2),
        lambda: torch.zeros(4, 0),
    ],
    ids=["strided", "transposed", "expanded", "empty"],
)
def test_microbatches_are_views(smp, make):
    x = make()
    seen = []

    @smp.step
    def body(x):
        seen.append(x)
        return x.clone()

    assert torch.equal(body(x).concat(), x)
    half = len(x) // 2
    assert [each.data_ptr() for each in seen] == [x.data_ptr(), x[half:].data_ptr()]
    assert all(each.stride() == x.stride() for each in seen)


@two
def test_gradients_flow_into_a_leaf(smp):
    x = torch.arange(4.0, requires_grad=True)

    @smp.step
    def body(x):
        assert x.requires_grad
        loss = (x**2).sum()
        loss.backward()
        return loss

    body(x)
    assert x.grad.tolist() == [0, 2, 4, 6]


@two
def test_sparse_and_integer_and_bool_tensors(smp):
    dense = torch.tensor([[0, 1], [2, 0], [3, 0], [0, 0]])
    for given in (dense, dense.bool(), dense.to_sparse()):
        got = smp.step(lambda x: x.to_dense() if x.is_sparse else x)(given).concat()
        assert torch.equal(got, given.to_dense())
        assert got.dtype == given.dtype


# ---- Results


@two
def test_structure_is_kept(smp):
    pair = namedtuple("pair", "a b")

    @smp.step
    def body(x):
        return {
            "o": Output(loss=x.sum(), logits=x),
            "p": pair(x, [x, None]),
            "s": {x},
            "z": x.shape,
        }

    out = body(torch.arange(4.0))
    assert type(out["o"]) is Output
    assert isinstance(out["o"], dict)
    assert [key for key, _ in out["o"].items()] == ["loss", "logits"]
    assert out["o"].loss is out["o"]["loss"]
    assert out["o"].loss.reduce_sum().item() == 6
    assert type(out["p"]) is pair
    assert out["p"].a.concat().tolist() == [0, 1, 2, 3]
    assert out["p"].b[1] == [None, None]
    assert isinstance(next(iter(out["s"])), smp.StepOutput)
    assert out["z"] == [torch.Size([2])] * 2


@two
def test_no_result_is_a_list_of_none(smp):
    assert smp.step(lambda x: None)(torch.zeros(2)) == [None, None]


@two
def test_results_that_differ_in_structure(smp):
    with pytest.raises(StructureError, match="list of 1 for microbatch 0 and list of 2 for"):
        smp.step(lambda x: [0] * int(x))(torch.tensor([1, 2]))
    with pytest.raises(StructureError, match=r"a set of 2 with tensors in it at \['k'\]"):
        smp.step(lambda x: {"k": {x, x + 1}})(torch.zeros(2))


@pytest.mark.smp(ranks=2, microbatches=3)
def test_every_replica_raises_when_the_structure_differs_on_one(smp):
    @smp.step
    def body(x):
        return {"k": [0] * int(x)}

    lengths = [2, 2, 1] if smp.rank() == 1 else [2, 2, 2]
    with pytest.raises(
        StructureError, match=r"2 at \['k'\] for microbatch 0 and list of 1.*crobatch 2"
    ):
        body(torch.tensor(lengths))
    assert body(torch.tensor([1, 1, 1])) == {"k": [[0, 0, 0]]}


@two
def test_outputs_are_detached_unless_asked(smp):
    w = torch.ones(1, requires_grad=True)

    def body(x):
        return [(x * w).sum()]

    assert not smp.step(body)(torch.ones(4))[0].outputs[0].requires_grad
    kept = smp.step(detach_outputs=False)(body)(torch.ones(4))[0]
    kept.reduce_mean().backward()
    assert w.grad.item() == 2


# ---- Where it may be called


def test_before_init():
    with pytest.raises(NotInitializedError, match=r"smp.step: module_level: call smp.init"):
        module_level(torch.zeros(2))


@two
def test_a_step_in_a_step_is_refused_and_the_next_one_works(smp):
    @smp.step
    def outer(x):
        return module_level(x)

    with pytest.raises(OutsideStepError, match="module_level was called inside a step"):
        outer(torch.zeros(2))
    assert module_level(torch.ones(2)).reduce_sum().item() == 4


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2, microbatches=2)
def test_in_a_pipeline_it_is_refused_where_the_body_is_traced_and_every_rank_says_so(smp):
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))

    @smp.step
    def outer(x):
        return module_level(model(x))

    with pytest.raises(OutsideStepError, match="module_level was called inside a step"):
        outer(torch.zeros(2, 2))
    out = smp.step(lambda x: model(x))(torch.ones(2, 2)).concat()
    assert out.shape == (2, 2)


@two
def test_an_error_of_the_body_passes_and_the_next_step_works(smp):
    with pytest.raises(ZeroDivisionError):
        smp.step(lambda x: 1 / 0)(torch.zeros(2))
    assert module_level(torch.ones(2)).reduce_sum().item() == 4


@pytest.mark.smp(ranks=2, microbatches=2)
def test_every_replica_raises_when_the_batch_of_one_cannot_be_split(smp):
    with pytest.raises(BatchSizeError, match="batch of 3"):
        module_level(torch.zeros(3 if smp.rank() else 4))
    assert module_level(torch.ones(2)).reduce_sum().item() == 4


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2, microbatches=2)
def test_in_a_pipeline_dummies_do_and_every_rank_has_the_results(smp):
    """API 1.3.3, 1.3.7 and 1.3.11."""
    model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU()))
    calls = []

    class Custom:
        def smp_slice(self, num_mb, mb, axis):
            calls.append((num_mb, mb, axis))
            return mb

    @smp.step
    def body(model, x, custom):
        out = model(x)
        return {"sum": out.sum(), "custom": custom, "shape": x.shape}

    x = torch.ones(4, 2) if smp.pp_rank() == 0 else torch.ones(3, 0)
    for _ in range(2):
        out = body(model, x, Custom())
        assert out["custom"] == [0, 1]
        assert out["shape"] == [torch.Size([2, 2])] * 2
        assert (
            len(
                {tuple(v) for v in smp.allgather([t.item() for t in out["sum"].outputs], smp.WORLD)}
            )
            == 1
        )
        assert calls == ([(2, 0, 0), (2, 1, 0)] if smp.pp_rank() == 0 else [])
        calls.clear()


@pytest.mark.smp(ranks=2, microbatches=2)
def test_each_rank_has_its_own_step(smp):
    out = module_level(torch.full((2,), float(smp.rank())))
    assert out.concat().tolist() == [2.0 * smp.rank()] * 2


# ---- StepOutput


def output(*values: Any, dtype: Any = None) -> smp.StepOutput:
    return smp.StepOutput([torch.tensor(each, dtype=dtype) for each in values])


def test_step_output_s_methods():
    out = output([1.0, 2.0], [3.0, 6.0])
    assert [each.tolist() for each in out.outputs] == [[1, 2], [3, 6]]
    assert isinstance(out.outputs, list)
    out.outputs.clear()
    assert len(out.outputs) == 2
    assert out.reduce_mean().tolist() == [2, 4]
    assert out.reduce_sum().tolist() == [4, 8]
    assert out.concat().tolist() == [1, 2, 3, 6]
    assert out.stack().tolist() == [[1, 2], [3, 6]]
    assert "StepOutput([tensor" in repr(out)
    assert torch.equal(pickle.loads(pickle.dumps(out)).concat(), out.concat())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_small_floats_are_added_in_float32(dtype):
    out = output(1.0, *[2.0**-12] * 4096, dtype=torch.float32)
    small = smp.StepOutput([each.to(dtype) for each in out.outputs])
    assert small.reduce_sum().dtype == small.reduce_mean().dtype == dtype
    assert small.reduce_sum().float().item() == 2
    # 2**16 is beyond float16: a sum that is rounded before it is divided would be infinite.
    assert output(32768.0, 32768.0, dtype=torch.float16).reduce_mean().item() == 32768


def test_integers_and_bools_as_torch_sum_has_them():
    assert output(100, 100, dtype=torch.int8).reduce_sum().item() == 200
    assert output(True, True).reduce_sum().item() == 2
    assert output(1, 2).reduce_mean().item() == 1.5
    assert output(1, 2).reduce_mean().dtype == torch.float32
    assert output(1j, 2.0).reduce_mean().item() == 1 + 0.5j


def test_the_order_of_the_sum_is_that_of_the_microbatches():
    assert output(1e8, -1e8, 1.0).reduce_sum().item() == 1
    assert output(1.0, 1e8, -1e8).reduce_sum().item() == 0


def test_uneven_outputs():
    out = output([1.0], [2.0, 3.0])
    assert out.concat().tolist() == [1, 2, 3]
    for method in ("reduce_mean", "reduce_sum", "stack"):
        with pytest.raises(ArgumentError, match=rf"StepOutput.{method}.*shapes \(1,\), \(2,\)"):
            getattr(out, method)()
    with pytest.raises(ArgumentError, match=r"StepOutput.concat.*shapes"):
        output([[1.0]], [[1.0, 2.0]]).concat()
    with pytest.raises(ArgumentError, match="without dimensions"):
        output(1.0, 2.0).concat()


def test_what_is_tensorflow_s():
    with pytest.raises(UnsupportedTrainingError, match=r"merge is only in the TensorFlow.*concat"):
        output(1.0).merge()
    with pytest.raises(UnsupportedTrainingError, match=r"accumulate is only.*reduce_mean"):
        output(1.0).accumulate("add_n", var=None)
