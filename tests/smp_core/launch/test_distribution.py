"""The dictionary ``distribution`` of SageMaker's estimators: every published one, and every bad one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from smp_core.errors import ConfigError
from smp_core.launch.distribution import Distribution

from .listings import LISTINGS

DEFAULT = ("--mca", "btl_vader_single_copy_mechanism", "none")
MODEL = {"enabled": True, "parameters": {"partitions": 2, "ddp": True}}
MPI = {"enabled": True, "processes_per_host": 4}
WHOLE: dict[str, Any] = {"smdistributed": {"modelparallel": MODEL}, "mpi": MPI}


def with_mpi(**changes: Any) -> dict[str, Any]:
    return {**WHOLE, "mpi": {**MPI, **changes}}


def with_model(**changes: Any) -> dict[str, Any]:
    return {**WHOLE, "smdistributed": {"modelparallel": {**MODEL, **changes}}}


def without(given: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name != key}


def refused(given: object, *said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Distribution.read(given)
    assert isinstance(caught.value, ValueError)
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize("name", LISTINGS)
@pytest.mark.parametrize("form", ["dict", "JSON"])
def test_published_ones_are_read(name: str, form: str) -> None:
    listing = LISTINGS[name]
    given = listing.arguments["distribution"]
    found = Distribution.read(given if form == "dict" else json.loads(json.dumps(given)))
    nodes = listing.arguments.get("instance_count", 1)
    assert found.processes_per_host * nodes == listing.ranks
    assert found.parameters == without(listing.parameters, "ranks_per_node")
    assert found.mpi_options == DEFAULT + listing.mpi_options
    assert found.environment == listing.environment


def test_parameters_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps(MODEL["parameters"]))
    for given in (path, str(path)):
        assert Distribution.read(with_model(parameters=given)) == Distribution.read(WHOLE)


def test_a_flag_may_be_1() -> None:
    """As in the SDK's own test (API 3.4)."""
    assert Distribution.read(with_model(parameters={"ddp": 1})).parameters == {"ddp": 1}


@pytest.mark.parametrize(
    ("given", "options", "environment"),
    [
        (None, (), {}),
        ("", (), {}),
        ("-x A=b -x C --tag-output", ("--tag-output",), {"A": "b"}),
        ("-x A='b c' -x D=", (), {"A": "b c", "D": ""}),
    ],
)
def test_mpi_options(
    given: str | None, options: tuple[str, ...], environment: dict[str, str]
) -> None:
    found = Distribution.read(with_mpi(custom_mpi_options=given))
    assert (found.mpi_options, found.environment) == (DEFAULT + options, environment)


def test_model_and_data_parallelism_exclude_each_other() -> None:
    """API 3.4, 6."""
    data = {"enabled": True}
    both = {"modelparallel": MODEL, "dataparallel": data}
    for given, reason in (({"dataparallel": data}, "are not launched"), (both, "exclude")):
        words = ('["smdistributed"] has "dataparallel"', reason, "Leave")
        refused({**WHOLE, "smdistributed": given}, *words)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "distribution must be a dict, not NoneType"),
        ("x.json", "distribution must be a dict, not str 'x.json'"),
        ({}, 'distribution["smdistributed"]["modelparallel"] is missing'),
        ({"smdistributed": {}, "mpi": MPI}, '["modelparallel"] is missing'),
        ({"smdistributed": {"modelparallel": {}}, "mpi": MPI}, '["modelparallel"] is missing'),
        ({"smdistributed": [MODEL], "mpi": MPI}, '["smdistributed"] must be a dict, not list'),
        ({**WHOLE, "pytorchddp": {"enabled": True}}, "distribution has the unknown key"),
        ({**WHOLE, "smdistribute": 1}, "'smdistribute': did you mean smdistributed?"),
        (
            {**WHOLE, "smdistributed": {"modelparalel": MODEL, "modelparallel": MODEL}},
            "'modelparalel': did you mean modelparallel?",
        ),
        (
            {**WHOLE, "smdistributed": {**MODEL, "modelparallel": MODEL}},
            "[\"smdistributed\"] has the unknown key 'modelparallel'",
        ),
        (with_model(enabled=False), '["modelparallel"]["enabled"] is False: model parallelism'),
        (with_model(enabled="true"), '["modelparallel"]["enabled"] is \'true\''),
        (
            {**WHOLE, "smdistributed": {"modelparallel": without(MODEL, "enabled")}},
            '["modelparallel"]["enabled"] is missing',
        ),
        ({**WHOLE, "smdistributed": {"enabled": False}}, '["smdistributed"]["enabled"] is False'),
        (with_model(parameter={}), "'parameter': did you mean parameters?"),
        (with_model(parameters={}), '["parameters"] is empty: give the parameters of smp.init'),
        (
            {**WHOLE, "smdistributed": {"modelparallel": {"enabled": True}}},
            '["parameters"] is missing',
        ),
        (with_model(parameters=[2]), '["parameters"]: parameters=[2]: must be a mapping'),
        (with_model(parameters="missing.json"), "is the path missing.json (in "),
        (without(WHOLE, "mpi"), 'distribution["mpi"] is missing: MPI starts the ranks'),
        ({**WHOLE, "mpi": True}, 'distribution["mpi"] must be a dict, not bool'),
        (with_mpi(enabled=False), 'distribution["mpi"]["enabled"] is False'),
        (
            with_mpi(custom_mpi_options="-x SMDDP_AG_SORT_BUFFER_SIZE_BYTES=8191"),
            "[\"custom_mpi_options\"]: SMDDP_AG_SORT_BUFFER_SIZE_BYTES='8191' is no positive multiple of 8192",
        ),
        ({**WHOLE, "mpi": {"processes_per_host": 4}}, '["mpi"]["enabled"] is missing'),
        (with_mpi(process_per_host=4), "did you mean processes_per_host?"),
        ({**WHOLE, "mpi": {"enabled": True}}, '["processes_per_host"] is missing: must be an int'),
        *(
            (with_mpi(processes_per_host=each), f'["processes_per_host"] is {each!r}: must be')
            for each in (0, -1, True, 2.0, "4", None)
        ),
        (with_mpi(custom_mpi_options=["--x"]), '["custom_mpi_options"] must be a str'),
        (with_mpi(custom_mpi_options="-x 'A"), "No closing quotation"),
        (with_mpi(custom_mpi_options="--tag-output -x"), "behind -x stands NAME or NAME=VALUE"),
    ],
)
def test_bad_ones(given: object, said: str) -> None:
    refused(given, said)


@pytest.mark.parametrize("option", ["--mca", "-mca"])
def test_the_default_option_is_not_listed_twice(option: str) -> None:
    """The trap that the page names (API 6)."""
    words = f"{option} btl_vader_single_copy_mechanism none --tag-output"
    refused(with_mpi(custom_mpi_options=words), '["custom_mpi_options"] has btl_vader', "Leave it")


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        # API 3.4
        *(({key: 0}, f"{key}=0") for key in ("microbatches", "partitions", "active_microbatches")),
        ({"pipeline": "fast"}, "pipeline='fast'"),
        ({"placement_strategy": "close"}, "placement_strategy='close'"),
        ({"optimize": "all"}, "optimize='all'"),
        *(
            ({key: 2}, f"{key}=2: must be True or False")
            for key in (
                *("auto_partition", "contiguous", "load_partition", "horovod", "ddp"),
                "deterministic_server",
            )
        ),
        ({"partition_file": 1}, "partition_file=1: must be a str"),
        ({"ddp": True, "ddp_port": -1}, "ddp_port=-1"),
        ({"memory_weight": 1.5}, "memory_weight=1.5"),
        ({"auto_partition": False}, "default_partition must be given"),
        ({"partitions": 2, "default_partition": 2}, "less than the number of partitions"),
        ({"ddp_port": 1234}, "ddp_port needs ddp"),
        ({"ddp_dist_backend": "auto"}, "ddp_dist_backend needs ddp"),
        ({"horovod": True, "ddp": True}, "horovod and ddp exclude each other"),
        # API 3.5
        ({"tensor_parallel_degree": 2}, "needs ddp"),
        ({"bf16": True}, "bf16 needs sharded data parallelism"),
        (
            {"fp16": True, "bf16": True, "sharded_data_parallel_degree": 2},
            "fp16 and bf16 exclude each other",
        ),
        ({"sharded_data_parallel_degree": 2, "partitions": 2}, "needs pipeline_parallel_degree 1"),
        (
            {"sharded_data_parallel_degree": 2, "shard_optimizer_state": True},
            "needs shard_optimizer_state off",
        ),
        (
            {"sharded_data_parallel_degree": 2, "tensor_parallel_degree": 2, "ddp": True},
            "needs prescaled_batch",
        ),
    ],
)
def test_bad_parameters(tmp_path: Path, parameters: dict[str, Any], said: str) -> None:
    """In a dict and in a file."""
    where = 'distribution["smdistributed"]["modelparallel"]["parameters"]: '
    refused(with_model(parameters=parameters), where, said)
    path = tmp_path / "parameters.json"
    path.write_text(json.dumps(parameters))
    refused(with_model(parameters=str(path)), where + str(path), said)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "parameters.json"
    path.write_text("{'partitions': 2}")
    refused(with_model(parameters=str(path)), f"is the path {path}, which holds no JSON")
