"""`Source`: what batches are cut from. A queue is one, and a reader of a topic."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from qewqew_core.batch import places
from qewqew_core.batch.batch import Batch
from qewqew_core.batch.batch_operations import BatchOperation
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import Manifest
from qewqew_core.clock import STEP
from qewqew_core.disk.engine import Engine
from qewqew_core.disk.files import Files
from qewqew_core.disk.opening import refusing
from qewqew_core.errors import Corrupt

T = TypeVar("T")
# What else can be done with a batch whose files are missing, by its state
_WAYS_OUT = {
    "leased": "; or end it with ack(): what is missing is lost then",
    "dead": "; or drop() it: what is missing is lost then",
}


class Source(ABC):
    """What batches are cut from. All calls are made with the engine's lock.

    The batches are in ``stem``.batches/ID, dead letters in ``stem``.dead/ID. Their ids are made from ``name``, a path or a
    name: see `places.batch_id`.
    """

    def __init__(self, files: Files, stem: str, name: str, engine: Engine[Any]) -> None:
        self.files = files
        self.stem = stem
        self.name = name
        self.engine = engine
        self._last_made = 0  # when the newest batch was made

    def new_batch(self, key: str) -> BatchState:
        """A batch for the owner of ``key``, as yet without records."""
        now = self.engine.now()
        if now <= self._last_made < now + STEP:  # it tells batches of one key apart. (Later: the clock was set back since)
            now = self._last_made + 1
        self._last_made = now
        return BatchState(
            places.batch_id(self.name, key), [key], "leased", 1, 0, 0, now, now, since=self.engine.state.clock.at(now)
        )

    @abstractmethod
    def cut(self, key: str, max_records: int, max_bytes: int, lease_timeout: int | None, retry_delay: int) -> BatchState | None:
        """Cut a batch off the front, durably, with its files; None if no records wait. Times in milliseconds."""

    @abstractmethod
    def put_back(self, batch: BatchState) -> None:
        """Put the records of a batch back to the front. The batch is gone after that. Durable when it returns."""

    @abstractmethod
    def commit(self, operation: BatchOperation) -> int:
        """Commit what happens to a batch. Durable when it returns, because the files follow; returns the position in the log."""

    @abstractmethod
    def manifest_of(self, batch: BatchState) -> Manifest:
        """The manifest that a batch with this owner and attempt has in its directory. Raises `Corrupt` or `BadManifest` if files
        of the batch are missing or damaged.
        """

    @property
    @abstractmethod
    def rescue(self) -> str:
        """What brings back the records of a batch whose files somebody has removed, as far as that is possible."""

    def files_missing(self, batch: Batch | BatchState, path: str) -> Corrupt:
        """What to raise if somebody has removed files of a batch that nobody has ended. ``path``: of what is missing.

        Raises `Corrupt` itself if they are at the batch's other place.
        """
        places.check_home(self.files, self.stem, batch)
        return Corrupt(
            f"the files of batch {batch.id} are missing, though nobody has ended it: somebody else removed them. Restore them, "
            f"or {self.rescue}{_WAYS_OUT.get(batch.state, '')}",
            path=path,
        )

    @abstractmethod
    def occupied(self, records: int, size: int) -> int:
        """Bytes that acknowledged records with ``size`` bytes of payload take, as ``retention_bytes`` counts them."""

    @abstractmethod
    def on_disk(self, batch: BatchState) -> int:
        """Bytes of disk that the files of a batch take for themselves."""

    # Room on the disk. A new name in a directory may need some.

    def prepare(self, act: Callable[[], T]) -> T:
        """Do what needs room before a commit. If it raises `DiskFull`, nothing has changed."""
        with refusing(self.engine.path, self.engine.what):
            return self.engine.with_room(act)

    @abstractmethod
    def keep_room(self, names: int, size: int = 0) -> None:
        """Make sure that this many files can be moved after the next commit (``size``: the bytes of that, if they may be many).

        Raises `DiskFull`; then nothing has changed.
        """

    @abstractmethod
    def move(self, act: Callable[[], None]) -> None:
        """Move files after a commit, also on a full disk."""

    @abstractmethod
    def make_room_elsewhere(self) -> bool:
        """As `Leases.make_room`, of others that share a reserve with this one. Waits for nobody."""
