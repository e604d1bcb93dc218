"""What `verify` and `repair` report about a queue or a topic."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from qewqew_core.errors import QewQewError


@dataclass
class Report:
    """What `verify` has read, and what was wrong: one message for each problem, with path and offset."""

    records: int = 0  # of a topic: messages
    bytes: int = 0  # payload, read and found right
    files: int = 0  # with records: chunk files of a queue, block files of a topic
    batches: int = 0  # of a topic: those of all readers
    unchecked: int = 0  # bytes of a topic's blocks without a checksum: a zbus server wrote them, or the log that had it was lost
    orphans: list[str] = field(default_factory=list)  # chunk files that nothing refers to; they are never delivered
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    @contextmanager
    def noting(self) -> Iterator[None]:
        """An error is a problem more, and ends the block."""
        try:
            yield
        except (QewQewError, OSError) as error:
            self.problems.append(str(error))


@dataclass
class Damage:
    """Something that was wrong, and what was done about it."""

    path: str
    offset: int | None  # in bytes, as `bytes`: what is damaged, or missing; None: the file as a whole
    bytes: int | None
    records: int | None  # that are lost with it, in a queue, topic or batch; None: nobody can say
    what: str

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" if self.offset is None else f"{self.path}, offset {self.offset}: {self.what}"


@dataclass
class RepairReport:
    """What `repair` or `repair_topic` has found, and what is in the queue or topic afterwards."""

    records: int = 0  # that will be delivered; of a topic: messages
    batches: int = 0  # of a topic: those of all readers
    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a person should look at, though it need not be wrong
    set_aside: str | None = None  # the directory with all that was replaced; of a queue with a report.json that says this too

    @property
    def ok(self) -> bool:
        """Nothing was wrong, and nothing was changed."""
        return not self.damage
