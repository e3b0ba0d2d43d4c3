"""GPUs of this machine, as a process can tell that has not imported torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

#: How a user hides the GPUs of a machine, on which models train on the CPU.
REMEDY = "hide them: CUDA_VISIBLE_DEVICES= smp-run --cpu"

_DEVICES = Path("/dev")


def count(environment: Mapping[str, str]) -> int:
    """The number of NVIDIA's GPUs that have device files, and that neither these variables nor our own hide by
    ``CUDA_VISIBLE_DEVICES``.
    """
    files = sum(each.name.removeprefix("nvidia").isdecimal() for each in _DEVICES.glob("nvidia*"))
    shown = {**os.environ, **environment}.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return files
    return min(files, sum(each.strip() not in ("", "-1") for each in shown.split(",")))


def torch_finds_some(environment: Mapping[str, str]) -> bool:
    """Return whether torch finds a GPU in a process that has these variables beside our own.

    A build of torch for the CPU finds none where there are device files.
    """
    code = "import torch; raise SystemExit(0 if torch.cuda.is_available() else 1)"
    asked = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        check=False,
    )
    return asked.returncode == 0
