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
from typing import Any, ClassVar

from qewqew_core import arguments
from qewqew_core.batch import places
from qewqew_core.batch.store import is_url
from qewqew_core.disk import lock
from qewqew_core.disk.descriptors import Descriptors, close_all
from qewqew_core.disk.engine import Transaction
from qewqew_core.disk.files import Files, files_of
from qewqew_core.disk.opening import adding, opening
from qewqew_core.errors import BadArgument, BadPath, Broken, Closed, Corrupt, InDoubt, Locked, QewQewError
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk import Record
from qewqew_core.keys import KeyStatus, key_hash
from qewqew_core.limits import LIMITS
from qewqew_core.queue import chunk_files, group_commit, paths, staged_files
from qewqew_core.queue.group_commit import Request, Terms
from qewqew_core.queue.inspection import durable_under, key_status
from qewqew_core.queue.queue import Queue
from qewqew_core.queue.session import OBJECT_BYTES
from qewqew_core.queue.writing import Spill

_DEFAULTS = {name: setting.default for name, setting in inspect.signature(Queue).parameters.items()}
PATIENCE = 60.0  # seconds to wait for the queue, if nothing else is said: many stages may commit at once, and in turn
PATIENCE_AT_THE_END = 0.5  # seconds to wait, when the time is over, for a leader that has taken the records along


class Stage(Transaction):
    """Records that are put into the queue at ``path`` together, or not at all. Nobody waits for a stage before its commit.

    ``settings`` are those of `Queue`. The commit opens the queue with them and checks them then; ``chunk_size``, ``sync``,
    ``min_free_bytes`` and ``lock_timeout`` are checked at once. In a ``with`` statement a stage commits at the end of the block,
    and forgets everything if the block raises. Otherwise call `commit` and finally `close`. A stage may commit several times. Do
    not use one stage in two threads at once, or in a forked process. Any number of stages of one queue may be open, in any number
    of processes.

    ``path`` may also be a URL, ``s3://lake/staged/orders``: the commit is one batch in that place, for machines without a disk.
    See `qewqew_core.queue.store_stage`, which says what differs.

    Raises `BadPath`, `BadArgument`.
    """

    _of_urls: ClassVar[type[Stage]]

    def __init_subclass__(cls, of_urls: bool = False) -> None:
        if of_urls:  # that module imports this one
            Stage._of_urls = cls

    def __new__(cls, path: str | os.PathLike[str] = "", **settings: Any) -> Stage:
        return super().__new__(cls._of_urls if cls is Stage and isinstance(path, str) and is_url(path) else cls)

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        if unknown := settings.keys() - _DEFAULTS.keys():
            raise BadArgument(f"{', '.join(sorted(unknown))}: Queue has no such argument")
        chosen = {**_DEFAULTS, **settings}
        members = None if chosen["group"] is None else arguments.check_group(chosen["group"])
        self.path = paths.check_path(path)
        self.chunk_size = arguments.check_whole("chunk_size", chosen["chunk_size"], chunk.MIN_CHUNK_SIZE, chunk.MAX_CHUNK_SIZE)
        arguments.check_choice("sync", chosen["sync"], ("commit", "never"))
        arguments.check_timeout("lock_timeout", chosen["lock_timeout"])
        self._settings = {"lock_timeout": PATIENCE, **settings}
        self._terms = Terms(self.chunk_size, arguments.check_whole("min_free_bytes", chosen["min_free_bytes"], 0, sys.maxsize))
        self._files: Files = files_of(
            chosen["_files"], os.path.dirname(self.path), self.path, self.path + paths.LOG, group=members
        )
        with self._files.entering(), opening(self.path, "stage"):
            self._files.enter()
            self._files.check_writable(os.path.dirname(self.path))
            self._home = self._files.inode_and_size(os.path.dirname(self.path))[0]
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
        if self._request.is_open:
            raise self._in_doubt()
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

        Raises `Locked`, `Full`, `DiskFull`, `BadKey`: nothing has happened, and the stage may commit again. `InDoubt`: another
        process has taken the records along, to store them with its own, and has not said in time whether it has. Commit again
        under the same key, here or in a new stage: they are stored once. See `key_status`. `Broken`: the disk
        failed, or somebody else has removed the staged files, or the queue failed while another stage put them, or an earlier
        commit of this stage was interrupted. The stage refuses every further call; unless the message says that nothing was
        stored, the records may be in the queue.
        """
        self._check_open()
        arguments.deadline(timeout)
        with self._unless_broken():
            try:
                return self._commit(key, timeout)
            except Locked as error:
                if (count := self._stored_before(key)) is None:
                    raise Locked(f"{error.what}. Nothing was stored", path=error.path, pid=error.pid) from error
                self._forget()
                self.stored = 0
                return count

    def _stored_before(self, key: str | None) -> int | None:
        """When the time is over: how many records an earlier commit under the key has stored, None if there was none. Raises
        `InDoubt` if nobody has said yet: a stage that was closed in doubt may have asked.
        """
        with contextlib.suppress(BadPath, Corrupt, FileNotFoundError):  # nobody can look: this commit has stored nothing
            if key is not None and key_status(self.path, key) != "not stored":
                if (count := durable_under(self.path, key)) is None:
                    raise self._in_doubt()
                return count
        return None

    def _commit(self, key: str | None, timeout: float | None) -> int:
        if key is not None:
            arguments.check_key(key)
        if self._request.is_open and self._request.key != (None if key is None else key_hash(key)):
            raise BadArgument("the last commit of this stage is in doubt: commit it again under the same key", path=self.path)
        if key is None and not self.records:
            self.stored = 0
            return 0
        if self._spill is not None and self._spill.chunks:
            if self._puts:
                self._spill_puts()
            with self._named():
                self._spill.finish(durable=True)  # now, without the lock; closing the queue would do it
            with Queue(self.path, **self._settings) as queue, self._put_once():
                self._check_home()
                before = len(queue)
                count = queue.put_staged(self._spill, key, timeout)
                self.stored = len(queue) - before
            return count
        until = time.monotonic() + self._settings["lock_timeout"]
        if not self._joins_groups:
            return self._put(key, timeout, until)
        with lock.Lead(self._files, self.path) as lead:
            try:
                self._ask(None if key is None else key_hash(key), until, lead)
                return self._put(key, timeout, until, lead)
            except BaseException as error:
                served, is_interrupt = self._was_served(), not isinstance(error, Exception)
                if served:
                    count = self.stored = self.records
                    self._forget()
                    if not is_interrupt:  # any other error came too late to matter
                        return count
                elif isinstance(error, OSError) and not isinstance(error, QewQewError):  # the disk did not say what became of it
                    if served is None:
                        raise self._unknown(f"the disk does not answer ({error.strerror})") from error
                    with self._named():
                        raise
                elif served is None and not is_interrupt and not isinstance(error, Broken):
                    raise self._in_doubt() from error
                raise
            finally:
                self._give_up(lead)

    def _ask(self, key: bytes | None, until: float, lead: lock.Lead) -> None:
        """Lead, or let the stage that leads put what is in memory, or one that leads later. Returns when that was done, when
        this stage leads, or when it is time to stand in line for the queue.
        """
        request, began = self._request, time.monotonic()
        if not request.is_open:  # else an earlier commit has asked, and goes on
            if lead.take():
                return
            try:
                self._make_claim()
                request.ask(self._claimed, self._puts, key, self._terms)
            except Broken:
                raise
            except OSError:
                pass  # a request saves time, and nothing else
        while not (request.is_served() or lead.take()) and request.wait(began + min(lock.PATIENCE, (until - began) / 2)):
            pass

    def _put(self, key: str | None, timeout: float | None, until: float, lead: lock.Lead | None = None) -> int:
        """Put what is in memory when our turn comes, unless a leader has served our request by then. Then serve others."""
        request = self._request
        try:
            if request.is_served():
                raise lock.NotNeeded
            with Queue(self.path, **self._settings, _until=until, _unless=request.is_served) as queue:
                with self._put_once():
                    if request.withdraw():
                        self._check_home()
                        count, self.stored = queue.put_group(self._puts, key, timeout)
                    elif request.is_served():
                        count = self.stored = self.records
                    else:
                        raise self._unknown("somebody else has removed what this stage waited to put")
                request.finish()
                if lead is not None:
                    self._serve(queue, lead)
        except lock.NotNeeded:
            count = self.stored = self.records
            self._forget()
            request.finish()
        return count

    def _check_home(self) -> None:
        """Raise `Broken` if the queue is in another directory than this stage was opened in: that one was moved or unmounted."""
        home = None
        with contextlib.suppress(FileNotFoundError):
            home, _ = self._files.inode_and_size(os.path.dirname(self.path))
        if home != self._home:
            raise Broken(
                "this is not the directory any more in which the stage was opened: it was moved, removed or unmounted. Nothing "
                "was stored, and what is here now was left as it is; stage the records again where the queue is",
                path=self.path,
            )

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

    def _was_served(self) -> bool | None:
        """After a commit that has raised: whether a leader has stored what it took along. None: that is not known within half a
        second. Then the request stays open, and the next commit goes on with it.
        """
        request, until = self._request, time.monotonic() + PATIENCE_AT_THE_END
        while True:
            with contextlib.suppress(OSError):  # the disk does not say: look again
                if (served := request.is_served()) or request.withdraw():
                    request.finish()
                    return served
            if not request.wait(until):
                return None
            with contextlib.suppress(OSError, QewQewError, lock.NotNeeded):  # opening the queue settles it
                Queue(self.path, **self._settings, _until=0.0, _unless=request.is_served).close()

    def _in_doubt(self) -> InDoubt:
        pid = lock.holder(self.path)
        who, what = "a process" if pid is None else f"process {pid}", "records that another commit has under the same key"
        return InDoubt(
            f"{who} has taken {'these records' if self._request.is_open else what} along, to store them with its own, and has "
            f"not said within {self._settings['lock_timeout']:g} s whether they are stored: it may have been stopped. Commit "
            "this stage again, or the same records in a new one under the same key: they are stored once. Under another key, or "
            "none, they might be stored twice. Stage.key_status, or `qewqew key-status`, tells whether what has a key is stored",
            path=self.path,
        )

    def _unknown(self, why: str) -> Broken:
        return Broken(
            f"{why}, so this stage does not know whether the records were stored. If they have a key, Stage.key_status and "
            "`qewqew key-status` tell, and a new Stage may commit them again under it: they are stored once. If not, look into "
            "the queue",
            path=self.path,
        )

    def key_status(self, key: str) -> KeyStatus:
        """Whether a commit under this key is stored: "stored", "not stored" or "not yet". Locks nothing, and waits for nobody.

        "not yet": a stage still asks for it, or another process has taken its records along, to store them with its own, and has
        not said whether it has. Commit again under the same key: it is stored once. After thirty days or 65,536 later keys,
        a key that was stored is "not stored". Raises `BadKey`, `BadPath`, `Corrupt`.
        """
        return key_status(self.path, key)

    def rollback(self) -> None:
        """Forget everything that was put since the last commit. Raises `InDoubt` if another process may still store it."""
        self._is_unsure = False
        self._check_open()
        if self._request.is_open and self._was_served() is None:
            raise self._in_doubt()
        self._forget()

    def close(self) -> None:
        """Forget what is not committed. A second call does nothing, or finishes a first one that was interrupted."""
        if self._process != os.getpid():
            close_all(self._claim)  # the stage is the parent's: its files too
            self._request.forked()
            self._files.leave()
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
        self._files.leave()

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
            with adding(self.path, "stage"):
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
            with contextlib.suppress(FileNotFoundError, FileExistsError), Descriptors() as fds:
                places.make_home(self._files, self.path, paths.STAGED)
                self._files.open_into(fds, self._claimed, new=True)
                if lock.whole(fds[0]) and self._files.exists(self._claimed):
                    fds.hand_over(self._claim)  # only now: an interrupt must not leave one that is not locked

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
