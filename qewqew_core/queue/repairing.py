"""`repair`: rescue everything that can be read of a damaged queue, set the rest aside, and report it.

1. Decide what the queue is. What opening believes is believed here too. If opening gives up, the commits before the damage in
   the log hold; if there is no whole log, the chunk files tell. Records of whole commits behind the damage were acknowledged
   to their producers, so they are appended at the end. (They may have been taken before: at least once, rather than never.)
2. Read everything piece by piece (about 64 KiB, each with a checksum). Chunks and segments with bad pieces are written
   again, without these, under ids that nothing refers to.
3. One new log says what the queue is from now on: that is the commit. It ends with a commit "repair", which lists the files
   that are still to be moved and carries the report. Until the checkpoint behind it, opening refuses the queue.
4. Pointers, header and manifests follow, and replaced files are moved to NAME.damaged/N. Then comes the checkpoint.

A repair that is interrupted before 3 starts over, and what it has written is a leftover. After 3 the next repair finishes 4.
Nothing but such leftovers is deleted.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from functools import partial
from typing import Any

from qewqew_core import arguments
from qewqew_core.batch import damage_met, places
from qewqew_core.batch.reports import Damage, RepairReport
from qewqew_core.disk import journal, lock
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files, files_of, read_whole, write_new
from qewqew_core.disk.opening import opening
from qewqew_core.disk.reserve import Reserve, with_room
from qewqew_core.errors import Corrupt
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk
from qewqew_core.limits import now_ms
from qewqew_core.queue import batch_files, chunk_files, java, orphans, paths, recovery, stamp
from qewqew_core.queue import log as logs
from qewqew_core.queue.log import Replayed
from qewqew_core.queue.operations import Repair, Served
from qewqew_core.queue.reading import is_blank, read_pointers
from qewqew_core.queue.repair_decision import Decision
from qewqew_core.queue.repair_pieces import Pieces
from qewqew_core.queue.repair_plan import Plan
from qewqew_core.queue.state import State
from qewqew_core.queue.strangers import strangers
from qewqew_core.secrecy import excerpt


def repair(
    path: str | os.PathLike[str], *, lock_timeout: float = 10.0, group: str | None = None, _files: Files | None = None
) -> RepairReport:
    """Make a damaged queue open again, with every record that can be read and no wrong one.

    If nothing is wrong, it changes nothing (a queue that crashed is recovered, as opening would do it; but the torn end of its
    log, which may have been a commit, is kept and reported). Damaged files are moved to NAME.damaged/N, never deleted. If it is
    killed, the next repair finishes it; opening in between works as before, or raises `Corrupt`. Durable when it returns.
    ``group``: as of the `Queue`.

    Raises `BadPath`, `Locked`, `DiskFull` or `Broken` (a file-system call failed): then repair it again.
    """
    members = None if group is None else arguments.check_group(group)
    full = paths.check_path(path)
    arguments.check_timeout("lock_timeout", lock_timeout)
    files = files_of(_files, os.path.dirname(full), full, full + paths.LOG, group=members)
    parts = [full, *(full + suffix for suffix in (paths.LOG, paths.STAMP, places.BATCHES, places.DEAD))]
    with opening(full, "queue", "repair it again"), contextlib.ExitStack() as stack:
        stack.callback(files.leave)
        files.enter()
        if not any(map(files.exists, parts)) and not paths.chunk_ids(full, files.list(os.path.dirname(full))):
            return RepairReport()
        files.check_writable(os.path.dirname(full))
        header, created = with_room(Reserve(files, full + paths.LOG), partial(lock.acquire, files, full, lock_timeout))
        try:
            report = _Repair(files, full, header.fd).run()
            report.note_strange(strangers(files, full), full)
            damage_met.forget(files, full)
            return report
        finally:
            if created and not any(files.read(header.fd, 2, 0)):
                with contextlib.suppress(OSError):
                    files.unlink(full)
            header.release()


class _Repair:
    def __init__(self, files: Files, path: str, header_fd: int) -> None:
        self._files, self._path = files, path
        self._plan = Plan(files, path, header_fd)
        self._pieces = Pieces(self._plan)
        self._decision = Decision(self._plan, self._pieces)

    def run(self) -> RepairReport:
        with contextlib.suppress(FileNotFoundError, Corrupt):
            replayed = logs.replay(read_whole(self._files, self._plan.log_path), self._plan.log_path)
            if isinstance(replayed.last_json_operation, Repair):
                self._finish(replayed, replayed.last_json_operation)
        state = self._decision.decide()
        self._decision.look_into_batches(state)
        self._plan.clock = state.clock
        try:
            chain = self._pieces.read_chain(state)
            for batch in state.with_history():
                if not places.is_strange(self._files, places.directory_of(self._path, batch), "queue"):  # which stays
                    self._pieces.read_batch(batch, state)
            if not self._plan.found_damage:
                self._plan.report.records, self._plan.report.batches = state.records, state.kept
                return self._plan.report
            replayed, repair = self._commit(chain, state)
        except BaseException:
            for path in self._plan.made:
                with contextlib.suppress(OSError):
                    self._files.unlink(path)
            raise
        self._finish(replayed, repair)
        recovery.remove_leftovers(self._files, self._path, replayed.state, self._plan.ids)
        return self._plan.report

    def _commit(self, chain: list[Chunk], state: State) -> tuple[Replayed, Repair]:
        """Step 3: the new log. What it says is not changed before it is there."""
        files, plan = self._files, self._plan
        new = self._new_state(chain, state)
        self._look_at_the_rest(new)
        directory = orphans.make_aside(files, self._path)
        moves = self._set_aside(directory)
        plan.report.set_aside = directory
        plan.report.records, plan.report.batches = new.records, new.kept
        body = asdict(plan.report) | {"set_aside": self._relative(directory)}
        del body["strange"]  # which is what is there at the end
        body["damage"] = [entry | {"path": self._relative(entry["path"])} for entry in body["damage"]]
        generation = journal.new_generation()
        data = logs.snapshot(new, generation)
        served = [Served(sorted(new.served))] if new.served else []  # until their files say so, the log does
        data += journal.frame(logs.COMMIT, logs.commit(now_ms(), [*served, Repair(moves, body)]), generation, len(data))
        write_new(files, plan.log_path + ".tmp", data)
        files.sync_directory(plan.parent)
        chunk_files.sync_moved(files, self._path)
        plan.made.clear()
        files.rename(plan.log_path + ".tmp", plan.log_path)
        stamp.make(files, self._path, new.changes)
        replayed = logs.replay(data, plan.log_path)
        assert isinstance(replayed.last_json_operation, Repair)
        return replayed, replayed.last_json_operation

    def _new_state(self, chain: list[Chunk], state: State) -> State:
        new = State.of({chunk_state.id: chunk_state for chunk_state in chain})
        new.with_batches_of(state)
        new.clock = new.clock.not_before(new.times()).now(self._files.boot())
        new.changes = max(new.changes, stamp.read(self._files, self._path) or 0)
        for chunk_state in chain:
            size = read_pointers(self._files, self._plan.chunk_path(chunk_state.id)).size
            chunk_state.size = max(chunk_state.tail, min(chunk_state.size, size))
        return new

    def _look_at_the_rest(self, new: State) -> None:
        """What lies beside the queue and is not part of it: orphans stay, what may hold other records is set aside."""
        plan = self._plan
        if self._files.is_directory(plan.lease_path):
            plan.moves.append(plan.lease_path)
        for chunk_id in sorted(plan.ids - new.chain.keys()):
            path = plan.chunk_path(chunk_id)
            if path in plan.moves or plan.is_orphan(chunk_id):
                continue
            with contextlib.suppress(OSError):  # no file at all: it is not ours
                with Descriptors([self._files.open_to_read(path)]) as (fd,):
                    is_set_aside = self._files.size(fd) <= chunk.MAX_CHUNK_SIZE and not is_blank(self._files, fd)
                if is_set_aside:  # else it is too large for a chunk, or opening may remove it as a leftover
                    plan.report.notes.append(f"{path}: it is unknown whether its records were committed; set aside")
                    plan.moves.append(path)

    def _set_aside(self, directory: str) -> list[list[str]]:
        """Copy into the directory what will be replaced. Returns what is to be moved there after the commit: from, to."""
        files = self._files
        for path in filter(files.exists, self._plan.copies):
            target = os.path.join(directory, self._relative(path).replace(os.sep, "_"))
            write_new(files, target, read_whole(files, path, most=chunk.MAX_CHUNK_SIZE, sparse=True))
        files.sync_directory(directory)
        moves: dict[str, str] = {}  # by their target
        for path in filter(files.exists, self._plan.moves):
            target = orphans.place_in(files, directory, self._relative(path).replace(os.sep, "_"))
            moves.setdefault(target, path)
        return [[self._relative(path), self._relative(target)] for target, path in moves.items()]

    def _finish(self, replayed: Replayed, repair: Repair) -> None:
        """Make the files what the new log says. After an interruption it is done again from the beginning."""
        files, state = self._files, replayed.state
        moves, body = repair
        try:
            aside = [(self._beside(source), self._beside(target)) for source, target in moves]
            self._plan.report = self._absolute(body)
        except journal.NONSENSE as error:
            raise Corrupt(f"an unfinished repair is invalid: {error!r}", path=self._plan.log_path) from error
        chunk_files.store_pointers(files, self._path, state, unsure=state.chain)
        chunk_files.store_header(files, self._plan.header_fd, state.first)
        parents = set()
        for source, target in aside:
            parents |= {os.path.dirname(source), os.path.dirname(target)}
            if files.exists(source) and not files.exists(target):
                files.rename(source, target)
        for parent in sorted(parents):
            if files.is_directory(parent):
                files.sync_directory(parent)
        for batch in state.batches.values():
            if not files.is_directory(places.directory_of(self._path, batch)):
                places.roll_forward_place(files, self._path, batch)
            if not self._pieces.has_manifest(batch):
                batch_files.roll_forward_manifest(files, self._path, batch)
        assert self._plan.report.set_aside is not None
        orphans.write_report(files, self._plan.report.set_aside, {"queue": os.path.basename(self._path), "moved": moves} | body)
        log_fd: list[int] = []
        recovery.own_log(files, self._path, log_fd)
        log = recovery.open_log(files, replayed, self._path, log_fd)
        try:
            log.sync(log.append(logs.CHECKPOINT, java.checkpoint_identity(files, self._path)), refuse=False)
        finally:
            log.close()

    def _relative(self, path: str) -> str:
        """As the log names it."""
        return os.path.relpath(path, self._plan.parent)

    def _absolute(self, body: dict[str, Any]) -> RepairReport:
        damage = [Damage(**entry | {"path": self._beside(entry["path"])}) for entry in body["damage"]]
        return RepairReport(**body | {"damage": damage, "set_aside": self._beside(body["set_aside"])})

    def _beside(self, name: str) -> str:
        """The path of a file that the log names; raises ValueError if it is not of the queue, or lies elsewhere."""
        path = os.path.normpath(os.path.join(self._plan.parent, name))
        inside = self._files.resolved(os.path.dirname(path)) + "/"
        first, base = os.path.relpath(path, self._plan.parent).split("/")[0], os.path.basename(self._path)
        ours = first == base or first.startswith(base + ".")  # and not those of another queue beside it
        if not ours or not inside.startswith(self._files.resolved(self._plan.parent) + "/"):
            raise ValueError(f"{excerpt(name, 120)} is not a file of this queue")
        return path
