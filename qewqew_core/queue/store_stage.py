"""`StoreStage`: what `Stage` is for the URL of a place in an object store, where no disk stays with the task.

A commit is one immutable batch in the place, as `Batch.publish` writes them, and its name is that of its key. The records go into
segment files with a name of this attempt, and then the manifest is created only if there is none: the attempt that creates it
has committed, and all others learn that it was done before. No lock, no lease, and no order between commits::

    s3://lake/staged/orders/ID/ATTEMPT.1        the records, as in a chunk file
    s3://lake/staged/orders/ID/manifest.json    the commit; ID is made of the name of the place and the key's hash
    s3://lake/staged/orders/.create-only        somebody has seen that this store keeps the condition
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TypeVar

from qewqew_core import arguments
from qewqew_core.batch import manifest, places
from qewqew_core.batch.manifest import MANIFEST, Manifest, Segment
from qewqew_core.batch.store import Store, Unavailable, local_path, store_of
from qewqew_core.crc import crc32
from qewqew_core.disk.opening import adding
from qewqew_core.disk.spool import Spool
from qewqew_core.errors import BadArgument, BadManifest, BadPath, Broken, InDoubt, QewQewError, StoreError
from qewqew_core.formats import chunk
from qewqew_core.keys import KeyStatus, key_hash
from qewqew_core.limits import LIMITS, now_ms
from qewqew_core.queue.stage import PATIENCE, Stage

T = TypeVar("T")

_TESTED, _TRIAL = ".create-only", ".create-only.trial"
_WAITS = (0.05, 5.0)  # seconds before a request is sent again: at first, and at the most
_LEASES = "it has no leases: a drain takes its batches"
_REFUSED = {
    "chunk_size": "records are in segments",
    "sync": "a store answers when it has stored the records",
    "min_free_bytes": "nobody runs out of room there",
    "log_bytes": "it has no log",
    "group": "its rights are those of the store",
    **dict.fromkeys(("max_records", "max_bytes"), "nobody counts there what many tasks store at once"),
    **dict.fromkeys(("max_attempts", "retry_delay", "retention", "retention_bytes"), _LEASES),
}


class _Run(NamedTuple):
    """Records between two boundaries, framed, in the spool."""

    segment: int
    records: int
    start: int
    end: int
    filled: int  # bytes of the segment up to the end …
    crc: int  # … and their checksum


class StoreStage(Stage, of_urls=True):
    """A `Stage` of a place in an object store: ``s3://``, ``gs://``, ``az://`` or ``abfs://``, or of a directory as ``file://``.

    ``settings``: ``options`` of the store (see `store.store_of`), and ``lock_timeout``: for how many seconds a commit repeats
    requests that fail. Every other setting of `Queue` is refused. Records wait in memory, and in a temporary file when they are
    many; a record has at most 65,535 bytes.

    `commit` raises `InDoubt` if the store does not say whether it has stored them: commit again under the same key. `BadPath`: no
    permission, or no such bucket; `StoreError`: it does not answer, or refuses; `BadArgument`: its package is missing, or it does
    not keep the condition. After these nothing is stored, and the stage may commit again. A key is known as long as its batch is
    in the place: `key_status` says "not stored" once a drain has removed it, and the table is what knows it then.
    """

    def __init__(self, path: str, **settings: Any) -> None:
        options, patience = settings.pop("options", None), settings.pop("lock_timeout", PATIENCE)
        for name in settings:
            if name not in _REFUSED:
                raise BadArgument(f"{name}: Queue has no such argument")
            raise BadArgument(f"a place in a store has no {name}: {_REFUSED[name]}; leave it out", path=path)
        local = local_path(path)
        if local is not None:
            path = arguments.check_path_text("batch", local)
        self._options = options
        self.path = path.rstrip("/")
        self._patience = arguments.check_timeout("lock_timeout", patience)
        place = store_of(self.path, options)
        place.check()
        place.check_create()
        self.chunk_size = chunk.MAX_CHUNK_SIZE
        self.stored = 0
        self._broken: Broken | None = None
        self._is_unsure = self._is_tested = False
        self._process = os.getpid()
        self._spool = Spool(LIMITS.spill_bytes)
        self._runs: list[_Run] = []
        self._waiting: list[bytes] = []  # records of the next run
        self._wait_bytes = 0
        self._begin_attempt()
        self._closed = False

    def _begin_attempt(self) -> None:
        self._attempt = secrets.token_hex(8)
        self._sent: set[str] = set()  # URLs of segments that are there
        self._doubted: str | None = None  # the place of a manifest that may be there

    @property
    def records(self) -> int:
        return len(self._waiting) + sum(run.records for run in self._runs)

    def _add(self, records: list[bytes]) -> int:
        self._check_open()
        if self._doubted is not None:
            raise self._doubt(self._doubted)
        with self._all_or_none():
            for record in records:
                self._waiting.append(record)
                self._wait_bytes += chunk.LENGTH.size + len(record)
                if self._wait_bytes >= LIMITS.piece_bytes:
                    self._end_run()
        return len(records)

    @contextlib.contextmanager
    def _all_or_none(self) -> Iterator[None]:
        runs, waiting, count, size = len(self._runs), self._waiting, len(self._waiting), self._wait_bytes
        try:
            yield
        except BaseException:
            del self._runs[runs:], waiting[count:]
            self._waiting, self._wait_bytes = waiting, size
            raise

    def _end_run(self) -> None:
        if not self._waiting:
            return
        frames, last = chunk.frame(self._waiting), self._runs[-1] if self._runs else _Run(0, 0, 0, 0, 0, 0)
        segment, filled, crc = last.segment, last.filled + len(frames), last.crc
        if last.filled and filled > LIMITS.segment_bytes:
            segment, filled, crc = segment + 1, len(frames), 0
        self._spool.write(frames, last.end)
        end = last.end + len(frames)
        self._runs.append(_Run(segment, len(self._waiting), last.end, end, filled, crc32(frames, crc)))
        self._waiting, self._wait_bytes = [], 0

    def commit(self, key: str | None = None, timeout: float | None = 0) -> int:
        self._check_open()
        arguments.deadline(timeout)
        if key is not None:
            arguments.check_key(key)
        named = self._attempt if key is None else key
        place = self._place(named)
        if self._doubted not in (None, place.path):
            raise BadArgument("the last commit of this stage is in doubt: commit it again under the same key", path=self.path)
        if key is None and not self.records:
            self.stored = 0
            return 0
        with self._all_or_none():
            self._end_run()
        until = time.monotonic() + self._patience
        if self._doubted is None:
            self._asked(until, self._check_condition)
        body = self._described(place, named)
        for segment, runs in zip(body.segments, self._segments(), strict=True):
            if (url := place.locate(segment.file)) not in self._sent:
                self._asked(until, partial(self._send, place, segment.file, runs[0].start, runs[-1].end))
                self._sent.add(url)
        ours, count = self._decide(place, body, until)
        self.stored = count if ours else 0
        self._forget()
        return count

    def _decide(self, place: Store, body: Manifest, until: float) -> tuple[bool, int]:
        """Create the manifest, or read the one that is there: whether it is ours, and how many records it has."""
        before, data = self._doubted, body.to_json()
        while True:
            self._doubted = place.path  # whatever interrupts the request, the store may have heard it
            try:
                self._tried(until, lambda: place.create(MANIFEST, data))
                return True, body.records
            except FileExistsError:
                pass
            except Exception as error:
                if before is not None or isinstance(error, (Unavailable, Broken)):
                    raise self._doubt(place.path) from error
                self._doubted = before
                raise self._refusal(error) from error
            try:
                there = self._tried(until, lambda: self._read(place))
            except FileNotFoundError:
                continue  # a drain has just taken it: it will know this one, too
            except StoreError as error:
                raise self._doubt(place.path) from error
            except BadManifest:
                self._doubted = None
                raise
            self._doubted = None
            if there.key != body.key:
                what = f"is the commit of another key, {there.key!r}, whose name is the same. Nothing was stored; use another key"
                raise BadPath(what, path=place.locate(MANIFEST))
            return there.segments == body.segments, there.records

    def _read(self, place: Store) -> Manifest:
        path = place.locate(MANIFEST)
        try:
            body = json.loads(place.read(MANIFEST))
        except ValueError as error:
            raise BadManifest(f"not JSON ({error}); see what it is, and move it away", path=path) from error
        return manifest.parse(body, path)

    def _place(self, key: str) -> Store:
        return store_of(f"{self.path}/{places.batch_id(self.path, key)}-{key_hash(key).hex()[16:]}", self._options)

    def _described(self, place: Store, key: str) -> Manifest:
        segments = []
        for number, runs in enumerate(self._segments(), 1):
            ends = [chunk.BEGIN + run.filled for run in runs]
            counts = list(accumulate(run.records for run in runs))
            *inside, whole = manifest.checksums(run.crc for run in runs)
            boundaries = tuple(zip(ends[:-1], counts[:-1], strict=True))
            name = f"{self._attempt}.{number}"
            segments.append(Segment(name, chunk.BEGIN, ends[-1], counts[-1], whole, boundaries, tuple(inside)))
        created = arguments.moment(now_ms()).to_rfc3339_string().replace("+00:00", "Z")
        size = sum(segment.end - segment.start for segment in segments) - chunk.LENGTH.size * self.records
        batch = os.path.basename(place.path)
        return Manifest(batch, key, places.queue_name(self.path), created, 1, self.records, size, tuple(segments))

    def _segments(self) -> list[list[_Run]]:
        return [list(runs) for _, runs in groupby(self._runs, lambda run: run.segment)]

    def _send(self, place: Store, name: str, start: int, end: int) -> None:
        def parts() -> Iterator[bytes]:
            yield chunk.POINTERS.pack(chunk.BEGIN, chunk.BEGIN + end - start, chunk.NONE)
            for at in range(start, end, LIMITS.write_bytes):
                yield self._spool.read(at, min(at + LIMITS.write_bytes, end))

        place.write(name, parts())

    def check(self) -> None:
        """Try what a commit needs: reading, writing, and a store that keeps the condition. Raises what `commit` raises."""
        until = time.monotonic() + self._patience
        self._asked(until, self._check_condition)
        self._asked(until, self._note_condition)

    def _check_condition(self) -> None:
        """Raise `BadArgument` if the store creates what is there: nothing else would say so, and each retry would double."""
        if self._is_tested:
            return
        place = store_of(self.path, self._options)
        try:
            place.size(_TESTED)
        except FileNotFoundError:
            for _ in range(2):
                try:
                    place.create(_TRIAL, b"")
                except FileExistsError:
                    break
            else:
                raise BadArgument(
                    "this store has created a file twice that was to be created only if there is none (If-None-Match: *), so it "
                    "would store what is retried twice. Nothing was stored; update the store, or use another one",
                    path=place.locate(_TRIAL),
                ) from None
            self._note_condition()
        self._is_tested = True

    def _note_condition(self) -> None:
        place = store_of(self.path, self._options)
        place.write(_TESTED, [b"This store creates a file only if there is none: QewQew has tried it.\n"])

    def _asked(self, until: float, request: Callable[[], T]) -> T:
        """The same as `_tried`; errors say that nothing was stored."""
        try:
            return self._tried(until, request)
        except Exception as error:
            raise self._refusal(error) from error

    def _tried(self, until: float, request: Callable[[], T]) -> T:
        """Send a request, and again while the store does not do it and it is not time to give up."""
        wait, most = _WAITS
        while True:
            try:
                return request()
            except Unavailable:
                if time.monotonic() + wait > until:
                    raise
            time.sleep(wait * (0.5 + secrets.randbelow(500) / 1000))  # not all at the same moment
            wait = min(2 * wait, most)

    def _refusal(self, error: Exception) -> Exception:
        """The error to raise for one after which nothing is stored."""
        if isinstance(error, StoreError):
            if isinstance(error.__context__, PermissionError):
                what = "a stage needs the right to write there, to read and to list"
                return BadPath(f"no permission ({error.what}). Nothing was stored; {what}", path=error.path)
            return StoreError(f"{error.what}. Nothing was stored", path=error.path)
        if isinstance(error, FileNotFoundError):
            return BadPath(
                f"there is no such place ({error.strerror}). Nothing was stored; make the bucket first", path=self.path
            )
        if isinstance(error, OSError) and not isinstance(error, QewQewError):
            try:
                with adding(self.path, "place"):
                    raise error
            except OSError as named:
                return named
        return error

    def _doubt(self, place: str) -> InDoubt:
        return InDoubt(
            f"the store has not said whether it has stored these records, within {self._patience:g} s. Commit this stage again, "
            "or the same records in a new one under the same key: they are stored once. Under another key, or none, they might "
            "be stored twice. Stage.key_status tells whether what has a key is stored",
            path=place,
        )

    def key_status(self, key: str) -> KeyStatus:
        place = self._place(arguments.check_key(key))
        try:
            self._tried(time.monotonic() + self._patience, lambda: place.size(MANIFEST))
        except FileNotFoundError:
            return "not yet" if self._doubted == place.path else "not stored"
        except Exception as error:
            raise self._refusal(error) from error
        return "stored"

    def rollback(self) -> None:
        self._check_open()
        if self._doubted is not None:
            raise self._doubt(self._doubted)
        self._forget()

    def close(self) -> None:
        if not self._closed and self._process == os.getpid():
            self._closed = True
            self._forget()
        self._spool.close()

    def _forget(self) -> None:
        self._runs, self._waiting, self._wait_bytes = [], [], 0
        self._begin_attempt()
