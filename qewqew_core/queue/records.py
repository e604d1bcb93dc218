"""`Records`: puts and takes of an open queue, one by one and as the transactions of sessions.

A commit of up to `Limits.inline_bytes` is carried by the log, and its frames go into the chunk file later. A larger one is
first written to the chunk files, past the tail, and made durable there; then the log says that it has happened.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from qewqew_core import arguments
from qewqew_core.crc import crc32
from qewqew_core.disk.engine import Engine
from qewqew_core.errors import DiskFull, Empty, Full
from qewqew_core.formats import chunk
from qewqew_core.keys import key_hash
from qewqew_core.limits import LIMITS
from qewqew_core.queue import chunk_files, group_commit, writing
from qewqew_core.queue import log as logs
from qewqew_core.queue.chain import Chain
from qewqew_core.queue.holds import Holds
from qewqew_core.queue.operations import Append, Clear, Extent, NewChunk, Operation, PutKey, Served, Take
from qewqew_core.queue.state import State, Step
from qewqew_core.queue.writing import Frames, Spill


class Records:
    """What calls of a queue and of its sessions do with records. All are made with the engine's lock.

    ``max_records``, ``max_bytes``: the bounds of the queue.
    """

    def __init__(self, engine: Engine[State], chain: Chain, holds: Holds, max_records: int | None, max_bytes: int | None) -> None:
        self.max_records = arguments.check_bound("max_records", max_records)
        self.max_bytes = arguments.check_bound("max_bytes", max_bytes)
        self._is_bounded = max_records is not None or max_bytes is not None
        self.largest = chunk.largest_record(chain.chunk_size)
        self.inline_bytes = LIMITS.inline_bytes["commit" if engine.sync else "never"]
        self._engine = engine
        self._chain = chain
        self._holds = holds

    # Putting

    def put_one(self, record: bytes, timeout: float | None) -> int:
        """As `put`, for what is put most often: a record that the log carries and the last chunk takes."""
        if type(timeout) is not int:
            arguments.deadline(timeout)  # also a call that need not wait refuses what is not a time
        engine, chain = self._engine, self._chain
        if self._is_bounded:
            self._wait_for_room(1, len(record), timeout)
        last, size = engine.state.last, len(record) + 2
        if last is None or (at := last.tail) + size > last.size or at + size > chain.chunk_size or size > self.inline_bytes:
            return self._put([record], [])
        if chain.min_free_bytes:
            chain.check_free(0)
        frames, now, log = chunk.LENGTH.pack(len(record)) + record, engine.now(), engine.log
        body = logs.commit_append(now, last.id, 1, frames)
        log.reserve(len(body))
        position = engine.happen(body)
        engine.state.append(last.id, size, 1, crc32(frames, last.crc), now)  # as `State.apply` does
        chain.pend(last.id, at, frames)
        if engine.waiting:
            engine.notify()
        if log.end > engine.rotate_at:  # nothing else can be to do
            chain.after_commit(position)
        return position

    def _put(self, records: list[bytes], operations_behind: list[Operation], others: Sequence[group_commit.Put] = ()) -> int:
        """Commit records, then other operations; returns the position in the log. ``others``: requests that are among them."""
        engine, chain = self._engine, self._chain
        engine.log.reserve(0)  # before files are made
        last = engine.state.last
        # A file made with another chunk size keeps its own; a new chunk is begun when the frame does not fit whole.
        room = min(chain.chunk_size, last.size) - last.tail if last else 0
        new_room = chain.chunk_size - chunk.BEGIN
        plan = writing.place(records, room, new_room)
        for other in others:
            writing.place_framed(plan, other.framed, room, new_room)
        into_last, *into_new = plan
        new_sizes = [chain.size_for(sum(run.size for run in runs)) for runs in into_new]
        chain.check_free(sum(new_sizes))
        inline = sum(run.size for runs in plan for run in runs) <= self.inline_bytes
        if not inline or into_new:
            chain.flush()  # these frames lie before what is written now
            engine.durable(engine.log.position)  # where the others go may be what an earlier commit has freed
        new_ids = chain.free_ids(len(into_new), last.id if last else chunk.NONE, chunk.successor)
        targets = [(last.id, last.tail, last.crc)] if last else []
        targets += [(chunk_id, chunk.BEGIN, 0) for chunk_id in new_ids]
        operations: list[Operation] = []
        made: list[int] = []
        sizes = dict(zip(new_ids, new_sizes, strict=True))
        writes: list[tuple[int, int, Frames]] = []  # of what the log carries: chunk, offset, frames
        try:
            for (chunk_id, at, crc), runs in zip(targets, [into_last, *into_new][not last :], strict=True):
                if chunk_id in sizes:
                    chain.make(chunk_id, sizes[chunk_id])
                    made.append(chunk_id)
                    operations.append(NewChunk(chunk_id, sizes[chunk_id]))
                for run in runs if inline else ():
                    frames = run.frames()
                    operations.append(Append(chunk_id, run.records, frames))
                    writes.append((chunk_id, at, frames))
                    at += run.size
                if runs and not inline:
                    operations.append(chain.write_ahead(chunk_id, runs, at, crc))
            if made and engine.sync:
                chain.sync_names()
            position = chain.commit(operations + operations_behind, reserve=True)
        except OSError as error:
            refusal = error if isinstance(error, DiskFull) else engine.refused(error)
            if refusal is None and not isinstance(error, FileExistsError):
                raise
            chain.unmake(made)
            if refusal is None:  # a Java program has made a file there, for a header that was removed: other ids
                chain.taken.update(new_ids)
                return self._put(records, operations_behind, others)
            raise refusal from error
        for chunk_id, at, frames in writes:
            if chunk_id == targets[-1][0]:
                chain.pend(chunk_id, at, frames)
            else:
                chain.write(chunk_id, frames, at)
        if records or others:
            engine.notify()
        if made:
            chain.own_ends()
        if others:
            engine.durable(position)
            group_commit.finish(chain.files, others)  # before the log is cut back, which forgets them too
            engine.state.served.clear()
        chain.after_commit(position)
        return position

    def put_group(self, records: list[bytes], key: str | None, timeout: float | None) -> tuple[int, int, int]:
        """As `transact`, with the requests of others; returns also how many of the records were put now."""
        engine = self._engine
        if type(timeout) is not int:
            arguments.deadline(timeout)
        hashed = None if key is None else key_hash(arguments.check_key(key))
        if self._is_bounded or not engine.sync or hashed in engine.state.idempotency_keys:
            before = engine.state.records
            position, count = self.transact(records, None, [], key, timeout)
            return position, count, engine.state.records - before
        position, _ = self._put_with_others(records, [] if hashed is None else [PutKey(hashed, len(records))])
        return position, len(records), len(records)

    def serve(self) -> tuple[int, int]:
        """Put what others have asked for; returns the position, and for how many."""
        return self._put_with_others([], [])

    def _put_with_others(self, records: list[bytes], own: list[PutKey]) -> tuple[int, int]:
        engine, chain = self._engine, self._chain
        terms = group_commit.Terms(chain.chunk_size, chain.min_free_bytes)
        operations, others, keys = list[Operation](own), list[group_commit.Put](), {put_key.key for put_key in own}

        def known(key: bytes) -> bool:
            return key in keys or key in engine.state.idempotency_keys

        for other in group_commit.take_along(chain.files, chain.path, terms, known):
            if other.key is not None:
                keys.add(other.key)
                operations.append(PutKey(other.key, sum(run.records for run in other.framed)))
            others.append(other)
        if others:
            operations.append(Served([other.id for other in others]))
        elif not records and not own:
            return engine.log.position, 0
        try:
            position = self._put(records, operations, others)
        except DiskFull:
            group_commit.give_back(chain.files, others)
            if not others or not (records or own):
                raise
            position = self._put(records, list[Operation](own))  # each for itself
            others.clear()
        return position, len(others)

    def _adopt(self, spill: Spill, operations_behind: list[Operation]) -> int:
        """Commit what a session has spilled, or a stage, by moving its files into the chain, then other operations."""
        engine, chain, files = self._engine, self._chain, self._chain.files
        try:
            spill.finish(engine.sync)
        except OSError as error:
            if (refusal := engine.refused(error)) is None:
                raise
            raise refusal from error
        durable = all(spilled.is_durable for spilled in spill.chunks)  # else the log may be on disk before they are
        last = engine.state.last
        ids = chain.free_ids(len(spill.chunks), last.id if last else chunk.NONE, chunk.successor)
        operations: list[Operation] = []
        for spilled, chunk_id in zip(spill.chunks, ids, strict=True):
            operations.append(NewChunk(chunk_id, spilled.size))
            operations.append(Extent(chunk_id, spilled.runs, durable))
        moved: list[tuple[str, str]] = []
        try:
            engine.log.reserve(len(logs.commit(engine.now(), [*operations, *operations_behind])))
            chain.check_place()
            chain.flush()
            for spilled, chunk_id in zip(spill.chunks, ids, strict=True):
                files.rename(spilled.path, chain.path_of(chunk_id))
                moved.append((spilled.path, chain.path_of(chunk_id)))
            if durable:
                chunk_files.sync_moved(files, chain.path)
            position = chain.commit(operations + operations_behind)
        except OSError as error:
            refusal = error if isinstance(error, DiskFull) else engine.refused(error)
            if refusal is None:
                raise
            for source, target in moved:
                files.rename(target, source)
            raise refusal from error
        spill.chunks.clear()
        chain.taken.update(ids)
        if not durable:
            chain.unsynced.update(ids)
        chain.own_ends()
        engine.notify()
        chain.after_commit(position)
        return position

    # Taking

    def first(self, timeout: float | None) -> tuple[bytes, Step]:
        """The first record that nobody holds, and where it is. Waits for one, then raises `Empty`."""
        if type(timeout) is not int:
            arguments.deadline(timeout)
        if self._engine.state.records == self._holds.records:
            self._wait(timeout)
        first = next(iter(self._engine.state.chain.values()))
        start = first.head
        if first.unavailable:  # else its first record is the one
            first, start, _ = next(self._chain.free())
        piece = self._chain.load(first, start)
        at = start - piece.start
        end = chunk.record_end(piece.data, at)
        return piece.data[at + 2 : end], (first, start, piece.start + end, 1)

    def pick(self, max_records: int, max_bytes: int | None) -> tuple[list[bytes], list[Step]]:
        """The first records that nobody holds, and where they are."""
        arguments.check_whole("max_records", max_records, 1, sys.maxsize)
        room = arguments.check_whole("max_bytes", max_bytes, 1, sys.maxsize) if max_bytes is not None else sys.maxsize
        picked: list[bytes] = []
        steps: list[Step] = []
        for chunk_state, start, end in self._chain.free():
            at, before = start, len(picked)
            while at < end and len(picked) < max_records and room > 0:
                piece = self._chain.load(chunk_state, at)
                records, used = chunk.split(piece.data[at - piece.start : end - piece.start], max_records - len(picked))
                sizes = list(accumulate(map(len, records)))
                fit = len(records) if sizes[-1] <= room else max(bisect_right(sizes, room), int(not picked))
                if fit < len(records):
                    used, room = sizes[fit - 1] + 2 * fit if fit else 0, 0
                else:
                    room -= sizes[-1]
                picked += records[:fit]
                at += used
            if len(picked) > before:
                steps.append((chunk_state, start, at, len(picked) - before))
            if at < end:
                break
        return picked, steps

    def get_one(self, timeout: float | None) -> tuple[bytes, int]:
        """Take the first record; returns it, and the position of the commit."""
        record, step = self.first(timeout)
        return record, self.take_one(step)

    def take_one(self, step: Step) -> int:
        """Commit that these records are gone: as `take`, for what is taken most often."""
        engine = self._engine
        chunk_state, start, end, records = step
        position = engine.happen(logs.commit_take(engine.now(), chunk_state.id, start, end, records))
        engine.state.take(chunk_state.id, start, end, records)  # as `State.apply` does
        if engine.state.emptied:
            self._chain.forget_emptied()
        self._holds.disturbed += 1
        if engine.waiting:
            engine.notify()
        self._chain.after_commit(position)
        return position

    def take(self, steps: list[Step]) -> int:
        """Commit that these records are gone. It works on a full disk, too."""
        return self._take([Take(chunk_state.id, *span) for chunk_state, *span in steps])

    def _take(self, operations: list[Operation]) -> int:
        position = self._chain.commit(operations)
        self._holds.disturbed += 1
        self._engine.notify()
        self._chain.after_commit(position)
        return position

    def clear(self) -> None:
        """All records are gone, those that sessions hold included. Durable."""
        self._chain.durable(self._take([Clear()]))

    # Both

    def transact(
        self, records: list[bytes], spill: Spill | None, taken: list[Step], key: str | None, timeout: float | None
    ) -> tuple[int, int]:
        """Commit puts and takes together; returns the position in the log, and how many records were put, now or under the
        same key before.
        """
        engine, state = self._engine, self._engine.state
        if type(timeout) is not int:
            arguments.deadline(timeout)
        hashed = None if key is None else key_hash(arguments.check_key(key))
        spill = spill if spill and spill.chunks else None
        count, payload = len(records), sum(map(len, records))
        if spill:
            count, payload = count + spill.records, payload + spill.payload
        leaving = sum(step[3] for step in taken)
        if hashed not in state.idempotency_keys:
            self._wait_for_room(count, payload, timeout, leaving, sum(end - start for _, start, end, _ in taken) - 2 * leaving)
        if hashed is not None and hashed in state.idempotency_keys:
            self._holds.release(taken)
            engine.notify()
            return engine.log.position, state.idempotency_keys[hashed][1]  # another thread may still be waiting for that commit
        operations: list[Operation] = [] if hashed is None else [PutKey(hashed, count)]
        # Takes come last: they may empty the chunk that the puts were planned for.
        operations += [Take(chunk_state.id, *span) for chunk_state, *span in taken]
        if spill:
            position = self._adopt(spill, operations)
        elif count or (hashed is not None and not taken):
            position = self._put(records, operations)
        elif taken:
            position = self._take(operations)
        else:
            return 0, 0
        self._holds.records -= leaving
        return position, count

    # Waiting

    def __len__(self) -> int:
        """How many can be taken."""
        return self._engine.state.records - self._holds.records

    def _wait(self, timeout: float | None) -> None:
        state, holds = self._engine.state, self._holds
        deadline = arguments.deadline(timeout)
        while state.records == holds.records:
            if not self._engine.wait(deadline):
                held = holds.records
                what = f"the {held:,} records in it are held by sessions" if held else "the queue is empty"
                raise Empty(what, path=self._engine.path)

    def _wait_for_room(
        self, records: int, payload: int, timeout: float | None, leaving: int = 0, leaving_payload: int = 0
    ) -> None:
        """Wait until this many records fit, in the place of others that leave with the same commit."""
        if not self._is_bounded:
            return
        state, path = self._engine.state, self._engine.path
        most_records, most_bytes = self.max_records or sys.maxsize, self.max_bytes or sys.maxsize
        bounds = f"max_records={self.max_records}, max_bytes={self.max_bytes}"
        if records > most_records or payload > most_bytes:
            raise Full(f"{records:,} records of {payload:,} bytes never fit: {bounds}", path=path)
        deadline = arguments.deadline(timeout)
        records, payload = records - leaving, payload - leaving_payload
        while (records > 0 and state.records + records > most_records) or (payload > 0 and state.bytes + payload > most_bytes):
            if not self._engine.wait(deadline):
                raise Full(
                    f"{state.records:,} records of {state.bytes:,} bytes wait already ({bounds}). "
                    "Nothing was stored; take or lease records, or wait for others to do so (timeout)",
                    path=path,
                )
