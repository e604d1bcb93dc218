"""`NAME.stamp`: says that the queue has a log, and how often its batches had changed.

The chunk files alone look like those of a Java program, which knows no log. So a stamp without a log says that
the log was lost, and with it what was taken, the keys, and the batches: `Corrupt`. The stamp is durable before the first
commit, and is removed before a log that is not needed any more.

The log counts the changes of batches (`State.changes`). After each change the count is written here too. If it is larger than
the log's, the log is an old copy beside newer batches: it would lease what has been acknowledged since. A power cut may leave
an older count, which says nothing, so nobody waits for the count to be durable.

=== ===== ==============================================
0   8     magic ``QEWQSTMP``
8   u64   how many changes
16  u32   crc32 of the 16 bytes before
=== ===== ==============================================

An empty file is a stamp that is being created: the log may not be there yet.
"""

from __future__ import annotations

import contextlib
import os
import struct

from qewqew_core.crc import crc32
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files, check_regular
from qewqew_core.errors import Corrupt
from qewqew_core.queue import paths

MAGIC = b"QEWQSTMP"
BODY = struct.Struct(">8sQ")
CRC = struct.Struct(">I")


def make(files: Files, queue: str, changes: int) -> None:
    """Say that there is a log, which is in its place by now. The names of both, and then the stamp, are durable after this."""
    path = queue + paths.STAMP
    if files.is_regular(path) and read(files, queue) is None:
        files.check_ours(path)
        files.unlink(path)  # it may have another name elsewhere
    with Descriptors([files.open(path, new=not files.exists(path))]) as (fd,):
        check_regular(files.status(fd), path)
        files.sync_directory(os.path.dirname(queue))
        files.write(fd, _pack(changes), 0)
        files.sync(fd)


def write(files: Files, queue: str, changes: int) -> None:
    """Write the count. If there is no room for it, nothing is written."""
    path = queue + paths.STAMP
    with contextlib.suppress(OSError), Descriptors([files.open(path, new=not files.exists(path))]) as (fd,):
        files.write(fd, _pack(changes), 0)


def _pack(changes: int) -> bytes:
    body = BODY.pack(MAGIC, changes)
    return body + CRC.pack(crc32(body))


def read(files: Files, queue: str) -> int | None:
    """The count; None if there is none, or none that can be read."""
    with contextlib.suppress(OSError), Descriptors([files.open_to_read(queue + paths.STAMP)]) as (fd,):
        return unpack(files.read(fd, BODY.size + CRC.size, 0))
    return None


def unpack(data: bytes) -> int | None:
    """The count; None if these bytes are not a whole stamp."""
    if len(data) != BODY.size + CRC.size or CRC.unpack_from(data, BODY.size)[0] != crc32(data[: BODY.size]):
        return None
    magic, changes = BODY.unpack_from(data)
    return int(changes) if magic == MAGIC else None


def check(files: Files, queue: str, changes: int) -> bool:
    """Whether there is a stamp. Raises `Corrupt` if the batches have changed more often than the log, which says ``changes``,
    knows of.
    """
    found = read(files, queue)
    if found is not None and found > changes:
        raise Corrupt(
            f"the log is older than the batches: it has {changes:,} of {found:,} changes of batches. Was an old copy "
            "restored? Nothing was changed; restore the latest log, or all files from the same time",
            path=queue + paths.LOG,
        )
    return found is not None


def check_no_log(files: Files, queue: str) -> None:
    """Raise `Corrupt` if there is no log, and should be one."""
    path = queue + paths.STAMP
    status = files.check_kind(path)  # what another user has put there says nothing
    if status is not None and status.st_size and not files.exists(queue + paths.LOG):
        raise Corrupt(
            f"the transaction log is missing: {path} says that there was one. Without it nobody knows which records were "
            "taken or never reached the chunk files, which keys were used, and which batches are out. Nothing was changed; "
            "restore it, or all files from the same time",
            path=queue + paths.LOG,
        )


def remove(files: Files, queue: str) -> None:
    """Remove the stamp. Once that is durable, the log may go."""
    with contextlib.suppress(FileNotFoundError):
        files.unlink(queue + paths.STAMP)
