"""The errors of this package, in addition to those of the core. All are a `QewQewError`."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from airflow.providers.common.compat.sdk import AirflowException, AirflowFailException

from qewqew_core import BadArgument, BadManifest, BadPath, Corrupt, QewQewError, RecordTooLarge
from qewqew_core.batch import damage_met
from qewqew_core.tools import listing


class WrongHost(BadPath):
    """The connection's directory is on another host. A directory of the same name here would hold another queue."""


class WrongConnection(BadArgument):
    """The connection is of another type, so it does not name a directory of queues."""


class SparkConnectionMissing(QewQewError):
    """The Spark connection does not exist or names no master. Airflow's Spark provider would submit to YARN."""


class SparkJobFailed(QewQewError, AirflowException):
    """The Spark job failed. The text is its last error; the cause (``__cause__``) has the end of its output."""


class DamagedBatches(QewQewError, AirflowException):
    """A drain has committed all batches but these, which stay under the prefix."""


class LeaseLost(QewQewError, AirflowException):
    """The lease could not be extended in time. Another task has the batch, or may get it. Nothing was acknowledged."""


# The cause is the task itself or its connection, so the next try would fail the same way …
HOPELESS = (BadArgument, BadPath, RecordTooLarge)
# … unless the system said one of these of a path: a mount may be away for a minute, and leaves an empty directory of root behind.
_MAY_PASS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS)
AGAIN = "A retry would fail in the same way, so there is none: correct this, then clear the task"


def errno_of(error: Exception) -> int | None:
    """What the system said, where an error of a path comes from it."""
    said = error if getattr(error, "errno", None) is not None else error.__cause__
    return said.errno if isinstance(said, OSError) else None


def remedy_of(path: str, kind: listing.Kind, said: str) -> str:
    """Remember damage of this queue or topic, and say what to run."""
    damage_met.note(listing.stem_of_damage(path, kind), said)
    return f"Run `qewqew verify {path}` on this host, which lists all damage, then `qewqew repair {path}`"


def fails_at_once(error: Exception, advice: str) -> AirflowFailException:
    return AirflowFailException(f"{type(error).__name__}: {error}. {advice}")


@contextmanager
def no_retry_for_the_hopeless() -> Iterator[None]:
    """Raise AirflowFailException instead of the errors in `HOPELESS`: Airflow does not retry after it. What may pass, such as a
    missing directory, stays as it is. Damage is remembered beside its store, and the error says what to run.
    """
    try:
        yield
    except (Corrupt, BadManifest) as error:
        if error.path is None or (found := listing.store_of(error.path)) is None:
            raise
        told = f"{error.what}. {remedy_of(*found, str(error))}"
        raise type(error)(told, path=error.path, offset=error.offset) from error
    except HOPELESS as error:
        if errno_of(error) in _MAY_PASS:
            raise
        raise fails_at_once(error, AGAIN) from error
