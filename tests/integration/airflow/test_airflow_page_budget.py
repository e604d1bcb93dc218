"""A directory that hangs, requests that are too large, and what errors tell: the page goes on, and so does the API server."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from asking import FROM_THE_PAGE, KEY, PAGE, Login, act, dead_batch, only_connection

from qewqew_core import Message, Queue, Topic

pytestmark = pytest.mark.filterwarnings("ignore:The HMAC key")  # of an Airflow that was just made

OF_A_STORE = [f"{what}?queue=orders" for what in ("batches", "samples", "records")]


class Hanging:
    """Directories that do not answer, as on a mount whose server is gone. Each counts the threads that wait for it."""

    def __init__(self, connect: Callable[..., None], beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from qewqew_airflow.hooks.qewqew import QewQewHook
        from qewqew_airflow.page import budget

        self.mounted, self.waiting = threading.Event(), dict[str, int]()
        self._connect, self._beside = connect, beside
        answer = QewQewHook.directory

        def directory(hook: QewQewHook) -> str:
            host = hook.connection.host or ""
            if host in self.waiting:
                self.waiting[host] += 1
                self.mounted.wait()
                self.waiting[host] -= 1
            return answer(hook)

        monkeypatch.setattr(QewQewHook, "directory", directory)
        monkeypatch.setattr(budget, "DEADLINE", 5.0)

    def add(self, name: str) -> Path:
        """A connection with a directory that hangs."""
        path = self._beside / name
        path.mkdir()
        self._connect(name, "qewqew", str(path))
        self.waiting[str(path)] = 0
        return path


@pytest.fixture
def hanging(connect: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    found = Hanging(connect, tmp_path, monkeypatch)
    yield found
    found.mounted.set()
    while any(thread.name == "qewqew page" for thread in threading.enumerate()):
        time.sleep(0.01)


def at_once(application: Any, cookies: dict[str, str], paths: list[str]) -> list[Any]:
    """The answers to requests that are all asked at the same time, as a server does."""
    import httpx

    async def ask() -> list[Any]:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver", cookies=cookies, timeout=300) as client:
            return await asyncio.gather(*map(client.get, paths))

    return asyncio.run(ask())


def rows(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in state["connections"]}


@pytest.mark.quick("a directory that hangs costs the page a row, and the API server nothing")
def test_a_directory_that_hangs_costs_a_row_and_a_thread_however_often_it_is_asked_for(
    application: Any, directory: Path, client: Login, fresh: None, hanging: Hanging
) -> None:
    dead_batch(directory, [b"x"])
    host = str(hanging.add("nfs"))
    Queue(os.path.join(host, "orders")).close()
    viewer = client("viewer")
    asked = [f"{PAGE}/connections/nfs/batches?queue=q{number}" for number in range(100)]
    asked += [f"{PAGE}/connections/nfs/samples?queue=orders"] * 50
    asked += [f"{PAGE}/data/state"] * 8  # few: each looks at the directory that answers, and a busy machine needs its time
    answers = at_once(application, dict(viewer.cookies), ["/api/v2/monitor/health", *asked, "/api/v2/version"])
    assert hanging.waiting == {host: 1}
    assert (answers[0].status_code, answers[-1].status_code) == (200, 200)
    for answer in answers[1:-1]:
        if answer.url.path == f"{PAGE}/data/state":
            found = rows(answer.json())
            assert [row["dead"] for row in found["qewqew_default"]["queues"]] == [1]
            said = found["nfs"]["error"]
        else:
            assert answer.status_code == 503
            said = answer.json()["detail"]
        assert "Slow: the directory of connection 'nfs' has not answered" in said
        assert host not in answer.text
    assert client("op").get(f"{PAGE}/connections/nfs/records?queue=orders").status_code == 503
    assert client("op").get(f"{PAGE}/connections/qewqew_default/records?queue=orders").status_code == 200
    assert hanging.waiting == {host: 1}
    hanging.mounted.set()
    while "error" not in (row := rows(viewer.get(f"{PAGE}/data/state").json())["nfs"]) or row["error"]:
        time.sleep(0.05)
    assert viewer.get(f"{PAGE}/connections/nfs/batches?queue=orders").status_code == 200


def test_threads_are_bounded_however_many_directories_hang(
    application: Any, directory: Path, client: Login, fresh: None, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qewqew_airflow.page import budget

    monkeypatch.setattr(budget, "THREADS", 3)
    for number in range(10):
        hanging.add(f"nfs{number}")
    viewer = client("viewer")
    answers = at_once(application, dict(viewer.cookies), [f"{PAGE}/data/state"] * 20)
    assert sum(hanging.waiting.values()) == 3
    for answer in answers:
        errors = [row["error"] for name, row in rows(answer.json()).items() if name != "qewqew_default"]
        assert sum("has not answered" in error for error in errors) == 3
        assert sum("has to wait" in error for error in errors) == 7
    hanging.mounted.set()
    while any(row["error"] for row in rows(viewer.get(f"{PAGE}/data/state").json()).values()):
        time.sleep(0.05)


def test_an_action_that_ran_out_of_time_says_that_it_may_be_done_and_one_that_did_not_begin_does_nothing(
    directory: Path, client: Login, monkeypatch: pytest.MonkeyPatch, hanging: Hanging
) -> None:
    from qewqew_airflow.page import actions

    first, second = (dead_batch(directory, [b"x"], name=name) for name in ("orders", "others"))
    goes_on, write = threading.Event(), actions._write_audit_log

    def hang(*told: Any) -> None:
        goes_on.wait()
        write(*told)

    monkeypatch.setattr(actions, "_write_audit_log", hang)
    op = client("op")
    answers = [act(op, "drop", body) for body in (first, second)]
    assert [answer.status_code for answer in answers] == [503, 503]
    assert "this may still be done: look at the batch" in answers[0].json()["detail"]
    assert "nothing was done" in answers[1].json()["detail"]
    goes_on.set()
    while (answer := act(op, "drop", first)).status_code == 503:
        time.sleep(0.05)
    assert answer.status_code == 404  # it was done
    assert act(op, "drop", second).status_code == 200


def test_the_sampler_goes_on_beside_a_directory_that_hangs(directory: Path, tmp_path: Path, hanging: Hanging) -> None:
    from qewqew_airflow.page.budget import Budget
    from qewqew_airflow.page.contents import each_directory
    from qewqew_airflow.page.samples import Sampler, Samples

    hanging.add("a_nfs")
    dead_batch(directory, [b"x"])
    samples = Samples(str(tmp_path / "state" / "page.sqlite3"))
    sampler = Sampler(samples, partial(each_directory, Budget()))
    for _ in range(3):
        sampler.sample()
    assert list(samples.depths(str(directory), 0)) == ["queue orders"]
    assert list(hanging.waiting.values()) == [1]


def test_what_took_long_to_read_is_kept_as_long(directory: Path, client: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    from qewqew_airflow.page import contents

    begun: list[float] = []

    def contents_of(connection: Any) -> Any:
        begun.append(time.monotonic())
        time.sleep(1)
        return look(connection)

    look = contents.contents_of
    monkeypatch.setattr(contents, "contents_of", contents_of)
    monkeypatch.setattr(contents, "FRESH", 0.1)
    while len(begun) < 3:
        only_connection(client("viewer"))
    assert all(after - before > 2 for before, after in pairwise(begun))


# Requests


class Sent:
    """A request body of which more comes whenever it is asked for, as the server hands it to the application."""

    def __init__(self, announced: int | None, most: int | None = None) -> None:
        """``most``: after so many bytes the browser is gone."""
        self.announced, self.read, self.most = announced, 0, most

    async def post(self, application: Any, token: str) -> tuple[int, dict[str, Any]]:
        headers = {"Content-Type": "application/json", "Host": "testserver", "Authorization": f"Bearer {token}", **FROM_THE_PAGE}
        if self.announced is not None:
            headers["Content-Length"] = str(self.announced)
        path = f"{PAGE}/connections/qewqew_default/drop"
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "server": ("testserver", 80),
            "client": ("127.0.0.1", 1), "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }  # fmt: skip
        answers: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if self.read > 100 << 20:
                raise AssertionError("all of it is read")
            if self.most is not None and self.read >= self.most:
                return {"type": "http.disconnect"}
            self.read += 1 << 16
            return {"type": "http.request", "body": b"[" * (self.most or 1 << 16), "more_body": True}

        async def send(message: dict[str, Any]) -> None:
            answers.append(message)

        await application(scope, receive, send)
        return answers[0]["status"], {name.decode(): value.decode() for name, value in answers[0]["headers"]}


@pytest.mark.parametrize("teams", [False, True])
@pytest.mark.parametrize("announced", [600 << 20, None])
def test_a_body_that_is_too_large_is_refused_and_not_read(
    announced: int | None, teams: bool, application: Any, directory: Path, client: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", str(teams))
    for role in ("viewer", "op"):
        sent = Sent(announced)
        status, headers = asyncio.run(sent.post(application, client(role).cookies["_token"]))
        if role == "op":
            assert (status, headers["connection"]) == (413, "close")
        assert status in (403, 413)
        assert sent.read <= (1 << 16 if announced is None else 0)


@pytest.mark.parametrize("teams", [False, True])
def test_a_request_that_the_browser_breaks_off_is_no_error(
    teams: bool, application: Any, client: Login, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", str(teams))
    status, _ = asyncio.run(
        Sent(None, most=10).post(application, client("op").cookies["_token"])
    )  # a server would log what is raised
    assert status == 499
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


# What errors tell


def bad_stores(directory: Path) -> dict[str, dict[str, str]]:
    """A store in each bad state: the parameters of a request, by name. Nothing of SECRET is for viewers."""
    secret = directory.parent / "SECRET-elsewhere"
    secret.mkdir()
    (secret / "passwd").write_bytes(b"SECRET-content\n" * 10)
    found: dict[str, dict[str, str]] = {}

    def queue(name: str) -> Path:
        with Queue(directory / name) as one:
            one.put_many([b"x" * 100] * 10)
        found[name] = {"queue": name}
        return directory / name

    def topic(name: str) -> Path:
        with Topic(directory / name) as one, one.reader("lake"):
            one.append_many([Message(b"x" * 100)] * 10)
        found[name] = {"topic": name}
        return directory / name

    for name, suffix in (("header", ""), ("log", ".wal")):
        for what in ("garbled", "cut", "linked", "gone", "directory", "socket", "pipe"):
            spoil(Path(f"{queue(f'{name}-{what}')}{suffix}"), what, secret)
    for what in ("garbled", "cut", "linked", "gone", "directory", "socket", "pipe"):
        for number, file in enumerate(sorted(one.name for one in topic(f"topic-{what}").iterdir())):
            where = topic(f"topic-{what}-{number}")
            spoil(where / file, what, secret)
    (directory / "link-out").symlink_to(secret / "passwd")
    (directory / "link-nowhere").symlink_to(secret / "SECRET-missing")
    (directory / "file").write_bytes(b"none of ours")
    names = ("link-out", "link-nowhere", "file", "file/x", "missing/x", "../x", "\0", "", "topic-gone/x", "x" * 300)
    found |= {f"queue {name!r}": {"queue": name} for name in names} | {f"topic {name!r}": {"topic": name} for name in names}
    found |= {"reader": {"topic": "topic-gone", "reader": "nobody"}, "bad reader": {"topic": "topic-gone", "reader": "../r"}}
    return found


def spoil(path: Path, what: str, secret: Path) -> None:
    whole = path.read_bytes() if path.is_file() else b""
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        path.unlink()
    match what:
        case "garbled":
            path.write_bytes(bytes(255 - byte for byte in whole))
        case "cut":
            path.write_bytes(whole[: len(whole) // 2])
        case "linked":
            path.symlink_to(secret / "passwd")
        case "directory":
            path.mkdir()
        case "socket":
            os.mknod(path, stat.S_IFSOCK | 0o600)
        case "pipe":
            os.mkfifo(path)


@pytest.mark.quick("a viewer is told nothing of paths, hosts and links")
def test_errors_tell_paths_hosts_and_links_to_those_alone_who_may_read_the_connection(
    application: Any, directory: Path, client: Login, connect: Callable[..., None], monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    from qewqew_airflow.page import budget

    monkeypatch.setattr(budget, "DEADLINE", 60.0)  # no store of these hangs
    whole = directory.parent / "SECRET-directory"
    whole.mkdir()
    connect("stores", "qewqew", str(whole))
    bad = bad_stores(whole)
    shutil.copy(whole / "link-out", directory.parent / "SECRET-file")
    connect("unmounted", "qewqew", "/SECRET-mount/queues")
    connect("file", "qewqew", str(directory.parent / "SECRET-file"))
    connect("relative", "qewqew", "SECRET-relative")
    connect("elsewhere", "qewqew", str(whole), hostname="SECRET-worker-7")
    connect("extra", "qewqew", str(whole), sync="SECRET-sync")
    connections = ["unmounted", "file", "relative", "elsewhere", "extra"]
    secrets = ("SECRET", str(directory.parent))
    roles = {role: client(role) for role in ("viewer", "op")}
    asked = [(f"{PAGE}/data/{what}", {}) for what in ("state", "history")]
    for what in ("batches", "samples", "records"):
        asked += [(f"{PAGE}/connections/stores/{what}", place) for place in bad.values()]
        asked += [(f"{PAGE}/connections/{one}/{what}", {"queue": "orders"}) for one in connections]
    told: dict[str, int] = {"viewer": 0, "op": 0}
    for path, place in asked:
        answers = {role: one.get(path, params=place) for role, one in roles.items()}
        viewer = answers["viewer"]
        assert not any(secret in viewer.text for secret in secrets), (path, place, viewer.text)
        if viewer.status_code in (400, 409, 500):
            assert answers["op"].status_code == viewer.status_code
            kind, _, rest = viewer.json()["detail"].partition(": ")
            assert "only users who may read the connection" in rest or "see the log" in kind, viewer.text
            assert answers["op"].json()["detail"].startswith(kind)
        for role, answer in answers.items():
            told[role] += any(secret in answer.text for secret in secrets)
    assert told["viewer"] == 0
    assert told["op"] > len(asked) / 4, told
    # Those who may act but not read are told no more than viewers.
    from qewqew_airflow.page import app

    monkeypatch.setattr(app, "may", lambda method, *_: method == "PUT")
    body = {"batch": "b", "attempt": 1, "made": 1}
    for place in bad.values():
        answer = roles["op"].post(f"{PAGE}/connections/stores/drop", json={**place, **body}, headers=FROM_THE_PAGE)
        assert answer.status_code in (400, 404, 409, 422, 500)
        assert not any(secret in answer.text for secret in secrets), (place, answer.text)


def test_a_handler_that_knows_no_rights_tells_the_kind_alone() -> None:
    from fastapi import Request

    from qewqew_airflow.page import app
    from qewqew_core import Corrupt

    scope = {"type": "http", "headers": [], "query_string": b"queue=orders", "path_params": {"connection_id": "c"}}
    answer = asyncio.run(app._failed(Request(scope), Corrupt("damaged", path="/SECRET")))
    assert json.loads(answer.body) == {"detail": "Corrupt: only users who may read the connection see what is wrong with orders"}
    assert KEY not in bytes(answer.body).decode()
