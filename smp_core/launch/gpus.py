"""GPUs of this machine, as a process can tell that has not imported torch."""

from __future__ import annotations

import os
from pathlib import Path


def count() -> int:
    """The number of NVIDIA's GPUs that have device files and are not hidden by ``CUDA_VISIBLE_DEVICES``."""
    files = sum(
        each.name.removeprefix("nvidia").isdecimal() for each in Path("/dev").glob("nvidia*")
    )
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return files
    return min(files, sum(each.strip() not in ("", "-1") for each in shown.split(",")))
