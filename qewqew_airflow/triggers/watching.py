"""`Watch` wakes when files change, without polling them. All watches of a process share a thread and an inotify instance.

Separate watchers would need too much: `watchfiles.awatch` holds one of anyio's forty threads, which other triggers need too,
and the kernel gives a user 128 inotify instances. A watch is only a hint. It misses changes that another host makes, or that
happen while the directories are looked up again. So callers wait with a time-out, and look again after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable
from typing import Self
from weakref import WeakKeyDictionary

GATHER = 0.2  # seconds: changes within this time are reported together, so that a busy directory does not wake more often
LOOK_UP = 10.0  # seconds until the directories are looked up again: one may be new, or replaced by another
_logger = logging.getLogger(__name__)
logging.getLogger("watchfiles.main").setLevel(logging.WARNING)  # it logs all changes at INFO


class Watch:
    """A watch on the files whose absolute paths begin with one of ``prefixes``. Their directories need not exist yet."""

    def __init__(self, prefixes: Iterable[str]) -> None:
        self.prefixes = tuple(prefixes)
        self.changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._watcher = _watchers.setdefault(loop, _Watcher())
        self._watcher.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._watcher.remove(self)

    async def wait(self, timeout: float) -> None:
        """Returns when something may have changed since the last call, or after ``timeout`` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.changed.wait(), timeout)
        self.changed.clear()


class _Watcher:
    """The watcher that all watches of an event loop share."""

    def __init__(self) -> None:
        self._watches: set[Watch] = set()
        self._added = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._warned = ""

    def add(self, watch: Watch) -> None:
        self._watches.add(watch)
        self._added.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="qewqew-watch")

    async def remove(self, watch: Watch) -> None:
        self._watches.discard(watch)
        if not self._watches and self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while True:
            try:
                await self._watch()
            except (OSError, RuntimeError) as error:  # a directory is gone, or the kernel's limit of watches is reached
                if self._warned != str(error):
                    self._warned = str(error)
                    _logger.warning("Cannot watch files for changes (%s): they are only looked at every few seconds", error)
                await asyncio.sleep(LOOK_UP)

    async def _watch(self) -> None:
        """Watch until other directories are to be watched."""
        from watchfiles import awatch  # late, because only a triggerer watches

        self._added.clear()
        directories = {os.path.dirname(prefix) for watch in self._watches for prefix in watch.prefixes}
        places = await asyncio.to_thread(_places, directories)
        if not places:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._added.wait(), LOOK_UP)
            return
        changes = awatch(
            *places,
            watch_filter=None,
            recursive=False,
            debounce=int(GATHER * 1000),
            step=50,
            stop_event=self._added,
            rust_timeout=1000,
            yield_on_timeout=True,
        )
        clock = asyncio.get_running_loop().time
        first, checked = True, clock()
        async with contextlib.aclosing(changes):
            async for found in changes:
                paths = [path for _, path in found]
                for watch in self._watches:
                    # Before this first answer nobody watched, so anything may have changed.
                    if first or any(path.startswith(watch.prefixes) for path in paths):
                        watch.changed.set()
                first = False
                if any(path in places for path in paths):  # one of the directories itself
                    return
                if clock() - checked > LOOK_UP:
                    if await asyncio.to_thread(_places, directories) != places:
                        return
                    checked = clock()


def _places(directories: Iterable[str]) -> dict[str, tuple[int, int]]:
    """The directories that exist, with their device and inode."""
    found = {}
    for directory in directories:
        with contextlib.suppress(OSError):
            status = os.stat(directory)
            found[directory] = (status.st_dev, status.st_ino)
    return found


_watchers: WeakKeyDictionary[asyncio.AbstractEventLoop, _Watcher] = WeakKeyDictionary()
