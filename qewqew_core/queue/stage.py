"""`Stage`: records on their way into a queue, written while others use the queue.

A stage writes, checksums and syncs its records in chunk files of its own, in ``NAME.staged/``. Any number of processes can do
this at once. The commit opens the queue, moves the files into its chain, and says so in one frame of the log: that takes as
long for a million records as for one. A stage that stays small is put as `Queue.put_many` does it, with one fsync.

Nothing refers to staged files before the commit. Each stage has an empty file, its *claim* ``NAME.staged/ID``, which it keeps
locked as long as it lives; its chunk files are ``ID.1``, ``ID.2`` and so on. The next process that opens the queue removes the
files of every claim that is not locked: its process has died. Small stages that commit
at once share a commit, see `group_commit`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from qewqew_core import arguments
from qewqew_core.batch import places
from qewqew_core.disk import lock
from qewqew_core.disk.engine import Transaction, adding
from qewqew_core.disk.files import Descriptors, Files, close_all, files_of
from qewqew_core.errors import BadArgument, Broken, Closed, Locked, QewQewError
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk import Record
from qewqew_core.keys import key_hash
from qewqew_core.limits import LIMITS
from qewqew_core.queue import chunk_files, group_commit, paths, staged_files
from qewqew_core.queue.group_commit import Request, Terms
from qewqew_core.queue.queue import Queue
from qewqew_core.queue.session import OBJECT_BYTES
from qewqew_core.queue.writing import Spill

_DEFAULTS = {name: setting.default for name, setting in inspect.signature(Queue).parameters.items()}
PATIENCE = 60.0  # seconds to wait for the queue, if nothing else is said: many stages may commit at once, and in turn


class Stage(Transaction):
    """Records that are put into the queue at ``path`` together, or not at all. Nobody waits for a stage before its commit.

    ``settings`` are those of `Queue`. The commit opens the queue with them and checks them then; ``chunk_size``, ``sync``,
    ``min_free_bytes`` and ``lock_timeout`` are checked at once. In a ``with`` statement a stage commits at the end of the block,
    and forgets everything if the block raises. Otherwise call `commit` and finally `close`. A stage may commit several times. Do
    not use one stage in two threads at once, or in a forked process. Any number of stages of one queue may be open, in any number
    of processes.

    Raises `BadPath`, `BadArgument`.
    """

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        if unknown := settings.keys() - _DEFAULTS.keys():
            raise BadArgument(f"{', '.join(sorted(unknown))}: Queue has no such argument")
        chosen = {**_DEFAULTS, **settings}
        self.path = paths.check_path(path)
        self.chunk_size = arguments.check_whole("chunk_size", chosen["chunk_size"], chunk.MIN_CHUNK_SIZE, chunk.MAX_CHUNK_SIZE)
        arguments.check_choice("sync", chosen["sync"], ("commit", "never"))
        arguments.check_timeout("lock_timeout", chosen["lock_timeout"])
        self._settings = {"lock_timeout": PATIENCE, **settings}
        self._files: Files = files_of(chosen["_files"], self.path, self.path + paths.LOG)
        self._terms = Terms(self.chunk_size, arguments.check_whole("min_free_bytes", chosen["min_free_bytes"], 0, sys.maxsize))
        bounds = chosen["max_records"], chosen["max_bytes"]
        self._joins_groups = chosen["sync"] == "commit" and bounds == (None, None)
        self._puts: list[bytes] = []
        self._put_bytes = 0
        self._claim: list[int] = []  # its descriptor, once something is spilled
        self._claimed = ""  # its path
        self._spill: Spill | None = None
        self._request = Request(self._files)
        self._process = os.getpid()
        self.stored = 0  # records that the last commit has put: none, if its key was used before
        self._broken: Broken | None = None  # every call raises it
        self._is_unsure = False  # whether a commit was interrupted that may have happened
        self._closed = False

    @property
    def records(self) -> int:
        """How many were put and are not committed."""
        return len(self._puts) + (self._spill.records if self._spill else 0)

    def put(self, record: Record) -> None:
        """Add one record. Raises `BadRecord`, `RecordTooLarge`, `DiskFull`, `BadPath` (no permission …): it was not added."""
        self._add(chunk.checked((record,), self.chunk_size))

    def put_many(self, records: Iterable[Record]) -> int:
        """Add all records, or none if it raises; returns how many. Raises as `put`."""
        return self._add(chunk.checked_all(records, self.chunk_size))

    def _add(self, records: list[bytes]) -> int:
        self._check_open()
        before = len(self._puts), self._put_bytes
        self._puts += records
        self._put_bytes += sum(map(len, records)) + OBJECT_BYTES * len(records)
        if self._put_bytes > LIMITS.spill_bytes:
            try:
                self._spill_puts()
            except OSError:
                del self._puts[before[0] :]
                self._put_bytes = before[1]
                raise
        return len(records)

    def commit(self, key: str | None = None, timeout: float | None = 0) -> int:
        """Put everything into the queue, as one commit; returns how many records. Durable when it returns, as `put_many` is.

        Waits for the queue up to its ``lock_timeout``. If the ``key`` was used before (within thirty days, and among the last
        65,536), nothing is stored, and the number that the first commit returned is returned again. If the queue is at its
        bound, this waits for room up to ``timeout`` seconds (None: forever). Only this process can take records meanwhile.

        Raises `Locked`, `Full`, `DiskFull`, `BadKey`: nothing has happened, and the stage may commit again. `Broken`: the disk
        failed, or somebody else has removed the staged files, or the queue failed while another stage put them, or an earlier
        commit of this stage was interrupted. The stage refuses every further call; unless the message says that nothing was
        stored, the records may be in the queue.
        """
        self._check_open()
        arguments.deadline(timeout)
        with self._unless_broken():
            return self._commit(key, timeout)

    def _commit(self, key: str | None, timeout: float | None) -> int:
        if key is not None:
            arguments.check_key(key)
        elif not self.records:
            self.stored = 0
            return 0
        if self._spill is not None and self._spill.chunks:
            if self._puts:
                self._spill_puts()
            with self._named():
                self._spill.finish(durable=True)  # now, without the lock; closing the queue would do it
            with Queue(self.path, **self._settings) as queue, self._put_once():
                before = len(queue)
                count = queue.put_staged(self._spill, key, timeout)
                self.stored = len(queue) - before
            return count
        until = time.monotonic() + self._settings["lock_timeout"]
        if not self._joins_groups:
            return self._put(key, timeout, until)
        with lock.Lead(self._files, self.path) as lead:
            try:
                put = self._put if lead.take() else self._follow
                return put(key, timeout, until, lead)
            finally:
                self._give_up(lead)

    def _put(self, key: str | None, timeout: float | None, until: float, lead: lock.Lead | None = None) -> int:
        """Put what is in memory when our turn comes, unless a leader has served our request by then. Then serve others."""
        request = self._request
        try:
            if request.is_served():
                raise lock.NotNeeded
            with Queue(self.path, **self._settings, _until=until, _unless=request.is_served) as queue:
                with self._put_once():
                    if request.end():
                        count, self.stored = queue.put_group(self._puts, key, timeout)
                    elif request.is_served():
                        count = self.stored = self.records
                    else:
                        raise self._unknown("somebody else has removed what this stage waited to put")
                if lead is not None:
                    self._serve(queue, lead)
        except lock.NotNeeded:
            count = self.stored = self.records
            self._forget()
        return count

    @contextlib.contextmanager
    def _put_once(self) -> Iterator[None]:
        """Forget what is put in here; if that is interrupted, nothing says whether it was, and it must not be put again."""
        self._is_unsure = True
        try:
            yield
            self._forget()  # now: they are in the queue, whatever closing it says
        except QewQewError:
            self._is_unsure = False
            raise
        self._is_unsure = False

    def _serve(self, queue: Queue, lead: lock.Lead) -> None:
        """Put what others have asked for meanwhile, a few times."""
        try:
            for _ in range(LIMITS.group_rounds):
                if not queue.serve():
                    break
        except QewQewError:
            pass  # ours is stored; they meet the error when they put theirs
        self._give_up(lead)

    def _give_up(self, lead: lock.Lead) -> None:
        """Lead no longer: one of those that still ask does, which fell asleep while we led."""
        if lead.is_taken:
            lead.close()
            with contextlib.suppress(OSError):  # they look by themselves, too
                group_commit.wake(self._files, self.path)

    def _follow(self, key: str | None, timeout: float | None, until: float, lead: lock.Lead) -> int:
        """Let the stage that leads put what is in memory, or one that leads later; or lead when it has finished."""
        request, began = self._request, time.monotonic()
        try:
            try:
                self._make_claim()
                request.ask(self._claimed, self._puts, None if key is None else key_hash(key), self._terms)
            except Broken:
                raise
            except OSError:
                pass  # a request saves time, and nothing else
            while not (request.is_served() or lead.take()) and request.wait(min(until, began + lock.PATIENCE)):
                pass
            while True:
                try:
                    return self._put(key, timeout, until, lead)
                except Locked:
                    if request.take_back():
                        raise
                    time.sleep(0.01)  # a leader has taken it along, and is about to say whether it was stored
        except BaseException as error:
            if request.take_back() or not self._was_served():
                raise
            count = self.stored = self.records
            self._forget()
            if not isinstance(error, Exception):  # interrupted; any other error came too late to matter
                raise
            return count
        finally:
            request.finish()

    def _was_served(self) -> bool:
        """Wait until a leader, which has taken the request along, has stored it, or has failed."""
        request = self._request
        while True:
            try:
                with Queue(self.path, **self._settings, _unless=request.is_served):
                    return not request.end() and request.is_served()
            except lock.NotNeeded:
                return True
            except Locked:
                time.sleep(0.01)
            except OSError as error:
                raise self._unknown(f"the queue cannot be opened ({error})") from error

    def _unknown(self, why: str) -> Broken:
        what = "nobody can say whether the records were stored. Under the same key it is safe to stage them again in a new Stage"
        return Broken(f"{why}; {what}", path=self.path)

    def rollback(self) -> None:
        """Forget everything that was put since the last commit."""
        self._is_unsure = False
        self._check_open()
        self._forget()

    def close(self) -> None:
        """Forget what is not committed. A second call does nothing, or finishes a first one that was interrupted."""
        if self._process != os.getpid():
            close_all(self._claim)  # the stage is the parent's: its files too
            self._request.forked()
            return
        self._closed = True
        self._forget()
        self._request.close()
        if self._claim:
            with contextlib.suppress(OSError):
                self._files.unlink(self._claimed)
            lock.unlock(*self._claim)
            close_all(self._claim)
            staged_files.remove_home(self._files, self.path)

    def _spill_puts(self) -> None:
        with self._unless_broken(), self._named():
            if self._spill is None:
                self._begin()
            assert self._spill is not None
            self._spill.add(self._puts)
        self._puts, self._put_bytes = [], 0

    @contextlib.contextmanager
    def _unless_broken(self) -> Iterator[None]:
        """After `Broken` nobody knows what is on disk, or in the queue: the stage neither syncs nor puts it again."""
        try:
            yield
        except Broken as error:
            self._broken = error
            raise

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Give errors of the system a name, and staged files that somebody has removed an error that says so."""
        try:
            with adding(self.path):
                yield
        except FileNotFoundError as error:
            what = "the staged files are gone: somebody else removed them. Nothing was stored; stage them again in a new Stage"
            raise Broken(what, path=error.filename) from error

    def _begin(self) -> None:
        self._make_claim()
        check_free = partial(chunk_files.check_free, self._files, self.path, self._terms.min_free_bytes)
        home, claim = os.path.split(self._claimed)
        self._spill = Spill(self._files, home, claim + ".", self.chunk_size, check_free)

    def _make_claim(self) -> None:
        """Meanwhile another process may remove the empty directory, or the file, as it is not locked yet."""
        home = self.path + paths.STAGED
        while not self._claim:
            self._claimed = os.path.join(home, secrets.token_hex(8))
            with contextlib.suppress(FileNotFoundError, FileExistsError), Descriptors() as made:
                places.make_home(self._files, self.path, paths.STAGED)
                self._files.open_into(made, self._claimed, new=True)
                if lock.whole(made[0]) and self._files.exists(self._claimed):
                    made.hand_over(self._claim)  # from now on it is the claim: an interrupt before leaves nothing open

    def _forget(self) -> None:
        self._puts, self._put_bytes = [], 0
        if self._spill is not None:
            with contextlib.suppress(OSError):  # what is left the next opening removes, once this stage is closed
                self._spill.remove()
            self._spill.chunks.clear()

    def _check_open(self) -> None:
        if self._closed or self._process != os.getpid():
            why = "the stage is closed" if self._closed else "the stage was made before this process was forked"
            raise Closed(f"{why}; make a new one", path=self.path)
        if self._broken is not None:
            raise self._broken.with_traceback(None)
        if self._is_unsure:
            raise self._unknown("the commit of this stage was interrupted")

    def __del__(self) -> None:
        if not self._closed and self._process == os.getpid():
            if self.records:
                warnings.warn(f"a stage for queue {self.path} was not closed", ResourceWarning, stacklevel=2)
            with contextlib.suppress(OSError):
                self.close()
