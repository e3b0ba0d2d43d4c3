"""Every private part of torch that the packages use, as data, and the check that it is there.

The parts count, not the version: a torch that nobody here has tried is used, with one
warning, if it has all of them; one that lacks a part is refused, in one sentence that names it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from smp_core.errors import BackendError, UnknownTorchWarning

#: The releases of torch with which everything was run.
TRIED = ("2.13", "2.14")

_C10D = "torch.distributed.distributed_c10d"
_C = "torch._C._distributed_c10d"


@dataclass(frozen=True)
class TorchPart:
    """A private name of torch.

    Attributes:
        module: the module to import.
        path: the name in it, dotted where it is an attribute of an attribute.
        takes: the parameters that are passed by name, for functions of Python. A function that
            takes any keyword has all of them.
        calls: with how many positional arguments it is called, for functions of Python.
    """

    module: str
    path: str
    takes: tuple[str, ...] = ()
    calls: int | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    def missing(self) -> str | None:
        """The difference between the part and its use, in words; None if there is none."""
        try:
            found: object = importlib.import_module(self.module)
            for name in self.path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError):
            return str(self)
        if not (self.takes or self.calls is not None):
            return None
        try:
            signature = inspect.signature(found)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            return f"{self} as a function of Python"
        parameters = signature.parameters
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            for name in self.takes:
                if name not in parameters:
                    return f"the parameter {name!r} of {self}"
        try:
            signature.bind(*[None] * (self.calls or 0), **dict.fromkeys(self.takes))
        except TypeError as error:
            return f"{self} with the parameters that it had ({error})"
        return None


def _parts(module: str, *names: str) -> tuple[TorchPart, ...]:
    return tuple(TorchPart(module, name) for name in names)


_REGISTER = TorchPart(
    _C10D,
    "_register_pg_in_world",
    takes=("backend_name", "store", "group_name", "backend_config", "rank_mapping"),
    calls=1,
)
#: The parts that make up a torch.distributed state for each rank, or for each run.
_WORLD = (
    *_parts(
        _C10D,
        "GroupName",
        "_unregister_all_process_groups",
        "_register_process_group",
        "_unregister_process_group",
        "_update_default_pg",
        "_world",
        "_WorldMeta.WORLD",
        "init_process_group.__wrapped__",
        *(
            f"_World.{name}"
            for name in (
                "pg_map",
                "pg_names",
                "pg_group_ranks",
                "pg_backend_config",
                "group_count",
                "tags_to_pg",
                "pg_to_tag",
                "pg_coalesce_state",
                "default_pg",
            )
        ),
    ),
    _REGISTER,
)
_GROUP = (
    *_parts(_C10D, "Backend.register_backend", "Backend._plugins"),
    *_parts("torch.distributed", "Backend._plugins"),
)
_WORK = _parts(_C, "Work", "Work.wait", "Work.get_future")
_PROFILER = (
    *_parts(
        "torch.autograd",
        "_disable_profiler_legacy",
        "_enable_profiler_legacy",
        "_profiler_enabled",
        "_add_metadata_json",
    ),
    *_parts("torch.autograd.profiler", "_disable_profiler", "profile._parse_kineto_results"),
    *_parts("torch.autograd.profiler_legacy", "_parse_legacy_records"),
)
_NATIVE = (
    *_parts(
        "torch._C",
        "_len_torch_dispatch_stack",
        "_len_torch_function_stack",
        "_DisableTorchDispatch",
        "DisableTorchFunction",
    ),
    *_parts(_C10D, "_resolve_process_group", "monitored_barrier"),
    *_parts(_C, "_register_work", "AllgatherOptions", "Reducer._set_forward_pass_work_handle"),
    *_parts(
        "torch",
        "library.get_kernel",
        "ops._c10d_functional.all_gather_into_tensor_out.default",
        "ops._c10d_functional.batch_p2p_ops.default",
    ),
)
_PHASES = (
    *_parts("torch._C", "_current_graph_task_id"),
    *_parts("torch.nn", "Module._call_impl.__code__"),
)
_WAIT = _parts("torch", "ops._c10d_functional.wait_tensor.default")
_OPTIONS = _parts(
    _C10D,
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceOptions",
    "BroadcastOptions",
    "ReduceScatterOptions",
)

#: The parts that each user cannot work without.
PARTS: dict[str, tuple[TorchPart, ...]] = {
    "the sim backend": (
        *_WORLD,
        *_WORK,
        *_GROUP,
        *_WAIT,
        *_PROFILER,
        *_NATIVE,
        *_PHASES,
        *_parts(_C, "Store", "_set_thread_isolation_mode"),
        TorchPart("torch.distributed.c10d_logger", "_get_msg_dict", calls=1),
        TorchPart(_C10D, "_new_process_group_helper", calls=6),
        *_parts("torch.distributed.c10d_logger", "_c10d_logger.name"),
        *_parts("torch.distributed.rendezvous", "_rendezvous_handlers"),
        *_parts("torch.distributed._functional_collectives", "all_reduce"),
        *_parts("torch", "_foreach_copy_", "_GLOBAL_DEVICE_CONTEXT"),
    ),
    "the mpi backend": (
        *_WORLD,
        *_WORK,
        *_GROUP,
        *_WAIT,
        *_NATIVE,
        *_parts("torch", "_foreach_copy_"),
    ),
    "rank processes": (
        *_WORLD,
        *_PHASES,
        *_parts("torch", "_GLOBAL_DEVICE_CONTEXT"),
        *_parts(_C10D, "PrefixStore", "destroy_process_group"),
        TorchPart(_C10D, "_new_process_group_helper", takes=("timeout", "group_desc"), calls=6),
    ),
    "the board": (
        _REGISTER,
        *_WAIT,
        *_parts(_C10D, "_world", "_new_group_with_tag"),
        *_parts(_C, "ProcessGroup", "ProcessGroup.unbox"),
        *_parts("torch._C", "_dispatch_keyset_full_after", "DispatchKey.BackendSelect", "Future"),
        *_parts("torch.distributed", "_verify_params_across_processes"),
        *_parts("torch.autograd", "_engine_run_backward", "Variable._execution_engine"),
    ),
    "training": (
        *_OPTIONS,
        *_parts(
            "torch._C",
            "DisableTorchFunctionSubclass",
            # Operators without 16-bit kernels.
            "DispatchKey.AutocastIPU",
            "DispatchKeySet",
            "_ExcludeDispatchKeyGuard",
            "_IncludeDispatchKeyGuard",
            "_dispatch_tls_is_dispatch_key_excluded",
            "_dispatch_tls_set_dispatch_key_excluded",
        ),
        *_parts("torch._C._autograd", "_top_saved_tensors_default_hooks"),
        *_parts("torch._ops", "OpOverload"),
        *_parts("torch", "Tensor._make_subclass", "_neg_view", "_GLOBAL_DEVICE_CONTEXT"),
        *_parts("torch.nn", "Module._load_from_state_dict"),
        *_parts("torch.nn.modules.batchnorm", "_NormBase._load_from_state_dict"),
        *_parts(
            "torch.utils._python_dispatch",
            "TorchDispatchMode",
            "_get_current_dispatch_mode_stack",
        ),
        *_parts("torch.utils._pytree", "tree_map", "tree_leaves"),
    ),
    "the CUDA stand-in": (
        *_parts("torch.serialization", "_package_registry"),
        *_parts("torch.utils._device", "DeviceContext", "_device_constructors"),
        *_parts("torch.utils.data.dataloader", "_BaseDataLoaderIter"),
    ),
}


def missing(users: Iterable[str]) -> dict[str, str]:
    """The first part that this torch lacks, for each user that lacks one."""
    lacks = {}
    for user in users:
        for part in PARTS[user]:
            absent = part.missing()
            if absent is not None:
                lacks[user] = absent
                break
    return lacks


@functools.cache
def installed() -> str:
    """The version of the torch that is installed, without importing it where its metadata tells."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:  # found by sys.path alone
        torch = importlib.import_module("torch")
        return str(torch.__version__)


def tried(version: str) -> bool:
    """Return whether everything was run with this release."""
    return version.startswith(tuple(f"{release}." for release in TRIED))


def require(
    *users: str, version: str | None = None, self_check: Callable[[], None] | None = None
) -> None:
    """Check that an untried torch has the parts that ``users`` (keys of PARTS) need; imports torch.

    ``self_check`` runs after the names and signatures were found, and raises if objects made of
    them do not work.

    Raises BackendError if this torch lacks a part, naming the part, its user, and a release that has
    it, or if the self-check fails.
    """
    version = version or installed()
    if tried(version):
        return
    remedy = f"Install a release with which it was tried (pip install 'torch=={TRIED[-1]}.*')"
    for user, absent in missing(users).items():
        raise BackendError(
            f"{user} needs a part of torch that this torch, {version}, does not have: {absent}. {remedy}"
        )
    try:
        if self_check is not None:
            self_check()
    except Exception as error:
        text = str(error).partition("\n")[0]
        raise BackendError(
            f"{users[0]} does not work with this torch, {version}: {type(error).__name__}: {text}. {remedy}"
        ) from error


def warn(version: str | None = None) -> None:
    """Warn once in a process with UnknownTorchWarning if this release was not tried."""
    version = version or installed()
    if not tried(version):
        _warn(version)


@functools.cache
def _warn(version: str) -> None:
    warnings.warn(
        f"torch {version} is none of the releases with which this was tried ({', '.join(TRIED)}); "
        "what is used of its private parts is checked, and goes on",
        UnknownTorchWarning,
        stacklevel=3,
    )
