"""The errors of this package, in addition to those of the core. All are a `QewQewError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException

from qewqew_core import BadArgument, BadPath, QewQewError, RecordTooLarge


class WrongHost(BadPath):
    """The connection's directory is on another host. A directory of the same name here would hold another queue."""


class WrongConnection(BadArgument):
    """The connection is of another type, so it does not name a directory of queues."""


class SparkConnectionMissing(QewQewError):
    """The Spark connection does not exist or names no master. Airflow's Spark provider would submit to YARN."""


class SparkSubmitNotFound(QewQewError):
    """There is no spark-submit on this worker."""


class JavaNotFound(QewQewError):
    """spark-submit needs Java, and this worker does not have it."""


class SparkJobFailed(QewQewError, AirflowException):
    """The Spark job failed. The text is its last error; the cause (``__cause__``) has the end of its output."""


class LeaseLost(QewQewError, AirflowException):
    """The lease could not be extended in time. Another task has the batch, or may get it. Nothing was acknowledged."""


# The cause is the task itself, its connection or its worker, so the next try would fail the same way.
HOPELESS = (BadArgument, BadPath, RecordTooLarge)
AGAIN = "A retry would fail in the same way, so there is none: correct this, then clear the task"


def fails_at_once(error: Exception, advice: str) -> AirflowFailException:
    return AirflowFailException(f"{type(error).__name__}: {error}. {advice}")


@contextmanager
def no_retry_for_the_hopeless() -> Iterator[None]:
    """Raise AirflowFailException instead of the errors in `HOPELESS`: Airflow does not retry after it."""
    try:
        yield
    except HOPELESS as error:
        raise fails_at_once(error, AGAIN) from error
