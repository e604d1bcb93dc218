"""Requests of the page, and a dead batch that they are about."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qewqew_core import Queue

PAGE = "/qewqew"
KEY = "flights|manual__2026-01-01T00:00:00+00:00|load|3"
FROM_THE_PAGE = {"X-QewQew": "1", "Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}
RECORDS = f"{PAGE}/connections/qewqew_default/records"

Login = Callable[..., Any]


def dead_batch(directory: Path, records: list[bytes], key: str = KEY, name: str = "orders") -> dict[str, Any]:
    """A dead batch of these records; what an action on it must send."""
    with Queue(directory / name, max_attempts=1) as queue:
        queue.put_many(records)
        batch = queue.lease(key)
        assert batch is not None
        batch.nack("the cluster was gone")
    return {"queue": name, "batch": batch.id, "attempt": 1, "made": batch.made}


def act(client: Any, action: str, body: dict[str, Any], **headers: str) -> Any:
    return client.post(f"{PAGE}/connections/qewqew_default/{action}", json=body, headers={**FROM_THE_PAGE, **headers})


def only_connection(client: Any) -> dict[str, Any]:
    answer = client.get(f"{PAGE}/data/state")
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["connections"]
    return dict(found)
