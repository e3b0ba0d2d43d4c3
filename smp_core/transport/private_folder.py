"""A folder of a run in which its processes meet."""

from __future__ import annotations

import os
import tempfile

#: The environment variable that names the folder of a job that ``smp-run`` has started, which goes with the job.
JOB_FOLDER = "SMP_RUN_FOLDER"


def private_folder() -> str:
    """A new folder that only this user can enter: in that of the job, if this process is part of one.

    Its path is short, because that of a Unix socket has 107 bytes.
    """
    job = os.environ.get(JOB_FOLDER, "")
    parent = job if os.path.isdir(job) else tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="smp-", dir=parent if len(parent) < 60 else "/tmp")
