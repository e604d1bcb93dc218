"""An object store for tests: moto's S3 server, to which boto3 and s3fs speak as to any other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
from botocore.config import Config
from moto.server import ThreadedMotoServer

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "hushhush", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def object_store(address: str = "127.0.0.1") -> Iterator[str]:
    """The URL of a server, for clients with `CREDENTIALS` in their environment; in each process there is one memory for all."""
    server = ThreadedMotoServer(address, 0, verbose=False)
    server.start()
    try:
        yield f"http://{address}:{server.get_host_and_port()[1]}"
    finally:
        server.stop()


def s3_client(url: str) -> Any:
    key, secret, region = CREDENTIALS.values()
    config = Config(retries={"max_attempts": 1})
    return boto3.client("s3", region, endpoint_url=url, aws_access_key_id=key, aws_secret_access_key=secret, config=config)
