"""One batch of a task: lease it, find it again, and keep it for this task alone while the work lasts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowFailException, AirflowSkipException

from qewqew_airflow.errors import LeaseLost, fails_at_once
from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.shared import metrics
from qewqew_airflow.shared.masking import masked
from qewqew_airflow.shared.source import Source
from qewqew_core import Batch, BatchConflict, BatchExpired, BatchNotFound, Locked, Queue, Reader

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator, Context


def lease(
    hook: QewQewHook, source: Source, key: str, max_records: int | None, max_bytes: int | None, lease_timeout: float | None
) -> LeasedBatch:
    """Lease the batch of this key from a queue or reader.

    Raises AirflowSkipException if there is nothing to lease, and AirflowFailException (no retries) if the batch has expired.
    """
    with source.open(hook) as opened:
        oldest = _oldest(opened)
        by_an_earlier_try = any((batch.state, batch.key) == ("leased", key) for batch in opened.batches())
        begun = time.monotonic()
        try:
            batch = opened.lease(key, max_records, max_bytes, lease_timeout)
        except BatchExpired as error:
            advice = "a longer retention in the connection's extra keeps batches longer"
            raise fails_at_once(error, f"Trigger a new run for what is in {source} now; {advice}") from error
        if batch is not None:
            batch.check()
        if batch is not None and batch.state == "leased" and not by_an_earlier_try:
            metrics.count("leased", batch.records, connection=hook.qewqew_conn_id, **source.names())
        due = min((other.due for other in opened.batches() if other.due is not None), default=None) if batch is None else None
    metrics.gauge(hook, source)
    if batch is None:
        later = "" if due is None else f" before {due}, when a batch that failed is due again"
        raise AirflowSkipException(f"{source} is empty: there is nothing to lease{later}")
    size = f"{batch.records:,} records, {batch.bytes:,} bytes"
    state = "acknowledged before, now processed again" if batch.state == "acked" else batch.state
    until = f" until {batch.expires}" if batch.expires else ""
    said = f"{batch.id} ({size}, attempt {batch.attempt}, {state}{until}), key {key}"
    hook.log.info("Leased batch %s: %s", said, batch.manifest_path)
    is_new = batch.state == "leased" and batch.attempt == 1 and not by_an_earlier_try
    return LeasedBatch(hook, source, batch, lease_timeout, begun, oldest if is_new else None)


def _oldest(opened: Queue | Reader) -> datetime | None:
    """When the oldest record of a queue was put, which a new batch begins with. None for a reader, which would have to read."""
    return opened.stats().oldest if isinstance(opened, Queue) else None


def still_ours(opened: Queue | Reader, batch_id: str, key: str, attempt: int) -> Batch:
    """The batch as it is now. Raises `BatchConflict` if another task has leased it since, `BatchNotFound`, `BatchExpired`."""
    batch = opened.batch(batch_id)
    if (batch.key, batch.attempt) != (key, attempt):
        raise BatchConflict(
            f"batch {batch_id} has been leased again by {batch.key}, attempt {batch.attempt}; this result is not acknowledged"
        )
    return batch


def numbers(batch: Batch) -> dict[str, Any]:
    """For the result of a task."""
    return {"batch_id": batch.id, "attempt": batch.attempt, "records": batch.records, "bytes": batch.bytes}


def is_last_try(operator: BaseOperator, context: Context, error: BaseException) -> bool:
    """Is this the last try of the task, by the rules of Airflow's own task runner?"""
    ti = context["ti"]
    if isinstance(error, AirflowFailException) or not 0 < ti.try_number <= ti.max_tries:
        return True
    policy = getattr(operator, "retry_policy", None)
    if policy is None:
        return False
    from airflow.sdk.definitions.retry_policy import RetryAction  # of Airflow 3.3, as the policies are

    decision = policy.evaluate(exception=error, try_number=ti.try_number, max_tries=ti.max_tries, context=context)
    return bool(decision.action == RetryAction.FAIL)


def return_leased(hook: QewQewHook, source: Source, key: str, error: BaseException) -> None:
    """Return the batch that is leased under the key, if there is one, after the last try of its task failed with the error."""
    try:
        if not source.may_have_leases(hook):
            return
        with source.open(hook) as opened:
            for batch in opened.batches():
                if batch.key == key and batch.state == "leased":
                    batch.nack(reason=masked(f"{type(error).__name__}: {error}".splitlines()[0])[:500])
                    metrics.ended(batch, connection=hook.qewqew_conn_id, **source.names())
                    what = "is a dead letter now" if batch.state == "dead" else f"was returned, and is due at {batch.due}"
                    hook.log.info("Last try failed: batch %s of %s %s", batch.id, source, what)
    except Exception as failure:  # this must not hide why the task failed
        hook.log.warning("The batch under %s could not be returned (%s): clear this task to process it", key, failure)


class LeasedBatch:
    """A batch that a task has leased. The task works on it in the blocks of `alone` and `extended`."""

    def __init__(
        self,
        hook: QewQewHook,
        source: Source,
        batch: Batch,
        lease_timeout: float | None,
        begun: float,
        oldest: datetime | None = None,
    ) -> None:
        self.batch = batch
        # For the result of the task: when its oldest record was put, if known.
        self.oldest = {} if oldest is None else {"oldest": oldest.isoformat(timespec="milliseconds")}
        self._hook, self._source, self._timeout, self._log = hook, source, lease_timeout, hook.log
        self._ends = begun + (lease_timeout or 0)  # by the monotonic clock

    @contextlib.contextmanager
    def alone(self, kill: Callable[[], None]) -> Iterator[None]:
        """Keep other tries away from the batch until the block ends. ``kill`` as for `extended`.

        A try whose supervisor was killed may live on while Airflow starts the next one, and two jobs that write the same
        output damage it. The kernel drops the lock when the process that holds it ends.
        """
        fd = os.open(os.path.dirname(self.batch.manifest_path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._log.warning("Another try of this task still works on batch %s; waiting for its end", self.batch.id)
                with self.extended(kill):
                    fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def extended(self, kill: Callable[[], None]) -> Iterator[None]:
        """Extend the lease in a thread until the block ends. Raises `LeaseLost` if the lease has ended, whatever the block did.

        In that case ``kill`` ends the work, and so the block. The thread has ended when this returns, because it and the
        acknowledgement must not wait for each other's queue.
        """
        if self._timeout is None or self.batch.state != "leased":  # nobody can take an acknowledged batch
            yield
            return
        done, lost = threading.Event(), list[Exception]()
        thread = threading.Thread(
            target=self._extend, args=(self._timeout, kill, done, lost), name=f"lease of {self.batch.id}", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            if lost:
                raise LeaseLost(
                    f"the lease of batch {self.batch.id} was not extended within {self._timeout:g} s: {lost[0]}. The work on it "
                    "was killed, and nothing was acknowledged. The next lease gets the batch, unless another task has it"
                ) from lost[0]

    def _extend(self, timeout: float, kill: Callable[[], None], done: threading.Event, lost: list[Exception]) -> None:
        """Extend the lease every third of its time until ``done``. If it ends, put the cause into ``lost``, and ``kill``."""
        every = timeout / 3
        soon = min(every / 10, 5.0)
        pause = self._ends - 2 * every - time.monotonic()
        while not lost and not done.wait(pause):
            begun = time.monotonic()
            pause = soon
            try:
                # Wait only shortly for the lock: the task waits for this thread before it acknowledges.
                with self._source.open(self._hook, lock_timeout=min(soon, 1.0)) as opened:
                    batch = self._find(opened)
                    if batch.state == "acked":  # by an earlier try, which this one waits for
                        return
                    batch.extend(timeout)
                self._ends, pause = begun + timeout, every
            except (BatchConflict, BatchNotFound, BatchExpired) as error:
                lost.append(error)
            except Exception as error:
                if time.monotonic() >= self._ends:  # another task may have the batch by now
                    lost.append(error)
                elif isinstance(error, Locked):
                    self._log.debug("The lease of batch %s will be extended a little later: %s", self.batch.id, error)
                else:
                    self._log.warning("The lease of batch %s could not be extended; trying again: %s", self.batch.id, error)
        if lost:
            self._log.error("Lost the lease of batch %s; killing the work on it: %s", self.batch.id, lost[0])
        while lost and not done.is_set():  # more than once, because spark-submit may just be starting
            try:
                kill()
            except Exception as error:
                self._log.warning("The work could not be killed; trying again: %s", error)
            done.wait(1.0)

    def acknowledge(self) -> None:
        """Acknowledge the batch. Raises what `still_ours` raises."""
        with self._source.open(self._hook) as opened:
            batch = self._find(opened)
            before = batch.state
            batch.ack()
        self._log.info("Acknowledged batch %s", batch.id)
        if before != "acked":
            metrics.ended(batch, connection=self._hook.qewqew_conn_id, **self._source.names())
        metrics.gauge(self._hook, self._source)

    def _find(self, opened: Queue | Reader) -> Batch:
        return still_ours(opened, self.batch.id, self.batch.key, self.batch.attempt)
