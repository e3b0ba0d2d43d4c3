"""Engines: how one is named, what is refused, and a third party's in a session of the suite."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import conformance
from conformance.engines.capabilities import EngineCapability
from conformance.engines.names import BUILT_IN, find_engine
from conformance.engines.protocol import Conventions, EngineError
from pytest_smp.strategies.training import Training

ENGINES = """
import dataclasses
from conformance.engines.capabilities import EngineCapability
from conformance.engines.ddp import DdpEngine
from conformance.engines.protocol import ENGINE_VERSION, Conventions
from conformance.engines.smp import SmpEngine

class Half:
    name = "half"
    conventions, protocol = Conventions(), ENGINE_VERSION

class Old:
    name = "old"

class Late:
    name, api, conventions = "late", "", Conventions()
    capabilities, uses, protocol = frozenset(EngineCapability), {}, ENGINE_VERSION
    def replica(self, case): return 0
    def build(self, case, *, salt=""): ...

RIGHT = DdpEngine("theirs")
# DistributedDataParallel averages: whoever says that it sums promises what is not so.
WRONG = DdpEngine("boasting", conventions=Conventions(dp="sum", microbatch="sum"))
HALF, LATE, LAST, OLD = Half(), Late(), DdpEngine("last", protocol=1), Old()
"""

PROFILE = """
from hypothesis import Phase, settings
settings.register_profile(
    "few", max_examples=35, derandomize=True, database=None, phases=[Phase.generate]
)
settings.load_profile("few")
"""

#: A requirement that any engine is asked for, and two of pipelines.
ASKED = "replicas_are_averaged or are_averaged_if_asked or may_have_no_data"


def verdicts(report: Path) -> dict[str, str]:
    """The verdict of each requirement that was asked for or cannot be, by its id."""
    found = json.loads(report.read_text())["requirements"]
    return {each["id"]: each["verdict"] for each in found if each["verdict"] != "SKIPPED"}


def test_a_third_partys_engine_is_tested_and_a_wrong_promise_fails(
    sessions: Any, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(ENGINES)
    (tmp_path / "ini").mkdir()
    (tmp_path / "ini" / "pytest.ini").write_text("[pytest]\nsmp_engine = mine:WRONG\n")
    common = ["--pyargs", "conformance.suite.test_pipeline_gradients", "-k", ASKED, "--smp-ranks=2"]
    common.append("--tb=line")
    right, wrong = sessions(
        [*common, "--smp-engine=mine:RIGHT", "--smp-report=right.json"],
        [*common, "-c", "ini/pytest.ini", f"--smp-report={tmp_path}/wrong.json"],
        plugin=PROFILE,
    )
    assert (
        "conformance: engine theirs claims all but pipeline, the SMP API, tensor parallelism, own batches, "
        "sharding, sharding blocks, clipping, bf16, fp16, counted exchanges, SMDDP gathers, "
        "replayed order" in right
    )
    assert "=== exit 0" in right
    found = verdicts(tmp_path / "right.json")
    assert [id for id, verdict in found.items() if verdict != "NOT SUPPORTED"] == ["GRAD-REPLICAS"]
    assert found["GRAD-REPLICAS"] == "PASS"
    assert {"PIPE-AVERAGE", "PIPE-FIRST-RANK"} <= set(found)
    assert "not claimed: pipeline, needed by PIPE-" in right
    said = json.loads((tmp_path / "right.json").read_text())["engine"]
    assert said == {
        "name": "theirs",
        "option": "mine:RIGHT",
        "claims": ["training", "unused parameters", "any parameter"],
        "not_claimed": [
            "pipeline",
            "the SMP API",
            "tensor parallelism",
            "own batches",
            "sharding",
            "sharding blocks",
            "clipping",
            "bf16",
            "fp16",
            "counted exchanges",
            "SMDDP gathers",
            "TensorFlow",
            "replayed order",
        ],
    }
    assert "conformance: engine boasting claims" in wrong  # the ini key
    assert "=== exit 1" in wrong
    assert verdicts(tmp_path / "wrong.json")["GRAD-REPLICAS"] == "FAIL"
    assert verdicts(tmp_path / "wrong.json")["PIPE-AVERAGE"] == "NOT SUPPORTED"
    assert re.search(r"gradient of [a-z.]+ after window 0: is .*, plain PyTorch has", wrong)


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["alone", "xdist"])
def test_what_is_no_engine_ends_the_session_before_it_runs(
    small: Any, tmp_path: Path, workers: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(ENGINES)
    wrong = {
        "nobody": "there is smp, ddp, fsdp2, hsdp, tp, tensorflow; or give module:attribute",
        "mine:": "there is smp, ddp, fsdp2, hsdp, tp, tensorflow; or give module:attribute",
        "not.there:ENGINE": "cannot import not.there: ModuleNotFoundError: No module named 'not'",
        "mine:NOTHING": "module mine has no attribute 'NOTHING'",
        "mine:HALF": " has no capabilities, api, uses, replica, build",
        "mine:OLD": "names no version of the engine protocol; this suite has 2",
        "mine:LAST": "was written for version 1 of the engine protocol; this suite has 2",
        "mine:LATE": "claims the SMP API and names no module in `api`",
    }
    outputs = small(*(["small", f"--smp-engine={name}", *workers] for name in wrong))
    for (name, message), output in zip(wrong.items(), outputs, strict=True):
        assert f"ERROR: --smp-engine: engine {name!r}: " in output
        assert message in output
        assert "=== exit 4" in output
        assert "collected" not in output
        assert "Traceback" not in output


def test_a_module_that_breaks_is_named() -> None:
    with pytest.raises(EngineError, match="cannot import no_such_module: ModuleNotFoundError"):
        find_engine("no_such_module:ENGINE")


def test_those_of_this_project() -> None:
    names = ["smp", "ddp", "fsdp2", "hsdp", "tp", "tensorflow"]
    assert {name: find_engine(name).name for name in BUILT_IN} == {name: name for name in names}
    of_tensorflow = frozenset({EngineCapability.TENSORFLOW})
    assert find_engine("smp").capabilities == frozenset(EngineCapability) - of_tensorflow
    assert find_engine("tensorflow").capabilities == of_tensorflow
    claims = {name: find_engine(name).capabilities for name in names}
    assert EngineCapability.SHARDING not in claims["ddp"]
    assert claims["hsdp"] - claims["fsdp2"] == {EngineCapability.BLOCKS}
    assert [name for name in names if EngineCapability.TENSOR in claims[name]] == ["smp", "tp"]
    assert EngineCapability.OWN_BATCHES not in claims["tp"]
    assert not any(claims[name] & {EngineCapability.REPLAYED} for name in names[1:])


def test_conventions_say_what_sums_are_divided_by() -> None:
    case = Training(dp=2, microbatches=4)
    other = Training(dp=2, microbatches=4, average=False)
    asked, summed = Conventions(), Conventions(dp="sum", microbatch="sum")
    assert [asked.divisor(case), asked.divisor(other)] == [8, 2]
    assert [summed.divisor(case), summed.divisor(other)] == [1, 1]
    assert Conventions(microbatch="mean").divisor(other) == 8
    assert Conventions(microbatch="sum").divisor(case) == 2


def test_the_page_names_the_modules_that_ask_an_engine() -> None:
    root = Path(conformance.__file__).parents[1]
    page = (root / "docs" / "conformance.md").read_text()
    sentence = page.partition("An engine is asked by the modules ")[2].partition(";")[0]
    modules = {
        path.stem
        for path in (root / "conformance" / "suite").glob("test_*.py")
        if "smp_engine" in path.read_text()
    }
    assert set(re.findall(r"`(\w+)`", sentence)) == modules
