"""What a reader and a session need of their open topic. `Topic` provides it."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Protocol

from qewqew_core.disk.files import Files
from qewqew_core.formats.zbus import Message
from qewqew_core.topic.outgoing import Outgoing
from qewqew_core.topic.writer import Writer


class OpenTopic(Protocol):
    files: Files
    path: str
    name: str
    dialect: str
    sync: str
    lock_timeout: float
    max_attempts: int
    retry_delay: float
    retention: timedelta
    retention_bytes: int

    @property
    def is_closed(self) -> bool: ...

    def writer(self) -> Writer:
        """The topic's writer, with its lock, which the first call takes."""

    def checked(self, messages: Iterable[bytes | Message]) -> Outgoing:
        """Messages as they are appended; raises before anything changes."""

    def trim_quietly(self) -> None:
        """Remove blocks that need not be kept, after a commit that began a new block."""

    def recover(self) -> None:
        """Finish what a killed writer left, unless a living one has done so."""
