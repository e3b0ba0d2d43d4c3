"""Where fixtures run, what they give to the ranks, and the plugin's own: ``smp``, ``smp_world``,
``smp_tmp_path``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.pytest_smp.conftest import Session


def test_fixtures_run_once_in_the_controller_and_give_each_rank_a_copy(session: Session) -> None:
    ended = session(
        """
        made = []

        @pytest.fixture
        def weights():
            made.append(threading.current_thread() is threading.main_thread())
            yield [1, 2]
            made.append("torn down")

        @pytest.mark.smp
        def test_x(smp, weights):
            assert weights == [1, 2]
            weights.append(smp.rank())
            smp.barrier()
            assert weights == [1, 2, smp.rank()]

        def test_after(weights):
            assert weights == [1, 2]
            assert made == [True, "torn down", True]
        """
    )
    assert ended.counts == {"passed": 2}


def test_the_controllers_own_value_stays_as_it_was(session: Session) -> None:
    ended = session(
        """
        @pytest.fixture(scope="module")
        def weights():
            return {"tensor": torch.ones(2)}

        @pytest.mark.smp
        def test_x(smp, weights):
            weights["tensor"] += smp.rank() + 1
            smp.barrier()
            assert weights["tensor"].tolist() == [smp.rank() + 2.0] * 2

        def test_after(weights):
            assert weights["tensor"].tolist() == [1.0, 1.0]
        """
    )
    assert ended.counts == {"passed": 2}


def test_autouse_fixtures_and_usefixtures_run_around_all_ranks(session: Session) -> None:
    ended = session(
        """
        open_now = []

        @pytest.fixture(autouse=True)
        def around(request):
            open_now.append(request.node.name)
            yield
            open_now.pop()

        @pytest.fixture
        def environment(monkeypatch):
            monkeypatch.setenv("MODEL", "small")

        @pytest.mark.smp
        @pytest.mark.usefixtures("environment", "capsys")
        def test_x(smp):
            assert open_now == ["test_x"]
            assert os.environ["MODEL"] == "small"
        """
    )
    assert ended.counts == {"passed": 1}


def test_parametrized_fixtures_and_tests(session: Session) -> None:
    ended = session(
        """
        seen = []

        @pytest.fixture(params=["adam", "sgd"])
        def optimizer(request):
            return request.param

        @pytest.mark.smp(ranks=[1, 2])
        @pytest.mark.parametrize("rate", [0.5, torch.tensor(2.0)], ids=["half", "two"])
        def test_x(smp, optimizer, rate):
            if smp.rank() == 0:
                seen.append((smp.size(), optimizer, float(rate)))

        def test_after():
            assert sorted(seen) == [
                (size, optimizer, rate)
                for size in (1, 2) for optimizer in ("adam", "sgd") for rate in (0.5, 2.0)
            ]
        """
    )
    assert ended.counts == {"passed": 9}


def test_a_closure_or_local_class_may_be_a_fixtures_value(session: Session) -> None:
    ended = session(
        """
        class Net(torch.nn.Linear):
            pass

        @pytest.fixture
        def make():
            width = 3
            return lambda: Net(width, 1)

        @pytest.fixture
        def net():
            return Net(2, 2)

        @pytest.mark.smp
        def test_x(smp, make, net):
            assert make().in_features == 3
            assert type(net) is Net  # what can be imported stays itself
        """
    )
    assert ended.counts == {"passed": 1}


def test_a_fixture_may_pass_smp_on(session: Session) -> None:
    ended = session(
        """
        @pytest.fixture
        def everybody(smp):
            return lambda value: smp.allgather(value, smp.WORLD)

        class Holder:
            def __init__(self, smp): self.smp = smp

        @pytest.fixture
        def holder(smp):
            return Holder(smp)

        @pytest.mark.smp
        def test_x(smp, everybody, holder):
            assert everybody(smp.rank()) == [0, 1, 2, 3]
            assert holder.smp.rank() == smp.rank()
            assert repr(smp) == "smp"
        """
    )
    assert ended.counts == {"passed": 1}


def test_a_test_needs_no_fixture_of_ours(session: Session) -> None:
    ended = session(
        """
        import smp_core.torch as smp

        @pytest.mark.smp(ranks=3)
        def test_x():
            assert smp.allgather(smp.rank(), smp.WORLD) == [0, 1, 2]
            numbers = torch.tensor([dist.get_rank() + 1])
            dist.all_reduce(numbers)
            assert numbers.item() == 1 + 2 + 3
        """
    )
    assert ended.counts == {"passed": 1}


def test_a_script_may_call_init_itself(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp(ranks=4, pipeline_parallel_degree=2)
        def test_the_marker_initialises(smp):
            smp.init()
            assert smp.pp_size() == 2
            smp.init({"pipeline_parallel_degree": 2})
            with pytest.raises(errors.AlreadyInitializedError, match="smp.init: rank"):
                smp.init({"pipeline_parallel_degree": 4})

        @pytest.mark.smp(ranks=4)
        def test_the_script_initialises(smp):
            assert not smp.is_initialized()
            smp.init({"pipeline_parallel_degree": 4})
            assert smp.pp_size() == 4
        """
    )
    assert ended.counts == {"passed": 2}


# Classes.


def test_self_is_an_argument_like_the_others(session: Session) -> None:
    ended = session(
        """
        class TestIt:
            def setup_method(self):
                self.weights = [1]

            def teardown_method(self):
                assert self.weights == [1]  # what ranks did to their copies is not seen

            @pytest.fixture
            def twice(self):
                return self.weights * 2

            @pytest.mark.smp
            def test_x(self, smp, twice):
                assert twice == [1, 1]
                self.weights.append(smp.rank())
                smp.barrier()
                assert self.weights == [1, smp.rank()]
        """
    )
    assert ended.counts == {"passed": 1}


def test_static_and_class_methods(session: Session) -> None:
    ended = session(
        """
        class TestIt:
            limit = 4

            @staticmethod
            @pytest.mark.smp
            def test_static(smp):
                assert smp.size() == 4

            @classmethod
            @pytest.mark.smp
            def test_class(cls, smp):
                assert smp.size() == cls.limit
        """
    )
    assert ended.counts == {"passed": 2}


# Paths.


def test_smp_tmp_path_is_one_for_all_ranks_and_new_for_each_test(session: Session) -> None:
    ended = session(
        """
        seen = []

        @pytest.mark.smp
        @pytest.mark.parametrize("number", [1, 2])
        def test_x(smp, smp_tmp_path, number):
            assert isinstance(smp_tmp_path, Path)
            assert list(smp_tmp_path.iterdir()) == []
            paths = smp.allgather(str(smp_tmp_path), smp.WORLD)
            assert len(set(paths)) == 1
            seen.append(paths[0])
            (smp_tmp_path / f"rank {smp.rank()}").touch()
            smp.barrier()
            assert len(list(smp_tmp_path.iterdir())) == 4

        def test_after():
            assert len(seen) == 8 and len(set(seen)) == 2
        """
    )
    assert ended.counts == {"passed": 3}


def test_a_fixture_may_fill_smp_tmp_path_and_look_at_it_afterwards(session: Session) -> None:
    ended = session(
        """
        @pytest.fixture
        def data(smp_tmp_path):
            (smp_tmp_path / "data").write_text("weights")
            yield smp_tmp_path / "data"
            assert (smp_tmp_path / "result").read_text() == "done"

        @pytest.mark.smp
        def test_x(smp, smp_tmp_path, data):
            assert (smp_tmp_path / "data").read_text() == "weights"
            assert data == smp_tmp_path / "data"
            smp.barrier()
            if smp.rank() == 0:
                (smp_tmp_path / "result").write_text("done")
        """
    )
    assert ended.counts == {"passed": 1}


def test_a_plain_test_keeps_one_smp_tmp_path_over_its_runs(session: Session) -> None:
    ended = session(
        """
        def save(folder):
            (folder / f"rank {api.rank()}").touch()

        def count(folder):
            return len(list(folder.iterdir()))

        def test_x(smp_world, smp_tmp_path):
            (smp_tmp_path / "by the controller").touch()
            smp_world.run(save, smp_tmp_path)
            assert smp_world.run(count, smp_tmp_path, ranks=2) == [5, 5]
            assert len(list(smp_tmp_path.iterdir())) == 5
            assert os.path.isdir(smp_tmp_path)
        """
    )
    assert ended.counts == {"passed": 1}


def test_pytests_own_tmp_path_is_one_for_all_ranks_too(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.smp
        def test_x(smp, tmp_path):
            assert len(set(smp.allgather(tmp_path, smp.WORLD))) == 1
            assert tmp_path.is_dir()
        """
    )
    assert ended.counts == {"passed": 1}


# smp_world.


def test_smp_world_gives_the_values_of_the_ranks(session: Session) -> None:
    ended = session(
        """
        def body(factor, *more):
            return api.rank() * factor, api.pp_size(), more

        def test_run(smp_world):
            assert smp_world.ranks == 4
            assert smp_world.run(body, 10) == [(0, 1, ()), (10, 1, ()), (20, 1, ()), (30, 1, ())]
            config = {"pipeline_parallel_degree": 2}
            assert smp_world.run(body, 1, 2, 3, ranks=2, config=config) == [(0, 2, (2, 3)), (1, 2, (2, 3))]

        def test_closure(smp_world):
            width = torch.tensor([3])
            assert smp_world.run(lambda: int(width) + api.rank(), ranks=2) == [3, 4]

        def test_without_init(smp_world):
            assert smp_world.run(api.is_initialized, ranks=1, init=False) == [False]
            with pytest.raises(RuntimeError, match="rank 0 has not called smp.init()"):
                smp_world.run(api.rank, ranks=1, init=False)
        """
    )
    assert ended.counts == {"passed": 3}


def test_smp_world_raises_the_root_cause_or_reports_it(session: Session) -> None:
    ended = session(
        """
        def body():
            if api.rank() == 2:
                raise KeyError("weights")
            api.barrier()

        def test_run(smp_world):
            with pytest.raises(KeyError, match="weights") as caught:
                smp_world.run(body)
            assert caught.value.__notes__[0] == "raised by rank 2 of 4 ranks (sim)"

        def test_report(smp_world):
            report = smp_world.report(body)
            assert (report.verdict, report.root, type(report.error)) == ("failed", 2, KeyError)
            assert [outcome.kind for outcome in report.outcomes] == [
                "cancelled", "cancelled", "raised", "cancelled"
            ]

        def test_fails(smp_world):
            smp_world.run(body)
        """
    )
    assert ended.counts == {"failed": 1, "passed": 2}
    ended.shows('> raise KeyError("weights")', "raised by rank 2 of 4 ranks (sim)")
    ended.hides("smp_core/", "pytest_smp/")


def test_smp_world_refuses_what_cannot_run(session: Session) -> None:
    ended = session(
        """
        @pytest.mark.parametrize("ranks", [0, -1, 5, True, "2", 2.0])
        def test_ranks(smp_world, ranks):
            with pytest.raises(ValueError, match=r"smp_world: ranks=.*: must be from 1 to 4"):
                smp_world.run(print, ranks=ranks)

        def test_config(smp_world):
            with pytest.raises(ValueError, match="pipeline_parallel_degree"):
                smp_world.run(print, ranks=3, config={"pipeline_parallel_degree": 2})

        def inner(world):
            world.run(print)

        def test_inside_itself(smp_world):
            with pytest.raises(TypeError, match="smp_world"):
                smp_world.run(inner, smp_world, ranks=2)

        def test_inside_itself_by_closure(smp_world):
            with pytest.raises((TypeError, RuntimeError), match="inside"):
                smp_world.run(lambda: smp_world.run(print), ranks=2)

        def test_works_on(smp_world):
            assert smp_world.run(api.rank, ranks=2) == [0, 1]
        """
    )
    assert ended.counts == {"passed": 10}


def test_a_property_of_smp_world_takes_a_fresh_folder_for_each_example(session: Session) -> None:
    ended = session(
        """
        seen = []

        @given(number=st.integers())
        def test_x(smp_world, smp_tmp_path, number):
            folder = smp_tmp_path.fresh()
            assert folder not in seen
            seen.append(folder)
            assert smp_world.run(lambda each: each.exists(), folder, ranks=2) == [True, True]
            assert smp_tmp_path == folder
        """,
    )
    assert ended.counts == {"passed": 1}


def test_smp_world_passes_keywords_on(session: Session) -> None:
    """A mapping of its own, so that a body's parameters may have the names of its options."""
    ended = session(
        """
        def body(scale, *, ranks, config=None, kwargs="none"):
            return scale, ranks, config, kwargs, api.rank()

        def test_run(smp_world):
            given = {"ranks": [7], "config": "mine", "kwargs": {}}
            assert smp_world.run(body, 2, ranks=2, kwargs=given) == [
                (2, [7], "mine", {}, 0), (2, [7], "mine", {}, 1)
            ]
            report = smp_world.report(body, ranks=1, kwargs={"scale": 3, "ranks": 4})
            assert report.values == [(3, 4, None, "none", 0)]

        @pytest.mark.parametrize("bad", [[("ranks", 1)], {1: 2}, "ranks"])
        def test_refused(smp_world, bad):
            with pytest.raises(errors.ArgumentError, match="kwargs=.*must map names"):
                smp_world.run(body, 1, kwargs=bad)
        """
    )
    assert ended.counts == {"passed": 4}
