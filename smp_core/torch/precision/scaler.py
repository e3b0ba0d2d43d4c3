"""Loss scalers: how large the loss is made before backward, so that small 16-bit gradients do not
vanish.

Pure state machines: they are told, once per ``optimizer.step()``, whether any rank of the world found an
infinity or NaN, so every rank's is in the same state. The rules are those of API 1.8 to the letter
(ENGINES 1.8). At the floor an overflow leaves the scale at ``min_scale`` and the step is skipped all the
same; DeepSpeed raises there, the API's rules do not. There is no ceiling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

from smp_core.errors import ArgumentError, ArgumentTypeError

_CALL = "smp.DistributedOptimizer"
#: The keys of ``dynamic_loss_args`` and their defaults (API 1.8).
DEFAULTS: Mapping[str, Any] = {
    "init_scale": 2**32,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 1,
    "consecutive_hysteresis": False,
}


class LossScaler:
    """The static scaler: one scale, and no step is ever an overflow (API 1.8).

    ``loss_scale`` is a float and may be set. ``dynamic`` is whether gradients need to be looked at.
    Raises ArgumentError unless the scale is a finite number above 0.
    """

    dynamic: ClassVar[bool] = False
    _FIELDS: ClassVar[tuple[str, ...]] = ("cur_scale",)

    def __init__(self, scale: float = 1.0) -> None:
        self.cur_scale = _scale("static_loss_scale", scale)

    @property
    def loss_scale(self) -> float:
        """The factor on losses."""
        return self.cur_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self.cur_scale = _scale("loss_scale", scale)

    def update_scale(self, overflow: bool) -> None:
        """After a step's gradients were looked at: ``overflow`` is the world's."""

    def state_dict(self) -> dict[str, object]:
        """All that the scaler remembers, as numbers."""
        return {"dynamic": self.dynamic, **{name: getattr(self, name) for name in self._FIELDS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state_dict`. Of a scaler of the other kind only the scale is taken: a run
        may be resumed with other arguments.

        Raises ArgumentTypeError if it is none.
        """
        if not isinstance(state, Mapping) or "cur_scale" not in state:
            raise ArgumentTypeError(
                f"loss_scaler.load_state_dict: no state of a loss scaler: {state!r}"
            )
        same_kind = bool(state.get("dynamic", False)) == self.dynamic
        given = {name: state[name] for name in self._FIELDS if name in state}
        for name in self._FIELDS if same_kind else ("cur_scale",):
            if name not in given:
                raise ArgumentTypeError(f"loss_scaler.load_state_dict: the state lacks {name!r}")
        self.cur_scale = _scale("cur_scale", given.pop("cur_scale"))
        if same_kind:
            for name, value in given.items():
                setattr(self, name, value)

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._FIELDS)
        return f"{type(self).__name__}({fields})"


class DynamicLossScaler(LossScaler):
    """The dynamic scaler: down by a factor at an overflow, up after a window without one.

    Args:
        init_scale: the first scale.
        scale_factor: by which it goes up and down.
        scale_window: good steps after which it goes up.
        min_scale: the floor.
        delayed_shift: overflows until it goes down (hysteresis); all of them are skipped steps.
        consecutive_hysteresis: each good step fills the hysteresis up again, rather than growth alone.

    ``cur_iter`` counts the updates; ``last_overflow_iter`` is that of the last overflow, -1 at first, so
    that the scale grows first at the ``scale_window``-th good step. ``cur_hysteresis`` is the rest of
    ``delayed_shift``. Raises ArgumentError, ArgumentTypeError for arguments that make no sense.
    """

    dynamic: ClassVar[bool] = True
    _FIELDS: ClassVar[tuple[str, ...]] = (
        "cur_scale",
        "cur_iter",
        "last_overflow_iter",
        "cur_hysteresis",
        "scale_factor",
        "scale_window",
        "min_scale",
        "delayed_shift",
        "consecutive_hysteresis",
    )

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None:
        self.cur_scale = _scale("init_scale", init_scale)
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = _scale("scale_factor", scale_factor)
        if self.scale_factor <= 1:
            raise ArgumentError(f"{_CALL}: scale_factor={scale_factor!r} must be above 1")
        self.scale_window = _count("scale_window", scale_window)
        self.min_scale = _scale("min_scale", min_scale)
        self.delayed_shift = _count("delayed_shift", delayed_shift)
        self.cur_hysteresis = self.delayed_shift
        self.consecutive_hysteresis = bool(consecutive_hysteresis)

    def update_scale(self, overflow: bool) -> None:
        """One step is over; see the class."""
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                if not self.consecutive_hysteresis:
                    self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1


def of_arguments(
    static_loss_scale: float, dynamic_loss_scale: bool, given: Mapping[str, Any]
) -> LossScaler:
    """The scaler that the arguments of ``smp.DistributedOptimizer`` ask for; ``given`` are the dynamic
    ones, checked by :func:`dynamic_arguments`.
    """
    if dynamic_loss_scale:
        return DynamicLossScaler(**given)
    return LossScaler(static_loss_scale)


def dynamic_arguments(keywords: Mapping[str, object]) -> dict[str, Any]:
    """The dynamic loss arguments in the forms that scripts pass: one dict named ``dynamic_loss_args``, or
    keywords of its keys. Raises ArgumentError for an unknown one, ArgumentTypeError if it is no dict.
    """
    given = dict(keywords)
    nested = given.pop("dynamic_loss_args", None)
    if nested is not None and not isinstance(nested, Mapping):
        raise ArgumentTypeError(f"{_CALL}: dynamic_loss_args must be a dict, not {nested!r}")
    given.update(nested or {})
    unknown = sorted(given.keys() - DEFAULTS.keys())
    if unknown:
        raise ArgumentError(
            f"{_CALL}: unknown argument {', '.join(map(repr, unknown))}; the arguments "
            f"of dynamic loss scaling are {', '.join(sorted(DEFAULTS))}"
        )
    return given


def _scale(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentTypeError(f"{_CALL}: {name}={value!r} is no number")
    if not math.isfinite(value) or value <= 0:
        raise ArgumentError(f"{_CALL}: {name}={value!r} must be a finite number above 0")
    return float(value)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{_CALL}: {name}={value!r} is no whole number")
    if value < 1:
        raise ArgumentError(f"{_CALL}: {name}={value!r} must be at least 1")
    return value
