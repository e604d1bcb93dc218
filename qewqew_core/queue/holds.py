"""`Holds`: the records that open sessions have taken and not committed. They are still there, but nobody else may take them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from qewqew_core.disk.engine import Engine, Gate
from qewqew_core.errors import Closed
from qewqew_core.queue.state import State, Step


class Holds(Gate):
    """What each open session has taken, by its number. The rest follows from that: how many, and `Chunk.unavailable`."""

    def __init__(self) -> None:
        self.records = 0  # how many are held
        self.disturbed = 0  # counts what disturbs an iteration: records were taken, held or released
        self.is_asked = False  # the predicate of `Queue.get_if` is looking at the first record
        self.is_needed = False  # set after everything that `enter` looks for
        self._steps: dict[int, list[Step]] = {}
        self._opened = 0  # how many sessions there were
        self._abandoned: deque[int] = deque()  # sessions that nobody has closed
        self._is_unsure = False  # because a call was interrupted: it must be counted again

    def open(self) -> tuple[int, list[Step]]:
        """A new session: its number, and the list into which it notes what it takes, before `hold`."""
        self._opened += 1
        steps = self._steps[self._opened] = []
        return self._opened, steps

    def close(self, number: int) -> None:
        """The session has ended, and has nothing."""
        self._steps.pop(number, None)

    def abandon(self, number: int) -> None:
        """Nobody has the session any more. The next call releases what it has: this one must not take a lock."""
        self._abandoned.append(number)
        self.is_needed = True

    def hold(self, steps: list[Step]) -> None:
        """A session has these records now."""
        for chunk, start, end, records in steps:
            chunk.hold(start, end)
            self.records += records
        self.disturbed += 1

    def release(self, steps: list[Step]) -> None:
        """A session has rolled back: the records are where they were. Empties the list."""
        held = steps.copy()
        steps.clear()
        for chunk, start, end, records in held:
            chunk.release(start, end)
            self.records -= records
            self.disturbed += 1

    def ask(self, predicate: Callable[[bytes], bool], record: bytes) -> bool:
        """What the predicate says of the first record. Meanwhile it cannot use the queue."""
        self.is_asked = self.is_needed = True
        try:
            return predicate(record)
        finally:
            self.is_asked = False

    def enter(self, engine: Engine[Any]) -> None:
        if self.is_asked:
            raise Closed("the predicate of get_if must not use the queue", path=engine.path)
        self.is_needed = False  # first: a session may be abandoned at any time, without the lock
        if self._is_unsure:
            self._count(engine.state)
        while self._abandoned:
            self.release(self._steps.get(self._abandoned[0], []))
            self._steps.pop(self._abandoned[0], None)
            self._abandoned.popleft()
            engine.notify()

    def failed(self) -> None:
        self._is_unsure = self.is_needed = True

    def _count(self, state: State) -> None:
        """What sessions hold, by what they have noted."""
        for chunk in state.chain.values():
            chunk.unavailable = [(span.start, span.end) for span in chunk.consumed]
        self.records = 0
        for steps in self._steps.values():
            self.hold(steps)
        self._is_unsure = False
