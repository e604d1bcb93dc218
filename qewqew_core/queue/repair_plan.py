"""`Plan`: what a repair of a queue has found so far, and what it will do. See `repairing`."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple

from qewqew_core.batch.reports import Damage, RepairReport
from qewqew_core.clock import NO_CLOCK
from qewqew_core.disk.files import Files
from qewqew_core.disk.journal import Body
from qewqew_core.errors import QewQewError
from qewqew_core.formats import chunk
from qewqew_core.queue import orphans, paths
from qewqew_core.queue.found import chunk_files


class Rescued(NamedTuple):
    """Records that a commit behind the damage has put."""

    chunk_id: int
    records: int
    size: int
    crc: int  # from the base of the chunk on
    time: int
    frames: bytes  # empty: they are in the chunk file
    key: bytes | None  # under which they were put


class Plan:
    """The plan for the repair of the queue at ``path``, whose header is locked."""

    def __init__(self, files: Files, path: str, header_fd: int) -> None:
        self.files = files
        self.path = path
        self.parent = os.path.dirname(path)
        self.log_path = path + paths.LOG
        self.lease_path = path + paths.LEASE
        self.header_fd = header_fd
        self.report = RepairReport()
        self.ids: set[int] = set()  # of chunk files beside the queue …
        self.irregular: set[int] = set()  # … and of those of them that are links, directories, pipes
        self.taken: set[int] = set()  # and of those that were made
        self.payload: dict[int, list[tuple[int, Body]]] = {}  # chunk id: (offset, frames) that the log carries
        self.rewrite: set[int] = set()  # chunks of the chain that are written again although all can be read
        self.rescued: list[Rescued] = []
        self.moves: list[str] = []  # what is moved to the new directory …
        self.copies: list[str] = []  # … and what is copied there, because something takes its place
        self.made: list[str] = []  # files that nothing refers to
        self.clock = NO_CLOCK  # of the log
        self.found_damage = False
        self.refused: QewQewError | None = None  # why opening gave up

    def damaged(self, path: str, offset: int, size: int, records: int | None, what: str) -> None:
        self.report.damage.append(Damage(path, offset, size, records, what))
        self.found_damage = True

    def chunk_path(self, chunk_id: int) -> str:
        return chunk.chunk_path(self.path, chunk_id)

    def look_again(self) -> None:
        self.ids, self.irregular = chunk_files(self.files, self.path)
        self.taken = set(self.ids)

    def is_orphan(self, chunk_id: int) -> bool:
        path = self.chunk_path(chunk_id)
        with contextlib.suppress(OSError):  # no file at all: it is not ours
            content, problem = orphans.readable(self.files, path, chunk_id)
            if content.records or problem:
                self.report.notes.append(f"{path}: nothing refers to it; Queue.orphans offers its records")
                return True
        return False
