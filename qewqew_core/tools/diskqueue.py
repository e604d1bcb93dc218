"""Reads a directory of Rhino.Queues' disk storage, DiskQueue or ModernDiskQueue (.NET, BSD licence), and changes nothing there.

By Oren Eini, Iain Ballard and Stephen Shephard. All integers are little-endian::

    transaction.log, transactions:   0          16     20           20 + 17 N     36 + 17 N
                                    ┌──────────┬──────┬────────────┬─────────────┐
                                    │ start    │  N   │ operations │ end         │
                                    │ 16 bytes │ i32  │ 17 bytes   │ 16 bytes    │
                                    └──────────┴──────┴────────────┴─────────────┘
    operation:   0                4       5       9        13       17     kind 1: the item is put, 2: it is taken
                ┌────────────────┬───────┬───────┬────────┬────────┐
                │ A1 BC FE 42    │ kind  │ file  │ start  │ length │      data.FILE: the bytes of the items,
                │                │  u8   │  i32  │  i32   │  i32   │      wherever the log says that they are
                └────────────────┴───────┴───────┴────────┴────────┘

Nothing has a checksum. An incomplete transaction at the end of the log has not happened. While the program replaces the
log, what it had before is ``transaction.log.old_copy``, and is whole.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files, read_whole
from qewqew_core.disk.opening import opening, refused
from qewqew_core.errors import BadPath, Corrupt, Locked

LOG, OLD_COPY, LOCK = "transaction.log", "transaction.log.old_copy", "lock"
_START = bytes.fromhex("12fb5bb7bb93b642acb1a897239ea3a5")
_END = bytes.fromhex("05976c8656449d4eb4523146b3bfa4ce")
_COUNT = struct.Struct("<i")
_OPERATION = struct.Struct("<4sBiii")
_SEPARATOR = bytes.fromhex("a1bcfe42")
_PUT, _TAKEN = 1, 2


class Item(NamedTuple):
    """Where the bytes of an item are."""

    file: int
    start: int
    length: int


class Found(NamedTuple):
    """The items that wait, in order, and what was left out of the log because it has not happened."""

    items: list[Item]
    torn: int  # bytes at the end of the log


def is_queue(directory: str) -> bool:
    return any(os.path.isfile(os.path.join(directory, name)) for name in (LOG, OLD_COPY))


def find(directory: str) -> Found:
    """The items of the queue in a directory. Raises `BadPath`, `Corrupt`, and `Locked` while its program runs."""
    if not is_queue(directory):
        raise BadPath(f"there is no {LOG} here: this is not a directory of DiskQueue", path=directory)
    _check_lock(directory)
    files = Files()
    found: list[Found] = []
    for name in (LOG, OLD_COPY):
        path = os.path.join(directory, name)
        if os.path.lexists(path):
            with opening(path, "file"):
                found.append(_replay(read_whole(files, path), path))
    if len(found) == 2:
        log, old = found
        if not log.items and (log.torn or not os.path.getsize(os.path.join(directory, LOG))):
            return old  # the program was killed while it wrote the new log
        if log.items != old.items:
            raise Corrupt(
                f"there is an {OLD_COPY} next to it, and they differ: {len(old.items):,} items there, "
                f"{len(log.items):,} here. Copy the directory, remove one of them from the copy, and import the copy",
                path=os.path.join(directory, LOG),
            )
    return found[0]


def _check_lock(directory: str) -> None:
    with opening(directory, "file"):
        try:
            data = read_whole(Files(), os.path.join(directory, LOCK))
        except FileNotFoundError:
            return
    pid = int.from_bytes(data[:4], "little", signed=True)
    if pid > 0 and os.path.exists(f"/proc/{pid}"):
        raise Locked(
            f"the file {LOCK!r} names process {pid}, which is running: end the program that has the queue open. If "
            f"that is a different program, copy the directory without {LOCK!r}, and import the copy",
            path=directory,
            pid=pid,
        )


def _replay(data: bytes, path: str) -> Found:
    """What a log says. Raises `Corrupt` with the offset."""
    order: list[Item] = []
    there: Counter[Item] = Counter()
    at = 0
    while at < len(data):
        if not data[at] and not data[at:].strip(b"\0"):  # space that a file system gave, and nobody wrote
            break
        operations, end = _transaction(data, at, path)
        if end > len(data):
            break
        for kind, item in operations:
            if kind == _PUT:
                order.append(item)
            there[item] += 1 if kind == _PUT else -1
        at = end
    items = []
    for item in reversed(order):  # of items that are told by the same place, the last ones wait
        if there[item] > 0:
            there[item] -= 1
            items.append(item)
    return Found(items[::-1], len(data) - at)


def _transaction(data: bytes, at: int, path: str) -> tuple[list[tuple[int, Item]], int]:
    """The operations of the transaction that begins here, and where it ends: behind the data if it was torn."""
    start = data[at : at + len(_START)]
    if not _START.startswith(start):
        raise Corrupt("no transaction begins here", path=path, offset=at)
    begin = at + len(_START) + _COUNT.size
    if begin > len(data):
        return [], begin
    (count,) = _COUNT.unpack_from(data, begin - _COUNT.size)
    if count < 0:
        raise Corrupt(f"a transaction cannot have {count} operations", path=path, offset=begin - _COUNT.size)
    end = begin + _OPERATION.size * count
    operations = []
    for place in range(begin, min(end, len(data)), _OPERATION.size):
        found = data[place : place + _OPERATION.size]
        if len(found) < _OPERATION.size and _SEPARATOR.startswith(found[:4]):
            break  # torn
        separator, kind, *numbers = _OPERATION.unpack(found.ljust(_OPERATION.size, b"\0"))
        if separator != _SEPARATOR or kind not in (_PUT, _TAKEN) or min(numbers) < 0:
            raise Corrupt("no operation of a transaction begins here", path=path, offset=place)
        operations.append((kind, Item(*numbers)))
    if not _END.startswith(data[end : end + len(_END)]):
        raise Corrupt("the transaction does not end here, although its number of operations says so", path=path, offset=end)
    return operations, end + len(_END)


def read(directory: str, items: list[Item], progress: Callable[[int, int], None]) -> Iterator[bytes]:
    """The bytes of the items. Raises `Corrupt`, with file, offset and item, if they are missing."""
    files, done, total = Files(), 0, sum(item.length for item in items)
    opened = -1
    with Descriptors() as fds:
        for number, item in enumerate(items, 1):
            if not item.length:
                yield b""
                continue
            path = os.path.join(directory, f"data.{item.file}")
            if opened != item.file:
                fds.close()
                fds.append(_open(files, path, number, item))
                opened = item.file
            if files.size(fds[0]) < item.start + item.length:  # before memory is taken for what a log says
                raise Corrupt(
                    f"the file ends before item {number:,}, which has {item.length:,} bytes. Nothing was imported",
                    path=path,
                    offset=item.start,
                )
            yield files.read(fds[0], item.length, item.start)
            done += item.length
            progress(done, total)


def _open(files: Files, path: str, number: int, item: Item) -> int:
    try:
        return files.open_to_read(path)
    except OSError as error:
        raise refused(error, path, "file") or Corrupt(
            f"item {number:,} is in this file, which cannot be read: {error.strerror}. Nothing was imported",
            path=path,
            offset=item.start,
        ) from error
