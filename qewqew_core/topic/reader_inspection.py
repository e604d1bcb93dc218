"""What a reader of a topic holds, and where it will go on, without its lock."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from qewqew_core.batch.stats import QueueStats, earliest, of_batches
from qewqew_core.disk import journal
from qewqew_core.disk.directories import Foreign
from qewqew_core.disk.files import SMALL, Files, list_if_there, read_whole
from qewqew_core.disk.looking import replay_live
from qewqew_core.errors import Corrupt
from qewqew_core.formats import zbus
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import HEAD
from qewqew_core.topic import reader_log, witness
from qewqew_core.topic.block_sums import waits_since
from qewqew_core.topic.in_flight import Delivered
from qewqew_core.topic.reader_files import without_files
from qewqew_core.topic.reader_log import Seal
from qewqew_core.topic.reader_state import Deliver, Lose, Move, Range, ReaderState
from qewqew_core.topic.topic_paths import LOCK, LOG, rdx_of, stem_of
from qewqew_core.topic.view import SCAN, Position, Stretch, View


def look(files: Files, directory: str, name: str, rdx: tuple[int, int] | None = None) -> ReaderState | None:
    """The state of a reader as of its last commit; None if it has no log because a zbus server made it. ``rdx``: the
    position that the .rdx named before.
    """
    stem = stem_of(directory, name)
    for attempt in range(5):
        seal = seal_of(files, stem)  # first: the owner of the reader goes on meanwhile
        try:
            found = replay_live(files, stem + LOG, reader_log.replay)
            reader_log.check_whole(found, seal, rdx, stem + LOG)
            return found.state
        except FileNotFoundError:
            if not witness.is_beside(files, stem + LOG) or not files.exists(rdx_of(directory, name)):
                return None
            if attempt == 4:
                raise reader_log.missing(stem + LOG) from None
        except Corrupt:
            if attempt == 4 or seal_of(files, stem) == seal:  # else the log was exchanged
                raise
    raise AssertionError


def was_closed(files: Files, directory: str, name: str) -> bool:
    """Whether its log ends with a checkpoint, which its last consumer wrote, or there never was one: a server has it. Takes the
    same time for any log.
    """
    log = stem_of(directory, name) + LOG
    try:
        return journal.ends_with(files, log, reader_log.CHECKPOINT)
    except FileNotFoundError:
        return not witness.is_beside(files, log)


def is_beyond(files: Files, directory: str, state: ReaderState) -> bool:
    """Whether it has read what a power cut has taken from the topic (``sync="never"``)."""
    with contextlib.closing(View(files, directory, "B")) as view:
        return state.furthest()[:2] > view.latest()[:2]


def seal_of(files: Files, stem: str) -> Seal | None:
    try:
        return reader_log.unpack_seal(read_whole(files, stem + LOCK, most=SMALL)[witness.SIZE :])
    except Foreign:
        raise
    except OSError:  # there is none, or nothing that could be locked: who opens the reader is told
        return None


def effective_state(files: Files, view: View, name: str) -> ReaderState | None:
    """The same, as it will be when the reader is opened: moved, if a zbus server moved it or the oldest messages were
    removed. None: there is no such reader.
    """
    path = rdx_of(view.directory, name)
    for _ in range(5):  # until nobody closes the reader in between
        try:
            found = read_whole(files, path, most=SMALL)
        except FileNotFoundError:
            return None
        data = found.ljust(zbus.READER_SIZE, b"\0")
        block, offset = zbus.unpack_position(data)
        state = look(files, view.directory, name, (block, offset))
        with contextlib.suppress(FileNotFoundError):
            if found == read_whole(files, path, most=SMALL):
                break
    if state is not None:
        check_rdx(state, zbus.is_whole_reader(found), path)
    text = zbus.unpack_filter(data)
    if state is None or (state.clean and (block, offset, text) != (*state.committed_position()[:2], state.filter)):
        place = Range(place_of_rdx(view, block, offset, path), None)
        if state is None:
            state = ReaderState(pending=[place])
        else:
            state.apply(Move([place], 0))
        state.filter = text
        add_naks(files, view, path.removesuffix(".rdx") + ".nak", state)
    if (lost := lost_of(state, view, view.index().start)) is not None:
        state.apply(Lose(*lost))
    return state


def missing_rdx(path: str) -> Corrupt:
    return Corrupt(
        "the file is missing, but the reader was not deleted. Restore it, or let `qewqew repair` (repair_topic) write it again "
        "from the log. If a zbus server deleted the reader, delete_reader deletes the rest",
        path=path,
    )


def short_rdx(path: str) -> Corrupt:
    return Corrupt(
        f"the file is shorter than {zbus.READER_SIZE:,} bytes, or zeros, or its filter has a zero byte; no zbus server leaves "
        "that. Restore it, or let `qewqew repair` (repair_topic) write it again from the reader's log, without mask, creator and "
        "extensions",
        path=path,
        offset=0,
    )


def check_temporary(files: Files, directory: str, name: str) -> None:
    """Raise `Corrupt` if the log of a reader whose .rdx says that it is temporary does not say so."""
    state = look(files, directory, name)
    if state is not None and not state.temporary:
        raise not_temporary(rdx_of(directory, name))


def not_temporary(path: str) -> Corrupt:
    return Corrupt(
        "the file says that the reader is temporary, and its log says that it is not: it was not deleted. To keep it, call "
        "Reader.keep(); to delete it, delete_reader (`qewqew topic readers delete`)",
        path=path,
        offset=zbus.mask_patch(0)[0],
    )


def without_rdx(files: Files, directory: str) -> list[str]:
    """Readers whose .rdx is missing, and that were not deleted."""
    found = list_if_there(files, os.path.join(directory, "state"))
    names = sorted(name.removesuffix(LOCK) for name in found if name.endswith(LOCK))

    def is_missing(rdx: str, log: str) -> bool:
        return not files.exists(rdx) and witness.is_beside(files, log) and not files.exists(rdx)  # else it was just made

    return [name for name in names if is_missing(rdx_of(directory, name), stem_of(directory, name) + LOG)]


def check_rdx(state: ReaderState, whole: bool, path: str) -> None:
    """Raise `Corrupt` if the .rdx has lost its end or all it said, and so cannot say where a server moved the reader."""
    if state.clean and not whole:
        raise short_rdx(path)


def add_naks(files: Files, view: View, path: str, state: ReaderState) -> list[int]:
    """Messages that a zbus server handed out without acknowledgement are delivered again; returns where their entries are.

    From now on they are in our log, and before the position in the .rdx: such a server reads them again from there.
    """
    try:
        data = read_whole(files, path)
    except FileNotFoundError:
        return []
    entries, chosen = zbus.unpack_naks(data, view.dialect), Filter(state.filter)
    entered: list[Delivered] = []
    for entry in entries.values():
        place = view.by_offset(entry.offset)
        if place is not None and place < state.pending[0].start and matches(view, place, chosen):
            entered.append((entry.offset - place.offset, place.block, max(1, entry.tries), place.number, [place.offset]))
    state.apply(Deliver(0, 0, entered, state.pending))
    return [zbus.nak_entry_at(number, view.dialect) for number in entries]


def matches(view: View, place: Position, chosen: Filter) -> bool:
    """Whether there is a message, and the filter lets it through."""
    message = view.message(place, cut=0) if chosen else None
    return not chosen or (message is not None and chosen.matches(message.tag))


def place_of_rdx(view: View, block: int, offset: int, path: str) -> Position:
    """The position that an .rdx names. A zbus server leaves the start of a message, or the end of a block, which may have
    been removed since. Everything else is damage.
    """
    index = view.index()
    behind = index.start + index.blocks
    if 0 <= block < index.start:
        return view.oldest()
    if block == behind and not offset:
        return view.latest()
    if not 0 <= block < behind:
        raise Corrupt(
            f"the reader stands in block {block:,}, but the last block is {behind - 1:,}. Restore the file, or let "
            "`qewqew repair` (repair_topic) put the reader where its log says, or at the beginning",
            path=path,
            offset=0,
        )
    entry = view.entry(block)
    if offset == entry.end:
        following = view.first_of(block + 1, index) if block + 1 < index.start + index.blocks else view.latest()
        return Position(block, entry.end, following.number)
    place = view.by_offset(entry.base + offset) if 0 <= offset < entry.end else None
    if place is None:
        raise Corrupt(
            f"no message begins at {offset} of block {block}, where the reader stands. Restore the file, or let `qewqew "
            "repair` (repair_topic) put the reader where its log says, or before a message",
            path=path,
            offset=0,
        )
    return place


def lost_of(state: ReaderState, view: View, start: int) -> tuple[list[Range], list[int], int] | None:
    """What `Lose` says if the oldest messages were removed from the topic before they were committed.

    ``start``: the first existing block.
    """
    if state.committed_position().block >= start:
        return None
    oldest = view.oldest()
    offsets = [offset for offset, flight in state.in_flight.items() if flight.at.block < start]
    lost, pending = len(offsets), []
    for part in state.pending:
        end = oldest if part.stop is None or part.stop > oldest else part.stop
        if part.start < oldest:
            lost += end.number - part.start.number
        if part.stop is None or part.stop > oldest:
            pending.append(Range(max(part.start, oldest), part.stop))
    if not pending:
        pending = [Range(oldest, None)]
    return (pending, offsets, lost) if offsets or pending != state.pending else None


def waiting(state: ReaderState, view: View, most: int, cut: int) -> Iterator[Stretch]:
    """What the reader can deliver, now or when it is given back, in this order; arguments as of `View.stretches`. Messages in
    flight match its filter, see `SetFilter`.
    """
    for at in sorted(flight.at for flight in state.in_flight.values()):
        yield from view.stretches(at, most=1, cut=cut)
    for start, stop in state.pending:
        yield from view.stretches(start, stop, Filter(state.filter), most=most, cut=cut)


def stats_of(files: Files, state: ReaderState, view: View, stem: str) -> QueueStats:
    """Counts of what waits in a reader."""
    chosen = Filter(state.filter)
    clock, latest = state.clock.now(files.boot()), view.latest()
    records = size = 0

    def put(places: list[Range]) -> int | None:
        """When the first of the messages there was appended."""
        for start, stop in sorted(places, key=lambda part: part.start):
            first = None
            with contextlib.suppress(Corrupt):  # its reader is told
                first = next((stretch for stretch in view.stretches(start, stop, chosen, most=1, cut=0) if stretch.places), None)
            if first is not None and (timestamp := first.messages()[0].timestamp) is not None:
                return waits_since(view, files, first.block, first.places[0], timestamp)
        return None

    oldest = put([Range(flight.at, None) for flight in state.in_flight.values()] + state.pending)
    for flight in state.in_flight.values():
        for stretch in view.stretches(flight.at, most=1, cut=0):  # none, if it was removed
            records, size = records + 1, size + stretch.size
    for start, stop in state.pending:
        if chosen:
            for stretch in view.stretches(start, stop, chosen, SCAN, cut=0):
                records, size = records + len(stretch.places), size + stretch.size
        else:
            end = stop or latest
            count = max(0, end.number - start.number)
            records += count
            size += max(0, view.entry(end.block).base + end.offset - view.entry(start.block).base - start.offset - HEAD * count)
    blocks = range(state.committed_position().block, latest.block + 1)
    return QueueStats(
        records=records,
        bytes=size,
        chunks=len(blocks) if records else 0,
        oldest=earliest(oldest if records else None),
        oldest_unacknowledged=earliest(
            oldest if records else None,
            *(
                put(state.ranges.get(batch.id, [])) or clock.shown(batch.created, batch.since)  # if the messages were removed
                for batch in state.batches.values()
            ),
        ),
        on_disk=sum(view.entry(block).end for block in blocks) if records else 0,
        missing=len(without_files(files, stem, state)),
        **of_batches([state], files.boot()),
    )
