"""Stages in an object store: moto's S3 server, and before it a proxy that fails, cuts off, or lets others go first."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import fsspec
import pytest
from object_store import CREDENTIALS, object_store_apart, s3_client

from qewqew_core import BadArgument, BadPath, InDoubt, Stage, StoreError
from qewqew_core.batch import published, segments
from qewqew_core.batch.store import store_of

ROWS = [b"%d" % number for number in range(10)]
CHANGED = [b"new", *ROWS]
LOST = 0  # the connection ends without an answer


class Proxy(ThreadingHTTPServer):
    """Passes requests on, but at one of them does what the test says."""

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind = urlsplit(behind).netloc
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.reset()

    def reset(self, at: int = 0, answer: int | None = None, stored: bool = False, act: Callable[[], Any] | None = None) -> None:
        """At the request ``at``: ``act``, and the ``answer`` instead of the store's, which got the request if ``stored``."""
        self.seen: list[str] = []
        self.at, self.answer, self.stored, self.act = at, answer, stored, act


class Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        server, body = self.server, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.seen.append(f"{self.command} {self.path}")
        is_it = len(server.seen) == server.at
        answer, stored, act = server.answer, server.stored, server.act
        if is_it and act:
            act()
        if not is_it or answer is None or stored:
            behind = http.client.HTTPConnection(server.behind)
            behind.request(self.command, self.path, body, dict(self.headers))
            got = behind.getresponse()
            data, status, headers = got.read(), got.status, got.getheaders()
            behind.close()
        if is_it and answer == LOST:
            self.close_connection = True
            return
        if is_it and answer:
            code = {403: "AccessDenied", 409: "ConditionalRequestConflict", 429: "TooManyRequests", 500: "InternalError"}[answer]
            status, headers, data = answer, [], f"<Error><Code>{code}</Code><Message>so it says</Message></Error>".encode()
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def log_message(self, *args: Any) -> None:
        """Nothing to the terminal."""


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with object_store_apart() as behind, Proxy(behind) as server:
        s3_client(behind).create_bucket(Bucket="lake")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@pytest.fixture
def options(proxy, monkeypatch) -> dict[str, Any]:
    """Of the store. The client itself does not try again: what is tested is what we do."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return {"endpoint_url": proxy.url, "config_kwargs": {"retries": {"max_attempts": 0}}}


_numbers = count()


def new_place() -> str:
    return f"s3://lake/staged/{next(_numbers)}/orders"


def drained(place: str, options: dict[str, Any]) -> list[bytes]:
    rows = []
    for body in published.load(place, published.complete(place, options), options):
        store = store_of(published.place(place, body.id), options)
        rows += [row for each in body.segments for some in segments.read_records(store, body, each) for row in some]
    return rows


def staged(place: str, records: list[bytes], options: dict[str, Any], patience: float = 60.0) -> tuple[int, int]:
    with Stage(place, options=options, lock_timeout=patience) as stage:
        stage.put_many(records)
        return stage.commit("run 1"), stage.stored


def requests(proxy: Proxy) -> list[str]:
    return [request.partition(" ")[0] for request in proxy.seen]


def test_a_stage_takes_two_puts_and_one_head(proxy, options):
    place = new_place()
    staged(place, [], options)  # the first use tries the condition
    with Stage(place, options=options) as stage:
        stage.put_many(ROWS)
        proxy.reset()
        assert stage.commit("run 2") == 10
        assert sorted(requests(proxy)) == ["HEAD", "PUT", "PUT"]
    proxy.reset()
    assert staged(place, CHANGED, options) == (0, 0)
    assert sorted(requests(proxy)) == ["GET", "HEAD", "HEAD", "PUT", "PUT"]  # the client looks before it reads
    assert drained(place, options) == ROWS


def test_a_segment_of_many_megabytes_is_sent_in_parts(proxy, options):
    records = [b"%06d" % number * 1000 for number in range(3000)]
    place = new_place()
    proxy.reset()
    assert staged(place, records, options) == (3000, 3000)
    assert "POST" in requests(proxy)
    assert drained(place, options) == records


@pytest.mark.quick("whatever fails between a stage and an object store, each record is there once")
def test_each_request_may_fail_be_refused_or_lose_its_answer(proxy, options, every):
    cases = [
        (at, answer, stored, patience)
        for at in range(1, 8)  # a first stage: HEAD and a listing, three PUTs of the trial, two of the stage
        for answer, stored in ((500, False), (500, True), (LOST, False), (LOST, True), (409, False), (429, False))
        for patience in (0.0, 60.0)
    ]
    said = []
    for at, answer, stored, patience in every(cases, quick=28, full=7):
        place = new_place()
        proxy.reset(at, answer, stored)
        try:
            assert staged(place, ROWS, options, patience) == (10, 10), (at, answer, stored)
        except InDoubt:
            assert (at, patience) == (7, 0)
        except StoreError as error:
            said.append((at < 7, patience, error.what.endswith("Nothing was stored")))
        assert len(proxy.seen) >= at, "there are fewer requests than this test knows"
        proxy.reset()
        count, _ = staged(place, CHANGED, options)  # the next pod, whose source has changed
        rows = drained(place, options)
        assert rows in (ROWS, CHANGED), (at, answer, stored, patience)
        assert count == len(rows)
    assert set(said) <= {(True, 0.0, True)}


def test_another_attempt_may_overtake_at_each_request(proxy, options, every):
    for at in every(range(1, 8), quick=7):
        place, other = new_place(), []
        proxy.reset(at, act=lambda place=place, other=other: (proxy.reset(), other.append(staged(place, CHANGED, options))))
        assert staged(place, ROWS, options) == (11, 0)
        assert other == [(11, 11)]
        assert drained(place, options) == CHANGED


def test_a_refusal_has_a_name_and_nothing_is_stored(proxy, options):
    for at in (1, 3, 6, 7):
        place = new_place()
        proxy.reset(at, 403)
        with pytest.raises(BadPath, match=r"no permission .*Nothing was stored"):
            staged(place, ROWS, options)
        proxy.reset()
        assert published.complete(place, options) == []
    with pytest.raises(BadPath, match="make the bucket first"):
        staged("s3://nobody/orders", ROWS, options)


def test_a_server_that_ignores_the_condition_is_refused(proxy, options, monkeypatch):
    real = http.client.HTTPConnection.request

    def ignoring(self: Any, method: str, url: str, body: Any = None, headers: Any = None, **more: Any) -> None:
        real(self, method, url, body, {name: value for name, value in (headers or {}).items() if name != "If-None-Match"}, **more)

    monkeypatch.setattr(http.client.HTTPConnection, "request", ignoring)
    place = new_place()
    with pytest.raises(BadArgument, match="created a file twice"):
        staged(place, ROWS, options)
    assert published.complete(place, options) == []
