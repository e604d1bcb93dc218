"""Airflow reads its configuration when it is imported: a home of its own first, never the user's."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qewqew_core.tools import marker

os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="airflow-"))
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")
os.environ.setdefault("AIRFLOW__CORE__UNIT_TEST_MODE", "False")


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Define a connection by its fields, as an environment variable does. A directory that is there gets its marker."""

    def define(conn_id: str, conn_type: str, host: str | None, **extra: Any) -> None:
        if host and Path(host).is_relative_to(tmp_path) and os.path.isdir(host):
            marker.init(host)
        fields = {"conn_type": conn_type, "host": host, "extra": extra}
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", json.dumps(fields))

    return define


@pytest.fixture
def directory(tmp_path: Path, connect: Callable[..., None]) -> Path:
    """The directory of the connection qewqew_default."""
    path = tmp_path / "queues"
    path.mkdir()
    connect("qewqew_default", "qewqew", str(path))
    return path
