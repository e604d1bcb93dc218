"""`LIMITS`: sizes and times at which the program changes its behaviour, and the clocks.

None of them changes what is promised, or how files are read. Programs leave them alone. Tests make them small, so that few
records reach each of them, and set the clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

_since_boot = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)


@dataclass
class Limits:
    """In bytes, unless a comment says otherwise."""

    piece_bytes: int = 64 << 10  # about how far the boundaries of the sparse index lie apart
    segment_bytes: int = 256 << 20  # of a segment that a stage puts into an object store
    first_chunk_bytes: int = 256 << 10  # a queue begins with a chunk file of this size; each next one is twice as large
    pending_bytes: int = 256 << 10  # frames that are in the log already, and not yet in their chunk
    # A commit of up to this many bytes is carried by the log: one fsync instead of two. Without fsync, only the copy counts.
    inline_bytes: dict[str, int] = field(default_factory=lambda: {"commit": 256 << 10, "never": 4 << 10})  # by ``sync``
    group_bytes: int = 8 << 20  # of the requests of others that a stage commits with its own records
    group_rounds: int = 8  # how often it does so, as long as there are any
    spill_bytes: int = 1 << 20  # what a session of a queue keeps of its puts in memory
    topic_spill_bytes: int = 16 << 20  # what a session of a topic keeps
    write_bytes: int = 1 << 20  # are written at once to a block or chunk; a body of this size is not copied for it
    joined_bytes: int = 4 << 10  # records that are smaller are joined before they are written to a chunk
    log_bytes_at_close: int = 256 << 10  # behind the snapshot: the next opening reads them …
    log_frames_at_close: int = 64  # … and applies them
    log_bytes_at_handover: int = 1 << 20  # the same where another process waits: cutting the log back costs it more …
    log_frames_at_handover: int = 32  # … than to read so much
    log_changes: int = 128  # leases, acknowledgements and the like behind the snapshot: who looks at an open queue reads them
    reader_log_bytes: int = 1 << 20  # a reader's log is cut back to a snapshot when it has grown by this much
    reader_log_bytes_at_close: int = 16 << 10  # who opens the topic, and who trims it, reads the logs of all readers
    look_again: float = 5.0  # seconds after which who waits looks for sessions that were collected as garbage: they wake nobody
    look_at_leader: float = 0.1  # seconds between two looks whether the stage that leads others still does
    look_at_owners: float = 0.25  # seconds between two looks whether those who have messages in flight still live
    clock: Callable[[], int] = time.time_ns  # nanoseconds since the epoch: for people, who may set it
    boot_clock: Callable[[], int] = _since_boot  # nanoseconds since the machine was started: for all ages, see `Clock`


LIMITS = Limits()


def now_ms() -> int:
    """Milliseconds since the epoch, as all times on disk that people read."""
    return LIMITS.clock() // 1_000_000


def uptime_ms() -> int:
    """Milliseconds since the machine was started."""
    return LIMITS.boot_clock() // 1_000_000
