"""How much of the tests a run has, and which positions of a sweep: by stride, not by luck.

A sweep goes over every byte, call, line or seed. A quick run takes every k-th of them, beginning at an offset that ``./run test``
takes from the commit and prints: runs of several commits cover all positions, and with its offset each can be repeated.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import pytest

T = TypeVar("T")

# quick: all unit tests, with thinned sweeps, and of the others those that are marked so; full: all but soaks; rest: what full
# has and quick has not; soak: all, every position.
LEVELS = ("quick", "full", "rest", "soak")
LEVEL = os.environ.get("QEWQEW_TEST_LEVEL", "full")
OFFSET = int(os.environ.get("QEWQEW_TEST_OFFSET", "0"))
SHARE = int(os.environ.get("QEWQEW_TEST_SHARE", "1"))  # a run has every so many-th of its tests
assert LEVEL in LEVELS, f"QEWQEW_TEST_LEVEL={LEVEL} is not one of {', '.join(LEVELS)}"


class Every(Protocol):
    """The type of the fixture ``every``."""

    def __call__(self, values: Iterable[T], *, quick: int, full: int = 1) -> list[T]: ...


def _positions(count: int, quick: int, full: int) -> tuple[range, range]:
    """Those of a full run, and those of them that a quick one has too; neither is empty if there is any."""
    assert quick % full == 0, "so that what is quick is part of what is full"
    if not count:
        return range(0), range(0)
    all_of_full = range(OFFSET % min(full, count), count, full)
    stride = min(quick // full, len(all_of_full))
    return all_of_full, all_of_full[OFFSET // full % stride :: quick // full]


def _selected(values: Iterable[T], *, quick: int, full: int = 1, level: str = LEVEL) -> list[T]:
    """Every ``quick``-th of the values in a quick run, every ``full``-th in a full one."""
    every = list(values)
    if level == "soak":
        return every
    of_full, of_quick = _positions(len(every), quick, full)
    return [every[at] for at in (of_quick if level == "quick" else of_full) if level != "rest" or at not in of_quick]


def swept(values: Iterable[Any], *, quick: int, full: int = 1) -> list[Any]:
    """Parameters for ``parametrize``: of these values those that this run has."""
    quickly = _selected(values, quick=quick, full=full, level="quick")
    chosen = _selected(values, quick=quick, full=full, level="full" if LEVEL == "rest" else LEVEL)
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.sweep(quickly=value in quickly))
        for value in chosen
    ]


@pytest.fixture
def every(request: pytest.FixtureRequest) -> Every:
    """Of the positions of a sweep those that this run has: ``for byte in every(range(1000), quick=50)``.

    The first and the last are among them, whatever the offset: a test may count on seeing what is before a sweep, and behind it.
    """
    level = "full" if LEVEL == "rest" and not _is_quickly(request.node) else LEVEL

    def with_both_ends(values: Iterable[T], *, quick: int, full: int = 1) -> list[T]:
        positions = range(len(listed := list(values)))
        ends = {*positions[:1], *positions[-1:]}
        return [listed[at] for at in sorted(ends.union(_selected(positions, quick=quick, full=full, level=level)))]

    return with_both_ends


def _is_quickly(item: pytest.Item) -> bool:
    """Whether a quick run has the test with these parameters."""
    is_quick = item.nodeid.startswith("tests/unit/") or item.get_closest_marker("quick") is not None
    return is_quick and all(mark.kwargs["quickly"] for mark in item.iter_markers("sweep"))


def is_wanted(item: pytest.Item) -> bool:
    """Whether a run of this level has the test."""
    if item.get_closest_marker("soak"):
        return LEVEL == "soak"
    has_other_positions = "every" in getattr(item, "fixturenames", ()) or getattr(
        getattr(item, "obj", None), "is_hypothesis_test", False
    )
    return {"quick": _is_quickly(item), "rest": has_other_positions or not _is_quickly(item)}.get(LEVEL, True)


def shared(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of all tests of a run those in its share: another one with another offset."""
    return items[OFFSET % SHARE :: SHARE]


def examples(*, quick: int, full: int, soak: int) -> int:
    """How many examples Hypothesis tries in this run."""
    return {"quick": quick, "full": full, "rest": full, "soak": soak}[LEVEL]
