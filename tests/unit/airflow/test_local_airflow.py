"""How `LocalAirflow` asks the API of its Airflow; that it runs one is tested in tests/system."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from demo.local_airflow import AirflowFailed, LocalAirflow

BUSY = (500, b'{"detail": {"reason": "Database error"}}')  # what Airflow says when SQLite has refused a transaction
BROKEN = (500, b"Internal Server Error")


class Api(BaseHTTPRequestHandler):
    answers: ClassVar[list[tuple[int, bytes]]] = []

    def do_GET(self) -> None:
        status, body = self.answers.pop(0)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def airflow(tmp_path: Path) -> Iterator[LocalAirflow]:
    with HTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever).start()
        asked = LocalAirflow(tmp_path / "home", tmp_path / "dags")
        asked.port = server.server_port
        try:
            yield asked
        finally:
            server.shutdown()


def test_a_busy_database_is_asked_again(airflow: LocalAirflow) -> None:
    Api.answers = [BUSY, BUSY, (200, b'{"total": 3}')]
    assert airflow._call("GET", "/api/v2/dags", login=False) == {"total": 3}
    assert Api.answers == []


def test_a_database_that_stays_busy_is_an_error(airflow: LocalAirflow) -> None:
    Api.answers = [BUSY] * 9
    with pytest.raises(AirflowFailed, match=r"GET /api/v2/dags: 500 .*Database error"):
        airflow._call("GET", "/api/v2/dags", login=False)
    assert len(Api.answers) == 4


def test_another_error_is_not_asked_again(airflow: LocalAirflow) -> None:
    Api.answers = [BROKEN, (200, b"null")]
    with pytest.raises(AirflowFailed, match="Internal Server Error"):
        airflow._call("GET", "/api/v2/dags", login=False)
    assert len(Api.answers) == 1
