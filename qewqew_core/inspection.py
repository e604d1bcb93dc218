"""`inspect`: what a queue holds, read without its lock, for sensors, pages and people."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qewqew_core import chunk, layout, recovery
from qewqew_core import log as logs
from qewqew_core.errors import BadPath, CorruptQueue, QewQewError
from qewqew_core.files import Files, read_whole
from qewqew_core.state import State

if TYPE_CHECKING:
    import pendulum


@dataclass(frozen=True)
class QueueStats:
    """Records, payload bytes and chunks of the queue (what open sessions hold included); numbers of batches; disk space."""

    records: int
    bytes: int
    chunks: int
    oldest: pendulum.DateTime | None  # when the oldest record was put; at most 64 KiB of records too early
    leased: int
    returned: int  # wait for the next lease: what was returned, and leases whose time is over
    dead: int
    on_disk: int  # bytes of disk of all files of the queue, those of its batches included


def inspect(path: str | os.PathLike[str]) -> QueueStats:
    """Counts and sizes of a queue as of its last commit. Takes no lock, waits for nobody, changes nothing.

    Zeros for a queue that does not exist (an empty closed queue leaves no files), if its directory does. Reads the
    transaction log, and the pointers of the chunks if the queue is closed; only where a Java program has used the
    queue must the records be counted. Raises `BadPath`, `CorruptQueue`.
    """
    full = layout.check_path(path)
    for attempt in range(5):
        try:
            return stats_of(full, _state(full))
        except (CorruptQueue, FileNotFoundError):
            # A queue in use changes between two looks at it; damage looks the same each time.
            if attempt == 4:
                raise
            time.sleep(0.01 * attempt)
        except OSError as error:
            if isinstance(error, QewQewError):
                raise
            what = "no permission to read the queue" if isinstance(error, PermissionError) else "cannot be read"
            raise BadPath(f"{what}: {error.strerror}", path=error.filename or full) from error
    raise AssertionError


def _state(path: str) -> State:
    files = Files()
    header = b""
    with contextlib.suppress(FileNotFoundError):
        header = read_whole(files, path, follow=True)
    found = recovery.look(files, path, header)
    if found.log is not None and (not found.log.clean or recovery.agree(files, found)):
        return found.log.state
    if found.log is not None and _changed_since(files, path, found.log.generation, found.log.end):
        raise CorruptQueue("the queue changed while it was read", path=path)
    chain, _ = recovery.chain_of(files, found)
    state = State.of(chain)
    if found.log is not None:
        state.batches = found.log.state.batches
    return state


def _changed_since(files: Files, path: str, generation: int, end: int) -> bool:
    log_path = path + layout.LOG
    now = logs.replay(read_whole(files, log_path), log_path)
    return (now.generation, now.end) != (generation, end)


def stats_of(path: str, state: State) -> QueueStats:
    chunks = [one for one in state.chain.values() if one.records]
    now = time.time_ns() // 1_000_000
    kinds = ["returned" if batch.expired(now) else batch.state for batch in state.batches.values()]
    return QueueStats(
        records=state.records,
        bytes=state.bytes,
        chunks=len(chunks),
        oldest=layout.moment(chunks[0].time()) if chunks else None,
        leased=kinds.count("leased"),
        returned=kinds.count("returned"),
        dead=kinds.count("dead"),
        on_disk=_on_disk(path, state),
    )


def _on_disk(path: str, state: State) -> int:
    files = [path, path + layout.LOG, *(chunk.chunk_path(path, chunk_id) for chunk_id in state.chain)]
    for home in (path + layout.BATCHES, path + layout.DEAD):
        for batch_id in state.batches:
            with contextlib.suppress(FileNotFoundError):
                files += [entry.path for entry in os.scandir(os.path.join(home, batch_id))]
    total = 0
    for file in files:
        with contextlib.suppress(FileNotFoundError):
            total += os.stat(file).st_blocks * 512
    return total
