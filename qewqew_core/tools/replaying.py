"""Replay: put the records of an acknowledged batch into the queue again, while they are kept."""

from __future__ import annotations

from contextlib import closing

from qewqew_core.batch.batch import Batch
from qewqew_core.errors import BatchConflict
from qewqew_core.queue.queue import Queue


def find(queue: Queue, key: str) -> Batch:
    """The acknowledged batch with this id, or leased under this key.

    Raises `BatchNotFound`, `BatchConflict` if it is not acknowledged, `BatchExpired` if its records are no longer kept.
    """
    batch = queue.find_batch(key)
    if batch.state != "acked":
        raise BatchConflict(f"batch {batch.id} is {batch.state}, not acknowledged", path=queue.path)
    return batch


def replay(queue: Queue, batch: Batch, name: str = "") -> int:
    """Put the records of an acknowledged batch at the end of the queue, in one commit; returns how many.

    They are leased like any others, under a new key; the batch stays acknowledged. This happens once for each batch and
    ``name``, however often it is called or killed: a second call does nothing and returns the same. Durable when it returns.
    Raises `Corrupt`, `BadManifest`, and what `Session.commit` raises: nothing has happened.
    """
    # An id alone may be that of an earlier batch of the same key, which was put back.
    key = f"replay of {batch.id}, made {batch.made}" + (f": {name}" if name else "")
    with closing(queue.session()) as session:
        for record in batch:
            session.put(record)
        return session.commit(key)
