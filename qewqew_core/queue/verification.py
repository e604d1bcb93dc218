"""`verify`: read everything in a queue, and report what is not as it was committed."""

from __future__ import annotations

from collections.abc import Callable

from qewqew_core.batch import places
from qewqew_core.batch.reports import Report
from qewqew_core.batch.segments import read_batch
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files, read_whole
from qewqew_core.errors import Corrupt
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk
from qewqew_core.queue import batch_files, orphans, paths
from qewqew_core.queue import log as logs
from qewqew_core.queue.reading import read_pointers, unread
from qewqew_core.queue.state import State
from qewqew_core.queue.strangers import strangers


def verify(files: Files, path: str, state: State, progress: Callable[[int, int], None] | None = None) -> Report:
    """Compare log, chunk files and batches with checksums and counts. Changes nothing.

    ``progress`` is called with the bytes of records read so far, and with how many there are.
    """
    report = Report()
    total = sum(chunk_state.tail - chunk_state.head for chunk_state in state.chain.values())
    batches = list(state.batches.values())
    with report.noting(path, "queue"):
        batches = state.with_history()
    total += sum(batch.bytes + 2 * batch.records for batch in batches)

    def read() -> None:
        if progress is not None:
            progress(report.bytes + 2 * report.records, total)

    report.note_strange(strangers(files, path), path, "queue")
    log_path = path + paths.LOG
    with report.noting(log_path, "queue"):
        logs.replay(read_whole(files, log_path), log_path)
    for chunk_state in state.chain.values():
        if chunk_state.records:
            report.files += 1
            file = chunk.chunk_path(path, chunk_state.id)
            if not report.is_strange(file):
                with report.noting(file, "queue"):
                    _verify_chunk(files, file, chunk_state, report, read)
    for batch in batches:
        report.batches += 1
        directory = places.directory_of(path, batch)
        if not report.is_strange(directory):
            with report.noting(directory, "queue"):
                places.check_home(files, path, batch)
                for records in read_batch(files, directory, batch):
                    report.records += len(records)
                    report.bytes += sum(map(len, records))
                    read()
    for directory in batch_files.unknown_batches(files, path, state):
        if not report.is_strange(directory) and batch_files.has_records(files, directory):
            report.problems.append(f"{directory}: the log knows no such batch; `qewqew repair` looks what it is")
    report.orphans += [orphan.path for orphan in orphans.find(files, path, state)]
    return report


def _verify_chunk(files: Files, path: str, chunk_state: Chunk, report: Report, read: Callable[[], None]) -> None:
    with Descriptors([files.open_to_read(path)]) as (fd,):
        found = 0
        for boundary, data in unread(files, fd, path, chunk_state):
            found += _count(data, path, boundary.offset, report)
            read()
        if found != chunk_state.total - chunk_state.taken:
            raise Corrupt(f"{found} records are in the chunk, {chunk_state.total - chunk_state.taken} were committed", path=path)
        report.records -= found - chunk_state.records  # those that sessions took from behind the head
        report.bytes -= chunk_state.tail - chunk_state.head - 2 * found - chunk_state.bytes
    on_disk = read_pointers(files, path)[1:]
    if chunk_state.stored not in (None, on_disk):  # an opening looks at those of the first chunk and the last alone
        raise Corrupt(
            f"head, tail, next are {on_disk}, not {chunk_state.stored}; a Java program would read wrong", path=path, offset=0
        )


def _count(data: bytes, path: str, offset: int, report: Report) -> int:
    try:
        records, used = chunk.split(data)
    except ValueError as error:
        raise Corrupt("a record does not end where the next one begins", path=path, offset=offset + int(error.args[0])) from error
    report.records += len(records)
    report.bytes += used - 2 * len(records)
    return len(records)
