"""``LocalEstimator``: published estimators as jobs, what a script is told, bad arguments, and real runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smp_core.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConfigError,
    ScriptFailedError,
    SmpError,
)
from smp_core.launch import LocalEstimator, backends, command
from smp_core.launch.instances import GPUS
from smp_core.launch.job import ScriptJob
from smp_core.launch.output import RankOutput
from smp_core.variables import PARAMETERS

from .listings import INPUTS, LISTINGS, OPEN

DEFAULT = ("--mca", "btl_vader_single_copy_mechanism", "none")
Make = Callable[..., LocalEstimator]


def distribution(processes: object = 2, **parameters: Any) -> dict[str, Any]:
    parameters = parameters or {"partitions": 2}
    model = {"modelparallel": {"enabled": True, "parameters": parameters}}
    return {"smdistributed": model, "mpi": {"enabled": True, "processes_per_host": processes}}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder, where results are."""
    path = tmp_path / "temporary"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with an empty script."""
    path = tmp_path / "source"
    path.mkdir()
    (path / "train.py").touch()
    return path


@pytest.fixture
def make(source: Path) -> Make:
    """An estimator of the script on 2 ranks, with further arguments."""

    def make(**arguments: Any) -> LocalEstimator:
        given = {"source_dir": source, "distribution": distribution(), **arguments}
        return LocalEstimator(given.pop("entry_point", "train.py"), **given)

    return make


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ScriptJob]]:
    """The jobs that were started; none of them runs."""
    found: list[ScriptJob] = []

    def start(job: ScriptJob, output: RankOutput) -> int:
        found.append(job)
        return 0

    monkeypatch.setattr(backends, "_OURS", {"gloo": start, "mpi": start})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return found


@pytest.mark.parametrize("name", LISTINGS)
@pytest.mark.parametrize("form", ["arguments", "object"])
def test_published_estimators_are_jobs(
    seen: list[ScriptJob], source: Path, name: str, form: str
) -> None:
    listing = LISTINGS[name]
    arguments = dict(listing.arguments)
    for argument, value in listing.arguments.items():
        if value is OPEN:
            ours = {"entry_point": "train.py", "source_dir": str(source), "image_uri": "image"}
            arguments[argument] = ours.get(argument, object())
    if "source_dir" not in arguments:
        arguments["entry_point"] = str(source / "train.py")
    if form == "object":
        estimator = LocalEstimator.of(SimpleNamespace(**arguments, _hyperparameters={}))
    else:
        estimator = LocalEstimator(**arguments)
    with pytest.raises(ArgumentError, match="aws s3 sync s3://my_bucket/my_training_data/ FOLDER"):
        estimator.fit(INPUTS)
    assert not seen
    estimator.fit()
    (job,) = seen
    assert job.script == str(source / "train.py")
    assert job.ranks == listing.ranks
    assert job.parameters == listing.parameters
    assert job.mpi_options == DEFAULT + listing.mpi_options
    assert job.environment.items() >= listing.environment.items()
    assert job.folder == (str(source) if "source_dir" in arguments else "")
    assert job.cpu is None


def test_the_packages_object_is_taken_as_it_is(
    seen: list[ScriptJob], source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the attributes of its objects, with what they have of arguments that nobody gave."""
    theirs = SimpleNamespace(
        entry_point="train.py",
        source_dir=str(source),
        _hyperparameters={"epochs": 3, "sagemaker_region": "eu-west-1"},
        hyperparameters=lambda: {"epochs": "3", "sagemaker_mpi_enabled": "true"},
        distribution=distribution(),
        instance_type="ml.p3.8xlarge",
        instance_count=1,
        environment={"A": "b"},
        output_path=None,
        base_job_name="name",
        role="arn",
        tags=[],
        volume_size=30,
        image_uri=None,
        use_spot_instances=False,
        latest_training_job=None,
    )
    LocalEstimator.of(theirs, backend="gloo", cpu=False, output="plain").fit()
    (job,) = seen
    assert job.arguments == ("--epochs", "3", "--mp_parameters", "partitions=2")
    assert (job.ranks, job.cpu, job.environment["A"]) == (2, False, "b")
    assert json.loads(job.environment["SM_FRAMEWORK_PARAMS"])["sagemaker_region"] == "eu-west-1"
    shown = capsys.readouterr().err
    assert "arguments of LocalEstimator without effect here: role, volume_size\n" in shown
    assert "train.py on 2 ranks (gloo)" in shown


@pytest.mark.parametrize("given", [object(), SimpleNamespace(entry_point=None), "train.py"])
def test_objects_that_are_no_estimators(given: object) -> None:
    with pytest.raises(ArgumentTypeError, match="object without an entry_point"):
        LocalEstimator.of(given)


def test_hyperparameters_are_arguments(seen: list[ScriptJob], make: Make) -> None:
    """As the toolkit writes them: sorted, ``str`` of what JSON has handed over, a dict as pairs."""
    hyperparameters = {
        "lr": 5e-5,
        "fp16": True,
        "epochs": 3,
        "b": 1,
        "name": "a b",
        "sizes": (1, 2),
        "nothing": None,
        "more": {"y": 2, "x": 1},
        "sagemaker_program": "x.py",
    }
    make(
        hyperparameters=hyperparameters, distribution=distribution(2, partitions=2, ddp=True)
    ).fit()
    (job,) = seen
    expected = ["-b", "1", "--epochs", "3", "--fp16", "True", "--lr", "5e-05"]
    expected += ["--more", "x=1,y=2", "--mp_parameters", "ddp=True,partitions=2"]
    expected += ["--name", "a b", "--nothing", "None", "--sizes", "[1, 2]"]
    assert list(job.arguments) == expected


def test_the_environment(
    seen: list[ScriptJob], make: Make, source: Path, tmp_path: Path, temporary: Path
) -> None:
    """Every variable that the toolkit sets and we do, by its documented name."""
    estimator = make(
        hyperparameters={"lr": 0.1, "text": "a", "on": True},
        instance_type="ml.p3.16xlarge",
        instance_count=2,
        environment={"OWN": "1", "SM_LOG_LEVEL": "10"},
    )
    assert estimator.model_data is None
    estimator.fit({"train": source, "test": f"file://{tmp_path}"}, job_name="job")
    (job,) = seen
    (results,) = temporary.iterdir()
    found = job.variables()
    parameters = {"partitions": 2, "ranks_per_node": 2}
    hyperparameters = {"lr": 0.1, "text": "a", "on": True, "mp_parameters": parameters}
    texts = {
        "SM_CHANNEL_TRAIN": str(source),
        "SM_CHANNEL_TEST": str(tmp_path),
        "SM_CURRENT_HOST": "algo-1",
        "SM_CURRENT_INSTANCE_TYPE": "ml.p3.16xlarge",
        "SM_NETWORK_INTERFACE_NAME": "lo",
        "SM_HP_LR": "0.1",
        "SM_HP_TEXT": "a",
        "SM_HP_ON": "true",
        "SM_MODEL_DIR": str(results / "model"),
        "SM_OUTPUT_DIR": str(results / "output"),
        "SM_OUTPUT_DATA_DIR": str(results / "output/data"),
        "SM_OUTPUT_INTERMEDIATE_DIR": str(results / "output/intermediate"),
        "SM_MODULE_DIR": str(source),
        "SM_MODULE_NAME": "train",
        "SM_USER_ENTRY_POINT": "train.py",
        "SM_NUM_GPUS": "8",
        "SM_LOG_LEVEL": "10",
        "TRAINING_JOB_NAME": "job",
        "OWN": "1",
    }
    objects = {
        "SM_HOSTS": ["algo-1", "algo-2"],
        "SM_CHANNELS": ["test", "train"],
        "SM_HPS": hyperparameters,
        "SM_USER_ARGS": list(job.arguments),
        "SM_FRAMEWORK_PARAMS": {
            "sagemaker_mpi_enabled": True,
            "sagemaker_mpi_num_of_processes_per_host": 2,
            "sagemaker_mpi_custom_mpi_options": "",
        },
        PARAMETERS: parameters,
    }
    assert {name: found[name] for name in texts} == texts
    assert {name: json.loads(found[name]) for name in objects} == objects
    training = json.loads(found["SM_TRAINING_ENV"])
    assert training["job_name"] == "job"
    assert training["channel_input_dirs"] == {"train": str(source), "test": str(tmp_path)}
    assert training["hyperparameters"] == hyperparameters
    assert found.keys() - {*texts, *objects} == {
        "SM_NUM_CPUS",
        "SM_TRAINING_ENV",
        "OMP_NUM_THREADS",
    }
    for name in ("SM_MODEL_DIR", "SM_OUTPUT_DATA_DIR", "SM_OUTPUT_INTERMEDIATE_DIR"):
        assert Path(found[name]).is_dir()
    assert estimator.model_data == found["SM_MODEL_DIR"]


def test_one_folder_is_the_channel_training(
    seen: list[ScriptJob], make: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    for given in (folder, str(folder), f"file://{tmp_path}/a%20b"):
        make().fit(given)
        assert seen[-1].environment["SM_CHANNEL_TRAINING"] == str(folder)
        assert seen[-1].environment["SM_CHANNELS"] == '["training"]'


@pytest.mark.parametrize("uri", [False, True])
def test_results_are_where_they_are_asked_for(
    seen: list[ScriptJob], make: Make, tmp_path: Path, uri: bool
) -> None:
    path = tmp_path / "results"
    estimator = make(output_path=f"file://{path}" if uri else path)
    estimator.fit(job_name="first")
    assert estimator.model_data == str(path / "first" / "model")


def test_the_users_nodes_stay(seen: list[ScriptJob], make: Make) -> None:
    parameters = {"partitions": 2, "ranks_per_node": 1}
    make(instance_count=2, distribution=distribution(2, **parameters)).fit()
    assert seen[0].parameters == parameters


def test_arguments_without_effect_are_named_once(
    seen: list[ScriptJob], make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    estimator = make(role="arn", max_run=5, output_path="s3://bucket/path")
    for _ in range(2):
        estimator.fit(wait=True)
        shown = capsys.readouterr().err
        head = "smp-run: arguments of LocalEstimator without effect here: "
        assert shown.count(head + "max_run, output_path, role\n") == 1
        assert shown.count("smp-run: arguments of fit without effect here: wait\n") == 1


@pytest.mark.parametrize(
    ("instance_type", "said"),
    [
        ("ml.m5.large", "instance_type ml.m5.large is not known, so nothing limits"),
        ("ml.p3.16xlage", "did you mean ml.p3.16xlarge?"),
    ],
)
def test_types_that_are_not_known(
    seen: list[ScriptJob],
    make: Make,
    capsys: pytest.CaptureFixture[str],
    instance_type: str,
    said: str,
) -> None:
    make(instance_type=instance_type, distribution=distribution(64)).fit()
    assert said in capsys.readouterr().err
    assert seen[0].environment["SM_NUM_GPUS"] == "64"


@pytest.mark.parametrize("instance_type", ["local", "local_gpu", None])
def test_this_machine_has_no_limit(
    seen: list[ScriptJob],
    make: Make,
    capsys: pytest.CaptureFixture[str],
    instance_type: str | None,
) -> None:
    make(instance_type=instance_type, distribution=distribution(64)).fit()
    assert "is not known" not in capsys.readouterr().err


def test_the_gpus_of_types() -> None:
    """Those that the pages and listings name: 8 GPUs for 8 processes."""
    known = {"ml.p3.2xlarge": 1, "ml.p3.8xlarge": 4, "ml.g5.12xlarge": 4, "ml.p2.16xlarge": 16}
    eight = ("ml.p3.16xlarge", "ml.p3dn.24xlarge", "ml.p4d.24xlarge", "ml.p5.48xlarge")
    assert GPUS.items() >= {**known, **dict.fromkeys(eight, 8)}.items()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"distribution": None}, ConfigError, "distribution is missing: LocalEstimator"),
        ({"distribution": {}}, ConfigError, '["modelparallel"] is missing'),
        (
            {"distribution": distribution(9), "instance_type": "ml.p3.16xlarge"},
            ConfigError,
            '["processes_per_host"] is 9: ml.p3.16xlarge has 8 GPUs',
        ),
        (
            {"distribution": distribution(2), "instance_type": "ml.p3.2xlarge"},
            ConfigError,
            "ml.p3.2xlarge has 1 GPU, and each rank has one of its own. Give at most 1",
        ),
        (
            {"distribution": distribution(3), "instance_count": 3},
            ConfigError,
            "3 * 3 = 9 ranks: pipeline_parallel_degree=2",
        ),
        ({"instance_count": 0}, ConfigError, "instance_count=0: must be an int of at least 1"),
        (
            {"environment": {"SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES": "8191"}},
            ConfigError,
            "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES='8191' is no positive multiple of 8192",
        ),
        ({"instance_count": "2"}, ConfigError, "instance_count='2': must be"),
        (
            {"hyperparameters": {"mp_parameters": "partitions=2"}},
            ConfigError,
            "hyperparameters['mp_parameters']: give the parameters",
        ),
        (
            {"hyperparameters": {"x": object()}},
            ArgumentTypeError,
            "hyperparameters['x'] is a object, which JSON cannot hold",
        ),
        ({"hyperparameters": {1: 2}}, ArgumentTypeError, "the name 1 must be a str"),
        ({"environment": {"A": 1}}, ArgumentTypeError, "environment['A']=1: name and value"),
        ({"output": "loud"}, ArgumentError, "output='loud': the forms are prefix, group, plain"),
        ({"hyperparameter": {}}, ArgumentError, "did you mean hyperparameters?"),
        ({"framework_versoin": "1"}, ArgumentError, "did you mean framework_version?"),
        ({"zzz": 1}, ArgumentError, "unknown argument zzz: SageMaker's has none of this name"),
        ({"source_dir": "s3://b/code.tar.gz"}, ArgumentError, "source_dir is s3://b/code.tar.gz"),
        ({"source_dir": "nowhere"}, ArgumentError, "nowhere does not exist"),
        ({"output_path": "https://x/y"}, ArgumentError, "output_path is https://x/y: give a path"),
    ],
)
def test_bad_arguments(
    make: Make, arguments: dict[str, Any], error: type[SmpError], said: str
) -> None:
    with pytest.raises(error) as caught:
        make(**arguments)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"inputs": "s3://b/x"}, ArgumentError, "inputs is s3://b/x: nothing is fetched from S3"),
        ({"inputs": {"train": "s3://b/x"}}, ArgumentError, "inputs['train'] is s3://b/x"),
        ({"inputs": "nowhere"}, ArgumentError, "nowhere does not exist"),
        ({"inputs": __file__}, ArgumentError, "is no folder"),
        ({"inputs": "http://x/y"}, ArgumentError, "inputs is http://x/y: give a path or a file://"),
        ({"inputs": "file://other/x"}, ArgumentError, "file:// URI of this machine"),
        ({"inputs": SimpleNamespace()}, ArgumentTypeError, "inputs is a SimpleNamespace: give"),
        ({"inputs": {"train": 3}}, ArgumentTypeError, "inputs['train'] is a int: give"),
        ({"job_name": "../x"}, ArgumentError, "the job's name '../x' names a folder"),
        ({"input": "x"}, ArgumentError, "fit: unknown argument input: did you mean inputs?"),
    ],
)
def test_bad_arguments_of_fit(
    seen: list[ScriptJob],
    make: Make,
    temporary: Path,
    arguments: dict[str, Any],
    error: type[SmpError],
    said: str,
) -> None:
    with pytest.raises(error) as caught:
        make().fit(**arguments)
    assert said in str(caught.value)
    assert not seen
    assert not list(temporary.iterdir())


def test_the_script_is_missing(seen: list[ScriptJob], make: Make, temporary: Path) -> None:
    with pytest.raises(ArgumentError, match=r"script .*nothing\.py: there is no such file"):
        make(entry_point="nothing.py").fit()
    with pytest.raises(ArgumentError, match="backend 'nccl': the backends are"):
        make(backend="nccl").fit()
    assert not seen


@pytest.mark.parametrize(
    ("code", "error"), [(7, ScriptFailedError), (137, ScriptFailedError), (130, KeyboardInterrupt)]
)
def test_a_failure_is_raised_with_its_exit_code(
    make: Make, monkeypatch: pytest.MonkeyPatch, code: int, error: type[BaseException]
) -> None:
    monkeypatch.setattr(backends, "_OURS", {"gloo": lambda job, output: code})
    with pytest.raises(error) as caught:
        make(backend="gloo").fit()
    if isinstance(caught.value, ScriptFailedError):
        assert caught.value.exit_code == code
        assert f"train.py failed with exit code {code}" in str(caught.value)


def test_asking_for_it_imports_no_torch() -> None:
    text = (
        "import sys, smp_core.launch\n"
        "assert 'smp_core.launch.estimator' not in sys.modules\n"
        "smp_core.launch.LocalEstimator\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", text], check=True, timeout=120)


SCRIPT = """
import argparse, json, os, sys
import beside
import torch
import smdistributed.modelparallel.torch as smp

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--fails", type=int, default=-1)
parser.add_argument("--mp_parameters")
arguments = parser.parse_args()
smp.init()
if smp.rank() == arguments.fails:
    sys.exit(5)
torch.manual_seed(0)
torch.cuda.set_device(smp.local_rank())

@smp.step
def step(model, x):
    loss = model(x).sum()
    model.backward(loss)
    return loss

model = smp.DistributedModel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=arguments.lr))
loss = step(model, torch.ones(4, 2)).reduce_mean()
optimizer.step()
with open(os.path.join(os.environ["SM_MODEL_DIR"], str(smp.rank())), "w") as file:
    with open(os.path.join(os.environ["SM_CHANNEL_TRAIN"], "data")) as source:
        data = source.read()
    local = [smp.local_rank(), smp.local_size()]
    found = [arguments.lr, os.getcwd(), data, smp.size(), smp.pp_size(), local, loss.item()]
    json.dump(found, file)
"""


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_script_is_fitted(
    make: Make, source: Path, tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two instances of two ranks, from its own folder; then the same script fails."""
    (source / "sub").mkdir()
    (source / "sub" / "train.py").write_text(SCRIPT)
    (source / "beside.py").touch()
    (tmp_path / "data").write_text("numbers")
    before = Path.cwd(), list(sys.path), dict(os.environ)
    about: dict[str, Any] = {
        "entry_point": "sub/train.py",
        "distribution": distribution(2, partitions=2, microbatches=2, ddp=True),
        "instance_count": 2,
        "backend": backend,
    }
    estimator = make(**about, hyperparameters={"lr": 0.25})
    estimator.fit({"train": tmp_path})
    assert estimator.model_data is not None
    found = [json.loads((Path(estimator.model_data) / str(rank)).read_text()) for rank in range(4)]
    losses = {each.pop() for each in found}
    assert found == [[0.25, str(source), "numbers", 4, 2, [rank % 2, 2]] for rank in range(4)]
    assert len(losses) == 1
    with pytest.raises(ScriptFailedError) as caught:
        make(**about, hyperparameters={"lr": 0.25, "fails": 2}).fit({"train": tmp_path})
    assert caught.value.exit_code == 5
    assert "smp-run: rank 2 failed" in capsys.readouterr().err
    assert (Path.cwd(), list(sys.path), dict(os.environ)) == before


def test_a_whole_distribution_configures_smp_run(
    seen: list[ScriptJob], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = distribution(4)
    given["mpi"]["custom_mpi_options"] = "-x A=b --tag-output"
    file = tmp_path / "distribution.json"
    file.write_text(json.dumps(given))
    words = ["--config", str(file), "-p", "microbatches=2", str(source / "train.py")]
    assert command.main(words) == 0
    assert command.main(["-n", "6", *words]) == 0
    assert [job.ranks for job in seen] == [4, 6]
    assert seen[0].parameters == {"partitions": 2, "microbatches": 2}
    assert seen[0].mpi_options == (*DEFAULT, "--tag-output")
    assert seen[0].environment == {"A": "b"}
    for bad, said in (
        ({**given, "mpi": {"enabled": False}}, '["mpi"]["enabled"] is False'),
        ({"smdistributed": given["smdistributed"]}, '["mpi"] is missing'),
        ({"mpi": given["mpi"]}, '["smdistributed"]["modelparallel"] is missing'),
        (distribution(3), "a world of 3"),
    ):
        file.write_text(json.dumps(bad))
        assert command.main(words) == 2
        shown = capsys.readouterr().err
        assert said in shown
        assert len(seen) == 2
