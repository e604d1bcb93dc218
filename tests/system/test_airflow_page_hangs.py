"""A real API server with a connection on a real mount that does not answer, and a viewer who asks a thousand times."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from demo.local_airflow import LocalAirflow
from qewqew_core import Queue
from qewqew_core.tools import marker

TIMEOUT = 300  # seconds


class ApiServer(LocalAirflow):
    components = {"api-server": ["api-server"]}  # noqa: RUF012

    def ask(self, path: str, token: str | None = None, body: dict[str, str] | None = None) -> tuple[int, Any]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT)
        headers = {"Content-Type": "application/json", **({} if token is None else {"Authorization": f"Bearer {token}"})}
        try:
            connection.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


class Mount:
    """A file system of FUSE whose server says that it is there, and then nothing any more."""

    def __init__(self, path: Path) -> None:
        self.path, self._libc = os.fsencode(path), ctypes.CDLL(None, use_errno=True)
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0".encode()
        if self._libc.mount(b"hangs", self.path, b"fuse", 0, options):
            os.close(self._fd)
            raise OSError(ctypes.get_errno(), "mount")
        _, _, unique = struct.unpack_from("<IIQ", os.read(self._fd, 1 << 16))  # FUSE_INIT
        said = struct.pack("<IIIIHHII", 7, 31, 1 << 16, 0, 12, 10, 1 << 16, 1).ljust(64, b"\0")
        os.write(self._fd, struct.pack("<IiQ", 16 + len(said), 0, unique) + said)

    def end(self) -> None:
        """All who wait for it are told that it is gone."""
        os.close(self._fd)
        self._libc.umount2(self.path, 2)  # MNT_DETACH


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    marker.init(str(tmp_path / "nfs"))
    try:
        mounted = Mount(tmp_path / "nfs")
    except OSError as error:
        pytest.skip(f"this machine lets no file system of FUSE be mounted: {error}")
    yield mounted
    with suppress(OSError):
        mounted.end()


@pytest.mark.quick("an API server with a mount that hangs goes on, however often the page is asked for it")
def test_a_mount_that_hangs_costs_a_row_and_never_the_server(mount: Mount, tmp_path: Path) -> None:
    marker.init(str(tmp_path / "queues"))
    with Queue(tmp_path / "queues" / "orders") as queue:
        queue.put_many([b"x"] * 3)
    env = {
        f"AIRFLOW_CONN_{name.upper()}": json.dumps({"conn_type": "qewqew", "host": str(tmp_path / name)})
        for name in ("queues", "nfs")
    }
    env["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS"] = "vera:viewer"
    (tmp_path / "dags").mkdir()
    with ApiServer(tmp_path / "airflow", tmp_path / "dags", env) as server:
        password = json.loads((server.home / "simple_auth_manager_passwords.json.generated").read_text())["vera"]
        token = server.ask("/auth/token", body={"username": "vera", "password": password})[1]["access_token"]

        def rows() -> dict[str, Any]:
            status, state = server.ask("/qewqew/data/state", token)
            assert status == 200, state
            return {row["id"]: row for row in state["connections"]}

        of_nfs = [f"/qewqew/connections/nfs/{what}?queue=q" for what in ("batches", "samples")]
        paths = [*of_nfs, "/qewqew/data/state", "/qewqew/data/history", "/qewqew/connections/queues/batches?queue=orders"] * 200
        with ThreadPoolExecutor(100) as viewers:
            asked = [
                viewers.submit(server.ask, f"{path}{number}" if path in of_nfs else path, token)
                for number, path in enumerate(paths)
            ]
            while not all(one.done() for one in asked):
                assert server.ask("/api/v2/monitor/health")[0] == 200
                assert [row["waiting"] for row in rows()["queues"]["queues"]] == [3]
                time.sleep(0.5)
        statuses = {path: Counter[int]() for path in paths}
        for path, one in zip(paths, asked, strict=True):
            statuses[path][one.result()[0]] += 1
        assert statuses == {path: {503 if path in of_nfs else 200: 200} for path in paths}
        assert "Slow: the directory of connection 'nfs' has not answered" in rows()["nfs"]["error"]
        assert server.ask(of_nfs[0], token)[1]["detail"].startswith("Slow: the directory of connection 'nfs'")

        mount.end()
        deadline = time.monotonic() + TIMEOUT
        while rows()["nfs"]["error"]:
            assert time.monotonic() < deadline
            time.sleep(0.5)
