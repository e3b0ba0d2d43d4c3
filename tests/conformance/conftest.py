"""What the properties need of their session when tests import them."""

from conformance.conftest import pytest_configure  # noqa: F401  # registers their marker
