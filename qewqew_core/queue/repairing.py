"""`repair`: rescue all that can be read of a damaged queue, set the rest aside, and say what.

1. Decide what the queue is. What opening believes is believed here too. Where opening gives up: the commits before the
   damage in the log hold; where there is no whole log, the chunk files tell. Payload in whole commits behind the damage
   is acknowledged data: it is appended at the end (and may have been taken before: at least once, rather than never).
2. Read everything piece by piece (about 64 KiB, each with a checksum). Chunks and segments with bad pieces are written
   anew, without these, under ids that nothing refers to.
3. One new log says what the queue is from now on: that is the commit. It ends with a commit "repair", which says what
   is still to be moved, and carries the report; until the checkpoint behind it, opening refuses the queue.
4. Pointers, header and manifests follow, and what was replaced is moved to NAME.damaged/N. Then the checkpoint.

Interrupted before 3 it begins anew, and what was written is a leftover; after 3 the next repair finishes 4. Nothing is
deleted but such leftovers.
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple

from qewqew_core import arguments
from qewqew_core.batch import manifest, places, segments
from qewqew_core.batch.batch_state import BATCH_ID, BatchState
from qewqew_core.disk import journal, lock
from qewqew_core.disk.files import Files, read_whole, write_new
from qewqew_core.errors import BadManifest, BadPath, Broken, Corrupt, DiskFull, Full, QewQewError
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk, Cut
from qewqew_core.limits import now_ms
from qewqew_core.queue import batch_files, chunk_files, java, orphans, paths, recovery, stamp
from qewqew_core.queue import log as logs
from qewqew_core.queue.found import Found
from qewqew_core.queue.log import Replayed
from qewqew_core.queue.operations import Append, Extent, Lease, NewChunk, Operation, PutKey, Repair, Take
from qewqew_core.queue.reading import OnDisk, read_pointers, scan
from qewqew_core.queue.state import State

NEW_CHUNK_BYTES = 16 << 20  # about the size of the files that rescued commits go to
_UNFIT = (FileNotFoundError, Corrupt, BadManifest)


@dataclass
class Damage:
    """Something that was wrong, and what was done about it."""

    path: str
    offset: int  # in bytes, as `bytes`: what is damaged, or missing
    bytes: int
    records: int | None  # that are lost with it, in a queue or a batch; None: nobody can say
    what: str


@dataclass
class RepairReport:
    """What `repair` found, and what the queue holds afterwards."""

    records: int = 0  # that will be delivered
    batches: int = 0
    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a person should look at, though it need not be wrong
    set_aside: str | None = None  # the directory with all that was replaced, and a report.json that says this too
    changed: bool = False

    @property
    def ok(self) -> bool:
        """Nothing was wrong."""
        return not self.damage


def repair(path: str | os.PathLike[str], *, lock_timeout: float = 10.0, _files: Files | None = None) -> RepairReport:
    """Make a damaged queue one that opens, with every record that can be read and none that is wrong.

    Where nothing is wrong it changes nothing (a queue that crashed is recovered, as opening would). Damaged files are
    moved to NAME.damaged/N, never deleted. Killed at any point, the next repair finishes; opening in between works as
    before, or raises `Corrupt`. Durable when it returns.

    Raises `BadPath`, `Locked`, `DiskFull` or `Broken` (a file-system call failed): then repair it again.
    """
    full = paths.check_path(path)
    files = _files or Files()
    parts = [full, *(full + suffix for suffix in (paths.LOG, places.BATCHES, places.DEAD))]
    if not any(map(files.exists, parts)) and not paths.chunk_ids(full, files.list(os.path.dirname(full))):
        return RepairReport()
    try:
        header, created = lock.acquire(full, lock_timeout)
    except OSError as error:
        if isinstance(error, QewQewError):
            raise
        raise BadPath(f"cannot be opened: {error.strerror}", path=full) from error
    try:
        return _Repair(files, full, header.fd).run()
    except OSError as error:
        if isinstance(error, QewQewError):
            raise
        kind = DiskFull if error.errno in journal.FULL else Broken
        raise kind(f"the repair was stopped: {error.strerror}. Repair it again", path=error.filename or full) from error
    finally:
        if created and not any(os.pread(header.fd, 2, 0)):
            with contextlib.suppress(OSError):
                files.unlink(full)
        header.release()


class _Extent(NamedTuple):
    """Records that a commit behind the damage has put."""

    chunk_id: int
    records: int
    size: int
    crc: int  # from the base of the chunk on
    time: int
    frames: bytes  # empty: they are in the chunk file
    key: bytes | None  # under which they were put


class _Repair:
    def __init__(self, files: Files, path: str, header_fd: int) -> None:
        self._files = files
        self._path = path
        self._parent = os.path.dirname(path)
        self._header_fd = header_fd
        self.report = RepairReport()
        self._ids: set[int] = set()  # of chunk files beside the queue
        self._taken: set[int] = set()  # and of those that were made
        self._payload: dict[int, list[tuple[int, bytes]]] = {}  # chunk id: (offset, frames) that the log carries
        self._rewrite: set[int] = set()  # chunks of the chain that are written anew although all can be read
        self._rescued: list[_Extent] = []
        self._moves: list[str] = []  # what is moved to the new directory …
        self._copies: list[str] = []  # … and what is copied there, because something takes its place
        self._made: list[str] = []  # files that nothing refers to
        self._found_damage = False
        self._refused: QewQewError | None = None  # why opening gave up

    def run(self) -> RepairReport:
        with contextlib.suppress(FileNotFoundError, Corrupt):
            replayed = logs.replay(read_whole(self._files, self._path + paths.LOG), self._path + paths.LOG)
            if isinstance(replayed.last_rare, Repair):
                self._finish(replayed, replayed.last_rare)
        state = self._decide()
        self._look_into_batches(state)
        try:
            chain = self._read_chain(state)
            for batch in list(state.batches.values()):
                self._read_batch(batch, state)
            if not self._found_damage:
                self.report.records, self.report.batches = state.records, len(state.batches)
                return self.report
            replayed, repair = self._commit(chain, state)
        except BaseException:
            for path in self._made:
                with contextlib.suppress(OSError):
                    self._files.unlink(path)
            raise
        self._finish(replayed, repair)
        recovery.remove_leftovers(self._files, self._path, replayed.state, self._ids)
        return self.report

    def _damaged(self, path: str, offset: int, size: int, records: int | None, what: str) -> None:
        self.report.damage.append(Damage(path, offset, size, records, what))
        self._found_damage = True

    def _chunk_path(self, chunk_id: int) -> str:
        return chunk.chunk_path(self._path, chunk_id)

    # 1. What the queue is

    def _decide(self) -> State:
        header = self._files.read(self._header_fd, 64, 0)
        self._look_again()
        found = Found(self._path, chunk.FIRST.unpack_from(header)[0] if len(header) > 1 else 0, self._ids, None)
        log_path = self._path + paths.LOG
        if not self._files.exists(log_path):
            return self._as_opened(found) or self._without_log(found)
        data = read_whole(self._files, log_path)
        try:
            found.log = logs.replay(data, log_path)
            self._payload = logs.replay(data, log_path, keep_redo=True).redo
        except Corrupt as error:
            left = logs.salvage(data, log_path, keep_redo=True)
            what = f"the log is damaged ({error.args[0].partition(': ')[2]}); the commits before it hold"
            self._damaged(log_path, left.damaged, left.end - left.damaged, None, what)
            self._copies.append(log_path)
            if left.prefix is None or left.frames:
                return self._from_damaged_log(found, left)
            found.log = logs.salvage(data, log_path).prefix
            self._payload = left.prefix.redo
        assert found.log is not None
        torn = data[found.log.end :].rstrip(b"\0")
        if torn and not self._copies:
            what = "behind the last whole commit: what a crash tore, and nobody was told of, or the last commit, damaged"
            self._damaged(log_path, found.log.end, len(torn), None, what)
            self._copies.append(log_path)
        state = None if self._copies or self._is_wrong_in_the_middle(found) else self._as_opened(found)
        if state is None:
            state = self._from_log(found, header)
            if not self._found_damage:  # what was missing, the log had
                state = self._as_opened(found) or state
        if self._refused and not self._found_damage:
            self._damaged(self._refused.path or self._path, self._refused.offset or 0, 0, None, str(self._refused))
        return state

    def _is_wrong_in_the_middle(self, found: Found) -> bool:
        """Whether the pointers of a chunk are wrong that opening does not look at."""
        assert found.log is not None
        return (
            found.log.clean
            and java.is_as_closed(self._files, found)
            and not java.is_as_closed(self._files, found, all_chunks=True)
        )

    def _look_again(self) -> None:
        self._ids = paths.chunk_ids(self._path, self._files.list(self._parent))
        self._taken = set(self._ids)

    def _as_opened(self, found: Found) -> State | None:
        """What opening believes; None where it gives up."""
        self._refused = None
        owned: dict[int, int] = {}
        before = found.log.state.records if found.log and found.log.clean and not java.is_as_closed(self._files, found) else None
        try:
            opened = recovery.recover(self._files, self._path, self._header_fd, owned)
            opened.log.close()
            chunk_files.store_header(self._files, self._header_fd, opened.state.first)
        except _UNFIT as error:
            self._refused = error if isinstance(error, QewQewError) else Corrupt(str(error), path=self._path)
            return None
        finally:
            for fd in owned.values():
                self._files.close(fd)
            self._look_again()
        self.report.notes += opened.notes
        if before is not None:
            self.report.notes.append(
                f"{self._path}: another program has used the queue since it was closed. It holds {opened.state.records} "
                f"records; it held {before}"
            )
        for chunk_id in sorted(self._ids - opened.state.chain.keys()):
            self._is_orphan(chunk_id)
        return opened.state

    def _is_orphan(self, chunk_id: int) -> bool:
        path = self._chunk_path(chunk_id)
        with contextlib.suppress(OSError):  # no file at all: it is not ours
            content, problem = orphans.readable(self._files, path, chunk_id)
            if content.records or problem:
                self.report.notes.append(f"{path}: nothing refers to it; Queue.orphans offers its records")
                return True
        return False

    def _from_log(self, found: Found, header: bytes) -> State:
        """The log is the truth; header and pointers are not, or something is missing."""
        replayed, files = found.log, self._files
        assert replayed is not None
        state = replayed.state
        if not replayed.clean:
            fd = files.open(self._path + paths.LOG)  # after a kill its end may be in the page cache only: files follow the log
            try:
                files.sync(fd)
            finally:
                files.close(fd)
        self._stand_in(replayed)
        with contextlib.suppress(*_UNFIT):
            recovery.finish_moves(files, self._path, state, replayed.last_rare)
        self._look_again()
        self._fetch_from_lease(state)
        if len(header) not in (0, chunk.FIRST.size) or found.header not in replayed.firsts | {state.first}:
            what = f"the header was {header.hex() or 'empty'}; it says chunk {state.first} again"
            self._damaged(self._path, 0, chunk.FIRST.size, 0, what)
        ours = set(self._ids)
        for one, pointers in state.pointers():
            if one.id in self._ids and one.stored is not None:
                on_disk = read_pointers(files, self._chunk_path(one.id))[1:]
                if any(now not in either for now, *either in zip(on_disk, one.stored, pointers, strict=True)):
                    what = f"head, tail, next were {on_disk}; they are {pointers} again"
                    self._damaged(self._chunk_path(one.id), 0, chunk.BEGIN, 0, what)
                    ours.remove(one.id)  # somebody else may have written there: what only the log has goes to a new file
        recovery.redo(files, self._path, state, {one: runs for one, runs in replayed.redo.items() if one in ours})
        self._moves += [self._chunk_path(one) for one in sorted((replayed.gone & self._ids) - state.chain.keys())]
        header_is_ours = found.header in replayed.firsts
        self._look_behind(state, chunk.NONE if header_is_ours else found.header, replayed.gone)
        return state

    def _look_behind(self, state: State, header: int, gone: set[int]) -> None:
        """Keep records in the files that the log does not know: it has lost its end, or another program has put them."""
        last, current, seen = state.last, header, {*state.chain, *gone}
        if last is not None and last.id in self._ids:
            path = self._chunk_path(last.id)
            disk = read_pointers(self._files, path)
            stored = last.stored or disk[1:]
            for start in dict.fromkeys((last.tail, stored[1])):  # another program does not know what only the log had
                if start < disk.tail <= disk.size and disk.tail not in (last.tail, stored[1]):
                    with contextlib.suppress(Corrupt):
                        self._keep(scan(self._files, path, last.id, OnDisk(disk.size, start, disk.tail, chunk.NONE)), path)
                        break
            current = disk.next if disk.next != stored[2] else chunk.NONE
        while current in self._ids and current not in seen:
            seen.add(current)
            path = self._chunk_path(current)
            self._keep(orphans.readable(self._files, path, current)[0], path)
            self._moves.append(path)
            current = read_pointers(self._files, path).next

    def _keep(self, one: Chunk, path: str) -> None:
        runs = list(self._good_runs(one, path))
        if any(any(frames) for frames, _, _ in runs):  # zeros would be empty records, but more likely are unused space
            self._damaged(path, one.head, one.tail - one.head, 0, f"{one.records} records that the log does not know; kept")
            for frames, records, when in runs:
                self._rescued.append(_Extent(one.id, records, len(frames), 0, when, frames, None))

    def _stand_in(self, replayed: Replayed) -> None:
        """For a lease to be finished, what is missing of its chunks is replaced by zeros, to be found damaged later."""
        files, last, making = self._files, replayed.last_rare, self._path + paths.LEASE
        batch = replayed.state.batches.get(last.id) if isinstance(last, Lease) else None
        if batch is None or files.is_directory(os.path.join(self._path + places.BATCHES, batch.id)):
            return
        if not files.is_directory(making):
            files.make_directory(making)
        for one in batch.chunks:
            target = os.path.join(making, batch_files.segment_file(self._path, one.id))
            if not files.exists(target) and not files.exists(self._chunk_path(one.id)):
                fd = files.open(target, new=True)
                try:
                    files.truncate(fd, one.tail)
                finally:
                    files.close(fd)

    def _fetch_from_lease(self, state: State) -> None:
        """A chunk in NAME.lease that the log knows nothing of was leased by a commit that is damaged."""
        making = self._path + paths.LEASE
        for one in state.chain.values():
            source = os.path.join(making, batch_files.segment_file(self._path, one.id))
            if one.id not in self._ids and self._files.exists(source):
                self._files.rename(source, self._chunk_path(one.id))
                self._files.sync_directory(self._parent)
                self._files.sync_directory(making)
                self._look_again()

    def _without_log(self, found: Found) -> State:
        if any(self._batch_directories()):
            what = "there are batches, but no log"
        else:
            what = "header and chunk files contradict themselves"
        self._damaged(self._path + paths.LOG, 0, 0, None, what + "; the chunk files are believed as far as they go")
        return self._from_files(found, None)

    def _from_files(self, found: Found, old: State | None) -> State:
        """Believe the chunk files as far as they go, without checksums."""
        state = old or State()
        state.chain = self._chain_of_files(found)
        return state

    def _chain_of_files(self, found: Found) -> dict[int, Chunk]:
        chain: dict[int, Chunk] = {}
        seen: set[int] = set()
        current = found.header
        if current and current not in found.ids:
            if chunk.successor(current) in found.ids:  # the original unlinks a read chunk before it moves the header on
                current = chunk.successor(current)
            else:
                self._damaged(self._path, 0, 2, None, f"refers to chunk {current}, of which there is no file")
        while current in found.ids and current not in seen:
            seen.add(current)
            path = self._chunk_path(current)
            one, problem = orphans.readable(self._files, path, current)
            following = read_pointers(self._files, path).next
            if problem:
                self._rewrite.add(current)
                what = f"{problem}; {one.records} records before that are kept"
                self._damaged(path, one.tail, max(one.size - one.tail, 0), None, what)
            if one.records:
                chain[current] = one
            if following > chunk.MAX_ID or following in seen:
                self._damaged(path, 8, 2, None, f"refers to chunk {following}; the chain ends here")
            current = following
        return chain

    def _from_damaged_log(self, found: Found, left: logs.Salvaged) -> State:
        """Commits are missing from the log, in its middle, or its snapshot is not whole."""
        kinds = [one.kind for one in left.frames]
        sealed = max((number for number, kind in enumerate(kinds) if kind == logs.CHECKPOINT), default=-1)
        state = _Behind(self, left.prefix.state if left.prefix else State())
        if left.prefix is None or sealed >= 0:  # the files are as they were at that checkpoint, or at the snapshot
            state.real = self._chain_of_files(found)
            self._payload = {}
        else:
            state.real = left.prefix.state.chain
            self._payload = left.prefix.redo
            self._rewrite.update(list(state.real)[-1:])  # what lies behind its tail is to be kept, not overwritten
        for number, (_, kind, body, _) in enumerate(left.frames):
            state.late = number > sealed
            with contextlib.suppress(*logs.NONSENSE):
                if kind == logs.COMMIT:
                    state.hear(body)
                elif left.prefix is None:
                    logs.load(kind, body, state)
        self._fetch_from_lease(State(chain=state.real))
        self._rescue(state)
        return State(chain=state.real).with_batches_of(state)

    def _rescue(self, state: _Behind) -> None:
        """Append what was put behind the damage: nobody knows any more where it lay, or whether it was taken since."""
        for chunk_id in dict.fromkeys(one.chunk_id for one in state.heard):
            mine = [one for one in state.heard if one.chunk_id == chunk_id]
            known = state.real.get(chunk_id)
            wanted = {one.crc: one for one in mine if not one.frames and one.size}
            runs: dict[int, bytes] = {}
            if wanted and chunk_id in self._ids:
                data = read_whole(self._files, self._chunk_path(chunk_id))
                for base in {chunk.BEGIN, known.base if known else chunk.BEGIN}:
                    runs |= _find_extents(data, base, wanted)
            for one in mine:
                frames = one.frames or runs.get(one.crc, b"")
                if frames:
                    state.found[id(one)] = frames
                elif one.size:
                    what = f"{one.records} records of a commit behind the damage are not in this file"
                    if chunk_id not in self._ids:
                        what += ", which is not there: it was read to its end, or is lost"
                    self._damaged(self._chunk_path(chunk_id), 0, one.size, None, what)
                    if one.key is not None:
                        state.put_keys.pop(one.key, None)
        self._rescued = [one._replace(frames=state.found[id(one)]) for one in state.heard if id(one) in state.found]
        if self._rescued:
            self.report.notes.append(
                f"{sum(one.records for one in self._rescued)} records were put by commits behind the damage in the log. They are "
                "at the end of the queue; those that were taken or leased since will be delivered again"
            )

    # Batches that no log knows

    def _batch_directories(self) -> Iterator[str]:
        """Those with records; of an acknowledged batch the manifest alone may be kept, for people."""
        prefix = places.numbered_id(self._path, 0)[:-16]
        for home in (self._path + places.BATCHES, self._path + places.DEAD):
            if self._files.is_directory(home):
                for name in sorted(self._files.list(home)):
                    directory = os.path.join(home, name)
                    if not name.startswith(prefix) or not self._files.is_directory(directory):
                        continue
                    if any(not one.startswith(manifest.MANIFEST) for one in self._files.list(directory)):
                        yield directory

    def _look_into_batches(self, state: State) -> None:
        """Batches that the log does not know become dead letters: nobody can say whether they were acknowledged."""
        expired = {places.numbered_id(self._path, number) for _, number in state.expired_keys.values()}
        for directory in list(self._batch_directories()):
            name = os.path.basename(directory)
            if name in state.batches or name in expired:
                continue
            unknown = BatchState(name, [], "dead", 0, 0, 0, 0, 0)
            places.settle_place(self._files, self._path, unknown)
            directory = places.directory_of(self._path, unknown)
            batch = self.batch_of(directory, "dead")
            if batch is None:
                self._moves.append(directory)
                self._damaged(directory, 0, 0, None, "a batch that neither the log nor a good manifest describes; set aside")
                continue
            batch.reason = "found by a repair; the log does not say whether it was acknowledged"
            state.batches[batch.id] = batch
            what = f"{batch.records} records of a batch that the log does not know are in the dead letters now"
            self._damaged(directory, 0, 0, 0, what)
        whole = {(one.id, one.tail) for batch in state.batches.values() for one in batch.chunks}
        for one in list(state.chain.values()):
            if one.id not in self._ids and (one.id, one.tail) in whole:
                del state.chain[one.id]

    def batch_of(self, directory: str, state: str) -> BatchState | None:
        """The batch in a directory as its manifest describes it, without segments that are not as it says."""
        try:
            body = manifest.load(directory)
            created = int(datetime.fromisoformat(body.created.replace("Z", "+00:00")).timestamp() * 1000)
            arguments.check_key(body.key)
        except (BadManifest, ValueError):
            return None
        if body.id != os.path.basename(directory) or not BATCH_ID.fullmatch(body.id):
            return None
        batch = BatchState(body.id, [body.key], state, body.attempt, 0, 0, created, now_ms())
        for one in body.segments:
            path, number = os.path.join(directory, one.file), one.file.rpartition(".")[2]
            if not number.isdecimal() or one.file != batch_files.segment_file(self._path, int(number)):
                return None
            content = None
            with contextlib.suppress(Corrupt):
                content = scan(self._files, path, int(number), OnDisk(one.end, one.start, one.end, chunk.NONE))
            if content is None or f"{content.crc:08x}" != one.crc32 or content.total != one.records:
                self._moves.append(path)
                self._damaged(path, one.start, one.end - one.start, one.records, "not as its manifest says; set aside")
                continue
            batch.chunks.append(content)
            batch.records += content.records
            batch.bytes += content.bytes
        return batch

    # 2. Reading, piece by piece

    def _read_chain(self, state: State) -> list[Chunk]:
        """The new chain. Chunks with damage are written anew; nothing refers to the new files yet."""
        old = list(state.chain.values())
        # All are checked before any is written: without damage nothing is changed.
        keep = [self._check(one, self._chunk_path(one.id)) and one.id not in self._rewrite for one in old]
        chain: list[Chunk] = []
        # Ids before the first chunk for those inside the chain: the original takes the id after the last for its next.
        last = old[-1].id if old else chunk.NONE
        first = old[0].id if old else 1
        for number, one in enumerate(old):
            if keep[number]:
                chain.append(one)
                continue
            path = self._chunk_path(one.id)
            if any(keep[number + 1 :]):
                new = first = self._free_id(first, chunk.predecessor)
            else:
                new = last = self._free_id(last, chunk.successor)
            copy = self._write(self._chunk_path(new), new, self._good_runs(one, path))
            if copy is not None:
                chain.append(copy)
            if one.id in self._ids:
                self._moves.append(path)
        runs = iter([(one.frames, one.records, one.time) for one in self._rescued])
        while (first_run := next(runs, None)) is not None:
            last = self._free_id(last, chunk.successor)
            copy = self._write(self._chunk_path(last), last, _limited(first_run, runs))
            if copy is not None:
                chain.append(copy)
        return chain

    def _free_id(self, start: int, step: Callable[[int], int]) -> int:
        if len(self._taken) == chunk.MAX_ID:
            raise Full("all chunk ids are in use; move chunk files that nothing refers to away", path=self._path)
        start = step(start)
        while start in self._taken:
            start = step(start)
        self._taken.add(start)
        return start

    def _check(self, one: Chunk, path: str) -> bool:
        """Whether the file holds all that was committed; notes what it does not."""
        there = self._files.exists(path)
        good, left = True, 0
        ranges: list[tuple[int, int, bool]] = []  # first piece, piece behind, whether the log has them
        with self._reading(path if there else None) as fd:
            for index in range(one.piece_of(one.head) if one.records else 0, len(one.pieces)):
                data, from_log = self._piece(one, fd, index)
                left += sum(records for _, records in _there(one, one.pieces[index].offset, data or b""))
                if from_log is False:
                    continue
                good, from_log = False, bool(from_log)
                if ranges and ranges[-1][1] == index and ranges[-1][2] == from_log:
                    ranges[-1] = (ranges[-1][0], index + 1, from_log)
                else:
                    ranges.append((index, index + 1, from_log))
            size = self._files.size(fd) if fd is not None else 0
        if good and (not there or size < one.tail):
            good = False
            self._damaged(path, size, one.tail - size, 0, "the file is missing or ends too early; it has no records")
        counts = [0 if from_log else _count(one, begin, end) for begin, end, from_log in ranges]
        if counts.count(None) == 1:
            counts[counts.index(None)] = one.records - left - sum(count or 0 for count in counts)
        for (begin, end, from_log), records in zip(ranges, counts, strict=True):
            start, stop = max(one.pieces[begin].offset, one.head), one.piece_end(end - 1)[0]
            what = "the file is missing" if not there else "the file ends too early" if size < stop else "the checksum is wrong"
            if from_log:
                what += "; the log had what belongs here"
            self._damaged(path, start, stop - start, records, what)
        return good

    @contextlib.contextmanager
    def _reading(self, path: str | None) -> Iterator[int | None]:
        fd = None if path is None else self._files.open_to_read(path)
        try:
            yield fd
        finally:
            if fd is not None:
                self._files.close(fd)

    def _piece(self, one: Chunk, fd: int | None, index: int) -> tuple[bytes | None, bool | None]:
        """The bytes of a piece if they can be had, and whether only with the help of the log (None: not at all)."""
        start, before, crc, _ = one.pieces[index]
        end, records, end_crc = one.piece_end(index)
        data = b""
        if fd is not None:
            try:
                data = self._files.read(fd, end - start, start)
            except OSError as error:
                if error.errno != errno.EIO:  # a bad sector
                    raise
        for from_log in (False, True):
            if from_log:
                filled = bytearray(data.ljust(end - start, b"\0"))
                for at, frames in self._payload.get(one.id, ()):
                    low, high = max(at, start), min(at + len(frames), end)
                    if low < high:
                        filled[low - start : high - start] = frames[low - at : high - at]
                data = bytes(filled)
            if len(data) == end - start and zlib.crc32(data, crc) == end_crc and _records(data) == records - before:
                return data, from_log
        return None, None

    def _good_runs(self, one: Chunk, path: str) -> Iterator[tuple[bytes, int, int]]:
        """Frames, how many, and when they were committed: all of a chunk that is there and right."""
        with self._reading(path if self._files.exists(path) else None) as fd:
            for index in range(one.piece_of(one.head) if one.records else 0, len(one.pieces)):
                data, _ = self._piece(one, fd, index)
                for frames, records in _there(one, one.pieces[index].offset, data or b""):
                    yield frames, records, one.pieces[index].time

    def _write(self, path: str, chunk_id: int, runs: Iterable[tuple[bytes, int, int]], segment: bool = False) -> Chunk | None:
        """A new durable chunk file, empty by its pointers unless it is a segment; None if there is nothing to write."""
        files, one, fd = self._files, Chunk(chunk_id, chunk.BEGIN), -1
        try:
            for frames, records, when in runs:
                if fd < 0:
                    fd = files.open(path, new=True)
                    self._made.append(path)
                    files.write(fd, chunk.POINTERS.pack(chunk.BEGIN, chunk.BEGIN, chunk.NONE), 0)
                files.write(fd, frames, one.tail)
                one.append(len(frames), records, zlib.crc32(frames, one.crc), when)
            if fd < 0:
                return None
            if segment:
                files.write(fd, chunk.POINTERS.pack(chunk.BEGIN, one.tail, chunk.NONE), 0)
            files.sync(fd)
        finally:
            if fd >= 0:
                files.close(fd)
        files.sync_directory(os.path.dirname(path))
        one.size = one.tail
        return one

    def _read_batch(self, batch: BatchState, state: State) -> None:
        """Check a batch; segments with damage are written anew, without what is wrong."""
        files, directory = self._files, places.directory_of(self._path, batch)
        if batch.state == "acked":
            self._read_acked(batch, directory, state)
            return
        if not files.is_directory(directory):
            places.settle_place(files, self._path, batch)
        if not files.is_directory(directory):
            self._damaged(directory, 0, 0, 0, "the directory of the batch is missing; it is made anew")
            places.make_home(files, self._path, places.DEAD if batch.state == "dead" else places.BATCHES)
            files.make_directory(directory)
            files.sync_directory(os.path.dirname(directory))
        old, segment_paths = (
            batch.chunks,
            [os.path.join(directory, batch_files.segment_file(self._path, one.id)) for one in batch.chunks],
        )
        good = [self._check(one, path) for one, path in zip(old, segment_paths, strict=True)]
        if all(good):
            if not self._has_manifest(batch, directory, segment_paths):
                what = "the manifest is missing or not that of the batch; it is written anew"
                self._damaged(os.path.join(directory, manifest.MANIFEST), 0, 0, 0, what)
                self._copies.append(os.path.join(directory, manifest.MANIFEST))
            return
        self._copies.append(os.path.join(directory, manifest.MANIFEST))
        batch.chunks = []
        taken = {one.id for one in old} | paths.chunk_ids(self._path, files.list(directory))
        new = 0
        for one, path, whole in zip(old, segment_paths, good, strict=True):
            if whole:
                batch.chunks.append(one)
                continue
            new = next(number for number in range(new + 1, chunk.MAX_ID) if number not in taken)
            target = os.path.join(directory, batch_files.segment_file(self._path, new))
            copy = self._write(target, new, self._good_runs(one, path), segment=True)
            if copy is not None:
                batch.chunks.append(copy)
            if files.exists(path):
                self._moves.append(path)
        batch.records = sum(one.records for one in batch.chunks)
        batch.bytes = sum(one.bytes for one in batch.chunks)

    def _has_manifest(self, batch: BatchState, directory: str, segment_paths: list[str]) -> bool:
        try:
            found = manifest.load(directory)
        except BadManifest:
            return False
        right = batch_files.manifest_of(self._files, self._path, batch, segment_paths)
        # An older release wrote no checksums of the boundaries.
        return found in (right, replace(right, segments=tuple(replace(one, checksums=()) for one in right.segments)))

    def _read_acked(self, batch: BatchState, directory: str, state: State) -> None:
        """The records were processed, and are only kept for a while: all of them, or none."""
        try:
            body = manifest.load(directory)
            if (body.id, body.records, body.bytes) != (batch.id, batch.records, batch.bytes):
                raise BadManifest("it is that of another batch", path=directory)
            for one in body.segments:
                for _ in segments.read_segment(directory, one):
                    pass
        except (BadManifest, Corrupt) as error:
            what = f"{error}. The batch was acknowledged; its {batch.records} records are no longer kept"
            self._damaged(directory, 0, 0, 0, what)
            state.forget([batch.id])
            if self._files.is_directory(directory):
                self._moves.append(directory)

    # 3. The commit

    def _commit(self, chain: list[Chunk], state: State) -> tuple[Replayed, Repair]:
        files, log_path = self._files, self._path + paths.LOG
        new = State.of({one.id: one for one in chain})
        new.with_batches_of(state)
        new.changes = max(new.changes, stamp.read(files, self._path))
        for one in chain:
            one.size = max(one.tail, min(one.size, read_pointers(files, self._chunk_path(one.id)).size))
        if files.is_directory(self._path + paths.LEASE):
            self._moves.append(self._path + paths.LEASE)
        for chunk_id in sorted(self._ids - new.chain.keys()):
            path = self._chunk_path(chunk_id)
            if path in self._moves or self._is_orphan(chunk_id):
                continue
            with contextlib.suppress(OSError):  # no file at all: it is not ours
                if any(read_whole(files, path)[chunk.BEGIN :]):  # else opening may remove it as a leftover
                    self.report.notes.append(f"{path}: nobody can say whether what it holds was committed; set aside")
                    self._moves.append(path)
        directory = orphans.make_aside(files, self._path)
        for path in self._copies:
            if files.exists(path):
                target = os.path.join(directory, os.path.relpath(path, self._parent).replace(os.sep, "_"))
                write_new(files, target, read_whole(files, path))
        files.sync_directory(directory)
        targets: set[str] = set()
        moves = []
        for path in self._moves:
            name = os.path.relpath(path, self._parent).replace(os.sep, "_")
            target = orphans.place_in(files, directory, name)
            if files.exists(path) and target not in targets:
                targets.add(target)
                moves.append([os.path.relpath(path, self._parent), os.path.relpath(target, self._parent)])
        self.report.set_aside, self.report.changed = directory, True
        self.report.records, self.report.batches = new.records, len(new.batches)
        body = asdict(self.report) | {"set_aside": os.path.relpath(directory, self._parent)}
        body["damage"] = [one | {"path": os.path.relpath(one["path"], self._parent)} for one in body["damage"]]
        generation = journal.new_generation()
        data = logs.snapshot(new, generation)
        data += journal.frame(logs.COMMIT, logs.commit(now_ms(), [Repair(moves, body)]), generation, len(data))
        write_new(files, log_path + ".tmp", data)
        files.sync_directory(self._parent)
        self._made.clear()
        files.rename(log_path + ".tmp", log_path)
        files.sync_directory(self._parent)
        replayed = logs.replay(data, log_path)
        assert isinstance(replayed.last_rare, Repair)
        return replayed, replayed.last_rare

    # 4. What follows

    def _finish(self, replayed: Replayed, repair: Repair) -> None:
        """Make the files what the new log says. Done again from the beginning after an interruption."""
        files, state = self._files, replayed.state
        moves, body = repair
        try:
            aside = [(self._beside(source), self._beside(target)) for source, target in moves]
            self.report = self._absolute(body)
        except logs.NONSENSE as error:
            raise Corrupt(f"an unfinished repair makes no sense: {error!r}", path=self._path + paths.LOG) from error
        for one, pointers in state.pointers():
            on_disk = read_pointers(files, self._chunk_path(one.id))[1:]
            one.stored = on_disk if on_disk == pointers else None
        chunk_files.store_pointers(files, self._path, state)
        chunk_files.store_header(files, self._header_fd, state.first)
        parents = set()
        for source, target in aside:
            parents |= {os.path.dirname(source), os.path.dirname(target)}
            if files.exists(source) and not files.exists(target):
                files.rename(source, target)
        for parent in sorted(parents):
            if files.is_directory(parent):
                files.sync_directory(parent)
        for batch in state.batches.values():
            directory = places.directory_of(self._path, batch)
            if batch.state != "acked":
                if not files.is_directory(directory):
                    places.settle_place(files, self._path, batch)
                segment_paths = [os.path.join(directory, batch_files.segment_file(self._path, one.id)) for one in batch.chunks]
                if not self._has_manifest(batch, directory, segment_paths):
                    batch_files.settle_manifest(files, self._path, batch)
        assert self.report.set_aside is not None
        orphans.write_report(files, self.report.set_aside, {"queue": os.path.basename(self._path), "moved": moves} | body)
        log_fd: list[int] = []
        recovery.own_log(files, self._path, log_fd)
        log = recovery.open_log(files, replayed, self._path, log_fd)
        try:
            log.sync(log.append(logs.CHECKPOINT, java.seal(files, self._path)), refuse=False)
        finally:
            log.close()

    def _absolute(self, body: dict[str, Any]) -> RepairReport:
        damage = [Damage(**one | {"path": self._beside(one["path"])}) for one in body["damage"]]
        return RepairReport(**body | {"damage": damage, "set_aside": self._beside(body["set_aside"])})

    def _beside(self, name: str) -> str:
        """The path of a file that the log names; raises ValueError if it is not of the queue, or lies elsewhere."""
        path = os.path.normpath(os.path.join(self._parent, name))
        inside = os.path.realpath(os.path.dirname(path)) + "/"
        first, base = os.path.relpath(path, self._parent).split("/")[0], os.path.basename(self._path)
        ours = first == base or first.startswith(base + ".")  # and not those of another queue beside it
        if not ours or not inside.startswith(os.path.realpath(self._parent) + "/"):
            raise ValueError(f"{name!r:.120} is not the queue's")
        return path


class _Behind(State):
    """Hears what commits behind damage say: batches and keys as they are, of the chain only what was put."""

    def __init__(self, owner: _Repair, known: State) -> None:
        super().__init__(known.batches, known.expired_keys, put_keys=known.put_keys)
        self.owner = owner
        self.real: dict[int, Chunk] = {}
        self.late = True  # not yet in the files
        self.heard: list[_Extent] = []
        self.found: dict[int, bytes] = {}

    def hear(self, body: bytes) -> None:
        before, key, time = len(self.heard), None, logs.time_of(body)
        try:
            for operation in logs.unpack(body):
                key = operation.key if isinstance(operation, PutKey) and operation.key not in self.put_keys else key
                self.apply(operation, time)
        finally:
            if key is not None:
                self.heard[before:] = [one._replace(key=key) for one in self.heard[before:]]

    def apply(self, operation: Operation, time: int) -> None:
        match operation:
            case Append(chunk_id, records, frames):
                self._put(_Extent(chunk_id, records, len(frames), zlib.crc32(frames), time, frames, None))
            case Extent(chunk_id, records, size, crc):
                self._put(_Extent(chunk_id, records, size, crc, time, b"", None))
            case NewChunk() | Take():
                pass
            case _:
                super().apply(operation, time)

    def _put(self, one: _Extent) -> None:
        if self.late:
            self.heard.append(one)

    def clear(self) -> None:
        pass

    def replace(self, chunk_id: int, cut: Cut, new_id: int, size: int) -> None:
        if self.late and chunk_id in self.real:
            copy = cut.chunk(new_id)
            copy.size = size
            self.real = {one.id: one for one in (copy if one.id == chunk_id else one for one in self.real.values())}

    def lease(self, batch: BatchState, parts: list[tuple[int, Cut | None]]) -> None:
        directory = places.directory_of(self.owner._path, batch)
        found = self.owner.batch_of(directory, "leased")
        if found is None:  # dead since, or the commit of a lease that was not finished: it moved nothing yet, or is looked for
            return
        batch.chunks, batch.records, batch.bytes = found.chunks, found.records, found.bytes
        self.batches[batch.id] = batch
        whole = {chunk_id for chunk_id, cut in parts if cut is None}
        self.heard = [one for one in self.heard if one.chunk_id not in whole]

    def put_back(self, batch_id: str, new_ids: list[int]) -> None:
        batch = self.batches.pop(batch_id, None)
        if batch is not None and self.late and len(batch.chunks) == len(new_ids):
            for one, new_id in zip(batch.chunks, new_ids, strict=True):
                one.id, one.stored = new_id, None
            self.real = {one.id: one for one in (*batch.chunks, *self.real.values())}


def _limited(first: tuple[bytes, int, int], rest: Iterator[tuple[bytes, int, int]]) -> Iterator[tuple[bytes, int, int]]:
    """The runs that go into one file; one more than fits is smaller than any chunk."""
    yield first
    size = len(first[0])
    while size < NEW_CHUNK_BYTES and (run := next(rest, None)) is not None:
        yield run
        size += len(run[0])


def _records(frames: bytes) -> int:
    """How many records these are; -1 if they are no run of whole frames."""
    try:
        return len(chunk.split(frames)[0])
    except ValueError:
        return -1


def _there(one: Chunk, start: int, data: bytes) -> Iterator[tuple[bytes, int]]:
    """The runs in a piece that nobody has taken, and how many records each has."""
    at, end = max(start, one.head), start + len(data)
    for span in (*((gone.start, gone.end) for gone in one.gone), (end, end)):
        stop = min(span[0], end)
        if at < stop:
            frames = data[at - start : stop - start]
            yield frames, _records(frames)
        at = max(at, span[1])


def _count(one: Chunk, begin: int, end: int) -> int | None:
    """The records of some pieces that nobody has taken; None if what is taken begins or ends outside."""
    start, (stop, records, _) = one.pieces[begin].offset, one.piece_end(end - 1)
    records -= max(one.pieces[begin].records, one.taken)
    for span in one.gone:
        if span.start < stop and span.end > start:
            if not start <= span.start <= span.end <= stop:
                return None
            records -= span.records
    return records


def _find_extents(data: bytes, base: int, wanted: dict[int, _Extent]) -> dict[int, bytes]:
    """Where the bytes from the base on have the checksum of a commit, it ends there: crc → its frames."""
    view, found = memoryview(data), dict[int, bytes]()
    starts = {base: 0}  # offset of each record → how many are before it
    at, crc = base, 0
    while at + 2 <= len(data) and (end := chunk.record_end(data, at)) <= len(data) and len(found) < len(wanted):
        crc, at = zlib.crc32(view[at:end], crc), end
        starts[at] = len(starts)
        one = wanted.get(crc)
        if one is not None and starts[at] - starts.get(at - one.size, -1) == one.records:
            found[crc] = data[at - one.size : at]
    return found
