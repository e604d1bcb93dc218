"""`verify`: read a whole topic, and compare it with its checksums and counts. Changes nothing."""

from __future__ import annotations

import time as clock
from collections.abc import Callable
from itertools import pairwise

from qewqew_core.batch import places
from qewqew_core.batch.reports import Report
from qewqew_core.batch.segments import read_batch
from qewqew_core.disk.files import Files
from qewqew_core.errors import Corrupt, QewQewError
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import HEAD
from qewqew_core.topic import block_sums, reader_files, reader_inspection
from qewqew_core.topic.topic_inspection import names_in_use, strangers
from qewqew_core.topic.topic_paths import rdx_of, stem_of
from qewqew_core.topic.view import View


def verify(files: Files, view: View, progress: Callable[[int, int], None] | None) -> Report:
    """Verify the topic of this view; see `Topic.verify`."""
    report = Report()
    index = view.index()
    entries = view.entries(index)
    total, done, number = sum(entry.end for entry in entries), 0, None
    base = entries[0].base if entries else 0
    report.note_strange(strangers(files, view.directory), view.directory, "topic")
    for block, entry in enumerate(entries, index.start):
        report.files += 1
        try:
            number = verify_block(files, view, block, entry, base, number, report)
        except (QewQewError, OSError):
            if block < view.index().start:  # it was removed meanwhile
                report.files -= 1
            else:
                with report.noting(view.block_path(entry.base), "topic"):
                    raise
            number = None
        base, done = entry.base + entry.end, done + entry.end
        if progress is not None:
            progress(done, total)
    if number is not None and not index.number <= number <= _published(view, number):
        report.problems.append(
            f"{view.path}: the index says that the next message is {index.number}, the last one is {number - 1}"
        )
    for name in sorted(names_in_use(files, view.directory)):
        rdx = rdx_of(view.directory, name)
        report.note_strange(reader_files.strangers(files, view.directory, name), rdx, "reader")
        if reader_files.stranger(files, view.directory, name) is None:
            _verify_reader(files, view, name, report)
    for name in reader_inspection.without_rdx(files, view.directory):
        report.problems.append(str(reader_inspection.missing_rdx(rdx_of(view.directory, name))))
    return report


def _published(view: View, number: int) -> int:
    """The number of the next message by now: a writer that is at work has stored the end of a block before it."""
    until = clock.monotonic() + 1
    while (found := view.index().number) < number and clock.monotonic() < until:
        clock.sleep(0.001)
    return found


def verify_block(
    files: Files, view: View, block: int, entry: zbus.Entry, base: int, number: int | None, report: Report
) -> int | None:
    """The number of the message after the block's last one; ``base`` and ``number``: where and with what it must begin."""
    view.check_entry(block, entry)
    if entry.base != base:
        raise Corrupt(
            f"the entry of block {block} does not follow the one before: {entry}", path=view.path, offset=zbus.entry_at(block)
        )
    if not entry.end:
        return number
    pieces = block_sums.pieces_of(files, view.directory, entry.base)
    at = 0
    for piece, following in pairwise(pieces):
        if piece.offset > at:
            report.unchecked += piece.offset - at
        if block_sums.crc_of(view, entry.base, piece.offset, following.offset, piece.crc) != following.crc:
            raise block_sums.damaged(view.block_path(entry.base), piece, following)
        at = following.offset
    report.unchecked += max(0, entry.end - at)
    first = view.number_of(entry)
    numbers = [number for _, number in view.heads(entry, first if number is None else number)]
    count = len(numbers)
    report.records += count
    report.bytes += entry.end - HEAD * count
    return numbers[-1] + 1


def _verify_reader(files: Files, view: View, name: str, report: Report) -> None:
    with report.noting(rdx_of(view.directory, name), "reader"):
        state = reader_inspection.effective_state(files, view, name)
        for batch in state.with_history() if state is not None else []:
            report.batches += 1
            stem = stem_of(view.directory, name)
            directory = places.directory_of(stem, batch)
            if not report.is_strange(directory):
                with report.noting(directory, "reader"):
                    places.check_home(files, stem, batch)
                    for _ in read_batch(files, directory, batch):
                        pass
