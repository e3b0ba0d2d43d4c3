"""``smp-run`` before any rank starts: what it is told, and what it refuses."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import torch

from smp_core.errors import RealInstallationError
from smp_core.launch import backends, command, gpus
from smp_core.launch.job import ScriptJob
from smp_core.launch.output import RankOutput
from smp_core.launch.runner import RUNNER_VERSION
from smp_core.launch.script import prepare
from smp_core.torch import cuda_stand_in
from smp_core.variables import PARAMETERS

Seen = list[tuple[ScriptJob, RankOutput]]
Run = Callable[..., int]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The jobs that were started."""
    found: Seen = []

    def start(job: ScriptJob, output: RankOutput) -> int:
        found.append((job, output))
        return 0

    monkeypatch.setattr(backends, "_OURS", {"gloo": start, "mpi": start})
    return found


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], seen: Seen, *words: str) -> str:
    """The message of a command that is refused before anything starts."""
    assert command.main(words) == 2
    assert not seen
    message = capsys.readouterr().err
    assert message.startswith("smp-run: ")
    return message


def test_what_is_after_the_script_is_the_scripts(seen: Seen, script: str) -> None:
    for words in (["-n", "7", "--cpu", "--", "x"], ["--", "-n", "x"], ["--"], []):
        assert command.main(["-n", "3", "--backend", "gloo", script, *words]) == 0
        job, _ = seen[-1]
        assert (job.ranks, job.cpu) == (3, False)
        assert job.arguments == tuple(words)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("1e6", 1e6),
        ("true", True),
        ("True", True),
        ("None", None),
        ("null", None),
        ("cluster", "cluster"),
        ('"cluster"', "cluster"),
        ("a=b", "a=b"),
    ],
)
def test_values_are_read_as_json_or_python_writes_them(text: str, value: object) -> None:
    found = command._parameters({}, [f"key={text}"])
    assert found == {"key": value}
    assert type(found["key"]) is type(value)


def test_the_later_parameters_win(
    seen: Seen, script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"microbatches": 2, "ddp": True, "optimize": "speed"}
    monkeypatch.setenv(PARAMETERS, json.dumps(environment))
    file = tmp_path / "options.json"
    file.write_text(json.dumps({"microbatches": 4, "optimize": "memory"}))
    assert command.main(["-n", "1", "--config", str(file), "-p", "microbatches=8", script]) == 0
    ((job, _),) = seen
    assert job.parameters == {"microbatches": 8, "ddp": True, "optimize": "memory"}
    assert json.loads(job.variables()[PARAMETERS]) == job.parameters


@pytest.mark.parametrize(
    ("parameters", "ranks"),
    [
        (["pipeline_parallel_degree=2"], 2),
        (["partitions=2", "tensor_parallel_degree=3", "ddp=True"], 6),
        (["sharded_data_parallel_degree=4"], 4),
    ],
)
def test_degrees_say_how_many_ranks(
    seen: Seen, script: str, parameters: list[str], ranks: int
) -> None:
    words = [word for each in parameters for word in ("-p", each)]
    assert command.main([*words, script]) == 0
    assert seen[0][0].ranks == ranks


def test_hugging_face_finds_a_launcher_and_partitions(seen: Seen, script: str) -> None:
    """Its two conditions (API 1.2). The rules leave sharded data parallelism one partition."""
    for parameters, partitions in (
        (["pipeline_parallel_degree=2"], 2),
        (["ddp=True", "sharded_data_parallel_degree=2"], 1),
    ):
        assert command.main([*(w for each in parameters for w in ("-p", each)), script]) == 0
        variables = seen[-1][0].variables()
        assert json.loads(variables[PARAMETERS])["partitions"] == partitions
        assert json.loads(variables["SM_FRAMEWORK_PARAMS"])["sagemaker_mpi_enabled"] is True


@pytest.mark.parametrize("where", ["exported", "of an estimator"])
def test_what_hugging_face_reads_is_added_to_the_users_own(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    name, own = "SM_FRAMEWORK_PARAMS", {"sagemaker_instance_type": "ml.p3.8xlarge"}
    if where == "exported":
        monkeypatch.setenv(name, json.dumps(own))
    environment = {} if where == "exported" else {name: json.dumps(own)}
    job = ScriptJob(script="train.py", parameters={"ddp": True}, environment=environment)
    assert json.loads(job.variables()[name]) == {**own, "sagemaker_mpi_enabled": True}
    for text, wanted in (("[1", True), ("", True), ('{"sagemaker_mpi_enabled": false}', False)):
        job = ScriptJob(script="train.py", parameters={"ddp": True}, environment={name: text})
        assert json.loads(job.variables()[name]) == {"sagemaker_mpi_enabled": wanted}


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        (["ddp=True"], True),
        (["ddp=True", "partitions=1"], False),
        (["ddp=True", "pipeline_parallel_degree=1"], False),
        (["ddp=True", "sharded_data_parallel_degree=2"], False),
        ([], False),
    ],
)
def test_parameters_by_which_hugging_face_does_not_find_smp_are_told(
    seen: Seen,
    script: str,
    capsys: pytest.CaptureFixture[str],
    parameters: list[str],
    told: bool,
) -> None:
    words = [word for each in parameters for word in ("-p", each)]
    assert command.main(["-n", "2", "--backend", "gloo", *words, script]) == 0
    assert ("add -p partitions=1" in capsys.readouterr().err) == told


@pytest.mark.parametrize(("local", "threads"), [(None, "1"), (2, "4"), (16, "1")])
def test_ranks_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, local: int | None, threads: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("smp_core.launch.job.cores", lambda: 8)
    assert ScriptJob(script="train.py", ranks=8).variables(local)["OMP_NUM_THREADS"] == threads
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ScriptJob(script="train.py", ranks=8).variables(local)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("cpu", "gpus"), [(True, "2"), (False, "0")])
def test_a_script_finds_the_variables_that_arguments_have_as_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpu: bool, gpus: str
) -> None:
    """As in ``parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])``. The user's own values stay."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("smp_core.launch.job.gpus.count", lambda _: 0)
    job = ScriptJob(script="train.py", ranks=8, cpu=cpu, environment={"SM_CURRENT_HOST": "here"})
    found = job.variables(2)
    assert {name: found[name] for name in found if name.startswith("SM_")} == {
        "SM_MODEL_DIR": str(tmp_path),
        "SM_OUTPUT_DATA_DIR": str(tmp_path),
        "SM_NUM_GPUS": gpus,
        "SM_HOSTS": '["algo-1"]',
        "SM_CURRENT_HOST": "here",
    }
    monkeypatch.setenv("SM_MODEL_DIR", "/elsewhere")
    assert "SM_MODEL_DIR" not in job.variables(2)  # that of this process


def test_channels(
    seen: Seen, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"--channel=train={tmp_path}", f"--channel=eval-set={tmp_path.parent}"]
    assert command.main(["-n", "1", *words, script]) == 0
    found = seen.pop()[0].variables()
    assert found["SM_CHANNEL_TRAIN"] == str(tmp_path)
    assert found["SM_CHANNEL_EVAL-SET"] == str(tmp_path.parent)
    assert json.loads(found["SM_CHANNELS"]) == ["eval-set", "train"]
    for bad, said in (
        (str(tmp_path), f"--channel {tmp_path}: write NAME=DIR"),
        ("train=s3://bucket", "--channel train is s3://bucket: nothing is fetched"),
        (f"train={script}", "is no folder"),
    ):
        assert said in refused(capsys, seen, "-n", "1", "--channel", bad, script)


def test_without_parameters_the_script_decides(seen: Seen, script: str) -> None:
    assert command.main(["-n", "2", script]) == 0
    assert PARAMETERS not in seen[0][0].variables()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the number of ranks by -n"),
        (["-n", "0"], "-n 0: a world needs at least one rank"),
        (["-n", "2", "--backend", "nccl"], "backend 'nccl': the backends are gloo, mpi, sim"),
        (["-n", "2", "-p", "ddp"], "-p ddp: write KEY=VALUE"),
        (["-n", "2", "-p", "=1"], "-p =1: write KEY=VALUE"),
        (["-n", "2", "--config", "missing.json"], "--config missing.json: No such file"),
        (["-n", "2", "-p", "microbatches=0"], "microbatches=0: must be an int of at least 1"),
        (["-n", "2", "-p", "microbatch=1"], "did you mean microbatches?"),
        (["-n", "2", "-p", "tensor_parallel_degree=2"], "tensor_parallel_degree > 1) needs ddp"),
        (["-n", "6", "-p", "partitions=4"], "must be a multiple of 4 * 1 = 4"),
        (
            ["-n", "6", "-p", "sharded_data_parallel_degree=4"],
            "6 / (1 * 1) = 6. Use one of 1, 2, 3, 6",
        ),
    ],
)
def test_bad_words(
    seen: Seen, script: str, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert said in refused(capsys, seen, *words, script)


def test_a_bad_size_of_a_buffer_is_named_before_a_rank_starts(
    seen: Seen, script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMDDP_AG_SORT_BUFFER_SIZE_BYTES", "8191")
    said = "SMDDP_AG_SORT_BUFFER_SIZE_BYTES='8191' is no positive multiple of 8192"
    assert said in refused(capsys, seen, "-n", "2", script)


def test_the_script_is_missing(
    seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "nothing.py")
    assert f"script {path}: there is no such file" in refused(capsys, seen, "-n", "2", path)
    folder = str(tmp_path)
    assert f"script {folder}: is a folder" in refused(capsys, seen, "-n", "2", folder)


@pytest.mark.parametrize("place", ["beside the script", "installed"])
@pytest.mark.parametrize("file", ["smdistributed/__init__.py", "smdistributed/torch.py"])
def test_another_smdistributed_is_named_before_a_rank_starts(
    seen: Seen,
    script: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    file: str,
) -> None:
    """The script would import one of the two, and its author may mean the other."""
    path = tmp_path / file if place == "beside the script" else tmp_path / "site" / file
    path.parent.mkdir(parents=True)
    path.touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "site")])
    message = refused(capsys, seen, "-n", "2", script)
    assert "there is another smdistributed already: " in message
    assert str(path.parent) in message


def test_another_smdistributed_of_the_script_stays(tmp_path: Path) -> None:
    """Also where nothing is checked before."""
    for name in ("source", "scripts"):
        (tmp_path / name).mkdir()
    (tmp_path / "source" / "smdistributed").mkdir()
    job = ScriptJob(
        script=str(tmp_path / "scripts" / "train.py"), folder=str(tmp_path / "source"), cpu=False
    )
    before = list(sys.path)
    with pytest.raises(RealInstallationError, match=r"source/smdistributed"):
        prepare(job, 1)
    assert sys.path == before


@pytest.mark.parametrize("text", ["def", "a = '\0'"])
def test_the_script_is_no_python(
    seen: Seen, script: str, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    Path(script).write_text(text)
    message = refused(capsys, seen, "-n", "2", script)
    assert f"script {script} is not valid Python:\n" in message
    assert "Error: " in message


@pytest.mark.parametrize("text", ["[1]", "{", "'a'"])
def test_a_file_that_holds_no_object(
    seen: Seen, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    file = tmp_path / "options.json"
    file.write_text(text)
    words = ["-n", "2", "--config", str(file), script]
    message = refused(capsys, seen, *words)
    assert str(file) in message
    assert "JSON" in message


def test_inside_of_another_launcher(
    seen: Seen, script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PMI_RANK": "1", "PMI_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    message = refused(capsys, seen, "-n", "2", script)
    assert "this process is rank 1 of 4 of mpiexec (MPICH) already. Leave out -n" in message


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
SHELL = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}  # srun --pty bash


@pytest.mark.parametrize(
    ("environment", "words", "ranks"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, [], None),
        (TORCHRUN, ["-p", "ddp=True"], None),
        (TORCHRUN, ["-n", "2"], 2),
        (TORCHRUN, ["-p", "partitions=2"], 2),
        (TORCHRUN, ["-p", "ddp=True", "--backend", "gloo"], 1),
        # Either torch's rank or the MPI's, which mpi4py would be needed for.
        (
            {"PMI_RANK": "0", "PMI_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"},
            ["-p", "ddp=True"],
            1,
        ),
        (SHELL, ["-n", "2"], 2),
    ],
)
def test_a_launcher_of_one_process(
    seen: Seen,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    words: list[str],
    ranks: int | None,
) -> None:
    """The process is one rank, unless the command asks for several. srun starts shells as well."""
    here: list[ScriptJob] = []

    def run_here(job: ScriptJob, *_: object) -> NoReturn:
        here.append(job)
        raise SystemExit(0)

    monkeypatch.setattr(command.rank, "run_here", run_here)
    monkeypatch.setattr(os, "environ", {**os.environ, **environment})
    if ranks is None:
        with pytest.raises(SystemExit):
            command.main([*words, script])
        assert (here[0].ranks, seen) == (1, [])
    else:
        assert command.main([*words, script]) == 0
        assert (seen[0][0].ranks, here) == (ranks, [])


def test_a_shell_of_srun_is_no_rank(
    seen: Seen, script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, **SHELL})
    assert "give the number of ranks by -n" in refused(capsys, seen, script)


def test_two_launchers_that_contradict_each_other(
    seen: Seen, script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = {"PMI_RANK": "1", "PMI_SIZE": "4"}
    both |= {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    for name, value in both.items():
        monkeypatch.setenv(name, value)
    message = refused(capsys, seen, script)
    assert "mpiexec (Open MPI) says rank 0 of 2" in message
    assert "mpiexec (MPICH) rank 1 of 4" in message


def test_more_ranks_than_cores(
    seen: Seen, script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "cores", lambda: 3)
    for ranks, warned in ((3, False), (4, True)):
        assert command.main(["-n", str(ranks), "--backend", "gloo", script]) == 0
        assert ("4 ranks share 3 cores" in capsys.readouterr().err) == warned


@pytest.mark.parametrize(
    ("cpu", "files", "torch_finds", "refused_", "told"),
    [
        (["--cpu"], 2, True, True, False),
        (["--cpu"], 2, False, False, False),  # a torch for the CPU
        (["--cpu"], 0, True, False, False),
        ([], 2, True, False, True),
        ([], 0, True, False, False),
    ],
)
def test_gpus_that_are_not_hidden(
    seen: Seen,
    script: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    cpu: list[str],
    files: int,
    torch_finds: bool,
    refused_: bool,
    told: bool,
) -> None:
    """Models train on the CPU. Torch is asked by another process, and only where there are devices."""
    monkeypatch.setattr(gpus, "count", lambda _: files)
    monkeypatch.setattr(gpus, "torch_finds_some", lambda _: torch_finds)
    assert command.main(["-n", "1", "--backend", "gloo", *cpu, script]) == (2 if refused_ else 0)
    shown = capsys.readouterr().err
    assert bool(seen) != refused_
    assert ("--cpu: this machine has 2 GPUs" in shown) == refused_
    assert ("this machine has 2 GPUs, and models train on the CPU" in shown) == told
    assert ("CUDA_VISIBLE_DEVICES= smp-run --cpu" in shown) == (refused_ or told)


@pytest.mark.parametrize(("shown", "number"), [(None, 3), ("", 0), ("-1", 0), ("0,2", 2)])
def test_gpus_are_counted_by_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, number: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia12", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.setattr(gpus, "_DEVICES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert gpus.count({}) == number
    assert gpus.count({"CUDA_VISIBLE_DEVICES": ""}) == 0


@pytest.mark.parametrize("hidden", [False, True])
def test_torch_is_asked_for_gpus_with_the_jobs_own_variables(tmp_path: Path, hidden: bool) -> None:
    """By a torch that has a GPU."""
    text = "import os\n\nclass cuda:\n    is_available = lambda: os.environ['CUDA_VISIBLE_DEVICES']"
    (tmp_path / "torch.py").write_text(text)
    variables = {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "" if hidden else "0"}
    assert gpus.torch_finds_some(variables) is not hidden


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_of_another_launcher_tells_what_smp_run_tells(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    def run_here(*_: object) -> NoReturn:
        raise SystemExit(0)

    monkeypatch.setattr(command.rank, "run_here", run_here)
    monkeypatch.setattr(command, "cores", lambda: 3)
    monkeypatch.setattr(gpus, "count", lambda _: 0)
    there = {"MPI_LOCALNRANKS": "4", "PMI_RANK": str(rank), "PMI_SIZE": "8"}
    monkeypatch.setattr(os, "environ", {**os.environ, **there})
    with pytest.raises(SystemExit):
        command.main(["--cpu", script])
    shown = capsys.readouterr().err
    assert ("4 ranks share 3 cores" in shown) == (rank == 0)
    assert ("the script sees a stand-in for torch.cuda" in shown) == (rank == 0)


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    about: dict[str, Any] = {"arguments": ("a", "b c"), "parameters": {"ddp": True}, "ranks": 3}
    job = ScriptJob(script="x.py", cpu=True, mpi_options=("-x", "A"), **about)
    job.write(tmp_path / "job")
    assert ScriptJob.read(tmp_path / "job") == job
    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("cpu", "gpus", "sees"),
    [(True, False, True), (None, False, True), (None, True, False), (False, False, False)],
)
def test_the_stand_in_is_where_no_gpu_is(
    monkeypatch: pytest.MonkeyPatch, script: str, cpu: bool | None, gpus: bool, sees: bool
) -> None:
    installed = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(cuda_stand_in, "install", installed.append)
    monkeypatch.setattr(cuda_stand_in, "remove", lambda: None)
    with prepare(ScriptJob(script=script, cpu=cpu), 3):
        assert installed == [3] * sees


class _Runner:
    """A package's backend of ``smp-run``, which notes the ranks of its jobs."""

    def __init__(self, protocol: int) -> None:
        self.protocol = protocol
        self.ranks: list[int] = []

    def __call__(self, job: ScriptJob, output: RankOutput) -> int:
        self.ranks.append(job.ranks)
        return 3


def _unversioned(job: ScriptJob, output: RankOutput) -> int:
    raise AssertionError("called")


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with backends, which entry points name."""
    module = ModuleType("their_backends")
    vars(module).update(
        good=_Runner(RUNNER_VERSION), newer=_Runner(RUNNER_VERSION + 1), bare=_unversioned
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    points = [
        importlib.metadata.EntryPoint(name, f"{module.__name__}:{name}", backends.GROUP)
        for name in ("good", "newer", "bare")
    ]
    found = importlib.metadata.EntryPoints(points)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found.select(group=group))
    return module


def test_a_package_brings_a_backend(script: str, theirs: ModuleType) -> None:
    assert command.main(["-n", "2", "--backend", "good", script]) == 3
    assert theirs.good.ranks == [2]


@pytest.mark.parametrize(
    ("backend", "says"),
    [("newer", "was written for version 2 of its protocol"), ("bare", "names no version")],
)
def test_a_backend_of_another_version_is_refused(
    seen: Seen,
    script: str,
    capsys: pytest.CaptureFixture[str],
    theirs: ModuleType,
    backend: str,
    says: str,
) -> None:
    message = refused(capsys, seen, "-n", "2", "--backend", backend, script)
    assert message.startswith(f"smp-run: backend '{backend}': their_backends:{backend} {says}")
    assert "this one has 1" in message
    assert not theirs.newer.ranks
