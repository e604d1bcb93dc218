"""What spark-submit needs on the worker, and how it ends with its task."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from qewqew_airflow.errors import JavaNotFound, SparkSubmitNotFound


def find_spark_submit(binary: str, environment: Mapping[str, str]) -> str:
    """``binary`` if it is on the PATH of ``environment``, or its path beside this Python. Raises `SparkSubmitNotFound`."""
    if shutil.which(binary, path=environment.get("PATH")):
        return binary
    # Not resolved, because the Python of a virtual environment is a link into the system.
    beside = os.path.join(os.path.dirname(sys.executable), binary)
    client = installed("pyspark-client")
    if not os.access(beside, os.X_OK):
        package = f"pyspark=={client} (the version of pyspark-client, which is there)" if client else "pyspark"
        raise SparkSubmitNotFound(
            f"{binary!r} is neither on the PATH of this worker nor beside {sys.executable}; install {package} into the "
            "environment of the workers, or put the bin directory of a Spark on their PATH"
        )
    if client and (spark := installed("pyspark")) and spark != client:
        raise SparkSubmitNotFound(
            f"pyspark {spark} and pyspark-client {client} are both installed beside {sys.executable}; they have the same "
            f"directory, so they must be of one version: pip install --force-reinstall --no-deps pyspark=={client}"
        )
    return beside


def installed(package: str) -> str | None:
    """The version of a Python package in this environment, or None."""
    with suppress(PackageNotFoundError):
        return version(package)
    return None


def check_java(environment: Mapping[str, str]) -> None:
    """Raise `JavaNotFound` if spark-submit would not find Java in this ``environment``."""
    home = environment.get("JAVA_HOME")
    if home:
        if not os.access(os.path.join(home, "bin", "java"), os.X_OK):
            raise JavaNotFound(f"JAVA_HOME is {home}, but has no bin/java; set it to a Java 17 or newer, or unset it")
        return
    # A Spark installation may set JAVA_HOME itself, in this file.
    spark_home = environment.get("SPARK_HOME")
    settings = environment.get("SPARK_CONF_DIR") or (spark_home and os.path.join(spark_home, "conf"))
    if settings and os.path.isfile(os.path.join(settings, "spark-env.sh")):
        return
    if not shutil.which("java", path=environment.get("PATH")):
        raise JavaNotFound(
            "spark-submit needs Java; install Java 17 or newer on the workers, and set JAVA_HOME or put it on PATH"
        )


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
