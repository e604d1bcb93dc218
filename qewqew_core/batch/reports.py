"""What `verify` and `repair` report about a queue or a topic."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadPath, QewQewError


@dataclass
class Report:
    """What `verify` has read, and what was wrong: one message for each problem, with path and offset."""

    records: int = 0  # of a topic: messages
    bytes: int = 0  # payload, read and found right
    files: int = 0  # with records: chunk files of a queue, block files of a topic
    batches: int = 0  # of a topic: those of all readers
    unchecked: int = 0  # bytes of a topic's blocks without a checksum: a zbus server wrote them, or the log that had it was lost
    orphans: list[str] = field(default_factory=list)  # chunk files that nothing refers to; they are never delivered
    problems: list[str] = field(default_factory=list)  # damage, which a repair is for
    # By path: what is in the place of something of the queue or topic, and what to do. No repair moves it away.
    strange: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not self.problems and not self.strange

    def note_strange(self, found: Iterable[QewQewError], path: str, what: str) -> None:
        """Add what is strange at the ``what`` with this path. What is below something strange is not named."""
        with self.noting(path, what):
            for error in found:
                _note(self.strange, error, path)

    def is_strange(self, path: str) -> bool:
        """Whether there is something strange at this path, above or below it, so that reading it says nothing more."""
        return any(_is_below(path, place) or _is_below(place, path) for place in self.strange)

    @contextmanager
    def noting(self, path: str, what: str) -> Iterator[None]:
        """An error ends the block, and is a problem more, or something strange. ``path``, ``what``: see `opening`."""
        try:
            with opening(path, what):
                yield
        except BadPath as error:
            _note(self.strange, error, path)
        except QewQewError as error:
            self.problems.append(str(error))


def _note(strange: dict[str, str], error: QewQewError, path: str) -> None:
    place = error.path or path
    if not any(_is_below(place, above) for above in strange):
        strange[place] = error.what


def _is_below(path: str, above: str) -> bool:
    return path == above or path.startswith(above + os.sep)


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
    strange: dict[str, str] = field(default_factory=dict)  # as in a `Report`: it was left where it is

    @property
    def ok(self) -> bool:
        """Nothing was wrong, and nothing was changed."""
        return not self.damage and not self.strange

    def note_strange(self, found: Iterable[QewQewError], path: str) -> None:
        """As in a `Report`."""
        for error in found:
            _note(self.strange, error, path)
