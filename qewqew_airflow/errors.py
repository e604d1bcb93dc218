"""The errors of this package beside those of the core; all are a `QewQewError`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException

from qewqew_core import BadArgument, BadPath, QewQewError, RecordTooLarge


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


# What is wrong with the task itself, its connection or its worker: it is the same at the next try.
HOPELESS = (BadArgument, BadPath, RecordTooLarge)
AGAIN = "Another try would end the same way, so there is none: mend this, then clear the task"


def fails_at_once(error: Exception, advice: str) -> AirflowFailException:
    return AirflowFailException(f"{type(error).__name__}: {error}. {advice}")


@contextmanager
def no_retry_for_the_hopeless() -> Iterator[None]:
    """Turn what `HOPELESS` names into an AirflowFailException, after which Airflow does not try the task again."""
    try:
        yield
    except HOPELESS as error:
        raise fails_at_once(error, AGAIN) from error
