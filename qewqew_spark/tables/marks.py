"""What a commit of a table says of itself: which batches it has, which run of these made it, and which records it left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

BATCH_ID = "qewqew.batch-id"
BATCH_IDS = "qewqew.batch-ids"  # instead, where there are several: as JSON
ATTEMPT = "qewqew.attempt"  # which of the runs of the batch
BAD = "qewqew.bad"  # which records are not in the commit, see `Append.bad`


@dataclass(frozen=True)
class Found:
    """What a table says of a batch that it has. ``ours``: what this attempt wrote; ``bad``: see `Append`, None if not known."""

    snapshot: str
    ours: bool = False
    bad: str | None = None


def marks_in(text: str | None) -> dict[str, str]:
    """`Append.marks` as JSON; nothing if somebody else wrote the text."""
    try:
        found = json.loads(text or "null")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def named(marks: Mapping[str, str]) -> list[str]:
    """The batches that a commit with these marks has."""
    return json.loads(marks[BATCH_IDS]) if BATCH_IDS in marks else [marks[BATCH_ID]] if BATCH_ID in marks else []
