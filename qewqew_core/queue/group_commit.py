"""Group commit: of the stages that commit at once, one puts the records of all.

The first one *leads* (`Lead`). Each of the others writes its records to a file, its *request*, and sleeps until the leader has
finished a round. The leader opens the queue, puts the records of all requests behind its own in one commit, and goes on for a few
rounds as long as others ask. Those that were served have nothing left to do; one of those that were not leads next. So a dozen
processes share one opening of the queue and one fsync. While one half is served, the other half prepares.

If nothing happens for a second, because the leader waits for a program that has the queue open, or was stopped, the others stand
in line for the queue themselves.

A request is exactly one of these, and each change is one call of the file system:

* ``CLAIM.mine`` is there: its own stage is just writing it, or has taken it back. It was not stored.
* ``CLAIM.ID.put`` is there: it was not stored. A leader renames it, or its own stage.
* ``CLAIM.ID.taken`` is there: it was stored if the log says so (`Served`), and else not. The next opening renames those that the
  log names to ``.done``; so one that is still there then was not stored.
* ``CLAIM.ID.done`` is there: it was stored, and is durable. Its stage makes it ``CLAIM.mine`` again.
* None of them is there: somebody else has removed it, and its stage raises `Broken`. That a file is missing never means success.

Each request has a new ID, so that no log takes a later one for it.

The requests need no fsync: what a power cut leaves of them belongs to processes that are gone, and the next opening removes it
with their claims (`staged_files`). Databases share fsyncs in this way: PostgreSQL's ``commit_siblings``, RocksDB's write groups.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from qewqew_core.crc import crc32
from qewqew_core.disk.files import Closes, Descriptors, Files, read_all
from qewqew_core.disk.lock import Lead
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


class Request(Closes):
    """The requests of a stage, one after another, in a file that it keeps: a new one would cost twice as much."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._mine = ""  # the path of the file …
        self._asked = ""  # … and while it may be a leader's, without a suffix
        self._fds = Descriptors()

    def ask(self, claim: str, records: list[bytes], key: bytes | None, terms: Terms) -> None:
        """A leader may put these from now on, until `finish`. ``claim``: path of the stage's claim."""
        (runs,) = place(records, sys.maxsize, sys.maxsize)
        head = _HEAD.pack(_MAGIC, terms.chunk_size, terms.min_free_bytes, key or _NO_KEY, len(runs))
        rest = b"".join((head, *(_RUN.pack(run.records, run.size) for run in runs), *(run.frames() for run in runs)))
        if not self._fds:
            self._mine = claim + MINE
            self._files.open_into(self._fds, self._mine, new=True)
        (fd,) = self._fds
        self._files.write(fd, _CRC.pack(crc32(rest)) + rest, 0)
        self._files.truncate(fd, _CRC.size + len(rest))
        self._asked = f"{claim}.{secrets.token_hex(8)}"
        self._files.rename(self._mine, self._asked + PUT)

    def is_served(self) -> bool:
        """Whether it was stored, and is durable."""
        return self._asked != "" and self._files.exists(self._asked + DONE)

    def take_back(self) -> bool:
        """Nobody stores it from now on, unless a leader has taken it along; whether it is ours."""
        return self._asked == "" or self._files.exists(self._mine) or self._take(PUT)

    def end(self) -> bool:
        """Nobody else stores it, unless that was done; whether it is left to us. Only with the queue open."""
        return self._asked == "" or self._take(PUT) or self._take(TAKEN)

    def _take(self, suffix: str) -> bool:
        try:
            self._files.rename(self._asked + suffix, self._mine)
        except FileNotFoundError:
            return False
        return True

    def finish(self) -> None:
        """Its stage knows what has become of it, and may ask again."""
        if self._asked and not (self._files.exists(self._mine) or self._take(DONE)):
            self._fds.close()  # somebody else has removed it
        self._asked = ""

    def close(self) -> None:
        """The stage asks no more."""
        if self._fds:
            with contextlib.suppress(OSError):  # if it is left, the next opening removes it with the claim
                self._files.unlink(self._mine)
            self._fds.close()

    def forked(self) -> None:
        """In a forked child: the file is the parent's."""
        self._fds.close()


def serve(lead: Lead, put_others: Callable[[], int]) -> None:
    """What a leader does with the queue still open: a few rounds more, as long as somebody asks."""
    for _ in range(LIMITS.group_rounds):
        if not (lead.next_round() and put_others()):
            break


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


def is_asked(files: Files, queue: str) -> bool:
    """Whether a stage waits for the next leader."""
    with contextlib.suppress(FileNotFoundError):
        return any(name.endswith(PUT) for name in files.list(queue + paths.STAGED))
    return False


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
