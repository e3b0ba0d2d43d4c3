"""The folder of a self-test goes with the self-test, however that ends."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from conformance.mutants.folder import temporary_folder

SCRIPT = """
import ctypes, os, signal, time
from conformance.mutants.folder import temporary_folder
with temporary_folder("smp-mutants-") as folder:
    parent = os.getpid()
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
        (folder / "of a fork").write_text("")
        print(folder, flush=True)
    time.sleep(600)
"""


def test_a_folder_goes_with_a_killed_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        folder = Path(process.stdout.readline().strip())
        assert folder.is_dir()
        process.kill()
    deadline = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_folder_goes_with_its_block():
    with temporary_folder("smp-mutants-") as folder:
        (folder / "file").write_text("")
    assert not folder.exists()
