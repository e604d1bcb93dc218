"""The errors of this package beside those of the core; all are a `QewQewError`."""

from __future__ import annotations

from airflow.providers.common.compat.sdk import AirflowException

from qewqew_core import BadArgument, BadPath, QewQewError


class WrongHost(BadPath):
    """The connection's directory is on another host; one of the same name here would hold another queue."""


class WrongConnection(BadArgument):
    """The connection is of another type: what it says is not a directory of queues."""


class SparkConnectionMissing(QewQewError):
    """The Spark connection does not exist or names no master; the Spark provider would submit to YARN."""


class SparkSubmitNotFound(QewQewError):
    """There is no spark-submit on this worker."""


class JavaNotFound(QewQewError):
    """spark-submit needs Java, and there is none on this worker."""


class SparkJobFailed(QewQewError, AirflowException):
    """The Spark job failed; the text has its last error, the cause (``__cause__``) the end of its output."""


class LeaseLost(QewQewError, AirflowException):
    """The lease could not be extended in time: the batch is another's now, or may be; nothing was acknowledged."""
