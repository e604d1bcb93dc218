"""Group commit: the process that has the queue also commits what others wait to put.

A stage that finds the queue locked writes its records to a file, its *request*, ``NAME.staged/CLAIM.ID.put``, and waits in
line as before. The stage that commits next, the *leader*, renames each request to ``CLAIM.ID.taken``, puts its records
behind its own in the same commit, and renames the file to ``CLAIM.ID.done`` when that is durable. A stage whose turn comes and
whose request is done has nothing left to do. So a dozen processes share one opening of the queue and one fsync.

A request is exactly one of these, and each change is one call of the file system:

* ``.put`` is there: it was not stored. A leader renames it, or its own stage.
* ``.taken`` is there: it was stored if the log says so (`Served`), and else not. The next opening renames those that the
  log names to ``.done``; so one that is still there then was not stored.
* ``.mine`` is there: its own stage is just writing it, or has taken it back. It was not stored.
* ``.done`` is there: it was stored, and is durable. Its stage removes it.
* None of them is there: somebody else has removed it, and its stage raises `Broken`. That a file is missing never means success.

The requests need no fsync: what a power cut leaves of them belongs to processes that are gone, and the next opening removes it
with their claims (`staged_files`). Databases share fsyncs in this way: PostgreSQL's ``commit_siblings``, RocksDB's write groups.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qewqew_core.crc import crc32
from qewqew_core.disk.files import Descriptors, Files, read_all
from qewqew_core.limits import LIMITS
from qewqew_core.queue import paths
from qewqew_core.queue.writing import Framed, place

PUT, TAKEN, MINE, DONE = ".put", ".taken", ".mine", ".done"
_NO_KEY = bytes(16)
_CRC = struct.Struct(">I")  # of all that follows
# magic, chunk size, bytes to leave free, hash of the key or zeros, number of runs; then these
_HEAD = struct.Struct(">8sIQ16sI")
_RUN = struct.Struct(">II")  # records, and bytes of their frames; behind all of them the frames
_MAGIC = b"QEWQPUT1"


@dataclass(frozen=True)
class Terms:
    """What a leader must agree with, to put records as the stage itself would."""

    chunk_size: int
    min_free_bytes: int


@dataclass(frozen=True)
class Put:
    """What a request asks for."""

    path: str  # without `PUT` or `TAKEN`
    framed: list[Framed]
    key: bytes | None  # hash of it

    @property
    def id(self) -> bytes:
        """What the log calls it."""
        return bytes.fromhex(self.path.rpartition(".")[2])


class Request:
    """A request, for the stage that made it."""

    def __init__(self, files: Files, claim: str, records: list[bytes], key: bytes | None, terms: Terms) -> None:
        """``claim``: path of the stage's claim."""
        self._files = files
        self._path = f"{claim}.{secrets.token_hex(8)}"
        (runs,) = place(records, sys.maxsize, sys.maxsize)
        head = _HEAD.pack(_MAGIC, terms.chunk_size, terms.min_free_bytes, key or _NO_KEY, len(runs))
        rest = b"".join((head, *(_RUN.pack(run.records, run.size) for run in runs), *(run.frames() for run in runs)))
        self.was_asked = False
        with Descriptors([files.open(self._path + MINE, new=True)]) as (fd,):
            try:
                files.write(fd, _CRC.pack(crc32(rest)) + rest, 0)
            except OSError:
                self.remove()
                raise

    def ask(self) -> None:
        """A leader may take it from now on."""
        self.was_asked = True
        self._files.rename(self._path + MINE, self._path + PUT)

    def is_served(self) -> bool:
        """Whether it was stored, and is durable."""
        return self._files.exists(self._path + DONE)

    def take_back(self) -> bool:
        """Nobody stores it from now on, unless a leader has taken it along; whether it is ours."""
        return self._files.exists(self._path + MINE) or self._take(PUT)

    def end(self) -> bool:
        """Nobody else stores it, unless that was done; whether it is left to us. Only with the queue open."""
        return self._take(PUT) or self._take(TAKEN)

    def _take(self, suffix: str) -> bool:
        try:
            self._files.rename(self._path + suffix, self._path + MINE)
        except FileNotFoundError:
            return False
        return True

    def remove(self) -> None:
        """Its stage has finished with it."""
        for suffix in (MINE, DONE):
            with contextlib.suppress(OSError):  # there is one of them; if one is left, the next opening removes it with the claim
                self._files.unlink(self._path + suffix)


def take_along(files: Files, queue: str, terms: Terms) -> Iterator[Put]:
    """The requests of others that a leader may put with its own records; each is ``.taken`` when it comes.

    Leaves those on other terms, and what goes beyond `Limits.group_bytes`. One that the leader does not put after all its own
    stage puts when its turn comes.
    """
    home, size = queue + paths.STAGED, 0
    with contextlib.suppress(FileNotFoundError):
        for name in sorted(files.list(home)):
            if not name.endswith(PUT):
                continue
            path = os.path.join(home, name.removesuffix(PUT))
            with contextlib.suppress(FileNotFoundError):  # withdrawn
                put, length = _read(files, path, terms)
                size += length
                if size > LIMITS.group_bytes:
                    return
                if put is not None:
                    files.rename(path + PUT, path + TAKEN)
                    yield put


def _read(files: Files, path: str, terms: Terms) -> tuple[Put | None, int]:
    """The request, if it is whole and on these terms, and how many bytes it has."""
    with Descriptors([files.open_to_read(path + PUT)]) as (fd,):
        data = read_all(files, fd, path + PUT)
    rest = memoryview(data)[_CRC.size :]
    if len(rest) < _HEAD.size or data[: _CRC.size] != _CRC.pack(crc32(rest)):
        return None, len(data)  # not ours, or damaged: its own stage puts from memory
    magic, chunk_size, min_free_bytes, key, count = _HEAD.unpack_from(rest)
    if magic != _MAGIC or Terms(chunk_size, min_free_bytes) != terms:
        return None, len(data)
    at, framed = _HEAD.size + _RUN.size * count, list[Framed]()
    for records, size in _RUN.iter_unpack(rest[_HEAD.size : at]):
        framed.append(Framed(records, bytes(rest[at : at + size])))
        at += size
    return Put(path, framed, None if key == _NO_KEY else key), len(data)


def finish(files: Files, puts: Sequence[Put]) -> None:
    """These are durable in the queue: their stages may go on."""
    for put in puts:
        with contextlib.suppress(FileNotFoundError):  # removed by somebody else: its stage says so
            files.rename(put.path + TAKEN, put.path + DONE)


def finish_served(files: Files, queue: str, served: set[bytes]) -> None:
    """Recovery: a leader may have died, or failed, before it finished what the log says was stored."""
    home, ids = queue + paths.STAGED, {each.hex() for each in served}
    for name in files.list(home) if served and files.is_directory(home) else ():
        if name.endswith(TAKEN) and name.removesuffix(TAKEN).rpartition(".")[2] in ids:
            files.rename(os.path.join(home, name), os.path.join(home, name.removesuffix(TAKEN) + DONE))
