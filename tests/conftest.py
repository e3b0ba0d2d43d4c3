"""What all tests share: pytest's own fixture for running pytest."""

pytest_plugins = ["pytester"]
