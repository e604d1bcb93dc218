"""`Spool`: bytes that wait in memory, or in a temporary file without a name once they are many. It goes with its process."""

from __future__ import annotations

from tempfile import SpooledTemporaryFile

from qewqew_core.disk.descriptors import NotCopied
from qewqew_core.disk.reserve import FULL
from qewqew_core.errors import BadPath, DiskFull


class Spool(NotCopied):
    """Up to ``memory`` bytes are in memory; more are in ``TMPDIR``."""

    def __init__(self, memory: int) -> None:
        self._file = SpooledTemporaryFile(memory)  # noqa: SIM115 - `close` closes it

    def write(self, data: bytes, offset: int) -> None:
        """Raises `DiskFull` or, for what else the system says, `BadPath`."""
        try:
            self._file.seek(offset)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            if error.errno in FULL:
                raise DiskFull(f"no room for temporary files (TMPDIR): {error.strerror}. Nothing was stored") from error
            said = f"no temporary file can be written (TMPDIR): {error.strerror}. Nothing was stored; set TMPDIR"
            raise BadPath(said, path=error.filename) from error

    def read(self, start: int, end: int) -> bytes:
        self._file.seek(start)
        return self._file.read(end - start)

    def close(self) -> None:
        self._file.close()
