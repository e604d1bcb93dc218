"""An object store for tests: moto's S3 server, to which boto3 and s3fs speak as to any other."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import boto3
import fsspec
from botocore.config import Config
from moto.server import ThreadedMotoServer

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "hushhush", "AWS_DEFAULT_REGION": "us-east-1"}

LOST = 0  # the connection ends without an answer


@contextmanager
def object_store(address: str = "127.0.0.1") -> Iterator[str]:
    """The URL of an empty server, for clients with `CREDENTIALS` in their environment; in each process one at a time."""
    server = ThreadedMotoServer(address, 0, verbose=False)
    server.start()
    url = f"http://{address}:{server.get_host_and_port()[1]}"
    try:
        yield url
    finally:
        urllib.request.urlopen(f"{url}/moto-api/reset", data=b"").close()  # noqa: S310 - our own
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()  # else the next test with a server speaks to this one


def s3_client(url: str) -> Any:
    key, secret, region = CREDENTIALS.values()
    config = Config(retries={"max_attempts": 1})
    return boto3.client("s3", region, endpoint_url=url, aws_access_key_id=key, aws_secret_access_key=secret, config=config)


@contextmanager
def object_store_apart() -> Iterator[str]:
    """The same in a process of its own, for clients that hold Python's lock while they wait for an answer, as delta-rs does."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, __file__], text=True, **pipes) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


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
        self.fails: str | None = None  # what has this in its path is answered with 500 whenever it is read
        self.before: Callable[[str], object] = lambda request: None  # called before a request is passed on


class Handler(BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        server, body = self.server, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = f"{self.command} {self.path}"
        server.seen.append(request)
        is_it = len(server.seen) == server.at
        server.before(request)
        fails = server.fails is not None and server.fails in self.path and self.command != "HEAD"
        answer, stored, act = (500, False, None) if fails else (server.answer, server.stored, server.act)
        is_it = is_it or fails
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


@contextmanager
def proxied(bucket: str) -> Iterator[Proxy]:
    """An empty bucket behind a `Proxy`."""
    with object_store_apart() as behind, Proxy(behind) as server:
        s3_client(behind).create_bucket(Bucket=bucket)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


if __name__ == "__main__":
    with object_store() as place:
        print(place, flush=True)
        sys.stdin.read()
