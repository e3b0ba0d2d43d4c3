"""Each rank of `sim` has its own copy of the state that a process has once: a rank changes its own copy alone."""

from __future__ import annotations

import contextlib
import decimal
import importlib
import os
import socket
import subprocess
import sys
import tempfile
import unittest.mock
import warnings

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from hypothesis import given
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.modules import module as hooks
from torch.nn.utils import parametrize
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

import smp_core.torch as smp
from pytest_smp.ranks import rank_state, working_folders
from pytest_smp.ranks.backends import open_backend
from pytest_smp.ranks.protocols import ExecutorOptions, Job, VerdictKind
from smp_core.torch.cuda_stand_in import answers


def _hook(*_):
    return None


def entered(manager):
    """Enter a context manager, and keep it: what a generator has entered ends with it."""
    return manager, manager.__enter__()


def _hooked(register, names):
    """Registers a hook, and which of these hooks there are."""
    return lambda: register(_hook), lambda: [len(getattr(hooks, f"_global_{n}")) for n in names]


class _Calls(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class _Passes(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def _of_torch_distributed(state):
    """A change of an attribute, or of the container that it is in place."""
    importlib.import_module(state.module)
    owner, name = rank_state._attribute(state)

    def change():
        value = getattr(owner, name)
        if (state.module, state.path) not in rank_state._CONTAINERS:
            setattr(owner, name, "PROBE")
        elif isinstance(value, set):
            value.add("PROBE")
        else:
            value["PROBE"] = 1

    def show():
        value = getattr(owner, name)
        return len(value) if isinstance(value, dict | set) else value

    return change, show


# A name, what changes it, and what shows it.
PROBES = {
    "environ": (lambda: os.environ.update(PROBE="1"), lambda: os.getenv("PROBE")),
    "environb": (lambda: os.environb.update({b"PROBE": b"1"}), lambda: os.environ.get("PROBE")),
    "working folder": (lambda: os.chdir("/"), os.getcwd),
    "stdout": (lambda: setattr(sys, "stdout", None), lambda: sys.stdout is None),
    "stderr": (lambda: setattr(sys, "stderr", None), lambda: sys.stderr is None),
    "excepthook": (lambda: setattr(sys, "excepthook", _hook), lambda: sys.excepthook is _hook),
    "warning filters": (lambda: warnings.simplefilter("ignore"), lambda: warnings.filters[0]),
    "catch_warnings": (
        lambda: entered(warnings.catch_warnings(record=True)),
        lambda: id(getattr(warnings._showwarnmsg_impl, "__self__", None)),
    ),
    "showwarning": (
        lambda: setattr(warnings, "showwarning", _hook),
        lambda: warnings.showwarning is _hook,
    ),
    "tempdir": (lambda: setattr(tempfile, "tempdir", "/x"), lambda: tempfile.tempdir),
    "socket time-out": (lambda: socket.setdefaulttimeout(9.0), socket.getdefaulttimeout),
    "buffer hooks": _hooked(
        hooks.register_module_buffer_registration_hook, ["buffer_registration_hooks"]
    ),
    "module hooks": _hooked(
        hooks.register_module_module_registration_hook, ["module_registration_hooks"]
    ),
    "parameter hooks": _hooked(
        hooks.register_module_parameter_registration_hook, ["parameter_registration_hooks"]
    ),
    "backward pre-hooks": _hooked(
        hooks.register_module_full_backward_pre_hook, ["backward_pre_hooks"]
    ),
    "backward hooks": _hooked(hooks.register_module_full_backward_hook, ["backward_hooks"]),
    "kind of backward hooks": (
        lambda: hooks.register_module_full_backward_hook(_hook),
        lambda: hooks._global_is_full_backward_hook,
    ),
    "forward pre-hooks": _hooked(hooks.register_module_forward_pre_hook, ["forward_pre_hooks"]),
    "forward hooks": _hooked(
        lambda hook: hooks.register_module_forward_hook(hook, with_kwargs=True, always_call=True),
        ["forward_hooks", "forward_hooks_always_called", "forward_hooks_with_kwargs"],
    ),
    "optimizer pre-hooks": (
        lambda: optimizers.register_optimizer_step_pre_hook(_hook),
        lambda: len(optimizers._global_optimizer_pre_hooks),
    ),
    "optimizer post-hooks": (
        lambda: optimizers.register_optimizer_step_post_hook(_hook),
        lambda: len(optimizers._global_optimizer_post_hooks),
    ),
    "dispatch mode": (lambda: entered(_Passes()), is_in_torch_dispatch_mode),
    "function mode": (lambda: entered(_Calls()), torch._C._len_torch_function_stack),
    "profiler": (
        lambda: entered(torch.autograd.profiler.profile()),
        lambda: torch.autograd.profiler._is_profiler_enabled,
    ),
    "mutation of saved tensors": (
        lambda: entered(torch.autograd.graph.allow_mutation_on_saved_tensors()),
        lambda: torch.autograd.graph._allow_mutation_on_saved_tensors_enabled,
    ),
    "checkpoint debug": (
        lambda: entered(checkpoint.set_checkpoint_debug_enabled(True)),
        lambda: checkpoint._checkpoint_debug_enabled,
    ),
    "checkpoint early stop": (
        lambda: entered(checkpoint.set_checkpoint_early_stop(False)),
        lambda: checkpoint._enable_checkpoint_early_stop,
    ),
    "parametrize cache": (
        lambda: entered(parametrize.cached()),
        lambda: parametrize._cache_enabled,
    ),
    "overwrite parameters": (
        lambda: torch.__future__.set_overwrite_module_params_on_conversion(True),
        torch.__future__.get_overwrite_module_params_on_conversion,
    ),
    "swap parameters": (
        lambda: torch.__future__.set_swap_module_params_on_conversion(True),
        torch.__future__.get_swap_module_params_on_conversion,
    ),
    "print options": (
        lambda: torch.set_printoptions(precision=2),
        lambda: torch._tensor_str.PRINT_OPTS.precision,
    ),
    "DTensor's generator": (
        lambda: setattr(torch.distributed.tensor._random, "_rng_tracker", 1),
        lambda: torch.distributed.tensor._random._rng_tracker,
    ),
    "the current device of a stand-in for CUDA": (
        lambda: setattr(answers, "current_index", 1),
        lambda: answers.current_index,
    ),
    "implicit replication": (
        lambda: torch._C._set_dtensor_allow_implicit_replication(True),
        torch._C._get_dtensor_allow_implicit_replication,
    ),
    "anomaly": (
        lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    ),
    "deterministic algorithms": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        torch.get_deterministic_debug_mode,
    ),
    "filling memory": (
        lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
    ),
    "matmul precision": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "warn always": (lambda: torch.set_warn_always(True), torch.is_warn_always_enabled),
    "mkldnn": (
        lambda: setattr(torch.backends.mkldnn, "enabled", False),
        lambda: torch.backends.mkldnn.enabled,
    ),
    "attention": (
        lambda: entered(nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH)),
        lambda: (
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
        ),
    ),
    "mathematical attention": (
        lambda: torch.backends.cuda.enable_math_sdp(False),
        torch.backends.cuda.math_sdp_enabled,
    ),
    "cudnn": (
        lambda: torch.backends.cudnn.set_flags(_benchmark=True, _deterministic=True),
        lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    ),
    "sparse invariants": (
        torch.sparse.check_sparse_tensor_invariants.enable,
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
    ),
    "default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "default device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "gradient mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "autocast": (
        lambda: entered(torch.autocast("cpu", torch.bfloat16)),
        lambda: torch.is_autocast_enabled("cpu"),
    ),
    "saved tensors": (
        lambda: entered(torch.autograd.graph.saved_tensors_hooks(_hook, _hook)),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True) is None,
    ),
    "numpy's errors": (lambda: np.seterr(all="raise"), lambda: np.geterr()["divide"]),
    "decimal": (
        lambda: setattr(decimal.getcontext(), "prec", 3),
        lambda: decimal.getcontext().prec,
    ),
}

PROBES.update(
    {
        f"{state.module}.{state.path}": _of_torch_distributed(state)
        for state in rank_state.TORCH_DISTRIBUTED
    }
)


@pytest.mark.parametrize("name", PROBES)
def test_a_rank_changes_its_own(smp_world, name):
    change, show = PROBES[name]

    def body():
        before = str(show())
        smp.barrier()
        if smp.rank() == 1:
            kept = change()  # noqa: F841  a hook's handle, a mode
        smp.barrier()
        seen = str(show())
        smp.barrier()
        return before, seen, str(show())

    outside = str(show())
    for _ in range(2):  # the threads serve again
        results = smp_world.run(body, ranks=3)
        before = results[0][0]
        assert results[0] == results[2] == (before, before, before)
        assert results[1][0] == before
        assert results[1][1] == results[1][2] != before
        assert str(show()) == outside


def test_every_entry_of_the_list_is_changed_by_a_probe(smp_world, monkeypatch):
    # The entry of TensorFlow is changed in tests/smp_core/tensorflow/test_session.py.
    STATES = tuple(each for each in rank_state.STATES if not each.module.startswith("tensorflow"))
    monkeypatch.setattr(rank_state, "STATES", STATES)

    def body():
        loaded = rank_state._look()
        assert len(loaded.writes) == len(STATES)  # this torch has all of it
        before, kept = loaded.read(), [change() for change, _ in PROBES.values()]
        after = loaded.read()
        assert kept
        return [
            str(state)
            for state, was, now in zip(STATES, before, after, strict=True)
            if was is now and getattr(state, "path", "") not in SAME
        ]

    assert smp_world.run(body, ranks=1) == [[]]


# Entries that change together with another one, or that no function of every supported torch changes.
SAME = {f"PRINT_OPTS.{name}" for name in ("threshold", "edgeitems", "linewidth", "sci_mode")} | {
    "_cache",
    "_is_in_any_mode_without_ignore_compile_internals",
}


def test_state_of_a_module_that_a_rank_loads_is_a_ranks_own(smp_world, monkeypatch, tmp_path):
    (tmp_path / "loaded_late.py").write_text("switch = 0\ntable = {}")
    monkeypatch.syspath_prepend(tmp_path)
    late = [rank_state.Attribute("loaded_late", name) for name in ("switch", "table")]
    monkeypatch.setattr(rank_state, "STATES", (*rank_state.STATES, *late))
    monkeypatch.setattr(rank_state, "_CONTAINERS", (*rank_state._CONTAINERS, late[1]))

    def body():
        smp.barrier()
        import loaded_late

        loaded_late.switch += 1
        loaded_late.table[smp.rank()] = True
        smp.barrier()
        return loaded_late.switch, dict(loaded_late.table)

    for _ in range(2):  # with the module loaded in the run, and before it
        assert smp_world.run(body, ranks=3) == [(1, {rank: True}) for rank in range(3)]
        assert (sys.modules["loaded_late"].switch, sys.modules["loaded_late"].table) == (0, {})


def test_what_is_set_around_the_run_holds_in_it(smp_world, monkeypatch):
    monkeypatch.setenv("PROBE", "outside")
    torch.use_deterministic_algorithms(True)
    seen = []
    handle = hooks.register_module_forward_hook(lambda *_: seen.append(smp.rank()))
    try:
        result = smp_world.run(
            lambda: (
                os.environ["PROBE"],
                torch.are_deterministic_algorithms_enabled(),
                nn.Identity()(1),
            ),
            ranks=2,
        )
    finally:
        handle.remove()
        torch.use_deterministic_algorithms(False)
    assert result == [("outside", True, 1)] * 2
    assert seen == [0, 1]


def test_what_ranks_set_in_the_environment_is_gone_for_c_and_child_processes(smp_world):
    def body():
        os.environ["PROBE"] = str(smp.rank())
        os.environ.pop("HOME", None)
        smp.barrier()
        return os.environ["PROBE"]

    assert smp_world.run(body, ranks=2) == ["0", "1"]
    printed = subprocess.run(
        [sys.executable, "-S", "-c", "import os; print(os.getenv('PROBE'), os.getenv('HOME'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.split() == ["None", str(os.environ.get("HOME"))]


@pytest.mark.parametrize("encode", [str, os.fsencode])
def test_what_ranks_put_past_python_into_the_environment_is_gone(smp_world, monkeypatch, encode):
    monkeypatch.setenv("PROBE_KEPT", "kept")

    def body():
        os.putenv(encode("PROBE_KEPT"), encode("changed"))
        os.putenv(encode("PROBE_NEW"), encode("new"))
        with pytest.raises(ValueError, match="illegal"):
            os.putenv(encode("PROBE=BAD"), encode("bad"))
        smp.barrier()

    smp_world.run(body, ranks=2)
    shown = ["sh", "-c", "echo $PROBE_KEPT $PROBE_NEW"]
    assert subprocess.check_output(shown, text=True).split() == ["kept"]


def test_an_environment_that_a_rank_has_cleared_stays_empty(smp_world):
    def body():
        with unittest.mock.patch.dict(os.environ, {}, clear=True):
            smp.barrier()
            seen = dict(os.environ)
            os.environ["PROBE"] = "1"
            smp.barrier()
            return seen, dict(os.environ)

    assert smp_world.run(body, ranks=2) == [({}, {"PROBE": "1"})] * 2


def _open_descriptors():
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("most", [256, 2, 0])
def test_each_rank_is_in_its_own_folder_and_no_descriptor_stays(
    smp_world, tmp_path, monkeypatch, most
):
    """Beyond the descriptors that may be kept, folders are kept by their paths."""
    monkeypatch.setattr(working_folders, "_MOST", most)
    smp_world.run(smp.barrier, ranks=4)  # what is made once is made
    before, here = _open_descriptors(), os.getcwd()

    def body():
        seen = []
        for step in range(3):
            if smp.rank():  # one stays
                folder = tmp_path / f"{step}-{smp.rank() // 2}"  # two share one
                folder.mkdir(exist_ok=True)
                os.chdir(folder)
            smp.barrier()
            seen.append(os.getcwd())
        return seen

    assert smp_world.run(body, ranks=4) == [
        [here if rank == 0 else str(tmp_path / f"{step}-{rank // 2}") for step in range(3)]
        for rank in range(4)
    ]
    assert (_open_descriptors(), os.getcwd()) == (before, here)


def test_a_folder_may_be_deleted_while_a_rank_is_in_it(smp_world):
    before = os.getcwd()

    def body():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            smp.barrier()
            here = os.getcwd() == os.path.realpath(folder)
        smp.barrier()
        with pytest.raises(FileNotFoundError):  # as in a process
            os.getcwd()
        smp.barrier()
        return here

    assert smp_world.run(body, ranks=3) == [True] * 3
    assert os.getcwd() == before


def test_comm_debug_mode_follows_the_rank_that_entered_it(smp_world):
    def body():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with CommDebugMode() as mode:
            for layer in model:
                value = layer(torch.ones(1, 2))
                torch.distributed._functional_collectives.all_reduce(
                    value, "sum", dist.group.WORLD
                ).sum().item()
        return mode.get_total_counts()

    assert smp_world.run(body, ranks=3) == [2, 2, 2]


def test_warnings_are_caught_where_they_were_raised(smp_world):
    def body():
        if smp.rank() == 0:
            smp.barrier()
            smp.barrier()
            return []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            smp.barrier()
            warnings.warn(f"of rank {smp.rank()}", UserWarning, stacklevel=1)
            smp.barrier()
        return [str(each.message) for each in caught]

    assert smp_world.run(body, ranks=3) == [[], ["of rank 1"], ["of rank 2"]]


def _shown_warnings(program, namespace, hand_over):
    """The warnings that a program shows: the names of functions that warn, actions of new filters, and blocks."""
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        for step in program:
            hand_over()
            with warnings.catch_warnings() if step == "block" else contextlib.nullcontext():
                hand_over()
            if step in namespace:
                with contextlib.suppress(UserWarning):  # of the action "error"
                    namespace[step]()
            elif step != "block":
                warnings.simplefilter(step)
    return shown


def _warning_functions():
    """The functions of a module that has shown no warning yet."""
    namespace = {"__name__": "drawn", "warn": warnings.warn}
    exec("def a(): warn('a')\ndef b(): warn('b')", namespace)
    return namespace


_WARNING_STEPS = st.sampled_from(["a", "a", "b", "block", "default", "once", "always", "error"])
_WARNING_PROGRAMS = st.lists(
    st.lists(_WARNING_STEPS, min_size=6, max_size=6), min_size=2, max_size=3
)


@given(programs=_WARNING_PROGRAMS)
def test_each_rank_is_shown_the_warnings_of_a_process_of_its_own(smp_world, programs):
    namespace = _warning_functions()

    def body():
        return _shown_warnings(programs[smp.rank()], namespace, smp.barrier)

    alone = [_shown_warnings(program, _warning_functions(), int) for program in programs]
    assert smp_world.run(body, ranks=len(programs)) == alone


def test_output_is_redirected_by_one_rank_for_itself(smp_world, tmp_path):
    def body():
        with open(tmp_path / str(smp.rank()), "w") as file, contextlib.redirect_stdout(file):
            smp.barrier()
            print("of rank", smp.rank())
            smp.barrier()

    smp_world.run(body, ranks=2)
    assert [(tmp_path / name).read_text() for name in "01"] == ["of rank 0\n", "of rank 1\n"]


NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _no_arguments(rank):
    return (), {}


@pytest.mark.parametrize("backend", ["sim", "gloo", "mpi"])
def test_ranks_have_what_torchrun_sets(backend):
    def body():
        before = {name: os.environ.get(name) for name in NAMES}
        smp.barrier()
        after = {name: os.getenv(name) for name in NAMES}
        os.environ["RANK"] = "changed"
        return before == after, before, "WORLD_SIZE" in os.environ, smp.rank()

    outside = {name: os.environ.get(name) for name in NAMES}
    executor = open_backend(backend, ExecutorOptions(ranks=2))
    try:
        for ranks in (2, 1, 2):
            report = executor.open(ranks).run(Job(body=body, arguments=_no_arguments, timeout=60))
            assert report.verdict is VerdictKind.PASSED, report
            values = [outcome.value for outcome in report.outcomes]
            assert len({each[1]["MASTER_PORT"] for each in values}) == 1
            for rank, (same, variables, there, known) in enumerate(values):
                assert same
                assert there
                assert known == rank
                assert 1024 < int(variables.pop("MASTER_PORT")) < 32768
                assert variables == {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                }
    finally:
        executor.close()
    assert {name: os.environ.get(name) for name in NAMES} == outside
