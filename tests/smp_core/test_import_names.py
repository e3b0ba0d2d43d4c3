"""SMP's import names give our own modules: on request, never over another installation, and nothing exists twice."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.version import Version

import smp_core.torch
from smp_core import import_names, install_import_names, remove_import_names
from smp_core.errors import ImportNameError, RealInstallationError

#: API 1.1: the modules that clients import, and one object that each has for them.
IMPORTED = {
    "torch": "DistributedModel",
    "torch.nn": "DistributedTransformer",
    "torch.nn.huggingface.bert": "translate_state_dict_to_hf_bert",
    "torch.nn.huggingface.gpt2": "get_hf_gpt2_transformer_layer_hooks",
    "torch.nn.huggingface.gptj": "translate_hf_state_dict_to_smdistributed_gptj",
    "torch.nn.huggingface.gptneo": "translate_state_dict_to_hf_gptneo",
    "torch.nn.huggingface.roberta": "translate_state_dict_to_hf_roberta",
    "torch.optimizers": "FusedNovoGrad",
    "torch.amp": "GradScaler",
    "torch.patches.checkpoint": "checkpoint_sequential",
    "torch.state_mod": "state",
    "torch.utils": "get_distribution_axis",
    "torch.exceptions": "PartitionError",
    "torch.model": "DistributedModel",
    "torch.step": "StepOutput",
    "backend.exceptions": "SmpError",
}


@pytest.fixture
def names() -> Iterator[None]:
    install_import_names()
    yield
    remove_import_names()


def ours() -> set[str]:
    return {name for name in sys.modules if name.partition(".")[0] == "smdistributed"}


def run(code: str, *path: Path) -> str:
    """The output of a new process."""
    lines = [f"import sys; sys.path[:0] = {[str(each) for each in path]!r}", code]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_happens_without_the_call() -> None:
    assert not ours()
    with pytest.raises(ModuleNotFoundError, match="No module named 'smdistributed'"):
        importlib.import_module("smdistributed.modelparallel.torch")
    assert importlib.util.find_spec("smdistributed") is None


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(("name", "attribute"), IMPORTED.items())
def test_each_module_that_clients_import_is_ours(name: str, attribute: str) -> None:
    full = f"smdistributed.modelparallel.{name}"
    module = importlib.import_module(full)
    assert module is sys.modules[full]
    assert module.__name__.startswith("smp_core")
    assert module is sys.modules[module.__name__]
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__
    assert hasattr(module, attribute)


@pytest.mark.usefixtures("names")
def test_every_entry_of_the_table_leads_to_its_module() -> None:
    for name, target in import_names.MODULES.items():
        if (
            target.startswith("smp_core.tensorflow")
            and importlib.util.find_spec("tensorflow") is None
        ):
            with pytest.raises(
                ModuleNotFoundError, match=r"pip install 'pytest-smp\[tensorflow\]'"
            ):
                importlib.import_module(name)
        else:
            assert importlib.import_module(name) is sys.modules[target]


@pytest.mark.usefixtures("names")
def test_statements_of_scripts() -> None:
    space: dict[str, object] = {}
    exec(
        "import smdistributed.modelparallel\n"
        "import smdistributed.modelparallel.torch as smp\n"
        "from smdistributed.modelparallel import torch as same\n"
        "from smdistributed.modelparallel.torch.nn import FusedLayerNorm\n"
        "from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (\n"
        "    translate_hf_state_dict_to_smdistributed_gpt2 as to_smp)\n"
        "from smdistributed.modelparallel.torch.state_mod import state as smp_state\n"
        "from smdistributed.modelparallel.torch.step import StepOutput\n"
        "from smdistributed.modelparallel.backend import exceptions\n"
        "version = smdistributed.modelparallel.__version__\n",
        space,
    )
    smp = smp_core.torch
    assert space["smp"] is space["same"] is smp
    assert space["FusedLayerNorm"] is smp.nn.FusedLayerNorm
    assert space["smp_state"] is smp.state
    assert space["StepOutput"] is smp.StepOutput
    assert space["to_smp"] is smp.nn.huggingface.gpt2.translate_hf_state_dict_to_smdistributed_gpt2
    assert space["exceptions"] is sys.modules["smp_core.errors"]
    assert str(space["version"]) == str(Version(str(space["version"])))
    assert Version(str(space["version"])) >= Version("1.15")


def test_an_import_of_the_module_step_leaves_the_decorator(names: None) -> None:
    for name in ("step", "model", "nn.huggingface.gpt2"):
        sys.modules.pop("smdistributed.modelparallel.torch", None)
        importlib.import_module(f"smdistributed.modelparallel.torch.{name}")
        assert isinstance(smp_core.torch.step, type(lambda: None))
    assert smp_core.torch.model.DistributedModel is smp_core.torch.DistributedModel


@pytest.mark.usefixtures("names")
@pytest.mark.filterwarnings("ignore::smp_core.torch.fused.PlainEquivalentWarning")
def test_no_class_exists_twice() -> None:
    smp = importlib.import_module("smdistributed.modelparallel.torch")
    layer = smp.nn.FusedLayerNorm(2)
    assert isinstance(layer, smp_core.torch.nn.FusedLayerNorm)
    assert isinstance(pickle.loads(pickle.dumps(layer)), smp.nn.FusedLayerNorm)
    # A pickle of another process names a class by the import name.
    named = b"csmdistributed.modelparallel.torch.nn\nFusedLayerNorm\n."
    assert pickle.loads(named) is smp_core.torch.nn.FusedLayerNorm


def test_a_reload_by_the_import_name_reloads_the_module() -> None:
    code = """
import smp_core; smp_core.install_import_names()
import importlib, smdistributed.modelparallel.torch as smp
model, step = smp.DistributedModel, smp.step
assert importlib.reload(smp) is smp is sys.modules["smp_core.torch"]
assert (smp.DistributedModel, smp.step) == (model, step)
"""
    run(code)


@pytest.mark.usefixtures("names")
def test_a_module_that_is_not_in_the_table_is_refused_and_not_loaded_a_second_time() -> None:
    before = set(sys.modules)
    with pytest.raises(ImportNameError, match=r"torch\.sharding: there is no such module here"):
        importlib.import_module("smdistributed.modelparallel.torch.sharding")
    added = {name for name in set(sys.modules) - before if "sharding" in name}
    assert not added
    with pytest.raises(ImportError, match=r"modelparallel\.kubernetes: there is no such module"):
        exec("from smdistributed.modelparallel import kubernetes")


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize("name", ["dataparallel.torch.nothing", "modelparallel.nothing", "nothing"])
def test_a_part_that_is_not_there_has_no_spec(name: str) -> None:
    """As of any package: libraries ask before they import."""
    assert importlib.util.find_spec(f"smdistributed.{name}") is None
    assert importlib.util.find_spec("smdistributed.modelparallel.torch.amp") is not None
    with pytest.raises(ImportNameError):
        importlib.import_module(f"smdistributed.{name}")


def test_the_name_of_smddp_registers_its_backend() -> None:
    code = """
import smp_core
smp_core.install_import_names()
import torch.distributed as dist
assert not hasattr(dist.Backend, "SMDDP")
import smdistributed.dataparallel.torch.torch_smddp
dist.init_process_group("smddp", store=dist.HashStore(), rank=0, world_size=1)
tensor = dist.torch.ones(2)
dist.all_reduce(tensor)
print(dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "smddp [1.0, 1.0]\n", done.stderr


def test_a_new_part_is_one_line_of_the_table(names: None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "smdistributed.modelparallel.keras"
    monkeypatch.setattr(import_names, "MODULES", {**import_names.MODULES, name: "smp_core.comm"})
    assert importlib.import_module(name) is sys.modules["smp_core.comm"]
    del sys.modules[name]


def test_the_package_and_the_call_import_no_torch() -> None:
    code = """
import smp_core
smp_core.install_import_names()
import smdistributed.modelparallel
print("torch" in sys.modules, "smp_core.torch" in sys.modules)
"""
    assert run(code) == "False False\n"


def test_installing_twice_is_as_once_and_removing_leaves_nothing() -> None:
    before = list(sys.meta_path)
    install_import_names()
    install_import_names()
    assert len(sys.meta_path) == len(before) + 2
    importlib.import_module("smdistributed.modelparallel.torch.nn")
    assert importlib.util.find_spec("smdistributed") is not None
    remove_import_names()
    assert sys.meta_path == before
    assert not ours()
    remove_import_names()
    assert sys.modules["smp_core.torch"] is smp_core.torch
    test_nothing_happens_without_the_call()


def test_names_whose_finder_alone_is_gone_are_installed_again(names: None) -> None:
    """A pool of processes puts ``sys.meta_path`` back between tests, and leaves modules."""
    importlib.import_module("smdistributed.modelparallel.torch")
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "_Names"]
    install_import_names()
    importlib.import_module("smdistributed.modelparallel.backend.exceptions")


@pytest.mark.parametrize(
    ("file", "named"),
    [
        ("smdistributed/__init__.py", "smdistributed/__init__.py"),
        ("smdistributed.py", "smdistributed.py"),
        ("smdistributed/modelparallel/__init__.py", "smdistributed"),  # without a file above
    ],
)
def test_another_installation_is_named_and_stays(tmp_path: Path, file: str, named: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("REAL = True\n")
    code = """
import smp_core
from smp_core.errors import RealInstallationError
finders = list(sys.meta_path)
try:
    smp_core.install_import_names()
except RealInstallationError as error:
    print(error)
assert sys.meta_path == finders
import smdistributed
print(getattr(smdistributed, "REAL", None) or smdistributed.__path__)
smp_core.remove_import_names()
assert "smdistributed" in sys.modules
"""
    told = run(code, tmp_path)
    assert f"there is another smdistributed already: {tmp_path / named}. Remove it" in told
    assert "import smp_core.torch as smp" in told


def test_one_that_is_imported_already_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "smdistributed", ModuleType("smdistributed"))
    with pytest.raises(RealInstallationError, match=r"<module 'smdistributed'> has been imported"):
        install_import_names()
    remove_import_names()
    assert "smdistributed" in sys.modules


def test_the_page_of_scripts_has_every_import_name() -> None:
    page = (Path(__file__).parents[2] / "docs/scripts.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"`([\w.]+)`", page.split("## Names")[1].split("\n## ")[0]))
    for name in import_names.MODULES:
        _, front, rest = name.partition(".torch")
        last = "." + rest.rpartition(".")[2]
        assert {name, front + rest, last if ".huggingface" in rest else ""} & shown, name
