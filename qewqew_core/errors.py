"""Every error that QewQew raises on purpose, by name.

All derive from `QewQewError`. An error about a file has ``path`` and, if it applies, ``offset`` (bytes from the start of that
file); its text says what is wrong, where, and what to do. If Python has a built-in error for the same situation, ours derives
from it too, so ``except OSError`` or ``except queue.Empty`` keep working. No text shows what `secrecy` takes for a secret, such
as the password of a URL that somebody gave for a path.
"""

from __future__ import annotations

import queue

from qewqew_core.secrecy import hide


class QewQewError(Exception):
    """Base of all errors of QewQew."""

    def __init__(self, message: str, *, path: str | None = None, offset: int | None = None) -> None:
        self.path = path
        self.offset = offset
        self.what = hide(message)  # without the place
        where = "" if path is None else hide(f"{path}" if offset is None else f"{path}, offset {offset}")
        super().__init__(f"{where}: {self.what}" if where else self.what)


class Empty(QewQewError, queue.Empty):
    """No record came within the time-out."""


class Locked(QewQewError, OSError):
    """Another owner (process, thread or Java program) has the queue, topic or reader; ``pid`` if the system tells it."""

    def __init__(self, message: str, *, path: str | None = None, pid: int | None = None) -> None:
        self.pid = pid
        super().__init__(message, path=path)


class Closed(QewQewError, ValueError):
    """The object (a queue, topic, reader or session) was closed, or belongs to the parent of a forked process."""


class Broken(QewQewError, OSError):
    """The disk failed, the open files were moved away, or descriptors ran out in the middle of a change, so this process does not
    know the state on disk.

    The object refuses every further call; opening the queue or topic again recovers what was committed. A failed fsync is never
    repeated: the kernel may have dropped the data and would report success.
    """


class InDoubt(QewQewError, OSError):
    """Another process has taken the records of a `Stage` along, to store them with its own, and has not said in time whether it
    has: it was stopped, or its disk does not answer. Nothing is lost: commit again, and they are stored once.
    """


class Full(QewQewError):
    """The queue is at its limit (``max_records``, ``max_bytes``) or out of files, or a reader's window is full. Nothing was
    stored.
    """


class DiskFull(QewQewError, OSError):
    """The file system has no room. The call stored nothing; it works again once there is room."""


class OutOfResources(QewQewError, OSError):
    """No file descriptor, or no memory, is left to this process or machine. Nothing was changed; the call works again once there
    is one.
    """


class RecordTooLarge(QewQewError, ValueError):
    """A record does not fit into a chunk or block. The call stored nothing."""


class BadRecord(QewQewError, TypeError):
    """A record is not bytes-like. The call stored nothing."""


class BadArgument(QewQewError, ValueError):
    """An argument is out of range; nothing was changed."""


class BadKey(BadArgument):
    """A key that is empty, too long, or unsafe in a path or a log line."""


class BadPath(QewQewError, OSError):
    """This path cannot be a queue or topic: a wrong kind of file, a missing parent, a link that leads out, no permission. Nothing
    was changed.
    """


class Corrupt(QewQewError):
    """Bytes on disk contradict themselves or their checksum. Nothing was changed."""


class BatchNotFound(QewQewError, KeyError):
    """No batch has this id."""

    __str__ = Exception.__str__  # KeyError would print the repr


class BatchExpired(QewQewError):
    """The batch of this key was acknowledged, and its records were removed when its retention ended."""


class BatchConflict(QewQewError):
    """The batch is not in the state that the call needs, or somebody else has leased it in the meantime."""


class CommitConflict(QewQewError):
    """This consumer no longer has the message: it was delivered again, or the reader was moved. Nothing was committed."""


class MessagesLost(QewQewError):
    """Messages that were asked for were removed from the topic, by its retention or with the topic."""


class RecordsTaken(QewQewError):
    """A read without the queue's lock came too late: somebody has taken the records, and their file is gone."""


class BadManifest(QewQewError, ValueError):
    """A manifest that cannot be read, or does not describe the files next to it."""


class StoreError(QewQewError, OSError):
    """A store that is reached by URL did not do what it was asked for: no permission, no connection, a time-out."""


class SparkSubmitNotFound(QewQewError):
    """There is no spark-submit on this machine."""


class JavaNotFound(QewQewError):
    """spark-submit needs Java, and this machine does not have it."""
