"""What the tests stage into and lease from: a queue or a topic, of which they expect the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from qewqew_core import Queue, Reader, Topic, inspect, inspect_reader

IMPORTS = [str(Path(__file__).parent), str(Path(__file__).parents[2])]  # where a process of its own finds the tests' modules


class Held:
    """A queue, or a topic with a reader, in the directory of the connection: to the operators they are the same."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.directory = directory
        self.path = directory / "orders"
        self.into = {kind + "_name" * (kind == "queue"): "orders"}  # what the stage operator is given
        self.names = self.into if kind == "queue" else {**self.into, "reader": "load"}  # and the others

    def put(self, *records: str) -> None:
        bodies = [record.encode() for record in records]
        if self.kind == "queue":
            with Queue(self.path) as queue:
                queue.put_many(bodies)
        else:
            with Topic(self.path) as topic:
                topic.append_many(bodies)

    @contextmanager
    def open(self) -> Iterator[Queue | Reader]:
        if self.kind == "queue":
            with Queue(self.path) as queue:
                yield queue
        else:
            with Topic(self.path) as topic, topic.reader("load") as reader:
                yield reader

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Nobody else gets at it."""
        with self.open() as opened:
            if isinstance(opened, Queue):
                yield
            else:
                with opened._engine.exclusive():  # as a process that is stopped in the middle of a call
                    yield

    def taken(self) -> list[bytes]:
        """The records that wait, which are gone then."""
        with self.open() as opened:
            if isinstance(opened, Queue):
                return opened.get_many(10_000)
            messages = opened.read_many(10_000)
            opened.commit()
            return [message.body for message in messages]

    def counts(self) -> dict[str, int]:
        stats = inspect(self.path) if self.kind == "queue" else inspect_reader(self.path, "load")
        return {name: getattr(stats, name) for name in ("records", "leased", "returned", "dead")}

    def operator(self, **arguments: Any) -> Any:
        from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator

        outputs = [{"path": "/nowhere/orders"}]
        return QewQewSparkSubmitOperator(
            **{"task_id": "submit", "outputs": outputs, "retry_delay": timedelta(0), **self.names, **arguments}
        )

    def make(self, dag_id: str, **arguments: Any) -> Any:
        """A DAG of one such operator."""
        from airflow.sdk import DAG

        with DAG(self.dag_id(dag_id), schedule=None) as dag:
            self.operator(**arguments)
        return dag

    def dag_id(self, name: str) -> str:
        return f"spark_{self.kind}_{name}"
