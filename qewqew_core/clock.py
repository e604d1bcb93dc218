"""`Clock`: how much time has surely passed for a store. Ages are measured by it: those of keys, leases, batches and blocks.

The wall clock is set by people and by NTP, and may be a year ahead for a moment. So the times that logs say are for people, and
a log also notes whenever the wall clock was set: then each of its times can be translated into *elapsed* time, which never
jumps. Within one run of the machine it goes as CLOCK_BOOTTIME does. In the next run it goes on from the newest commit of the
log: how long the machine was off, or another one had the files, nobody knows. So what depends on an age is never forgotten too
early, and perhaps late.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

from qewqew_core.limits import now_ms, uptime_ms

STEP = 1000  # milliseconds: if the wall clock moves by less beside the time that has passed, it was not set
FRAME = 10  # the kind of the frames of a log that note it
RUNS = 16  # other runs that are remembered: hosts may have a file system together, and use a store in turn

LATEST = 1 << 62  # of all times, in a log of any content

_BODY = struct.Struct(">QQQq")


class Clock(NamedTuple):
    """One moment by all clocks, in milliseconds: the others follow from it until the wall clock is set, or the run ends."""

    run: bytes = b""  # of the machine: `Files.boot`
    uptime: int = 0  # how long it had lasted
    wall: int = 0  # since the epoch
    elapsed: int = 0  # what had surely passed for the store
    step: int = 0  # by how much the wall clock was found set, when it last was; < 0: back
    others: tuple[Clock, ...] = ()  # the last moments of other runs, newest first

    def at(self, time: int) -> int:
        """The elapsed time of a commit, which says this time of the wall clock."""
        return max(0, self.elapsed + min(time, LATEST) - self.wall) if self.wall else 0

    def wall_at(self, elapsed: int) -> int:
        """What the wall clock shows, as it is set now, at this elapsed time."""
        return self.wall + elapsed - self.elapsed

    def shown(self, time: int, elapsed: int) -> int:
        """When something was, for people, whose log says both: if the wall clock was ahead then, as far back as is sure."""
        return min(time, self.wall_at(elapsed))

    def until(self, time: int) -> Self:
        """The moment of a commit that follows."""
        if (passed := min(time, LATEST) - self.wall) <= 0:
            return self
        uptime, elapsed = min(self.uptime + passed, LATEST), min(self.elapsed + passed, LATEST)
        return self._replace(uptime=uptime, wall=self.wall + passed, elapsed=elapsed)

    def now(self, run: bytes) -> Clock:
        """This moment, in this run of the machine. Its `step` says whether the wall clock was set since."""
        uptime, wall = uptime_ms(), now_ms()
        if run != self.run or not run:
            # How far the wall clock was set cannot be told from the time between the runs, unless it went back.
            of_this_run = (each for each in self.others if each.run == run != b"")
            elapsed = max([self.elapsed, *(each.elapsed + uptime - each.uptime for each in of_this_run)])
            return self.then(Clock(run, uptime, wall, elapsed, min(0, wall - self.wall) or self.step))
        passed = max(0, uptime - self.uptime)
        step = wall - self.wall - passed
        if abs(step) < STEP:  # the elapsed time of each commit stays what it is
            return self.until(wall)
        return self._replace(uptime=uptime, wall=wall, elapsed=self.elapsed + passed, step=step)

    def then(self, following: Clock) -> Clock:
        """What the log notes next."""
        known = [self._replace(others=()), *self.others] if self.run else self.others
        return following._replace(others=tuple(each for each in known if each.run != following.run)[:RUNS])

    def not_before(self, times: Iterable[int]) -> Self:
        """The same, where a damaged log has things of later elapsed times: else these would never grow old."""
        return self._replace(elapsed=max([self.elapsed, *times]))

    def each(self) -> Iterator[Clock]:
        """What a snapshot notes: other runs, oldest first, and this moment."""
        yield from reversed(self.others)
        yield self


def pack(clock: Clock) -> bytes:
    """The body of a frame that notes it."""
    return _BODY.pack(clock.uptime, clock.wall, clock.elapsed, clock.step) + clock.run


def unpack(body: bytes | memoryview) -> Clock:
    """Raises `journal.NONSENSE`."""
    return checked(bytes(body[_BODY.size :]), *_BODY.unpack_from(body))


def checked(run: bytes, uptime: int, wall: int, elapsed: int, step: int) -> Clock:
    """Raises ValueError for what QewQew cannot have written."""
    if any(type(number) is not int or not 0 <= number <= LATEST for number in (uptime, wall, elapsed, abs(step))):
        raise ValueError("this is not a clock")
    return Clock(run, uptime, wall, elapsed, step)


NO_CLOCK = Clock()  # of a log that is not there yet: all that it will know has been there since time 0
