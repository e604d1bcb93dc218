"""Durable local queues and topics, with sessions and batches; `inspect` and `repair`. Knows neither Spark nor Airflow."""

from qewqew_core.batch import Batch
from qewqew_core.errors import (
    BadArgument,
    BadKey,
    BadManifest,
    BadPath,
    BadRecord,
    BatchConflict,
    BatchExpired,
    BatchNotFound,
    CommitConflict,
    CorruptQueue,
    DiskFull,
    Empty,
    MessagesLost,
    QewQewError,
    QueueBroken,
    QueueClosed,
    QueueFull,
    QueueLocked,
    RecordTooLarge,
    StoreError,
)
from qewqew_core.inspection import inspect
from qewqew_core.orphans import Orphan
from qewqew_core.queue import Queue
from qewqew_core.reader import Reader
from qewqew_core.repairing import Damage, RepairReport, repair
from qewqew_core.session import Session
from qewqew_core.stats import QueueStats
from qewqew_core.topic import Topic
from qewqew_core.topic_inspection import TopicStats, inspect_reader
from qewqew_core.topic_repairing import TopicRepair, repair_topic
from qewqew_core.topic_session import TopicSession
from qewqew_core.topic_verification import TopicReport
from qewqew_core.verification import Report
from qewqew_core.zbus import Message

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
    "CommitConflict",
    "CorruptQueue",
    "Damage",
    "DiskFull",
    "Empty",
    "Message",
    "MessagesLost",
    "Orphan",
    "QewQewError",
    "Queue",
    "QueueBroken",
    "QueueClosed",
    "QueueFull",
    "QueueLocked",
    "QueueStats",
    "Reader",
    "RecordTooLarge",
    "RepairReport",
    "Report",
    "Session",
    "StoreError",
    "Topic",
    "TopicRepair",
    "TopicReport",
    "TopicSession",
    "TopicStats",
    "inspect",
    "inspect_reader",
    "repair",
    "repair_topic",
]
