"""``smp.step``: a function whose body runs once for each microbatch (API 1.3)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, ParamSpec, overload

from smp_core import microbatch
from smp_core.errors import ArgumentTypeError
from smp_core.microbatch import CallArguments
from smp_core.torch import session as sessions
from smp_core.torch.exceptions import OutsideStepError
from smp_core.torch.execution import engine
from smp_core.torch.framework import FRAMEWORK, StepOutput
from smp_core.torch.tensor_tree import detached

__all__ = ["StepFunction", "StepOutput", "step"]

P = ParamSpec("P")


class StepFunction(Generic[P]):
    """A decorated function.

    Looks like it (name, docstring, signature; ``__wrapped__`` is the function) and, unlike it, is no
    descriptor: called as ``self.train_step(model, x)``, where the class body holds it, it gets exactly
    those arguments, without ``self`` (1.3 item 10).
    """

    def __init__(
        self,
        function: Callable[P, object],
        non_split_inputs: Collection[str] | None,
        input_split_axes: Mapping[str, int] | None,
        detach_outputs: bool,
    ) -> None:
        if isinstance(function, StepFunction):
            raise ArgumentTypeError(f"smp.step: {function!r} is decorated already")
        rules = microbatch.rules(function, non_split_inputs, input_split_axes)
        functools.update_wrapper(self, function)  # first: it copies the function's attributes
        self._rules, self._function, self._detach_outputs = rules, function, detach_outputs

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the step; every rank of the model-parallel group calls it together.

        Only the arguments of pp_rank 0 are looked at (item 11): elsewhere they may be dummies. The
        result, on every rank, has the structure of the body's result: each tensor is a
        :class:`StepOutput`, every other leaf a list by microbatch (items 5 to 7).

        Raises, the same on every rank:
            NotInitializedError: ``smp.init`` has not been called.
            OutsideStepError: another step is in progress on this rank.
            ArgumentTypeError: the function cannot be called with these arguments.
            BatchSizeError: ``microbatches`` does not divide a batch, or a tensor has no batch axis.
            StructureError: the body returned another structure for one microbatch than for another.
        """
        name = self._rules.function
        session = sessions.current(f"smp.step: {name}")
        if session.step is not None or session.tracing:
            raise OutsideStepError(
                f"smp.step: {name} was called inside a step: a step cannot run in a microbatch of another. "
                "Call the undecorated function (its __wrapped__), or return and call it after the step"
            )

        batch, count = CallArguments(args, kwargs), session.runtime.config.microbatches

        # Once: the body of microbatch 0 runs twice where it is traced, smp_slice does not (item 3).
        @functools.cache
        def split() -> list[CallArguments]:
            calls = microbatch.split(FRAMEWORK, self._rules, batch, count)
            return [CallArguments((index, call), {}) for index, call in enumerate(calls)]

        first: list[tuple[int, object]] = []

        def body(index: int, call: CallArguments) -> object:
            result = self._function(*call.args, **call.kwargs)
            if not session.tracing:
                # Here, where an error is one of the step: every rank raises it, before any gradient
                # is reduced.
                first[:] = first or [(index, detached(result))]
                seen = dict([*first, (index, result)])
                microbatch.join(FRAMEWORK, name, [*seen.values()], [*seen])
            return result

        results = engine.run_step(session, body, split, self._detach_outputs)
        return microbatch.join(FRAMEWORK, name, results)

    def __repr__(self) -> str:
        return f"<smp.step of {self._function!r}>"

    def __reduce__(self) -> str:
        # By name, as functions are pickled: the name leads to this object, not to the function.
        return self._rules.function


@overload
def step(function: Callable[P, object], /) -> StepFunction[P]: ...


@overload
def step(
    non_split_inputs: Collection[str] | None = None,
    /,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[Callable[P, object]], StepFunction[P]]: ...


@overload
def step(
    *,
    non_split_inputs: Collection[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[Callable[P, object]], StepFunction[P]]: ...


def step(
    first: Any = None,
    /,
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
    *,
    non_split_inputs: Collection[str] | None = None,
) -> Any:
    """Decorate a function so that its body runs once for each microbatch, in a pipeline.

    In all of its forms: ``@smp.step``, ``@smp.step()`` and ``@smp.step(non_split_inputs=["mask"])``.

    Args:
        first: the function, or ``non_split_inputs`` by position.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: batch axis by name of argument; 0 where none is said. May be negative.
        detach_outputs: detach every returned tensor; otherwise the graphs live as long as it does.

    Raises:
        ArgumentTypeError: no function, or an argument of a wrong type.
        ArgumentError: a name that is no parameter of the function, or is in both.
    """
    function = None
    if callable(first) or isinstance(first, staticmethod | classmethod | property):
        function = first
    elif first is not None:
        if non_split_inputs is not None:
            raise ArgumentTypeError("smp.step: non_split_inputs is given twice")
        non_split_inputs = first
    if type(detach_outputs) is not bool:
        raise ArgumentTypeError(f"smp.step: detach_outputs={detach_outputs!r} is no bool")

    def decorate(function: Callable[..., object]) -> StepFunction[...]:
        return StepFunction(function, non_split_inputs, input_split_axes, detach_outputs)

    return decorate if function is None else decorate(function)
