"""What leaves a task, without secrets: reasons, notices, XComs, events and lineage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.providers.common.compat.sdk import redact

from qewqew_core.secrecy import hide


def masked(value: Any) -> Any:
    """The same, with all texts as Airflow shows them: it knows the secrets of connections and variables, we those of URLs."""
    match value:
        case str():
            return redact(hide(value))
        case Mapping():
            return {name: masked(each) for name, each in value.items()}
        case list() | tuple():
            return [masked(each) for each in value]
    return value
