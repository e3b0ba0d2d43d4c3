"""The stacks of a rank process, out of the dump of its signal handler."""

from __future__ import annotations

import threading

from pytest_smp.ranks.processes import rank, stacks
from smp_core.transport.smddp import progress

_THREADS = f"""\
Thread 0x00007f78daffd6c0 (most recent call first):
  File "{progress.__file__}", line 340 in run
  File "{threading.__file__}", line 1045 in _bootstrap_inner
  File "{threading.__file__}", line 1002 in _bootstrap

Thread 0x00007f78daffd6c1 (most recent call first):
  File "/tmp/site-packages/torch/distributed_c10d.py", line 5356 in barrier
  File "/tmp/test_saver.py", line 7 in <lambda>
  File "{threading.__file__}", line 1045 in _bootstrap_inner
  File "{threading.__file__}", line 1002 in _bootstrap

Thread 0x00007f78eac476c0 (most recent call first):
  File "{rank.__file__}", line 99 in _listen
  File "{threading.__file__}", line 1002 in _bootstrap

Current thread 0x00007f790c070b80 (most recent call first):
  File "{threading.__file__}", line 1119 in join
  File "/tmp/test_saver.py", line 9 in test_saver
  File "{rank.__file__}", line 164 in serve
"""


def test_every_thread_of_the_body_is_shown_the_rank_s_own_first():
    shown = [
        [line.strip() for line in stack.splitlines() if "/tmp/" in line or "thread:" in line]
        for stack in stacks.render_stacks(_THREADS)
    ]
    assert shown == [
        ['File "/tmp/test_saver.py", line 9, in test_saver'],
        [
            "another thread:",
            'File "/tmp/test_saver.py", line 7, in <lambda>',
            'File "/tmp/site-packages/torch/distributed_c10d.py", line 5356, in barrier',
        ],
    ]
