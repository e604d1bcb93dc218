"""`Decision`: step 1 of a repair. It decides what the queue is: by the log as far as that is whole, else by the chunk files."""

from __future__ import annotations

import contextlib
import os
from datetime import datetime

from qewqew_core import arguments
from qewqew_core.batch import manifest, places
from qewqew_core.batch.batch_state import BATCH_ID, BatchState
from qewqew_core.crc import crc32
from qewqew_core.disk import journal
from qewqew_core.disk.descriptors import Descriptors, close_each
from qewqew_core.disk.files import read_whole, write_new
from qewqew_core.errors import BadManifest, Corrupt, QewQewError
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk, Cut
from qewqew_core.limits import now_ms
from qewqew_core.queue import batch_files, chunk_files, java, orphans, recovery, stamp
from qewqew_core.queue import log as logs
from qewqew_core.queue.found import Found
from qewqew_core.queue.log import Replayed
from qewqew_core.queue.operations import Append, Extent, Lease, NewChunk, Operation, PutKey, Take
from qewqew_core.queue.reading import OnDisk, read_pointers, scan
from qewqew_core.queue.repair_pieces import Pieces
from qewqew_core.queue.repair_plan import Plan, Rescued
from qewqew_core.queue.state import State

_UNFIT = (FileNotFoundError, Corrupt, BadManifest)


class Decision:
    """The decision about the queue of this plan."""

    def __init__(self, plan: Plan, pieces: Pieces) -> None:
        self._plan = plan
        self._files, self._path = plan.files, plan.path
        self._pieces = pieces

    def decide(self) -> State:
        header = self._files.read(self._plan.header_fd, 64, 0)
        self._plan.look_again()
        first = chunk.FIRST.unpack_from(header)[0] if len(header) > 1 else 0
        found = Found(self._files, self._path, first, None)
        log_path = self._plan.log_path
        if not self._files.exists(log_path):
            return self._as_opened(found) or self._without_log(found)
        data = read_whole(self._files, log_path)
        try:
            found.log = logs.replay(data, log_path)
            if (lost := recovery.lost_from(self._files, self._path, found.log)) is not None:  # as opening does it
                data = data[:lost]
                found.log = logs.replay(data, log_path)
            self._plan.payload = logs.replay(data, log_path, keep_redo=True).redo
        except Corrupt as error:
            left = logs.salvage(data, log_path, keep_redo=True)
            what = f"the log is damaged ({error.what}); the commits before it hold"
            self._plan.damaged(log_path, left.damaged, left.end - left.damaged, None, what)
            self._plan.copies.append(log_path)
            if left.prefix is None or left.frames:
                return self._from_damaged_log(found, left)
            found.log = logs.salvage(data, log_path).prefix
            self._plan.payload = left.prefix.redo
        assert found.log is not None
        torn = data[found.log.end :].rstrip(b"\0")
        if torn and not self._plan.copies:
            what = "after the last whole commit: a torn commit that was never confirmed, or the last commit, damaged"
            self._plan.damaged(log_path, found.log.end, len(torn), None, what)
            self._plan.copies.append(log_path)
        state = None if self._plan.copies or self._is_wrong_in_the_middle(found) else self._as_opened(found)
        if state is None:
            state = self._from_log(found, header)
            if not self._plan.found_damage:  # what was missing, the log had
                state = self._as_opened(found) or state
        refused = self._plan.refused
        if refused and not self._plan.found_damage:
            self._plan.damaged(refused.path or self._path, refused.offset or 0, 0, None, str(refused))
        return state

    def _is_wrong_in_the_middle(self, found: Found) -> bool:
        """Whether a chunk that opening does not look into has wrong pointers."""
        assert found.log is not None
        return (
            found.log.clean
            and java.is_as_closed(self._files, found)
            and not java.is_as_closed(self._files, found, all_chunks=True)
        )

    def _as_opened(self, found: Found) -> State | None:
        """What opening believes; None if it gives up."""
        self._plan.refused = None
        owned: dict[int, int] = {}
        before = found.log.state.records if found.log else 0
        try:
            opened = recovery.recover(self._files, self._path, self._plan.header_fd, owned)
            opened.log.close()
            chunk_files.store_header(self._files, self._plan.header_fd, opened.state.first)
        except _UNFIT as error:
            self._plan.refused = error if isinstance(error, QewQewError) else Corrupt(str(error), path=self._path)
            return None
        finally:
            close_each(owned)
            self._plan.look_again()
        self._plan.report.notes += opened.notes
        if opened.by_java:
            self._plan.report.notes.append(
                f"{self._path}: another program has used the queue since it was closed. It holds {opened.state.records} "
                f"records; it held {before}"
            )
        for chunk_id in sorted(self._plan.ids - opened.state.chain.keys()):
            self._plan.is_orphan(chunk_id)
        return opened.state

    def _from_log(self, found: Found, header: bytes) -> State:
        """Believe the log: header or pointers are wrong, or something is missing."""
        replayed, files = found.log, self._files
        assert replayed is not None
        state = replayed.state
        if not replayed.clean:
            # After a kill its end may be in the page cache only: files follow the log.
            with Descriptors([files.open(self._plan.log_path)]) as (fd,):
                files.sync(fd)
        self._make_again(replayed)
        with contextlib.suppress(*_UNFIT):
            recovery.finish_moves(files, self._path, state, replayed.last_json_operation)
        self._plan.look_again()
        self._fetch_from_lease(state)
        if len(header) not in (0, chunk.FIRST.size) or found.header not in replayed.firsts | {state.first}:
            what = f"the header was {header.hex() or 'empty'}; it says chunk {state.first} again"
            self._plan.damaged(self._path, 0, chunk.FIRST.size, 0, what)
        ours = set(self._plan.ids)
        for chunk_state, pointers in state.pointers():
            if chunk_state.id in self._plan.ids:
                on_disk = read_pointers(files, self._plan.chunk_path(chunk_state.id))[1:]
                if not replayed.may_be_ours(chunk_state, pointers, on_disk):
                    what = f"head, tail, next were {on_disk}; they are {pointers} again"
                    self._plan.damaged(self._plan.chunk_path(chunk_state.id), 0, chunk.BEGIN, 0, what)
                    ours.remove(chunk_state.id)  # somebody else may have written there: what only the log has goes to a new file
        recovery.redo(files, self._path, {chunk_id: runs for chunk_id, runs in replayed.redo.items() if chunk_id in ours})
        emptied = (replayed.dropped & self._plan.ids) - state.chain.keys()
        self._plan.moves += [self._plan.chunk_path(chunk_id) for chunk_id in sorted(emptied)]
        header_is_ours = found.header in replayed.firsts
        self._look_behind(state, chunk.NONE if header_is_ours else found.header, replayed.dropped)
        return state

    def _look_behind(self, state: State, header: int, dropped: set[int]) -> None:
        """Keep records that are in the files and not in the log: it has lost its end, or another program has put them."""
        last, current, seen = state.last, header, {*state.chain, *dropped}
        if last is not None and last.id in self._plan.ids and not self._is_anothers(last, state):
            path = self._plan.chunk_path(last.id)
            disk = read_pointers(self._files, path)
            stored = last.stored or disk[1:]
            for start in dict.fromkeys((last.tail, stored[1])):  # another program does not know what only the log had
                if self._is_logged(last.id, start, disk.tail):
                    break
                if start < disk.tail <= disk.size and disk.tail not in (last.tail, stored[1]):
                    with contextlib.suppress(Corrupt):
                        self._keep(scan(self._files, path, last.id, OnDisk(disk.size, start, disk.tail, chunk.NONE)), path)
                        break
            current = disk.next if disk.next != stored[2] else chunk.NONE
        while current in self._plan.ids and current not in seen:
            seen.add(current)
            path = self._plan.chunk_path(current)
            self._keep(orphans.readable(self._files, path, current)[0], path)
            self._plan.moves.append(path)
            current = read_pointers(self._files, path).next

    def _is_anothers(self, mine: Chunk, state: State) -> bool:
        """Whether a chunk's file has the first records of another chunk, or of a batch, and not its own: somebody has exchanged
        files.
        """
        with Descriptors([self._files.open_to_read(self._plan.chunk_path(mine.id))]) as (fd,):

            def is_of(some: Chunk) -> bool:
                if not some.pieces:
                    return False
                (start, _, before, *_), (end, _, crc) = some.pieces[0], some.piece_end(0)
                data = self._files.read(fd, end - start, start)
                return len(data) == end - start and crc32(data, before) == crc

            others = (*state.chain.values(), *(part for batch in state.batches.values() for part in batch.chunks))
            return not is_of(mine) and any(map(is_of, others))

    def _is_logged(self, chunk_id: int, start: int, end: int) -> bool:
        """Whether what is there in the file of a chunk is what the log carries: then nobody else has put it."""
        at = start
        with Descriptors([self._files.open_to_read(self._plan.chunk_path(chunk_id))]) as (fd,):
            for offset, frames in self._plan.payload.get(chunk_id, ()):
                if offset <= at < min(end, offset + len(frames)):
                    part = frames[at - offset : end - offset]
                    if self._files.read(fd, len(part), at) != part:
                        return False
                    at += len(part)
        return start < at >= end

    def _keep(self, chunk_state: Chunk, path: str) -> None:
        runs = list(self._pieces.good_runs(chunk_state, path))
        if any(any(frames) for frames, _, _ in runs):  # zeros would be empty records, but more likely are unused space
            self._plan.damaged(
                path,
                chunk_state.head,
                chunk_state.tail - chunk_state.head,
                0,
                f"{chunk_state.records} records that the log does not know; kept",
            )
            for frames, records, when in runs:
                self._plan.rescued.append(Rescued(chunk_state.id, records, len(frames), 0, when, frames, None))

    def _make_again(self, replayed: Replayed) -> None:
        """Make what is missing in NAME.lease, so that the lease can be finished. Copies that are not whole are made again from
        their chunks. For whole chunks, and where the chunk of a copy is missing too, there are zeros, found damaged later.
        """
        files, lease, making = self._files, replayed.last_json_operation, self._plan.lease_path
        if not isinstance(lease, Lease) or batch_files.is_moved(files, self._path, lease.id):
            return
        if not files.is_directory(making):
            files.make_directory(making)
        for chunk_state, (chunk_id, cut) in zip(replayed.state.batches[lease.id].chunks, lease.parts, strict=True):
            target = os.path.join(making, batch_files.segment_file(self._path, chunk_id))
            data = bytes(chunk_state.tail - chunk.BEGIN) if isinstance(cut, int) else self._pieces.uncut(cut, chunk_id)
            if files.exists(target):
                if isinstance(cut, int) or crc32(data) != cut.crc or java.as_committed(files, target, chunk_state):
                    continue
            elif isinstance(cut, int) and files.exists(self._plan.chunk_path(chunk_id)):
                continue
            if isinstance(cut, Cut):
                self._plan.report.notes.append(f"{target}: the copy was missing or damaged; it was made again from its chunk")
            write_new(files, target, chunk.POINTERS.pack(chunk.BEGIN, chunk_state.tail, chunk.NONE) + data)

    def _fetch_from_lease(self, state: State) -> None:
        """Fetch chunks in NAME.lease that the log does not know: a damaged commit had leased them. Shorter ones are copies."""
        making = self._plan.lease_path
        for chunk_state in state.chain.values():
            source = os.path.join(making, batch_files.segment_file(self._path, chunk_state.id))
            is_there = chunk_state.id not in self._plan.ids and self._files.is_regular(source)
            if is_there and self._files.status(source).st_size >= chunk_state.tail:
                self._files.rename(source, self._plan.chunk_path(chunk_state.id))
                self._files.sync_directory(self._plan.parent)
                self._files.sync_directory(making)
                self._plan.look_again()

    def _without_log(self, found: Found) -> State:
        if stamp.read(self._files, self._path) is not None:
            what = "the log is missing, and with it the keys, the batches, and what it had of the records"
        elif any(batch_files.has_records(self._files, each) for each in batch_files.batch_directories(self._files, self._path)):
            what = "there are batches, but no log"
        else:
            what = "header and chunk files contradict themselves"
        self._plan.damaged(self._plan.log_path, 0, 0, None, what + "; the records are those of the chunk files")
        return State(chain=self._chain_of_files(found))

    def _chain_of_files(self, found: Found) -> dict[int, Chunk]:
        """Believe the chunk files as far as they go, without checksums."""
        chain: dict[int, Chunk] = {}
        seen: set[int] = set()
        current = found.header
        if current and current not in found.ids:
            if chunk.successor(current) in found.ids:  # the original unlinks a read chunk before it moves the header on
                current = chunk.successor(current)
            else:
                self._plan.damaged(self._path, 0, 2, None, f"refers to chunk {current}, which has no file")
        while current in found.ids and current not in seen:
            seen.add(current)
            path = self._plan.chunk_path(current)
            chunk_state, problem = orphans.readable(self._files, path, current)
            following = read_pointers(self._files, path).next
            if problem:
                self._plan.rewrite.add(current)
                what = f"{problem}; {chunk_state.records} records before that are kept"
                self._plan.damaged(path, chunk_state.tail, max(chunk_state.size - chunk_state.tail, 0), None, what)
            if chunk_state.records:
                chain[current] = chunk_state
            if following > chunk.MAX_ID or following in seen:
                self._plan.damaged(path, 8, 2, None, f"refers to chunk {following}; the chain ends here")
            current = following
        return chain

    def _from_damaged_log(self, found: Found, left: logs.Salvaged) -> State:
        """Commits are missing from the log, in its middle, or its snapshot is not whole."""
        kinds = [frame.kind for frame in left.frames]
        last_checkpoint = max((number for number, kind in enumerate(kinds) if kind == logs.CHECKPOINT), default=-1)
        state = _Behind(self, self._path, left.prefix.state if left.prefix else State())
        if left.prefix is None or last_checkpoint >= 0:  # the files are as they were at that checkpoint, or at the snapshot
            state.real = self._chain_of_files(found)
            self._plan.payload = {}
        else:
            state.real = left.prefix.state.chain
            self._plan.payload = left.prefix.redo
            self._plan.rewrite.update(list(state.real)[-1:])  # what lies behind its tail is to be kept, not overwritten
        for number, (_, kind, body, _) in enumerate(left.frames):
            state.late = number > last_checkpoint
            with contextlib.suppress(*journal.NONSENSE):
                if kind == logs.COMMIT:
                    state.hear(body)
                elif left.prefix is None or kind == logs.CLOCK:
                    logs.load(kind, body, state)
        self._fetch_from_lease(State(chain=state.real))
        self._rescue(state)
        return State(chain=state.real).with_batches_of(state)

    def _rescue(self, state: _Behind) -> None:
        """Append what was put behind the damage: its place is not known any more, nor whether it was taken since."""
        for chunk_id in dict.fromkeys(commit.chunk_id for commit in state.heard):
            mine = [commit for commit in state.heard if commit.chunk_id == chunk_id]
            known = state.real.get(chunk_id)
            wanted = {commit.crc: commit for commit in mine if not commit.frames and commit.size}
            runs: dict[int, bytes] = {}
            if wanted and chunk_id in self._plan.ids:
                data = read_whole(self._files, self._plan.chunk_path(chunk_id), most=chunk.MAX_CHUNK_SIZE, sparse=True)
                for base in {chunk.BEGIN, known.base if known else chunk.BEGIN}:
                    runs |= _find_extents(data, base, wanted)
            for commit in mine:
                frames = commit.frames or runs.get(commit.crc, b"")
                if frames:
                    state.found[id(commit)] = frames
                elif commit.size:
                    what = f"{commit.records} records of a commit after the damage are not in this file"
                    if chunk_id not in self._plan.ids:
                        what += ", whose file is missing: it was read to its end, or is lost"
                    self._plan.damaged(self._plan.chunk_path(chunk_id), 0, commit.size, None, what)
                    if commit.key is not None:
                        state.idempotency_keys.pop(commit.key, None)
        self._plan.rescued = [
            commit._replace(frames=state.found[id(commit)]) for commit in state.heard if id(commit) in state.found
        ]
        if self._plan.rescued:
            rescued = sum(commit.records for commit in self._plan.rescued)
            self._plan.report.notes.append(
                f"{rescued} records were put by commits after the damage in the log. "
                "They are at the end of the queue; those that were taken or leased since will be delivered again"
            )

    def look_into_batches(self, state: State) -> None:
        """Batches that the log does not know become dead letters: nobody can say whether they were acknowledged."""
        if lost := state.history.drop_nonsense():
            self._plan.damaged(self._plan.log_path, 0, 0, 0, f"{lost} acknowledged batches in the log are invalid")
        for there, home in places.bring_home(self._files, self._path, state.with_history()):
            self._plan.damaged(home, 0, 0, 0, f"the batch was in {there}; it was moved back")
        for directory in list(batch_files.unknown_batches(self._files, self._path, state)):
            if not batch_files.has_records(self._files, directory):
                continue
            unknown = BatchState(os.path.basename(directory), [], "dead", 0, 0, 0, 0, 0)
            places.roll_forward_place(self._files, self._path, unknown)
            directory = places.directory_of(self._path, unknown)
            batch = self.batch_of(directory, "dead")
            if batch is None:
                self._plan.moves.append(directory)
                self._plan.damaged(directory, 0, 0, None, "a batch that neither the log nor a good manifest describes; set aside")
                continue
            batch.reason = "found by a repair; the log does not say whether it was acknowledged"
            state.batches[batch.id] = batch
            what = f"{batch.records} records of a batch that the log does not know are in the dead letters now"
            self._plan.damaged(directory, 0, 0, 0, what)
        whole = {(chunk_state.id, chunk_state.tail) for batch in state.batches.values() for chunk_state in batch.chunks}
        for chunk_state in list(state.chain.values()):
            if chunk_state.id not in self._plan.ids and (chunk_state.id, chunk_state.tail) in whole:
                del state.chain[chunk_state.id]

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
        for segment in body.segments:
            path, number = os.path.join(directory, segment.file), segment.file.rpartition(".")[2]
            if not number.isdecimal() or segment.file != batch_files.segment_file(self._path, int(number)):
                return None
            content = None
            with contextlib.suppress(Corrupt):
                content = scan(self._files, path, int(number), OnDisk(segment.end, segment.start, segment.end, chunk.NONE))
            if content is None or f"{content.crc:08x}" != segment.crc32 or content.total != segment.records:
                self._plan.moves.append(path)
                self._plan.damaged(
                    path, segment.start, segment.end - segment.start, segment.records, "does not match its manifest; set aside"
                )
                continue
            batch.chunks.append(content)
            batch.records += content.records
            batch.bytes += content.bytes
        return batch


class _Behind(State):
    """Follows the commits behind damage: batches and keys as they are, and of the chain only what was put."""

    def __init__(self, owner: Decision, path: str, known: State) -> None:
        super().__init__(
            known.batches,
            known.history,
            known.last_lease,
            known.expired_keys,
            known.clock,
            idempotency_keys=known.idempotency_keys,
            served=known.served,
        )
        self.owner = owner
        self.path = path
        self.real: dict[int, Chunk] = {}
        self.late = True  # not yet in the files
        self.heard: list[Rescued] = []
        self.found: dict[int, bytes] = {}

    def hear(self, body: bytes) -> None:
        before, key, time = len(self.heard), None, logs.time_of(body)
        try:
            for operation in logs.unpack(body):
                key = operation.key if isinstance(operation, PutKey) and operation.key not in self.idempotency_keys else key
                self.apply(operation, time)
        finally:
            if key is not None:
                self.heard[before:] = [commit._replace(key=key) for commit in self.heard[before:]]

    def apply(self, operation: Operation, time: int) -> None:
        match operation:
            case Append(chunk_id, records, frames):
                self._put(Rescued(chunk_id, records, len(frames), crc32(frames), time, bytes(frames), None))
            case Extent(chunk_id, runs, _):
                for records, size, crc in runs:
                    self._put(Rescued(chunk_id, records, size, crc, time, b"", None))
            case NewChunk() | Take():
                pass
            case _:
                super().apply(operation, time)

    def _put(self, commit: Rescued) -> None:
        if self.late:
            self.heard.append(commit)

    def clear(self) -> None:
        pass

    def replace(self, chunk_id: int, cut: Cut, new_id: int, size: int) -> None:
        if self.late and chunk_id in self.real:
            copy = cut.chunk(new_id)
            copy.size = size
            chunks = (copy if chunk_state.id == chunk_id else chunk_state for chunk_state in self.real.values())
            self.real = {chunk_state.id: chunk_state for chunk_state in chunks}

    def lease(self, batch: BatchState, parts: list[tuple[int, Cut | int]]) -> None:
        directory = places.directory_of(self.path, batch)
        found = self.owner.batch_of(directory, "leased")
        if found is None:  # dead since, or the commit of a lease that was not finished: it moved nothing yet, or is looked for
            return
        batch.chunks, batch.records, batch.bytes = found.chunks, found.records, found.bytes
        self.batches[batch.id] = batch
        whole = {chunk_id for chunk_id, cut in parts if isinstance(cut, int)}
        self.heard = [commit for commit in self.heard if commit.chunk_id not in whole]

    def put_back(self, batch_id: str, new_ids: list[int]) -> None:
        batch = self.batches.pop(batch_id, None)
        if batch is not None and self.late and len(batch.chunks) == len(new_ids):
            for chunk_state, new_id in zip(batch.chunks, new_ids, strict=True):
                chunk_state.id, chunk_state.stored = new_id, None
            self.real = {chunk_state.id: chunk_state for chunk_state in (*batch.chunks, *self.real.values())}


def _find_extents(data: bytes, base: int, wanted: dict[int, Rescued]) -> dict[int, bytes]:
    """Where the bytes from the base on have the checksum of a commit, it ends there: crc → its frames."""
    view, found = memoryview(data), dict[int, bytes]()
    starts = {base: 0}  # offset of each record → how many are before it
    at, crc = base, 0
    while at + 2 <= len(data) and (end := chunk.record_end(data, at)) <= len(data) and len(found) < len(wanted):
        crc, at = crc32(view[at:end], crc), end
        starts[at] = len(starts)
        commit = wanted.get(crc)
        if commit is not None and starts[at] - starts.get(at - commit.size, -1) == commit.records:
            found[crc] = data[at - commit.size : at]
    return found
