"""An object store for tests: moto's S3 server, to which boto3 and s3fs speak as to any other."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import fsspec
from botocore.config import Config
from moto.server import ThreadedMotoServer

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "hushhush", "AWS_DEFAULT_REGION": "us-east-1"}


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


if __name__ == "__main__":
    with object_store() as place:
        print(place, flush=True)
        sys.stdin.read()
