"""`repair_topic`: make a topic usable again that refuses to open or has a torn end, with everything that can be read.

1. A log of the topic or of a reader that cannot be read, or whose end is missing, is set aside, with the batches and
   dead letters of that reader. A reader goes on at its .rdx: the first message that it had not committed; an .rdx that is missing
   or short is made again from the log. Keys of appends, and which sessions were committed, are kept as far as the topic's log can
   be read.
2. Which blocks there are is said by the files, as they are named by their offsets, where the index does not agree with them.
3. The last block is cut behind its last whole message; what lies behind is set aside.
4. The index is written by that, and a new log with the keys and the sessions, which the next opening completes.
5. Where the numbers of blocks could not be kept, readers are placed by the numbers of messages that their logs say; one without
   a log goes back to the first block whose number is a guess.
6. The manifest of a batch that is missing or damaged is made again from the reader's log and the blocks, and a file of it is
   replaced by the block. If neither helps, it is set aside. Checksums of a block that are damaged themselves are set aside.

Messages in the middle of a topic that cannot be read stay where they are and are reported: a reader gets `Corrupt` there,
and may `seek` behind them.
"""

from __future__ import annotations

import contextlib
import os
from typing import Literal, cast

from qewqew_core import arguments
from qewqew_core.batch import damage_met, places
from qewqew_core.batch.reports import Damage, RepairReport, Report
from qewqew_core.disk import journal, lock
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files, files_of, read_whole, write_new
from qewqew_core.disk.opening import opening
from qewqew_core.disk.reserve import Reserve
from qewqew_core.errors import BadPath, Corrupt
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import Entry, Index
from qewqew_core.limits import now_ms
from qewqew_core.topic import reader_files, reader_log, topic_log, topic_paths, witness
from qewqew_core.topic.index_repair import IndexRepair, whole_messages
from qewqew_core.topic.manifest_repair import BatchRepair
from qewqew_core.topic.reader_files import make_rdx, stranger, withdraw_witness
from qewqew_core.topic.reader_inspection import missing_rdx, place_of_rdx, seal_of, short_rdx
from qewqew_core.topic.reader_placing import Places, store
from qewqew_core.topic.reader_state import ReaderState
from qewqew_core.topic.topic import Topic
from qewqew_core.topic.topic_inspection import all_readers, names_in_use, stats_of, strangers
from qewqew_core.topic.topic_log import Replayed
from qewqew_core.topic.topic_state import Block, TopicState
from qewqew_core.topic.topic_verification import verify_block
from qewqew_core.topic.view import View


def _damage(error: Corrupt, records: int | None) -> Damage:
    return Damage(error.path or "", error.offset, None, records, error.what)


def _beginning(data: bytes, path: str) -> Replayed | None:
    """A log as far as it can be read; None where nothing of it can be."""
    try:
        return topic_log.replay(data, path)
    except Corrupt as error:
        readable = data[: error.offset]
    try:
        return topic_log.replay(readable, path)
    except Corrupt:
        return None


def log_set_aside(files: Files, path: str) -> str | None:
    """The log of the topic that the last repair set aside."""
    home = os.path.join(path, "state", "topic") + places.DAMAGED
    made = files.list(home) if files.is_directory(home) else []
    logs = (
        os.path.join(home, str(number), os.path.basename(topic_paths.log_of(path)))
        for number in sorted((int(name) for name in made if name.isdecimal()), reverse=True)
    )
    return next(filter(files.exists, logs), None)


class _Repair:
    def __init__(self, files: Files, path: str, dialect: str | None) -> None:
        self.files = files
        self.path = path
        self.log_path, self.index_path = topic_paths.log_of(path), topic_paths.index_of(path)
        self.report = RepairReport()
        self.log = self._read_log()
        self.image = self.read(self.index_path)  # of the index
        bases = map(zbus.base_of, files.list(topic_paths.data_of(path)))
        self.bases = sorted(base for base in bases if base is not None)
        self.dialect = dialect or (self.log.state.dialect if self.log else "B")
        self.index = IndexRepair(files, path, self.bases, self.image, self.log, self.dialect)

    def damaged(self, error: Corrupt, records: int | None) -> None:
        self.report.damage.append(_damage(error, records))

    def aside(self) -> str:
        """The directory for what is set aside, made with the first thing."""
        if self.report.set_aside is None:
            home = places.make_home(self.files, os.path.join(self.path, "state", "topic"), places.DAMAGED)
            number = 1 + max((int(name) for name in self.files.list(home) if name.isdecimal()), default=0)
            self.report.set_aside = os.path.join(home, str(number))
            self.files.make_directory(self.report.set_aside)
            self.files.sync_directory(home)
        return self.report.set_aside

    def set_aside(self, path: str, name: str | None = None) -> None:
        self.files.rename(path, os.path.join(self.aside(), name or os.path.basename(path)))
        self.files.sync_directory(self.aside())
        self.files.sync_directory(os.path.dirname(path))

    def read(self, path: str) -> bytes | None:
        try:
            return read_whole(self.files, path)
        except FileNotFoundError:
            return None

    def _read_log(self) -> Replayed | None:
        data = self.read(self.log_path)
        if data is None:
            return None
        try:
            return topic_log.replay(data, self.log_path)
        except Corrupt as error:
            self.damaged(error, None)
            self.set_aside(self.log_path)
            return _beginning(data, self.log_path)

    def _log_before(self) -> Replayed | None:
        """The log that a repair has set aside which was stopped before it made another."""
        path = log_set_aside(self.files, self.path)
        return None if path is None else _beginning(read_whole(self.files, path), path)

    def blocks(self) -> None:
        """Steps 2 to 4: index and blocks."""
        if not self.bases:
            said = "there are no blocks, so `qewqew repair` can do nothing: restore them from a backup"
            raise Corrupt(said, path=topic_paths.data_of(self.path))
        index, entries = self._index()
        last = entries[-1]
        if self.log is not None:
            if self.log.state.last.base == last.base:
                last = last._replace(end=max(last.end, self.log.state.last.end))  # both say what was committed, one may be behind
            self._write_again(self.log, {entry.base for entry in entries})
        end, following = whole_messages(self.files, topic_paths.block_of(self.path, last.base), self.dialect, last.end)
        number = index.number if following is None else following
        where = topic_paths.block_of(self.path, last.base)
        if (size := self.files.status(where).st_size) > end or end < last.end:
            whole = "nothing says that this was committed" if end == last.end else "there are no whole messages here"
            self.report.damage.append(Damage(where, end, max(size, last.end) - end, None, whole))
            self._cut(where, end)
        entries[-1] = last._replace(end=end)
        new = bytearray(zbus.new_index(now_ms()) if self.image is None else self.image.ljust(zbus.INDEX_SIZE, b"\0"))
        new[: zbus.INDEX_HEAD] = zbus.pack_index(Index(zbus.VERSION, len(entries), index.start, number))
        for block, entry in enumerate(entries, index.start):
            new[zbus.entry_at(block) : zbus.entry_at(block) + zbus.ENTRY] = zbus.pack_entry(entry)
        write_new(self.files, self.index_path + ".tmp", bytes(new))
        if self.files.exists(self.log_path):
            self.set_aside(self.log_path)
        self._place_without_log()
        self.files.rename(self.index_path + ".tmp", self.index_path)
        self.files.sync_directory(self.path)

    def _write_again(self, log: Replayed, bases: set[int]) -> None:
        """What the log carries of these blocks."""
        for base in {redo.block.base for _, redo in log.redo if redo.data is not None} & bases:
            with Descriptors([self.files.open(topic_paths.block_of(self.path, base))]) as (fd,):
                for _, redo in log.redo:
                    if redo.block.base == base and redo.data is not None:
                        self.files.write(fd, redo.data, redo.offset)
                self.files.sync(fd)

    def index_problem(self) -> Damage | None:
        """What is wrong with the index of a topic that opens, since opening looks only at the last block."""
        try:
            self.index.as_it_is()
        except Corrupt as error:
            return _damage(error, 0)
        return None

    def _index(self) -> tuple[Index, list[Entry]]:
        """The index as it is, if its entries are those of the block files; else as these say."""
        try:
            return self.index.as_it_is()
        except Corrupt as error:
            self.damaged(error, 0)
        made = self.index.made_again()
        self.report.damage += self.index.damage
        return made

    def _cut(self, path: str, end: int) -> None:
        copy = os.path.join(self.aside(), f"{os.path.basename(path)}.from-{end}")
        with Descriptors([self.files.open(path)]) as (fd,), Descriptors([self.files.open(copy, new=True)]) as (target,):
            size = self.files.size(fd)
            for at in range(end, size, 1 << 20):
                self.files.write(target, self.files.read(fd, min(1 << 20, size - at), at), at - end)
            self.files.sync(target)
            self.files.sync_directory(self.aside())
            self.files.truncate(fd, end)
            self.files.sync(fd)

    def _known_state(self, name: str) -> ReaderState | None:
        """What the log of a reader says, also if it is not whole; None if there is none, or it cannot be read."""
        path = topic_paths.stem_of(self.path, name) + topic_paths.LOG
        with contextlib.suppress(Corrupt):
            if (log := self.read(path)) is not None:
                return reader_log.replay(log, path).state
        return None

    def _place_without_log(self) -> None:
        """Step 5. Readers without a log go back to the first block whose number is a guess."""
        if (guessed := self.index.guessed) is None:
            return
        for name in self._readers_of_ours():
            path = topic_paths.rdx_of(self.path, name)
            rdx = self.read(path)
            if rdx is None or len(rdx) < zbus.READER_SIZE or self._known_state(name) is not None:
                continue
            if zbus.unpack_position(rdx) > (guessed, 0):
                what = f"the number of the block where it stands is lost: the reader goes back to block {guessed}"
                self._write_place(path, guessed, 0, what)

    def _write_place(self, path: str, block: int, offset: int, what: str) -> None:
        self.report.damage.append(Damage(path, 0, None, 0, what))
        with Descriptors([self.files.open(path)]) as (fd,):
            self.files.write(fd, zbus.pack_position(block, offset), 0)
            self.files.sync(fd)

    def place_readers(self) -> None:
        """Step 5. The numbers of blocks may be others now than in the logs of readers. To be done before there is a new log:
        then the next repair does it again if this one is stopped.
        """
        with contextlib.closing(View(self.files, self.path, self.dialect)) as view:
            found = Places(view)
            for name in self._readers_of_ours():
                state, path = self._known_state(name), topic_paths.rdx_of(self.path, name)
                if state is not None and found.correct(state):
                    self._store(name, state)
                    block, offset, number = state.committed_position()
                    what = f"blocks have other numbers now; the reader goes on at message {number}, at {offset} of block {block}"
                    self.report.damage.append(Damage(path, 0, None, 0, what))

    def _readers_of_ours(self) -> list[str]:
        """Without what others have put in the place of one, which the report names and leaves where it is."""
        return [name for name in all_readers(self.files, self.path) if stranger(self.files, self.path, name) is None]

    def readers(self) -> None:
        """Step 1 for readers, and step 6."""
        with contextlib.closing(View(self.files, self.path, self.dialect)) as view:
            for name in self._readers_of_ours():
                self._reader(view, name)
                self._batches(view, name)

    def _reader(self, view: View, name: str) -> None:
        stem, path = topic_paths.stem_of(self.path, name), topic_paths.rdx_of(self.path, name)
        rdx = self.read(path)
        whole = rdx is not None and zbus.is_whole_reader(rdx)
        state = self._reader_log(stem, rdx if whole else None)
        if state is None:
            self._check_position(view, path, rdx, None)
        elif not whole:
            self.damaged(missing_rdx(path) if rdx is None else short_rdx(path), 0)
            make_rdx(self.files, path, state.committed_position(), state.filter)
        elif state.clean:  # a server may have moved the reader since
            self._check_position(view, path, rdx, state.committed_position()[:2])

    def _reader_log(self, stem: str, rdx: bytes | None) -> ReaderState | None:
        """What the log says; None if there is none. A damaged one is set aside, with the batches. ``rdx``: a whole one."""
        log_path = stem + topic_paths.LOG
        log, seal = self.read(log_path), seal_of(self.files, stem)
        try:
            if log is not None:
                found = reader_log.replay(log, log_path)
                reader_log.check_whole(found, seal, None if rdx is None else zbus.unpack_position(rdx), log_path)
                return found.state
            if witness.is_beside(self.files, log_path):
                raise reader_log.missing(log_path)
        except Corrupt as error:
            self.damaged(error, 0)
            if log is not None:
                self.set_aside(log_path)
            for home in (places.BATCHES, places.DEAD):
                if self.files.is_directory(stem + home):
                    self.set_aside(stem + home)
                    self.report.notes.append(f"{stem + home} is in {self.aside()} now: the reader has forgotten these batches")
            withdraw_witness(self.files, stem)  # at last: until then the next repair finds the same
        return None

    def _check_position(self, view: View, path: str, rdx: bytes | None, stands: tuple[int, int] | None) -> None:
        """Let the .rdx name a place at which a message begins. ``stands``: the place by the log, if that says one."""
        block, offset = zbus.unpack_position((rdx or b"").ljust(zbus.READER_SIZE, b"\0"))
        try:
            place_of_rdx(view, block, offset, path)
            return
        except Corrupt:
            index = view.index()
        if stands is None:
            stands = index.start, 0
            if index.start <= block < index.start + index.blocks:
                try:
                    entry = view.entry(block)
                    heads = [0, *(at for at, _ in view.heads(entry, view.number_of(entry)))] if entry.end else [0]
                except Corrupt:
                    return  # the messages are what is damaged
                stands = block, max(at for at in heads if at <= max(0, offset))
        if stands == (block, offset):
            return  # the messages are what is damaged
        what = f"no message begins at {offset} of block {block}; the reader goes on at {stands[1]} of block {stands[0]}"
        self._write_place(path, *stands, what)

    def _batches(self, view: View, name: str) -> None:
        """Step 6, for the batches that the reader's log knows."""
        log_path = topic_paths.stem_of(self.path, name) + topic_paths.LOG
        if (log := self.read(log_path)) is not None:
            state = reader_log.replay(log, log_path).state
            if BatchRepair(view, name, state, self.files, self.report, self.set_aside).repair():
                Places(view).correct(state)
                self._store(name, state)

    def _store(self, name: str, state: ReaderState) -> None:
        rdx = topic_paths.rdx_of(self.path, name)
        store(self.files, topic_paths.stem_of(self.path, name), rdx, state, Reserve(self.files, self.log_path))

    def sums(self) -> None:
        """Checksums that are damaged themselves are set aside: the block is as one of a server then."""
        data = topic_paths.data_of(self.path)
        for name in sorted(self.files.list(data)):
            path = os.path.join(data, name)
            if name.endswith(".sums") and zbus.base_of(f"{name.removesuffix('.sums')}.zbus") is not None:
                try:
                    topic_log.unpack_sums(read_whole(self.files, path), path)
                except Corrupt as error:
                    self.damaged(error, 0)
                    self.set_aside(path)

    def what_stays(self) -> None:
        """Note what is left of the damage: messages in the middle that cannot be read."""
        told = {one.path for one in self.report.damage}
        with contextlib.closing(View(self.files, self.path, self.dialect)) as view:
            index = view.index()
            number: int | None = None
            for block, entry in enumerate(view.entries(index), index.start):
                try:
                    number = verify_block(self.files, view, block, entry, entry.base, number, Report())
                except Corrupt as error:
                    number = None
                    if error.path not in told:
                        self.report.damage.append(Damage(error.path or "", error.offset, None, None, f"{error.what}. It stays"))

    def begin_log(self) -> None:
        """A new log, with the keys and the sessions that could be read. It says that the first block is empty, so who opens the
        topic believes the index, as after a zbus server.
        """
        known = self.log or self._log_before()
        index = zbus.unpack_index(read_whole(self.files, self.index_path), self.index_path)
        state = TopicState(self.dialect, index.start, index.number, Block(index.start, self.bases[0], now_ms()))
        if known is None and witness.is_beside(self.files, self.log_path):
            self.report.notes.append("no key of an append is known any more: what is appended again under one is stored again")
        if known is not None:
            state.idempotency_keys, state.sessions = known.state.idempotency_keys, known.state.sessions
            state.clock = known.state.clock.not_before(elapsed for elapsed, _ in state.idempotency_keys.values())
        state.clock = state.clock.now(self.files.boot())
        log = journal.create(self.files, self.log_path, lambda generation: topic_log.snapshot(state, generation), "topic")
        log.close()


def repair_topic(
    path: str | os.PathLike[str],
    *,
    dialect: Literal["A", "B", "C"] | None = None,
    lock_timeout: float = 10.0,
    group: str | None = None,
    _files: Files | None = None,
) -> RepairReport:
    """Repair a topic; see the module. Nobody may have it open. Everything is durable when it returns.

    ``dialect`` is needed if the log cannot be read and the topic is in dialect C. ``group``: as of the `Topic`. Raises
    `BadPath`, `BadArgument`, `Locked`, and `Corrupt` if nothing can be done.
    """
    members = None if group is None else arguments.check_group(group)
    full = topic_paths.check_topic_path(path)
    timeout = arguments.check_timeout("lock_timeout", lock_timeout)
    with opening(full, "topic", "repair it again"):
        report = _repair(files := files_of(_files, full, full, group=members), full, dialect, timeout, group)
        damage_met.forget(files, os.path.join(full, "state", "topic"))
        return report


def _repair(files: Files, full: str, dialect: Literal["A", "B", "C"] | None, timeout: float, group: str | None) -> RepairReport:
    if files.check_kind(topic_paths.data_of(full), True) is None:
        raise BadPath("there is no topic here: it has no directory data", path=topic_paths.data_of(full))
    lock.check_system(full)
    state = os.path.join(full, "state")
    if not files.is_directory(state):
        files.make_directory(state)
        files.sync_directory(full)
    problem: Damage | None = None
    log_path = topic_paths.log_of(full)
    try:
        Topic(full, dialect=dialect, lock_timeout=timeout, group=group, _files=files).close()
    except Corrupt as error:  # else it was recovered, as every opening does
        problem = _damage(error, None)
    held, _ = lock.acquire(files, topic_paths.lock_of(full), timeout, what="topic")
    try:
        if files.exists(log_path) and not witness.is_in(files, held.fd):
            witness.write(files, held.fd, log_path)  # once the log is set aside, nobody must take this for a server's topic
        repair = _Repair(files, full, None if dialect is None else zbus.check_dialect(dialect))
        problem = problem or repair.index_problem()
        if problem is not None:
            repair.blocks()
            repair.place_readers()
            repair.begin_log()
            if str(problem) not in map(str, repair.report.damage):
                repair.report.damage.insert(0, problem)
        repair.sums()
        repair.readers()
    finally:
        held.release()
    if repair.report.damage:  # to end as a closed one, with all readers
        Topic(full, dialect=cast(Literal["B", "C"], repair.dialect), lock_timeout=timeout, group=group, _files=files).close()
    repair.what_stays()
    repair.report.note_strange(strangers(files, full), full)
    for name in sorted(names_in_use(files, full)):
        repair.report.note_strange(reader_files.strangers(files, full, name), topic_paths.rdx_of(full, name))
    try:
        with opening(full, "topic"), contextlib.closing(View.of(files, full)) as view:
            stats, readers = stats_of(files, view)
        repair.report.records, repair.report.batches = stats.messages, sum(len(state.batches) for state in readers.values())
    except (BadPath, Corrupt) as error:  # messages in the middle that cannot be read stay, and what is strange does
        repair.report.notes.append(f"the messages cannot be counted: {error}")
    return repair.report
