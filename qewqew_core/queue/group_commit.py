"""Group commit: of the stages that commit at once, one puts the records of all.

The first one *leads* (`lock.Lead`). Each of the others writes its records to a file, its *request*, and sleeps until its bell
rings (`Bell`). The leader opens the queue, puts the records of all requests behind its own in one commit, and goes on for a few
rounds as long as others ask, and nobody waits for the queue itself. Those that were served have nothing left to do; one of those
that were not leads next. So a dozen processes share one opening of the queue and one fsync. While one half is served, the other
half prepares.

If nothing happens for a second, because the leader waits for a program that has the queue open, or was stopped, the others stand
in line for the queue themselves.

A request is exactly one of these, and each change is one call of the file system:

* ``CLAIM.mine`` is there: its own stage is just writing it, or has taken it back. It was not stored.
* ``CLAIM.ID.put`` is there: it was not stored. A leader renames it, or its own stage.
* ``CLAIM.ID.taken`` is there: it was stored if the log says so (`Served`), and else not. The next opening knows (`staged_files`):
  it renames it to ``.done`` or, if its leader has died or failed, to ``.put``.
* ``CLAIM.ID.done`` is there: it was stored, and is durable. Its stage makes it ``CLAIM.mine`` again.
* None of them is there: somebody else has removed it, and its stage raises `Broken`. That a file is missing never means success.

What no stage writes, though its checksum is right, somebody has forged: it becomes ``.refused``, and is left at that.

Each request has a new ID, so that no log takes a later one for it.

While a request is ``.taken``, only its leader knows what happens to it. If that was stopped, the stage gives up when its time is
over: the commit is `InDoubt`. The request stays open, and the stage's next commit goes on with it, so it is stored once.

The requests need no fsync: what a power cut leaves of them belongs to processes that are gone, and the next opening removes it
with their claims (`staged_files`). Databases share fsyncs in this way: PostgreSQL's ``commit_siblings``, RocksDB's write groups.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import struct
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

from qewqew_core.crc import crc32
from qewqew_core.disk.bell import Bell, ring
from qewqew_core.disk.descriptors import Descriptors, NotCopied
from qewqew_core.disk.files import Files, read_all
from qewqew_core.disk.lock import WAITS
from qewqew_core.errors import Corrupt
from qewqew_core.formats import chunk
from qewqew_core.limits import LIMITS
from qewqew_core.queue import paths
from qewqew_core.queue.writing import Framed, place

_logger = logging.getLogger(__name__)

PUT, TAKEN, MINE, DONE, REFUSED = ".put", ".taken", ".mine", ".done", ".refused"
_ID_BYTES = 8
_ID = re.compile(f"[0-9a-f]{{{2 * _ID_BYTES}}}")
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


class Forged(Corrupt):
    """A request that no stage has written. Its records are not put."""

    def __init__(self, what: str, *, path: str) -> None:
        super().__init__(f"no stage has written this request: it {what}. It is not put; see who may write here", path=path)


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


class Request(NotCopied):
    """The requests of a stage, one after another, in a file that it keeps: a new one would cost twice as much."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._mine = ""  # the path of the file …
        self._asked = ""  # … and while it may be a leader's, without a suffix
        self.key: bytes | None = None  # hash of the key under which it asks
        self._fds = Descriptors()
        self._bell: Bell | None = None

    def ask(self, claim: str, records: list[bytes], key: bytes | None, terms: Terms) -> None:
        """A leader may put these from now on, until `finish`. ``claim``: path of the stage's claim."""
        (runs,) = place(records, sys.maxsize, sys.maxsize)
        head = _HEAD.pack(_MAGIC, terms.chunk_size, terms.min_free_bytes, key or _NO_KEY, len(runs))
        head += b"".join(_RUN.pack(run.records, run.size) for run in runs)
        if self._bell is None:
            self._bell = Bell(os.path.basename(claim))
        if not self._fds:
            self._mine = claim + MINE
            self._files.open_into(self._fds, self._mine, new=True)
        (fd,) = self._fds
        end, crc = _CRC.size + len(head), crc32(head)
        for run in runs:
            frames = run.frames()
            self._files.write(fd, frames, end)
            end, crc = end + run.size, crc32(frames, crc)
        self._files.write(fd, _CRC.pack(crc) + head, 0)
        self._files.truncate(fd, end)
        self._asked, self.key = f"{claim}.{secrets.token_hex(_ID_BYTES)}", key
        try:
            self._files.rename(self._mine, self._asked + PUT)
        except OSError:
            self._asked = ""
            raise

    def wait(self, until: float) -> bool:
        """Sleep until a leader has served it, or leads no longer. Returns False when the time is over, by the monotonic clock."""
        rest = until - (began := time.monotonic())
        if rest <= 0 or self._bell is None or not self._asked:
            return False
        self._bell.wait(min(rest, LIMITS.look_at_leader))
        WAITS.seconds += time.monotonic() - began
        return True

    @property
    def is_open(self) -> bool:
        """Whether a leader may still store it, or has."""
        return self._asked != ""

    def is_served(self) -> bool:
        """Whether it was stored, and is durable."""
        return self._asked != "" and self._files.exists(self._asked + DONE)

    def withdraw(self) -> bool:
        """Let nobody store it any more. False: a leader has taken it along or, if the queue is open here, has stored it."""
        return self._asked == "" or self._take(PUT) or self._files.exists(self._mine)

    def _take(self, suffix: str) -> bool:
        try:
            self._files.rename(self._asked + suffix, self._mine)
        except FileNotFoundError:
            return False
        return True

    def finish(self) -> None:
        """Its stage knows what has happened to it, and may ask again."""
        is_ours = False
        with contextlib.suppress(OSError):  # if it is left, the next opening removes it with the claim
            is_ours = not self._asked or self._files.exists(self._mine) or self._take(DONE)
        if not is_ours:
            self._fds.close()  # or somebody else has removed it
        self._asked = ""

    def close(self) -> None:
        """The stage asks no more."""
        if self._fds:
            with contextlib.suppress(OSError):  # if it is left, the next opening removes it with the claim
                self.withdraw()
                self._files.unlink(self._mine)
            self._fds.close()
        if self._bell is not None:
            self._bell.close()

    def forked(self) -> None:
        """In a forked child: file and bell are the parent's."""
        self._fds.close()
        if self._bell is not None:
            self._bell.close()


def wake(files: Files, queue: str) -> None:
    """Nobody leads any more: wake those that still ask, so that one of them does."""
    if names := _asking(files, queue):
        ring(map(_claim_of, names))


def take_along(files: Files, queue: str, terms: Terms, known: Callable[[bytes], bool]) -> Iterator[Put]:
    """The requests of others that a leader may put with its own records; each is ``.taken`` when it comes.

    Leaves those on other terms, those under a key that is ``known``, and what goes beyond `Limits.group_bytes`: their own stages
    put them when their turn comes.
    """
    size = 0
    for name in _asking(files, queue):
        path = os.path.join(queue + paths.STAGED, name.removesuffix(PUT))
        try:
            put, length = _read(files, path, terms)
            size += length
            if size > LIMITS.group_bytes:
                return
            if put is None or (put.key is not None and known(put.key)):
                continue
            files.rename(path + PUT, path + TAKEN)
        except Forged as error:
            _logger.warning("%s", error)
            with contextlib.suppress(OSError):
                files.rename(path + PUT, path + REFUSED)
            continue
        except (OSError, Corrupt):  # withdrawn, or nothing that we can read: that must not keep others from their commits
            continue
        yield put


def is_asked(files: Files, queue: str) -> bool:
    """Whether a stage waits for the next leader."""
    return bool(_asking(files, queue))


def _asking(files: Files, queue: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(name for name in files.list(queue + paths.STAGED) if name.endswith(PUT))
    return []


def _claim_of(name: str) -> str:
    """The name of the claim of the stage whose request it is. Its bell has the same name."""
    return name.partition(".")[0]


def _read(files: Files, path: str, terms: Terms) -> tuple[Put | None, int]:
    """The request, if it is whole and on these terms, and how many bytes it has."""
    try:
        with Descriptors([files.open_to_read(path + PUT)]) as (fd,):
            data = read_all(files, fd, path + PUT)
    except (OSError, Corrupt):  # withdrawn, or it cannot be read: its own stage puts from memory
        return None, 0
    rest = memoryview(data)[_CRC.size :]
    if len(rest) < _HEAD.size or data[: _CRC.size] != _CRC.pack(crc32(rest)):
        return None, len(data)  # not ours, or damaged: its own stage puts from memory
    magic, chunk_size, min_free_bytes, key, count = _HEAD.unpack_from(rest)
    if magic != _MAGIC or Terms(chunk_size, min_free_bytes) != terms:
        return None, len(data)
    at, framed = _HEAD.size + _RUN.size * count, list[Framed]()
    if at > len(rest):
        raise Forged("says that it has more than it has", path=path + PUT)
    for records, size in _RUN.iter_unpack(rest[_HEAD.size : at]):
        framed.append(_checked(Framed(records, rest[at : at + size]), size, path, chunk_size))
        at += size
    if at != len(rest):
        raise Forged(f"has {len(rest) - at:,} bytes too many", path=path + PUT)
    if _ID.fullmatch(path.rpartition(".")[2]) is None:
        raise Forged("has a name without an id", path=path + PUT)
    return Put(path, framed, None if key == _NO_KEY else key), len(data)


def _checked(run: Framed, size: int, path: str, chunk_size: int) -> Framed:
    try:
        records, used = chunk.split(bytes(run.frames))
    except ValueError:
        records, used = [], -1
    fit = max(map(len, records), default=sys.maxsize) <= chunk.largest_record(chunk_size)
    if (len(records), used, len(run.frames)) != (run.records, size, size) or not fit:
        raise Forged(f"says that it has {run.records:,} records in {size:,} bytes, which they are not", path=path + PUT)
    return run


def finish(files: Files, puts: Sequence[Put]) -> None:
    """These are durable in the queue: their stages may go on."""
    for put in puts:
        with contextlib.suppress(FileNotFoundError):  # removed by somebody else: its stage says so
            files.rename(put.path + TAKEN, put.path + DONE)
    with contextlib.suppress(OSError):  # they look by themselves, too
        ring(_claim_of(os.path.basename(put.path)) for put in puts)


def give_back(files: Files, puts: Sequence[Put]) -> None:
    """These were not stored, and will not be: their stages, or the next leader, may put them."""
    for put in puts:
        with contextlib.suppress(FileNotFoundError):  # removed by somebody else: its stage says so
            files.rename(put.path + TAKEN, put.path + PUT)


def settle(files: Files, path: str, served: Container[str]) -> None:
    """Recovery: the leader that took a request along has died or failed. ``served``: the numbers of those that the log names."""
    request = path.removesuffix(TAKEN)
    with contextlib.suppress(FileNotFoundError):  # removed by somebody else: its stage says so
        files.rename(path, request + (DONE if request.rpartition(".")[2] in served else PUT))


def keys_asked(files: Files, queue: str) -> dict[bytes, bool]:
    """The hashes of the keys under which stages ask, and whether a leader has taken one of their requests along."""
    found = dict[bytes, bool]()
    home = queue + paths.STAGED
    with contextlib.suppress(FileNotFoundError):  # nobody stages
        for name in files.list(home):
            if name.endswith((PUT, TAKEN)) and (key := _key(files, os.path.join(home, name))) is not None:
                found[key] = found.get(key, False) or name.endswith(TAKEN)
    return found


def _key(files: Files, path: str) -> bytes | None:
    try:
        with Descriptors([files.open_to_read(path)]) as (fd,):
            head = files.read(fd, _CRC.size + _HEAD.size, 0)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENXIO, errno.EINVAL, errno.ELOOP):
            raise
        return None  # settled meanwhile, or no request
    if len(head) < _CRC.size + _HEAD.size:
        return None
    magic, _, _, key, _ = _HEAD.unpack_from(head, _CRC.size)
    return key if magic == _MAGIC and key != _NO_KEY else None
