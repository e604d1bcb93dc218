"""The numbers of a topic's blocks, by what is left to say them: base offsets, files, and who remembers a block's number.

A reader says by the number of a block where it stands, so a block must keep its number when others are lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate
from typing import NamedTuple

_CANDIDATES = 64  # that are looked at: numbers of a run, those that most blocks say; and chains of them

Claim = tuple[int, int]  # the base offset of a block, and its number


class Run(NamedTuple):
    """Blocks that follow each other, up to a gap in which blocks are missing, or the end of the last one."""

    bases: list[int]
    end: int  # where the last of them ends, in the topic
    least: int  # how many blocks are missing behind it, at least …
    most: int  # … and at most


class Numbers(NamedTuple):
    firsts: list[int]  # of each run, the number of its first block
    known: int  # how many of the runs, from the first on, have a number that something says; those of the others are a guess


def number_runs(runs: list[Run], claims: Mapping[Claim, int]) -> Numbers:
    """Number the blocks as most claims say that can be right together. ``claims``: with their weight.

    Where nothing says which gap the missing blocks were in, it is the first one: then a reader comes too far back rather than
    too short.
    """
    least = [0, *accumulate(len(run.bases) + run.least for run in runs)]  # blocks before each run
    most = [0, *accumulate(len(run.bases) + run.most for run in runs)]
    chosen = _chosen(runs, claims, least, most)
    if not chosen:
        start = 0 if not runs[0].bases[0] else 1  # 1: a place before the first block is one that was removed
        return Numbers([start + before for before in least[:-1]], 0)
    last = max(chosen)
    firsts = [chosen.get(place, 0) for place in range(len(runs))]
    for place in range(last + 1, len(runs)):
        firsts[place] = firsts[place - 1] + least[place] - least[place - 1]
    for place in range(last - 1, -1, -1):
        if place not in chosen:
            firsts[place] = firsts[place + 1] - (least[place + 1] - least[place])
            before = max((known for known in chosen if known < place), default=None)
            if before is not None:  # what the gaps before it cannot hold was in the one behind it
                firsts[place] = min(firsts[place], chosen[before] + most[place] - most[before])
    return Numbers(firsts, last + 1)


def _chosen(runs: list[Run], claims: Mapping[Claim, int], least: list[int], most: list[int]) -> dict[int, int]:
    """The number of the first block of runs, by their place, for which there are claims."""
    places = {base: (place, number) for place, run in enumerate(runs) for number, base in enumerate(run.bases)}
    votes: list[Counter[int]] = [Counter() for _ in runs]
    for (base, block), weight in claims.items():
        if base in places:
            place, number = places[base]
            votes[place][block - number] += weight
    chains: list[tuple[int, dict[int, int]]] = [(0, {})]  # weight, and the runs that are chosen
    for place, counted in enumerate(votes):
        longer = []
        for first, weight in counted.most_common(_CANDIDATES):
            if first >= least[place]:
                fitting = (chain for chain in chains if _fits(place, first, chain[1], least, most))
                before, others = max(fitting, key=lambda chain: chain[0])
                longer.append((before + weight, {**others, place: first}))
        chains = [(0, {}), *sorted(chains + longer, key=lambda chain: chain[0])[-_CANDIDATES:]]
    return max(chains, key=lambda chain: chain[0])[1]


def _fits(place: int, first: int, chosen: dict[int, int], least: list[int], most: list[int]) -> bool:
    if not chosen:
        return True
    before = max(chosen)
    return least[place] - least[before] <= first - chosen[before] <= most[place] - most[before]


def bases_between(first: int, count: int, begin: int, stop: int, known: Mapping[int, int]) -> list[int]:
    """Where ``count`` missing blocks began, the first with this number, between the offsets ``begin`` and ``stop``; in even
    parts where nobody knows. ``known``: base offsets by the number of the block.
    """
    known = {number: base for number, base in known.items() if begin <= base < stop}
    bases = [known.get(first, begin)]
    for number in range(first + 1, first + count):
        after = next((other for other in range(number, first + count) if known.get(other, -1) > bases[-1]), first + count)
        bases.append(bases[-1] + (known.get(after, stop) - bases[-1]) // (after - number + 1))
    return bases
