"""What all tests share: pytest's own fixture for running pytest, and one terminal for everybody."""

from collections.abc import Iterator

import pytest

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
