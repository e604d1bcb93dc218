"""`python -m qewqew_airflow.preflight` in a process of its own, with a connection in Airflow's database."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qewqew_core.tools import marker


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Path]:
    """The directory of the connection stored_default, which is in Airflow's database alone."""
    from airflow.models.connection import Connection
    from airflow.utils.session import create_session

    with create_session() as session:
        session.add(Connection(conn_id="stored_default", conn_type="qewqew", host=str(tmp_path / "queues")))
    yield tmp_path / "queues"
    with create_session() as session:
        session.delete(session.query(Connection).filter_by(conn_id="stored_default").one())


def asked(connection: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qewqew_airflow.preflight", connection]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ}, cwd=Path(__file__).parents[3])


def test_a_connection_in_the_database_is_found_and_tried(stored: Path) -> None:
    missing = asked("stored_default")
    assert missing.returncode == 1
    assert f"WRONG directory: BadPath: {stored}: connection 'stored_default' needs this directory" in missing.stdout
    assert f"qewqew init {stored}" in missing.stdout
    marker.init(str(stored))
    there = asked("stored_default")
    assert (there.returncode, there.stdout.count("\nok    "), "WRONG" in there.stdout) == (0, 5, False)
    assert [path.name for path in stored.iterdir()] == [marker.NAME]
    unknown = asked("nobody_has_this")
    assert (unknown.returncode, "WRONG settings: " in unknown.stdout, "nobody_has_this" in unknown.stdout) == (1, True, True)
