"""Warnings, and exceptions that nobody could catch, count on rank processes as they do in a test without ranks."""

from __future__ import annotations

from .conftest import Session

CONFTEST = """
    outcomes, shown = {}, {}

    def pytest_warning_recorded(warning_message, nodeid):
        if nodeid:
            shown.setdefault(nodeid.partition("::")[2], []).append(warning_message.category.__name__)

    def pytest_runtest_logreport(report):
        if report.when == "call" or report.outcome != "passed":
            outcomes[report.nodeid.partition("::")[2]] = report.outcome

    def pytest_terminal_summary(terminalreporter):
        for name, outcome in outcomes.items():
            kinds = " ".join(shown.get(name, []))
            terminalreporter.write_line(f"{name}: {outcome} {kinds}".rstrip())
"""

#: The plain test is the reference: the same body, without ranks.
SOURCE = """
import asyncio, gc, warnings

class Local(UserWarning):
    pass

class Broken(UserWarning):
    def __reduce__(self):
        raise TypeError("no")

class Deletes:
    def __del__(self):
        raise ValueError("in del")

def thread():
    started = threading.Thread(target=lambda: 1 / 0)
    started.start()
    started.join()

def deletion():
    Deletes()

async def nothing():
    pass

def coroutine():
    nothing()

def file():
    open(os.devnull)

def warned():
    warnings.warn("one")
    for _ in range(2):
        warnings.warn("two", Local)

def deprecated():
    warnings.warn("old", DeprecationWarning)

def caught():
    with pytest.warns(Local):
        warnings.warn("expected", Local)
    with warnings.catch_warnings(record=True):
        warnings.warn("recorded")

def shown():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("by a filter of the body's", ResourceWarning)

def broken():
    warnings.warn(Broken("cannot travel"))

KINDS = [thread, deletion, coroutine, file, warned, deprecated, caught, shown, broken]
FILTERS = ["default", "always", "error", "ignore", "ignore:.*:UserWarning:test_it"]

def parameters(test):
    test = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)(test)
    marks = [pytest.param(one, marks=pytest.mark.filterwarnings(one)) for one in FILTERS]
    return pytest.mark.parametrize("filters", marks)(test)

@parameters
def test_plain(kind, filters):
    kind()

@parameters
@pytest.mark.smp(ranks=2)
def test_ranks(smp, kind, filters):
    if smp.rank():
        kind()

@parameters
def test_world(smp_world, kind, filters):
    smp_world.run(kind, ranks=1)

@pytest.mark.smp(ranks=3)
@pytest.mark.filterwarnings("default")
def test_default_shows_a_line_once(smp):
    warnings.warn("of all ranks")

@pytest.mark.smp(ranks=2)
@pytest.mark.filterwarnings("default")
def test_nobody_joins(smp):
    def answer():
        for _ in range(100):
            smp.send(smp.recv_from(0, smp.RankType.WORLD_RANK), 0, smp.RankType.WORLD_RANK)
        1 / 0

    if smp.rank():
        threading.Thread(target=answer).start()
        return
    for number in range(100):
        smp.send(number, 1, smp.RankType.WORLD_RANK)
        assert smp.recv_from(1, smp.RankType.WORLD_RANK) == number

def test_the_controller_expects_it(smp_world):
    with pytest.warns(UserWarning, match="one|two"):
        smp_world.run(warned, ranks=2)
"""


def test_incidents_count_as_without_ranks(session: Session) -> None:
    session.pytester.makeconftest(CONFTEST)
    result = session(SOURCE, "--smp-backend=gloo", ranks=3)
    told = dict(
        line.split(": ", 1)
        for line in result.text.splitlines()
        if line.startswith("test_") and ": " in line
    )
    plain = {name: words for name, words in told.items() if name.startswith("test_plain")}
    assert len(plain) == 45
    assert plain["test_plain[thread-error]"].startswith("failed")
    for name, words in plain.items():
        expected = words.replace("Broken", "UserWarning")
        for test in ("test_ranks", "test_world"):
            assert told[name.replace("test_plain", test)] == expected, (name, test)
    assert told["test_default_shows_a_line_once"] == "passed UserWarning"
    assert told["test_nobody_joins"] == "passed PytestUnhandledThreadExceptionWarning"
    assert told["test_the_controller_expects_it"] == "passed"
    result.shows("Exception in thread Thread-", "(rank 1)", "ZeroDivisionError")
