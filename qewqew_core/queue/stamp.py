"""`NAME.stamp`: how often batches had changed when the log and their files were last known to belong together.

The log counts the changes of batches (`State.changes`). After each change the count is written here too. If it is larger than
the log's, the log is an old copy beside newer batches: it would lease what has been acknowledged since. A power cut may leave
an older count, a damaged file or none. That says nothing, so nothing here is synced, and nothing waits for it.

=== ===== ==============================================
0   8     magic ``QEWQSTMP``
8   u64   how many changes
16  u32   crc32 of the 16 bytes before
=== ===== ==============================================
"""

from __future__ import annotations

import contextlib
import os
import struct

from qewqew_core.crc import crc32
from qewqew_core.disk.files import Files
from qewqew_core.errors import Corrupt
from qewqew_core.queue import paths

_MAGIC = b"QEWQSTMP"
BODY = struct.Struct(">8sQ")
CRC = struct.Struct(">I")


def write(files: Files, queue: str, changes: int) -> None:
    """Write the count. If there is no room for it, nothing is written."""
    path, body = queue + paths.STAMP, BODY.pack(_MAGIC, changes)
    with contextlib.suppress(OSError):
        fd = files.open(path, new=not files.exists(path))
        try:
            files.write(fd, body + CRC.pack(crc32(body)), 0)
        finally:
            files.close(fd)


def read(files: Files, queue: str) -> int:
    """The count; 0 if there is none, or none that can be read."""
    with contextlib.suppress(OSError):
        fd = files.open_to_read(queue + paths.STAMP)
        try:
            return unpack(files.read(fd, BODY.size + CRC.size, 0))
        finally:
            files.close(fd)
    return 0


def unpack(data: bytes) -> int:
    """The count; 0 if these bytes are not a whole stamp."""
    if len(data) != BODY.size + CRC.size or CRC.unpack_from(data, BODY.size)[0] != crc32(data[: BODY.size]):
        return 0
    magic, changes = BODY.unpack_from(data)
    return int(changes) if magic == _MAGIC else 0


def check(files: Files, queue: str, changes: int) -> None:
    """Raise `Corrupt` if the batches have changed more often than the log, which says ``changes``, knows of."""
    found = read(files, queue)
    if found > changes:
        raise Corrupt(
            f"the log is older than the batches: it has {changes:,} of {found:,} changes of batches. Was an old copy "
            "restored? Nothing was changed; restore the latest log, or all files from the same time",
            path=queue + paths.LOG,
        )


def remove(files: Files, queue: str) -> None:
    """Remove the stamp, because the log starts to count from zero. Durable."""
    with contextlib.suppress(FileNotFoundError):
        files.unlink(queue + paths.STAMP)
        files.sync_directory(os.path.dirname(queue))
