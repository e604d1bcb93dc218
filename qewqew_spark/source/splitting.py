"""How a read is divided between tasks: as many as are asked for, each of about the same number of bytes and of files."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from qewqew_spark.options import Options

SPLIT_OPTIONS = {"minPartitions", "maxPartitionBytes"}
LEAST_PARTITION, LARGEST_PARTITION = 8 << 20, 128 << 20  # starting a task of Python's costs as much as decoding several MiB
OPENING = 64 << 10  # to open one more file costs as much as to read this many bytes


class Piece(NamedTuple):
    """Bytes that lie side by side in a file: ``start`` to ``end``."""

    number: int  # of what it is a part of, in the order of the read
    start: int
    end: int
    cuts: Sequence[int] = ()  # rising offsets between the two, at which it can be divided


@dataclass(frozen=True)
class Split:
    """Into how many tasks a read is divided; ``size``: about how many bytes each reads, if the user says so."""

    least: int
    size: int | None

    @classmethod
    def of(cls, options: Options) -> Split:
        """Raises `BadArgument`."""
        return cls(options.whole("minPartitions") or 1, options.size("maxPartitionBytes"))

    def count(self, total: int) -> int:
        """How many tasks read ``total`` bytes. Without a size each processor gets some, and none too much.

        Spark does not tell a Python source how many processors there are, so those of the driver's host are counted.
        """
        processors = os.cpu_count() or 1
        size = self.size or min(LARGEST_PARTITION, max(LEAST_PARTITION, -(-total // processors)))
        count = -(-total // size)
        if self.size is None and count > processors:  # else most processors wait at the end for a last few tasks
            count = -(-count // processors) * processors
        return max(self.least, count)

    def __call__(self, pieces: Sequence[Piece]) -> list[list[Piece]]:
        """The pieces, or parts of them, that each task reads, in their order.

        There are fewer tasks than asked for only if there are not that many cuts; none is without a piece.
        """
        opening = 0 if self.size else OPENING  # a size that is given counts bytes
        places, total = [], -opening  # where the whole can be cut, counted over all pieces and what it costs to open each
        for piece in pieces:
            places += [total, *(total + opening + cut - piece.start for cut in piece.cuts)]
            total += opening + piece.end - piece.start
        cuts = even_cuts(sorted({at for at in places if 0 < at < total}), total, self.count(total))
        tasks: list[list[Piece]] = [[]]
        at = -opening
        for piece in pieces:
            if at in cuts[len(tasks) - 1 : len(tasks)]:  # the next cut
                tasks.append([])
            at += opening
            end = at + piece.end - piece.start
            inside = cuts[bisect_right(cuts, at) : bisect_left(cuts, end)]
            for start, stop in pairwise([piece.start, *(cut - at + piece.start for cut in inside), piece.end]):
                if start > piece.start:
                    tasks.append([])
                tasks[-1].append(Piece(piece.number, start, stop))
            at = end
        return [task for task in tasks if task]


def even_cuts(places: Sequence[int], total: int, count: int) -> list[int]:
    """Those of the rising ``places`` at which ``total`` bytes are cut into ``count`` parts, as even as the places allow."""
    count = min(count, len(places) + 1)
    found: list[int] = []
    first = 0
    for part in range(1, count):
        goal = total * part / count
        beyond = len(places) - (count - 1 - part)  # the rest is for the cuts that follow
        at = bisect_left(places, goal, first, beyond)
        if at == beyond or (at > first and goal - places[at - 1] <= places[at] - goal):
            at -= 1
        found.append(places[at])
        first = at + 1
    return found
