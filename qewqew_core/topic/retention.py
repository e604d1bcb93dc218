"""Which of a topic's oldest blocks need not be kept."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from qewqew_core.disk.files import Files
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import Entry
from qewqew_core.topic import reader_inspection
from qewqew_core.topic.reader_files import passing_foreign
from qewqew_core.topic.reader_state import Range, ReaderState
from qewqew_core.topic.topic_inspection import all_readers
from qewqew_core.topic.view import View


class Rules(Protocol):
    """What the topic keeps; see `Topic`."""

    max_age: timedelta | None
    max_bytes: int | None
    max_records: int | None
    delete_committed: bool
    slow_readers: str


def removable(files: Files, view: View, rules: Rules, age: Callable[[Entry], int]) -> tuple[int, int]:
    """How many of the oldest blocks can be removed, and how many messages they have. ``age``: of a block, in milliseconds.

    A block that is damaged where it begins says nothing: by the numbers of later ones more stays, never less.
    """
    index = view.index()
    entries = view.entries(index)
    total = sum(entry.end for entry in entries)
    max_age = None if rules.max_age is None else rules.max_age // timedelta(milliseconds=1)
    held: tuple[int, int] | None = None  # all readers must be looked at for it, which is only done if there is a need
    blocks = 0
    for place, entry in enumerate(entries[:-1]):
        following = _number_from(view, entries[place + 1 :], index)
        too_much = (
            (max_age is not None and age(entry) > max_age)
            or (rules.max_bytes is not None and total - entry.end >= rules.max_bytes)
            or (rules.max_records is not None and index.number - following >= rules.max_records)
        )
        if not too_much and not rules.delete_committed:
            break
        held = hold, committed = held or _held(files, view, index, rules)
        if index.start + place >= hold or not (too_much or index.start + place < committed):
            break
        blocks, total = blocks + 1, total - entry.end
    messages = _number_from(view, entries[blocks:], index) - _number_from(view, entries, index) if blocks else 0
    return blocks, messages


def _number_from(view: View, entries: list[Entry], index: zbus.Index) -> int:
    """The number of the first message of the first of these blocks that is not damaged there."""
    numbers = (view.sure_number(entry) for entry in entries if entry.end)
    return next((number for number in numbers if number is not None and number <= index.number), index.number)


def _held(files: Files, view: View, index: zbus.Index, rules: Rules) -> tuple[int, int]:
    """(the first block that must stay, the first that some reader has not committed completely)."""
    end = index.start + index.blocks
    hold = end
    committed, found = end, False
    for name in all_readers(files, view.directory):
        state = _state_of(files, view, name)
        if state is None:  # it was deleted since
            continue
        found, (block, offset, _) = True, state.committed_position()
        while index.start <= block < end - 1 and offset >= view.entry(block).end:  # committed, or empty
            block, offset = block + 1, 0
        committed = min(committed, block)
        if rules.slow_readers == "hold":
            hold = min(hold, block)
        else:
            hold = min([hold, *(min(ranges).start.block for ranges in _living(state))])
    return hold, committed if found else index.start


def _state_of(files: Files, view: View, name: str) -> ReaderState | None:
    """Also of a reader in the place of whose .rdx others have put something: by its log. If there is no log, and never was, it
    is not one of ours; a log that is damaged or gone raises, because nobody knows what the reader still needs.
    """
    state = None
    with passing_foreign(files, view.directory, name, log=False):
        state = reader_inspection.effective_state(files, view, name)
    return state or reader_inspection.look(files, view.directory, name)


def _living(state: ReaderState) -> list[list[Range]]:
    return [ranges for batch_id, ranges in state.ranges.items() if state.batches[batch_id].state in ("leased", "returned")]
