"""``smp_world.run_script``: a user's script as ``__main__`` on the ranks of a test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session

TRAIN = """
import argparse, os, pickle, sys
import torch
import torch.distributed as dist
import smdistributed.modelparallel.torch as smp
from helper_of_train import doubled

class Batch:
    pass

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--exit")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    total = torch.tensor(float(rank))
    dist.all_reduce(total)
    assert type(pickle.loads(pickle.dumps(Batch()))) is Batch
    print("rank", rank, "total", doubled(total.item()), sys.argv[0].rpartition("/")[2])
    dist.destroy_process_group()
    if options.exit == "text":
        sys.exit("no such file: weights.pt")
    if options.exit:
        sys.exit(int(options.exit))

if __name__ == "__main__":
    main()
"""

TESTS = """
    def test_output(smp_world):
        path, argv = list(sys.path), list(sys.argv)
        main = sys.modules["__main__"]
        for _ in range(2):
            ended = smp_world.run_script("train.py", ranks=2)
            assert [outcome.stdout for outcome in ended] == [
                f"rank {rank} total 2.0 train.py\\n" for rank in range(2)
            ]
        assert (sys.path, sys.argv, sys.modules["__main__"]) == (path, argv, main)
        assert "smdistributed" not in sys.modules

    def test_exit_of_zero(smp_world):
        smp_world.run_script("train.py", ["--exit", "0"], ranks=2)

    @pytest.mark.parametrize("said, text", [("256", "exit code 256"), ("text", "no such file: weights.pt")])
    def test_exit(smp_world, said, text):
        with pytest.raises(Exception) as info:
            smp_world.run_script("train.py", ["--exit", said], ranks=2)
        assert str(info.value) == text

    def test_error(smp_world):
        Path("broken.py").write_text("def main():\\n    1 / 0\\n\\nmain()\\n")
        with pytest.raises(ZeroDivisionError) as info:
            smp_world.run_script(Path("broken.py"), ranks=2)
        assert (info.traceback[-1].path.name, info.traceback[-1].lineno) == ("broken.py", 1)

    def test_deadlock(smp_world):
        Path("stuck.py").write_text(
            "import torch.distributed as dist\\n"
            "dist.init_process_group()\\n"
            "if dist.get_rank():\\n"
            "    dist.barrier()\\n"
        )
        with pytest.raises(errors.DeadlockError, match="stuck.py:4"):
            smp_world.run_script("stuck.py", ranks=2)

    def test_no_script(smp_world):
        with pytest.raises(errors.ArgumentError, match="absent.py: there is no such file"):
            smp_world.run_script("absent.py")

    def test_bad_arguments(smp_world):
        with pytest.raises(errors.ArgumentTypeError, match="a list of strings"):
            smp_world.run_script("train.py", "--exit 1")
"""


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_a_script_runs_as_main(session: Session, backend: str) -> None:
    session.pytester.makepyfile(train=TRAIN, helper_of_train="def doubled(x):\n    return 2 * x\n")
    ended = session(TESTS, f"--smp-backend={backend}", ranks=2)
    assert ended.counts == {"passed": 8}, ended.text
