"""What a command or a task needs to submit a job to Spark. Imports nothing of Spark."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from qewqew_core.errors import BadArgument, JavaNotFound, SparkSubmitNotFound


def ready_made_job(name: str) -> str:
    """The path of a job that comes with QewQew, found without importing Spark."""
    spec = importlib.util.find_spec("qewqew_spark")
    for directory in (spec and spec.submodule_search_locations) or ():
        path = os.path.join(directory, "jobs", name)
        if os.path.isfile(path):
            return path
    raise BadArgument("qewqew_spark is not installed here; install qewqew[spark]")


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
            f"{binary!r} is neither on PATH nor beside {sys.executable}; install {package} there, or put the bin directory "
            "of a Spark on PATH"
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
        raise JavaNotFound("spark-submit needs Java; install Java 17 or newer, and set JAVA_HOME or put it on PATH")
