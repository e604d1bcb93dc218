"""Durable local queues and topics, with sessions and batches; `inspect` and `repair`. Knows neither Spark nor Airflow."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qewqew_core.batch.batch import Batch
from qewqew_core.batch.reports import Damage, RepairReport, Report
from qewqew_core.batch.stats import QueueStats
from qewqew_core.errors import (
    BadArgument,
    BadKey,
    BadManifest,
    BadPath,
    BadRecord,
    BatchConflict,
    BatchExpired,
    BatchNotFound,
    Broken,
    Closed,
    CommitConflict,
    Corrupt,
    DiskFull,
    Empty,
    Full,
    InDoubt,
    Locked,
    MessagesLost,
    OutOfResources,
    QewQewError,
    RecordTooLarge,
    StoreError,
)
from qewqew_core.formats.zbus import Message
from qewqew_core.queue.inspection import inspect
from qewqew_core.queue.orphans import Orphan
from qewqew_core.queue.queue import Queue
from qewqew_core.queue.session import Session
from qewqew_core.queue.stage import Stage
from qewqew_core.queue.store_stage import StoreStage

if TYPE_CHECKING:
    from qewqew_core.queue.repairing import repair
    from qewqew_core.topic.reader import Reader
    from qewqew_core.topic.topic import Topic
    from qewqew_core.topic.topic_inspection import TopicStats, inspect_reader
    from qewqew_core.topic.topic_repairing import repair_topic
    from qewqew_core.topic.topic_session import TopicSession

__all__ = [
    "BadArgument",
    "BadKey",
    "BadManifest",
    "BadPath",
    "BadRecord",
    "Batch",
    "BatchConflict",
    "BatchExpired",
    "BatchNotFound",
    "Broken",
    "Closed",
    "CommitConflict",
    "Corrupt",
    "Damage",
    "DiskFull",
    "Empty",
    "Full",
    "InDoubt",
    "Locked",
    "Message",
    "MessagesLost",
    "Orphan",
    "OutOfResources",
    "QewQewError",
    "Queue",
    "QueueStats",
    "Reader",
    "RecordTooLarge",
    "RepairReport",
    "Report",
    "Session",
    "Stage",
    "StoreError",
    "StoreStage",
    "Topic",
    "TopicSession",
    "TopicStats",
    "inspect",
    "inspect_reader",
    "repair",
    "repair_topic",
]

# Imported when somebody asks: it takes a third of the time, and a task that stages records in a queue needs none of it.
_LATE = {
    "Reader": "topic.reader",
    "Topic": "topic.topic",
    "TopicSession": "topic.topic_session",
    "TopicStats": "topic.topic_inspection",
    "inspect_reader": "topic.topic_inspection",
    "repair": "queue.repairing",
    "repair_topic": "topic.topic_repairing",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATE})
