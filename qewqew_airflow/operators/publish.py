"""Publish one batch for a drain: lease, copy to an object store, acknowledge."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qewqew_airflow.arguments import place
from qewqew_airflow.errors import no_retry_for_the_hopeless
from qewqew_airflow.operators.process import WorkingOperator
from qewqew_core import Batch
from qewqew_core.batch import published
from qewqew_core.batch.manifest import MANIFEST
from qewqew_core.batch.store import store_of

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context


class QewQewPublishOperator(WorkingOperator):
    """Leases one batch, copies it below a prefix that all hosts reach, and acknowledges it: from then on the copy is what counts.

    `QewQewDrainOperator` appends the copies to a table. The queue is open only to lease and to acknowledge. The copy is named by
    the batch's id and the time at which it was made, which the queue keeps. So all tries, and all runs that lease the batch
    again, write the same files, and the table takes them once. No other batch has this name, not even one that another host, or
    a new disk, has leased under the same key. What happens when:

    - it is killed, or fails: what was written stays, and the next try sends only what is missing. After the last try the batch is
      returned, and the next run publishes it, under the same name.
    - it is killed after the copy is whole: the next try makes sure of that, and acknowledges. If a drain has taken the copy, it
      is sent again, and the next drain finds the batch in the table and removes it.
    - another try is cut off and lives on: this one waits for its end, or that one loses its lease (`LeaseLost`).
    - it is cleared after success: it repairs the copy if that is still there, and does nothing if a drain has taken it.
    - nothing is to be leased: the task is skipped.

    Returns (XCom) queue (or topic and reader), batch_id, attempt, records and bytes, ``oldest`` if it is known, and ``url``: the
    path or URL of the copy.

    :param prefix: directory or URL under which batches are published, and nothing else is (templated). The store's client takes
        its credentials from the environment
    :param queue_name: file name of the queue in the connection's directory (templated)
    :param topic: instead of queue_name: name of the topic there (templated)
    :param reader: whose messages of the topic are leased (templated)
    :param filter: which tags these have (templated); without it the reader keeps its filter
    :param start: where a new reader begins: "oldest", "latest", the number of a message, or a datetime
    :param max_records: at most this many records in the batch (templated)
    :param max_bytes: at most this many bytes in the batch (templated)
    :param lease_timeout: timedelta or seconds, from 1 s: if the task is killed and not tried again, others get the batch then
    :param qewqew_conn_id: the connection (templated)

    Raises `BadArgument`, `BadPath`, `Locked`, `BatchConflict`, `LeaseLost`, `StoreError`, and `Corrupt`.
    """

    template_fields: Sequence[str] = (*WorkingOperator.template_fields, "prefix")

    def __init__(self, *, prefix: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.prefix: Any = place("prefix", prefix)

    def _check(self) -> None:
        super()._check()
        self.prefix = place("prefix", self.prefix)

    @no_retry_for_the_hopeless()
    def _work(self, batch: Batch, context: Context) -> dict[str, Any]:
        name = f"{batch.id}-{batch.made:x}"
        url = published.place(self.prefix, name)
        if batch.state == "acked" and not _is_there(url):
            self.log.info("Batch %s was published, acknowledged and taken by a drain before: there is nothing to do", batch.id)
        else:
            batch.publish(self.prefix, name=name)
            self.log.info("Published batch %s: %s", batch.id, url)
        return {"url": url}

    def get_openlineage_facets_on_complete(self, task_instance: Any) -> OperatorLineage[Any, Any]:
        from qewqew_airflow.shared.lineage import lineage, of_queue, written_output

        queue = of_queue(self.qewqew_conn_id, str(self.queue_name or self.topic))
        return lineage([queue], [written_output({"path": self.prefix}, "")])


def _is_there(url: str) -> bool:
    try:
        store_of(url).size(MANIFEST)
    except FileNotFoundError:
        return False
    return True
