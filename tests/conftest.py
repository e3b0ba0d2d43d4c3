"""What all tests share: pytest's own fixture for running pytest, and one terminal for everybody."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine drawing an example may take seconds: that says nothing of what is tested.
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("patient")

# A shell starts what it puts into the background with SIGINT ignored, and a program and its children stay so: the
# tests that send Ctrl-C to a session would wait in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["pytester"]


@pytest.fixture(scope="session", autouse=True)
def _no_ci() -> Iterator[None]:
    """Let the sessions of pytest inside tests print the same everywhere.

    Under CI pytest cuts no line and no list of its summary and Hypothesis prints a blob, and tests read those. tox
    hides CI from what it runs, and keeps it under a name that Hypothesis knows
    (https://github.com/tox-dev/tox/issues/3442).
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("CI", "BUILD_NUMBER", "__TOX_ENVIRONMENT_VARIABLE_ORIGINAL_CI"):
            patch.delenv(name, raising=False)
        yield
