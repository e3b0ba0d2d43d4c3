"""torch's profiler on rank threads.

torch's default engine, Kineto, records one profile per process: where two threads profile at the
same time, the one that ends last crashes the process. torch's older engine keeps its profile per
thread, and each rank is a thread. So on a rank, ``torch.autograd.profiler.profile`` and
``torch.profiler.profile`` record with the older engine; every other thread keeps Kineto.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import profiler, profiler_legacy
from torch.autograd.profiler_util import EventList
from torch.profiler import profiler as torch_profiler

from smp_core.errors import UnsupportedError
from smp_core.transport import current_rank

_State: Any = profiler.ProfilerState  # type: ignore[attr-defined]
_Config: Any = profiler.ProfilerConfig  # type: ignore[attr-defined]
_disable: Any = torch.autograd._disable_profiler_legacy  # type: ignore[attr-defined]
_enable: Any = torch.autograd._enable_profiler_legacy  # type: ignore[attr-defined]
_enabled: Any = torch.autograd._profiler_enabled  # type: ignore[attr-defined]
_parse: Any = profiler_legacy._parse_legacy_records


def _refuse(what: str) -> NoReturn:
    raise UnsupportedError(
        f"{what}: on `sim` the ranks are threads of one process, and this part of torch's profiler "
        "exists once per process. Run on processes (--smp-backend=gloo)"
    )


class RankTrace:
    """The profile of one rank, in the place of Kineto's result."""

    def __init__(self, records: Any) -> None:
        self.records = records

    def save(self, path: str) -> None:
        """Write it in Chrome's format, as ``export_chrome_trace`` does."""
        events = EventList(_parse(self.records), use_device=None)  # type: ignore[no-untyped-call]
        events._build_tree()  # type: ignore[no-untyped-call]
        events.export_chrome_trace(path)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f"kineto_results.{name}")


def _config(state: Any, *rest: Any) -> Any:
    if state is not None and state != _State.KINETO:
        _refuse(f"a profiler of kind {state.name}")
    return _Config(_State.CPU, *rest)


def _prepare(config: Any, activities: Any, **options: Any) -> None:
    if _enabled():
        raise RuntimeError("Profiler is already enabled on this thread")  # torch's own words


def _start(config: Any, activities: Any) -> None:
    _enable(config)


def _stop() -> RankTrace:
    if not _enabled():
        raise RuntimeError("Can't disable Kineto profiler when it's not running")  # torch's own
    return RankTrace(_disable())


def _toggle(*_: Any) -> NoReturn:
    _refuse("toggle_collection_dynamic")


def _observe(*_: Any) -> NoReturn:
    _refuse("ExecutionTraceObserver")


def _parse_results(self: Any, result: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(result, RankTrace):
        return _parse(result.records)
    return _parse_kineto(self, result, *args, **kwargs)


_parse_kineto: Any = profiler.profile._parse_kineto_results


def _nothing(*_: Any) -> None:
    """Metadata is Kineto's."""


def _routed(outside: Callable[..., Any], on_rank: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        function = outside if current_rank.current() is None else on_rank
        return function(*args, **kwargs)

    return call


# The places where torch looks each function up, and the function that a rank finds there.
_ON_RANKS: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
    (profiler, "ProfilerConfig", _config),
    (profiler, "_prepare_profiler", _prepare),
    (profiler, "_enable_profiler", _start),
    (profiler, "_disable_profiler", _stop),
    (profiler, "_toggle_collection_dynamic", _toggle),
    (torch.autograd, "_add_metadata_json", _nothing),
    (torch_profiler, "_enable_execution_trace_observer", _observe),
)
_PATCHES = [
    (owner, name, getattr(owner, name), _routed(getattr(owner, name), on_rank))
    for owner, name, on_rank in _ON_RANKS
]


def enter() -> None:
    """Give each rank a profiler of its own from now on."""
    for owner, name, _, routed in _PATCHES:
        setattr(owner, name, routed)
    # Stays in place: a rank's recordings are often read after the run.
    profiler.profile._parse_kineto_results = _parse_results  # type: ignore[method-assign]


def leave() -> None:
    """Give torch's profiler back."""
    for owner, name, outside, _ in _PATCHES:
        setattr(owner, name, outside)


def end() -> None:
    """Stop what the calling rank has started and not stopped: its thread serves again."""
    while _enabled():
        _disable()
