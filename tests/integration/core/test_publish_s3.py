"""Batches in an object store: moto's S3 server answers on 127.0.0.1, and s3fs speaks to it as to any other."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from object_store import CREDENTIALS, object_store, s3_client

from qewqew_core import BadManifest, Batch, Corrupt, Message, Queue, StoreError, Topic
from qewqew_core.batch import manifest, segments
from qewqew_core.batch.store import store_of

BUCKET = "s3://batches/at/some/depth"
RECORDS = [b"%06d" % number * 20 for number in range(100_000)]  # 12 MB: one file is sent in parts


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with object_store() as url:
        yield url


@pytest.fixture
def s3(endpoint, monkeypatch) -> Iterator[Any]:
    """A client of the server, whose only bucket is new; the environment has the credentials."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    client = s3_client(endpoint)
    client.create_bucket(Bucket="batches")
    yield client
    for upload in client.list_multipart_uploads(Bucket="batches").get("Uploads", []):
        client.abort_multipart_upload(Bucket="batches", Key=upload["Key"], UploadId=upload["UploadId"])
    for one in objects(client):
        client.delete_object(Bucket="batches", Key=one)
    client.delete_bucket(Bucket="batches")


def objects(s3: Any) -> dict[str, Any]:
    """When each object was written."""
    return {one["Key"]: one["LastModified"] for one in s3.list_objects_v2(Bucket="batches").get("Contents", [])}


@pytest.fixture
def batch(tmp_path) -> Batch:
    with Queue(tmp_path / "q", chunk_size=10 << 20, sync="never") as q:
        q.put_many(RECORDS)
        return q.lease("key")


def records_of(url: str, options: dict[str, Any] | None = None) -> list[bytes]:
    body = manifest.load(url, options)
    store = pickle.loads(pickle.dumps(store_of(url, options)))  # noqa: S301 - as Spark does
    return [one for segment in body.segments for some in segments.read_records(store, body, segment) for one in some]


def test_a_pattern_finds_the_batches_that_are_there(s3, batch):
    assert store_of(f"{BUCKET}/*").glob("manifest.json") == []
    url = batch.publish(BUCKET)
    s3.put_object(Bucket="batches", Key="at/some/depth/half/orders.qew.1", Body=b"x")
    assert store_of(f"{BUCKET}/*").glob("manifest.json") == [f"{url}/manifest.json"]
    assert store_of(f"{BUCKET[:-4]}*/q-[0-9a-f]*").glob("*.json") == [f"{url}/manifest.json"]


@pytest.mark.quick("a batch in an object store is read where it lies")
def test_a_published_batch_is_read_where_it_lies(s3, batch):
    told: list[tuple[int, int]] = []
    url = batch.publish(BUCKET, progress=lambda *both: told.append(both))
    assert url == f"{BUCKET}/{batch.id}"
    assert records_of(url) == RECORDS
    assert manifest.load(url) == manifest.load(f"{url}/manifest.json") == manifest.load(batch.manifest_path)
    body = manifest.load(url)
    ends = ((segment, *pair) for segment in body.segments for pair in pairwise([segment.start, *segment.cuts[::50], segment.end]))
    for part in (segment.part(start, end) for segment, start, end in ends):
        list(segments.read_segment(store_of(url), part))
    total = sum(body.files().values())
    assert told == sorted(told)
    assert len(told) > 3
    assert told[-1] == (total, total)


def test_options_are_those_of_s3fs(s3, batch, endpoint, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name)
    options = {"key": "somebody", "secret": "hushhush", "endpoint_url": endpoint, "client_kwargs": '{"region_name": "us-east-1"}'}
    assert records_of(batch.publish(BUCKET, options=options), options) == RECORDS
    assert "hushhush" not in repr(store_of(BUCKET, options))


def test_published_again_nothing_is_sent_but_the_manifest(s3, batch):
    batch.publish(BUCKET)
    before = objects(s3)
    time.sleep(1.1)  # S3 has whole seconds
    batch.publish(BUCKET)
    changed = [key.rpartition("/")[2] for key, when in objects(s3).items() if before[key] != when]
    assert changed == ["manifest.json"]


def test_an_object_of_the_right_size_with_other_bytes_is_sent_again(s3, batch):
    url = batch.publish(BUCKET)
    key = next(key for key in objects(s3) if key.endswith(".30001"))
    data = bytearray(s3.get_object(Bucket="batches", Key=key)["Body"].read())
    data[5_000_000] ^= 1
    s3.put_object(Bucket="batches", Key=key, Body=bytes(data))
    with pytest.raises(Corrupt, match=rf"{url}/q\.30001, offset \d+: the checksum"):
        records_of(url)
    batch.publish(BUCKET)
    assert records_of(url) == RECORDS


def test_a_damaged_segment_is_never_published(s3, batch):
    file = Path(batch.manifest_path).parent / "q.30001"
    data = bytearray(file.read_bytes())
    data[9_000_000] ^= 1  # behind the first part, which is sent by then
    file.write_bytes(data)
    with pytest.raises(Corrupt, match=r"q\.30001, offset \d+: the checksum"):
        batch.publish(BUCKET)
    assert objects(s3) == {}, "not even the object that was begun"
    assert s3.list_multipart_uploads(Bucket="batches").get("Uploads", []) == []


def test_a_kill_while_it_is_published_leaves_no_batch_and_the_next_call_goes_on(s3, batch):
    program = (
        "import sys, time\n"
        "from qewqew_core.batch.publishing import publish\n"
        "def progress(done, total):\n"
        "    if done > 11_000_000:\n"
        "        print('sent', flush=True)\n"
        "        time.sleep(60)\n"
        "publish(sys.argv[1], sys.argv[2], progress=progress)\n"
    )
    folder = str(Path(batch.manifest_path).parent)
    process = subprocess.Popen([sys.executable, "-c", program, folder, BUCKET], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"sent\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = objects(s3)
    assert [key.rpartition("/")[2] for key in before] == ["q.30001"], "whole, and the second is not begun"
    url = f"{BUCKET}/{batch.id}"
    with pytest.raises(BadManifest, match="there is no manifest"):
        manifest.load(url)
    time.sleep(1.1)
    assert batch.publish(BUCKET) == url
    assert records_of(url) == RECORDS
    (key,) = before
    assert objects(s3)[key] == before[key], "what was there is not sent again"


def test_a_batch_of_a_topic_is_published_too(s3, tmp_path):
    with Topic(tmp_path / "t", block_size=1 << 20) as topic:
        reader = topic.reader("loader", start="oldest", filter="a")
        topic.append_many([Message(b"%d" % number * 100, "a") for number in range(10_000)])
        batch = reader.lease("key")
        url = batch.publish(BUCKET)
        assert records_of(url) == list(batch.messages())
    assert manifest.load(url).filter == "a"


def test_what_is_missing_or_too_short_is_named(s3, batch):
    url = batch.publish(BUCKET)
    body = manifest.load(url)
    with pytest.raises(BadManifest, match=r"s3://batches/none/manifest\.json: there is no manifest"):
        manifest.load("s3://batches/none")
    with pytest.raises(BadManifest, match=r"s3://nobody/manifest\.json: there is no manifest"):
        manifest.load("s3://nobody")
    s3.put_object(Bucket="batches", Key=f"at/some/depth/{batch.id}/q.30002", Body=b"short")
    with pytest.raises(BadManifest, match=rf"{url}/manifest\.json: segment file 'q\.30002' has 5 bytes"):
        manifest.load(url)
    with pytest.raises(Corrupt, match=rf"{url}/q\.30002, offset \d+: the file ends before offset"):
        list(segments.read_segment(store_of(url), body.segments[1]))
    s3.delete_object(Bucket="batches", Key=f"at/some/depth/{batch.id}/q.30002")
    with pytest.raises(BadManifest, match=rf"{url}/manifest\.json: segment file 'q\.30002' cannot be read"):
        manifest.load(url)
    with pytest.raises(Corrupt, match=rf"{url}/q\.30002, offset 10: the segment cannot be read"):
        list(segments.read_segment(store_of(url), body.segments[1]))
    s3.put_object(Bucket="batches", Key=f"at/some/depth/{batch.id}/manifest.json", Body=b"{")
    with pytest.raises(BadManifest, match=rf"{url}/manifest\.json: not JSON"):
        manifest.load(url)


def test_a_bucket_that_is_not_there_is_not_made(s3, batch):
    with pytest.raises((StoreError, FileNotFoundError), match=r"s3://nobody/"):
        batch.publish("s3://nobody/x")
    assert [one["Name"] for one in s3.list_buckets()["Buckets"]] == ["batches"]


def test_a_server_that_is_not_there_is_an_error_of_the_store_without_secrets(batch):
    options = {
        "key": "somebody",
        "secret": "hushhush",
        "endpoint_url": "http://127.0.0.1:9",
        "config_kwargs": json.dumps({"retries": {"max_attempts": 0}, "connect_timeout": 1}),
    }
    with pytest.raises(StoreError, match=rf"{BUCKET}/{batch.id}/manifest\.json: .*127\.0\.0\.1:9") as caught:
        batch.publish(BUCKET, options=options)
    assert "hushhush" not in str(caught.value)
    with pytest.raises(StoreError, match=rf"{BUCKET}/manifest\.json: "):
        manifest.load(BUCKET, options)


def test_a_store_that_was_used_is_used_in_a_forked_process_too(s3, batch):
    """As Spark's Python workers are: connections, and the thread that has them, do not survive a fork."""
    url = batch.publish(BUCKET)
    store, body = store_of(url), manifest.load(url)
    first = next(segments.read_records(store, body, body.segments[0]))
    child = os.fork()
    if not child:
        signal.alarm(300)
        os._exit(0 if next(segments.read_records(store, body, body.segments[0])) == first else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert next(segments.read_records(store, body, body.segments[0])) == first
