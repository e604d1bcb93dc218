"""Durable local queues in chunk files, with sessions and batches; `inspect` and `repair`. Knows neither Spark nor Airflow."""

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
    CorruptQueue,
    DiskFull,
    Empty,
    QewQewError,
    QueueBroken,
    QueueClosed,
    QueueFull,
    QueueLocked,
    RecordTooLarge,
)
from qewqew_core.inspection import QueueStats, inspect
from qewqew_core.orphans import Orphan
from qewqew_core.queue import Queue
from qewqew_core.repairing import Damage, RepairReport, repair
from qewqew_core.session import Session
from qewqew_core.verification import Report

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
    "CorruptQueue",
    "Damage",
    "DiskFull",
    "Empty",
    "Orphan",
    "QewQewError",
    "Queue",
    "QueueBroken",
    "QueueClosed",
    "QueueFull",
    "QueueLocked",
    "QueueStats",
    "RecordTooLarge",
    "RepairReport",
    "Report",
    "Session",
    "inspect",
    "repair",
]
