"""Looks at a store that may change meanwhile: what is there at the next look too is damage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from qewqew_core.disk.files import Files, read_whole
from qewqew_core.errors import Corrupt

T = TypeVar("T")


def replay_live(files: Files, path: str, replay: Callable[[bytes, str], T]) -> T:
    """What ``replay`` makes of a log that somebody may be appending to while it is read.

    A read may pass a place before a frame is written there, and still find the frames behind it. They say that the one before
    them was durable, which looks like damage. At the next look the frame is there; real damage looks the same, and is raised.
    """
    seen: tuple[int | None, bytes] | None = None
    while True:
        data = read_whole(files, path)
        try:
            return replay(data, path)
        except Corrupt as error:
            at = error.offset or 0
            here = error.offset, data[at : at + 64]
            if here == seen:
                raise
            seen = here


def look_again(look: Callable[[], T], changing: tuple[type[Exception], ...] = (Corrupt,)) -> T:
    """What ``look`` finds in a store that may change while it looks. Damage looks the same each time.

    ``changing``: what ``look`` raises then. The fifth time this passes through.
    """
    for attempt in range(4):
        with contextlib.suppress(*changing):
            return look()
        time.sleep(0.01 * attempt)
    return look()
