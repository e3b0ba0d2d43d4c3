"""State of Python and torch that exists once per process and that a body may change: on `sim`, each
rank has its own.

Rank threads share a process. At each hand-over the outgoing rank's values are put away, and the
incoming rank's are put back. A rank starts with the values that the process has when the run starts.
No other rank and no later run sees its changes.

``STATES`` is the whole list, with the environment beside it. Nearly no body changes any of these
states, so a hand-over reads all and compares, and a container that is changed in place (hooks, warning
filters) is shared until a rank changes it. Random generators and the default dtype are in isolation.py.
State that torch keeps per thread (gradient mode, autocast, dispatch modes, saved-tensor hooks) needs no
switching and is cleared by ``clear_thread``. docs/sim.md lists the state that stays shared.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pytest_smp.ranks.module_loads import ModuleLoads
from pytest_smp.ranks.warning_registries import WarningRegistries
from pytest_smp.ranks.working_folders import WorkingFolders


class Attribute(NamedTuple):
    """A module global, or an attribute of an object that lives as long as the process."""

    module: str
    path: str


class Switch(NamedTuple):
    """A switch of torch's C++: how it is read and set, by names in the module."""

    module: str
    read: tuple[str, ...]  # each is called without arguments
    write: str  # called with all that was read
    keywords: tuple[str, ...] = ()  # how all but the first are passed


_MODULE, _C = "torch.nn.modules.module", "torch._C"
_HOOKS = (
    "buffer_registration_hooks module_registration_hooks parameter_registration_hooks "
    "backward_pre_hooks backward_hooks forward_pre_hooks forward_hooks "
    "forward_hooks_always_called forward_hooks_with_kwargs"
)

_CP = "torch.distributed.tensor.experimental._context_parallel"
_DISPATCHER = "torch.distributed.tensor", "DTensor._op_dispatcher"
#: Dictionaries and sets of torch.distributed that its contexts change in place: a rank's own from its first change.
_CONTAINERS = (
    (_DISPATCHER[0], f"{_DISPATCHER[1]}._custom_op_handlers"),  # loss_parallel, context_parallel
    (_DISPATCHER[0], f"{_DISPATCHER[1]}.sharding_propagator.op_strategy_funcs"),
    (_DISPATCHER[0], f"{_DISPATCHER[1]}.sharding_propagator.op_to_schema_info"),
    (f"{_CP}._attention", "_replaced_functions"),
    (f"{_CP}._sharding_rules", "_cp_strategy_contexts"),
    (f"{_CP}._sharding_rules", "_original_strategies"),
    ("torch.distributed.fsdp._debug_utils", "SimpleProfiler.results"),
    ("torch.distributed.fsdp._debug_utils", "SimpleProfiler.profiling"),
    *(  # DefaultSavePlanner(enable_plan_caching=True)
        ("torch.distributed.checkpoint.planner", f"SavePlanner._cached_{name}")
        for name in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata")
    ),
)

#: State of the process that contexts and setters of torch.distributed write.
TORCH_DISTRIBUTED: tuple[Attribute, ...] = (
    *(Attribute(*container) for container in _CONTAINERS),
    Attribute("torch.nn.functional", "scaled_dot_product_attention"),
    Attribute(f"{_CP}._attention", "_dispatch_mode"),
    Attribute(f"{_CP}._attention", "_cp_options.enable_load_balance"),
    Attribute(f"{_CP}._attention", "_cp_options.rotate_method"),
    Attribute("torch.distributed._shard.api", "_CURRENT_PROCESS_GROUP"),
    Attribute("torch.distributed.fsdp._fsdp_extensions", "_extensions"),
    Attribute("torch.distributed.fsdp._fully_shard._fully_shard", "_enable_fsdp_module_new_init"),
    *(
        Attribute("torch.distributed.fsdp.wrap", f"_ConfigAutoWrap.{name}")
        for name in ("in_autowrap_context", "wrapper_cls", "kwargs")
    ),
    *(
        Attribute("torch.distributed.tensor._redistribute", name)
        for name in (
            "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",
            "_FORCE_MIN_COST_REDISTRIBUTION_PLAN",
        )
    ),
    Attribute("torch.nn.parallel.distributed", "DistributedDataParallel._active_ddp_module"),
    Attribute("torch", "UntypedStorage.resize_"),  # MemTracker
    Attribute("warnings", "formatwarning"),  # ModTracker
)

#: All state that a process has once and a rank has for itself.
STATES: tuple[Attribute | Switch, ...] = (
    Attribute("sys", "stdout"),
    Attribute("sys", "stderr"),
    Attribute("sys", "excepthook"),
    Attribute("warnings", "filters"),
    Attribute("warnings", "showwarning"),
    Attribute("warnings", "_showwarnmsg_impl"),
    Attribute("tempfile", "tempdir"),
    Switch("socket", ("getdefaulttimeout",), "setdefaulttimeout"),
    Switch(_C, ("_get_float32_matmul_precision",), "_set_float32_matmul_precision"),
    *(Attribute(_MODULE, f"_global_{name}") for name in _HOOKS.split()),
    Attribute(_MODULE, "_global_is_full_backward_hook"),
    Attribute("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    Attribute("torch.optim.optimizer", "_global_optimizer_post_hooks"),
    Attribute("torch.utils._python_dispatch", "_is_in_torch_dispatch_mode"),
    Attribute("torch.utils._python_dispatch", "_is_in_non_infra_torch_dispatch_mode"),
    Attribute("torch.utils._python_dispatch", "_is_in_any_mode_without_ignore_compile_internals"),
    Attribute("torch.autograd.profiler", "_is_profiler_enabled"),
    Attribute("torch.autograd.graph", "_allow_mutation_on_saved_tensors_enabled"),
    Attribute("torch.utils.checkpoint", "_checkpoint_debug_enabled"),
    Attribute("torch.utils.checkpoint", "_enable_checkpoint_early_stop"),
    Attribute("torch.nn.utils.parametrize", "_cache_enabled"),
    Attribute("torch.nn.utils.parametrize", "_cache"),
    Attribute("torch.__future__", "_overwrite_module_params_on_conversion"),
    Attribute("torch.__future__", "_swap_module_params_on_conversion"),
    *(
        Attribute("torch._tensor_str", f"PRINT_OPTS.{name}")
        for name in ("precision", "threshold", "edgeitems", "linewidth", "sci_mode")
    ),
    Attribute("torch.distributed.tensor._random", "_rng_tracker"),
    *TORCH_DISTRIBUTED,
    Attribute("smp_core.torch.cuda_stand_in.answers", "current_index"),
    Attribute(
        "tensorflow.python.eager.polymorphic_function.eager_function_run",
        "RUN_FUNCTIONS_EAGERLY",
    ),
    Switch("torch", ("is_anomaly_enabled", "is_anomaly_check_nan_enabled"), "set_anomaly_enabled"),
    Switch(
        _C,
        ("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only"),
        "_set_deterministic_algorithms",
        ("warn_only",),
    ),
    Switch(
        _C,
        ("_get_deterministic_fill_uninitialized_memory",),
        "_set_deterministic_fill_uninitialized_memory",
    ),
    Switch(_C, ("_get_warnAlways",), "_set_warnAlways"),
    Switch(_C, ("_get_mkldnn_enabled",), "_set_mkldnn_enabled"),
    Switch(_C, ("_get_flash_sdp_enabled",), "_set_sdp_use_flash"),
    Switch(_C, ("_get_mem_efficient_sdp_enabled",), "_set_sdp_use_mem_efficient"),
    Switch(_C, ("_get_math_sdp_enabled",), "_set_sdp_use_math"),
    Switch(_C, ("_get_cudnn_benchmark",), "_set_cudnn_benchmark"),
    Switch(_C, ("_get_cudnn_deterministic",), "_set_cudnn_deterministic"),
    Switch(_C, ("_check_sparse_tensor_invariants",), "_set_check_sparse_tensor_invariants"),
)


Values = tuple[Any, ...]


class _Loaded(NamedTuple):
    """The part of the list whose modules are loaded."""

    read: Callable[[], Values]
    has: Callable[[Values], bool]  # whether the process has these very values
    writes: tuple[Callable[[Any], None], ...]  # one for each value
    filters: int  # which of the values the warning filters are
    names: tuple[str, ...]  # one for each value
    containers: tuple[int, ...]  # which of the values are of _CONTAINERS
    modules: frozenset[str]  # of the whole list


def _attribute(state: Attribute) -> tuple[Any, str] | None:
    """The object that has the attribute, and its name there; None where this process has no such object."""
    owner: Any = sys.modules.get(state.module)
    *way, name = state.path.split(".")
    for each in way:
        owner = getattr(owner, each, None)
    return (owner, name) if owner is not None and hasattr(owner, name) else None


def _switch(
    state: Switch,
) -> tuple[list[Callable[[], Any]], Callable[[Any], None]] | None:
    """The functions that read the switch and the one that sets it; None where this process has no such switch.

    The value of several is the sum of their bits, a small number, which always is the same object.
    """
    module = sys.modules.get(state.module)
    names = (*state.read, state.write)
    if module is None or not all(hasattr(module, name) for name in names):
        return None
    *reads, write = (getattr(module, name) for name in names)
    if len(reads) == 1:
        return reads, write

    def write_bits(bits: int) -> None:
        values = [bool(bits >> bit & 1) for bit in range(len(reads))]
        positional = len(values) - len(state.keywords)
        write(*values[:positional], **dict(zip(state.keywords, values[positional:], strict=True)))

    return reads, write_bits


def _look() -> _Loaded:
    """The list's loaded part, read and compared by compiled expressions, since every hand-over looks at all of it."""
    names: dict[str, Any] = {"intern": sys.intern}
    terms: list[str] = []
    writes: list[Callable[[Any], None]] = []
    filters = 0
    containers: list[int] = []
    texts: list[str] = []
    for number, state in enumerate(STATES):
        if isinstance(state, Attribute):
            found = _attribute(state)
            if found is None:
                continue
            if state == Attribute("warnings", "filters"):
                filters = len(terms)
            if state in _CONTAINERS:
                containers.append(len(terms))
            owner, name = names[f"o{number}"], _ = found
            terms.append(f"o{number}.{name}")
            texts.append(f"{state.module}.{state.path}")
            writes.append(functools.partial(setattr, owner, name))
        else:
            switch = _switch(state)
            if switch is not None:
                reads = {f"o{number}_{bit}": read for bit, read in enumerate(switch[0])}
                names |= reads
                bits = [f"{1 << bit} * (not not {name}())" for bit, name in enumerate(reads)]
                term = " + ".join(bits) if len(bits) > 1 else f"o{number}_0()"
                text = state.read[0].endswith("precision")  # a new text each time, unlike the rest
                terms.append(f"intern({term})" if text else term)
                writes.append(switch[1])
                texts.append(f"{state.module}.{state.read[0]}")
    read: Callable[[], Values] = eval(f"lambda: ({', '.join(terms)},)", names)
    known = [f"v{index}" for index in range(len(terms))]
    same = " and ".join(f"({term}) is {value}" for term, value in zip(terms, known, strict=True))
    exec(f"def has(values):\n    {', '.join(known)}, = values\n    return {same}", names)
    modules = frozenset(state.module for state in STATES)
    return _Loaded(
        read, names["has"], tuple(writes), filters, tuple(texts), tuple(containers), modules
    )


_loaded: tuple[int, object, _Loaded] | None = None


def find() -> _Loaded:
    """The functions that read and write the part of the list whose modules are loaded."""
    global _loaded
    if _loaded is None or _loaded[0] != len(sys.modules) or _loaded[1] is not STATES:
        _loaded = len(sys.modules), STATES, _look()
    return _loaded[2]


#: The environment variables that a rank has beside the process's. Each run asks for them, so they are cached.
Variables = Callable[[int], dict[str, str]]


@functools.lru_cache(maxsize=4096)
def _encoded(variables: Variables, rank: int) -> dict[Any, Any]:
    """The rank's variables in the encoded form in which os.environ keeps them."""
    environment: Any = os.environ
    return {
        environment.encodekey(name): environment.encodevalue(value)
        for name, value in variables(rank).items()
    }


#: Methods by which dictionaries and sets change.
_CHANGING = (
    *("__setitem__", "__delitem__", "__missing__", "__ior__", "__iand__", "__isub__", "__ixor__"),
    *("update", "pop", "popitem", "clear", "setdefault", "add", "remove", "discard"),
)


class _Shared:
    """The common part of containers that a rank copies when it changes them first."""

    place: tuple[Any, str]
    ranks_run = False


@functools.cache
def _shared_kind(kind: Any) -> Any:
    """A class of containers like ``kind``."""

    def changing(method: str) -> Callable[..., Any]:
        def change(shared: Any, *args: Any, **kwargs: Any) -> Any:
            owner, name = shared.place
            if not _Shared.ranks_run:
                return getattr(kind, method)(shared, *args, **kwargs)
            if getattr(owner, name) is shared:
                setattr(owner, name, _copy(shared, kind))
            return getattr(getattr(owner, name), method)(*args, **kwargs)

        return change

    changes = {name: changing(name) for name in _CHANGING if hasattr(kind, name)}
    return type(f"Shared{kind.__name__}", (_Shared, kind), changes)


def _copy(container: Any, kind: Any) -> Any:
    factory = getattr(container, "default_factory", None)
    return kind(container) if factory is None else kind(factory, container)


def _share_containers() -> None:
    """Put containers that ranks copy in the place of those of loaded modules."""
    for path in _CONTAINERS:
        place = _attribute(Attribute(*path))
        if place is not None and not isinstance(container := getattr(*place), _Shared):
            kind: Any = type(container)
            shared = _copy(container, _shared_kind(kind))
            shared.place = place
            setattr(*place, shared)


class _HooksOfRanks:
    """Stands in for torch.utils.hooks where the optimizer looks for it."""

    RemovableHandle: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules["torch.utils.hooks"], name)


_hooks_of_ranks = _HooksOfRanks()


class RankStates:
    """The list above, for the ranks of one run and the controller outside it."""

    def __init__(self, size: int, variables: Variables | None) -> None:
        self._variables = variables
        self._loaded = loaded = find()
        self._outside: Values = loaded.read()
        if not all(isinstance(self._outside[index], _Shared) for index in loaded.containers):
            _share_containers()
            self._outside = loaded.read()
        self._last = self._outside  # what the last hand-over loaded
        self._ranks: list[Values | None] = [None] * size
        self._environment: dict[Any, Any] = vars(os.environ)["_data"]
        self._environments: list[dict[Any, Any] | None] = [None] * size
        self._changed: set[Any] = set()  # variables that ranks have set or unset
        self._folders = WorkingFolders()
        self._warnings = WarningRegistries()

    def _given(self, rank: int) -> dict[Any, Any]:
        """The environment that a rank starts with."""
        if self._variables is None:
            return dict(self._environment)
        return {**self._environment, **_encoded(self._variables, rank)}

    def switch(self, leaving: int | None, entering: int | None) -> None:
        """Put away what ``leaving`` has and put back what ``entering`` had; None is the controller."""
        loaded = self._loaded
        now = self._last if loaded.has(self._last) else loaded.read()
        if leaving is None:
            self._outside = now
        else:
            self._ranks[leaving] = now
        wanted = self._outside if entering is None else self._ranks[entering] or self._outside
        try:
            self._last = wanted
            if wanted is not now and not all(map(operator.is_, wanted, now)):
                self._load(wanted, now)
        finally:
            self._warnings.switch(leaving, entering)
            self._switch_environment(entering)
            self._folders.now = entering
            if self._folders.changed:
                self._folders.enter()

    def _switch_environment(self, entering: int | None) -> None:
        if entering is None:
            data = self._environment
        else:
            kept = self._environments[entering]
            data = self._given(entering) if kept is None else kept  # a rank may have cleared it
            self._environments[entering] = data
        os.environ._data = os.environb._data = data  # type: ignore[attr-defined]

    def _load(self, wanted: Values, now: Values) -> None:
        failed: Exception | None = None
        for write, want, have in zip(self._loaded.writes, wanted, now, strict=True):
            if want is not have:
                try:
                    write(want)
                except Exception as error:  # the others are put back all the same
                    failed = error
        if failed is not None:
            raise failed

    # Around a run: a container is made the rank's own before it is changed in place.

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """While entered, ranks that change a container or the working folder change their own."""
        modules: Any = importlib.import_module(_MODULE)
        optimizers: Any = importlib.import_module("torch.optim.optimizer")
        add_filter: Any = warnings._add_filter  # type: ignore[attr-defined]
        handle: Any = modules.RemovableHandle

        def own_filter(*item: Any, append: bool) -> None:
            if warnings.filters is self._outside[self._loaded.filters]:
                warnings.filters = list(warnings.filters)
            add_filter(*item, append=append)

        def own_handle(hooks: Any, *, extra_dict: Any = None) -> Any:
            copies = self._own_hooks(hooks, (modules, optimizers))
            if isinstance(extra_dict, list):
                extra_dict = [copies.get(id(each), each) for each in extra_dict]
            elif extra_dict is not None:
                extra_dict = copies.get(id(extra_dict), extra_dict)
            return handle(copies.get(id(hooks), hooks), extra_dict=extra_dict)

        _hooks_of_ranks.RemovableHandle, utils = own_handle, optimizers.hooks
        optimizers.hooks = _hooks_of_ranks
        self._putenv, self._unsetenv = os.putenv, os.unsetenv
        os.putenv, os.unsetenv = self._set_variable, self._unset_variable
        self._folders.watch()
        _Shared.ranks_run = True
        warnings._add_filter = own_filter  # type: ignore[attr-defined]
        modules.RemovableHandle = own_handle
        try:
            loads = ModuleLoads(self._loaded.modules, self._extend)
            with self._warnings.watched(), loads:
                yield
        finally:
            modules.RemovableHandle = handle
            warnings._add_filter = add_filter  # type: ignore[attr-defined]
            optimizers.hooks = utils
            os.putenv, os.unsetenv = self._putenv, self._unsetenv
            self._restore_environment()
            _Shared.ranks_run = False
            self._folders.close()

    def _extend(self) -> None:
        """Take in the state of a module that a rank has loaded: each rank starts with what it has now."""
        _share_containers()
        before = self._loaded.names
        self._loaded = loaded = _look()
        now = dict(zip(loaded.names, loaded.read(), strict=True))

        def extended(values: Values) -> Values:
            return tuple((now | dict(zip(before, values, strict=True))).values())

        self._outside = self._last = extended(self._outside)
        self._ranks = [None if values is None else extended(values) for values in self._ranks]

    def _own_hooks(self, hooks: Any, modules: tuple[Any, ...]) -> dict[int, Any]:
        """Copies of all global hooks of the module that ``hooks`` are of, if they are still the
        controller's, by the identity of what they stand for from now on.
        """
        if not any(hooks is each for each in self._outside):
            return {}
        copies = {}
        for module in modules:
            known = {
                name: value for name, value in vars(module).items() if name.startswith("_global_")
            }
            if any(hooks is each for each in known.values()):
                for name, value in known.items():
                    if isinstance(value, dict):
                        copies[id(value)] = value.copy()
                        setattr(module, name, copies[id(value)])
        return copies

    def _set_variable(self, name: Any, value: Any) -> None:
        self._putenv(name, value)
        self._changed.add(os.fsencode(name))  # as os.environ keeps it

    def _unset_variable(self, name: Any) -> None:
        self._unsetenv(name)
        self._changed.add(os.fsencode(name))

    def _restore_environment(self) -> None:
        """Undo the ranks' changes in the C library's environment, which is one per process."""
        for name in self._changed:
            if name in self._environment:
                self._putenv(name, self._environment[name])
            else:
                self._unsetenv(name)


def clear_thread() -> None:
    """End what a body has entered and not left, of what torch keeps per thread: the thread serves
    again.
    """
    import torch

    inner: Any = torch._C
    while inner._len_torch_dispatch_stack():
        inner._pop_torch_dispatch_stack(None)
    while inner._len_torch_function_stack():
        inner._pop_torch_function_stack()
    hooks: Any = inner._autograd
    while hooks._top_saved_tensors_default_hooks(True) is not None:
        hooks._pop_saved_tensors_default_hooks()
    inner._set_dtensor_allow_implicit_replication(False)
