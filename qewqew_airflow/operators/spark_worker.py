"""How spark-submit ends with its task."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_libc = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, whose id is ``parent``. Linux only.

    It also runs in the forked child before spark-submit, so it must do no more than this.
    """
    if sys.platform == "linux":
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os.kill(os.getpid(), signal.SIGKILL)


def end_with_supervisor() -> None:
    """End this task process with its supervisor, because Airflow starts the next try when that is gone.

    Does nothing where the task does not have its own process, as in ``dag.test()``.
    """
    from airflow.sdk.execution_time import comms, task_runner

    if isinstance(getattr(task_runner, "SUPERVISOR_COMMS", None), comms.CommsDecoder):
        end_with(os.getppid())
