"""Records as the page shows them, and reading them without the queue's lock."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from qewqew_airflow.page.contents import topic_row
from qewqew_airflow.page.permissions import told
from qewqew_airflow.page.preview import SHOWN, batch_records, described, queue_records, topic_messages
from qewqew_core import Message, Queue, Topic, inspect_reader


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (b'{"a":1.50,"a":[1e400,{}],"b":[]}', "json", '{\n  "a": 1.50,\n  "a": [\n    1e400,\n    {}\n  ],\n  "b": []\n}'),
        (b'{"a:,[]{}":"\\"x, y\\""}', "json", '{\n  "a:,[]{}": "\\"x, y\\""\n}'),
        (b'["\xe2\x80\xae\\u0000"]', "json", '[\n  "\\u202e\\u0000"\n]'),
        (b"12", "text", "12"),
        (b"", "text", ""),
        (b"{broken", "text", "{broken"),
        ("zwei\nZeilen\tü".encode(), "text", "zwei\nZeilen\tü"),
        (b"a\x1b[31mred" + b"." * 20, "text", "a\\x1b[31mred" + "." * 20),
        (b"\x00abc", "hex", "0000  00 61 62 63                                      ·abc"),
        (b"\xff\xfe", "hex", "0000  ff fe                                            ··"),
    ],
)
def test_a_record_is_shown_as_json_text_or_hex(body: bytes, kind: str, text: str) -> None:
    assert described(body) == {"bytes": len(body), "kind": kind, "text": text, "cut": False}


def test_a_large_record_is_cut_between_two_letters() -> None:
    shown = described("ü".encode() * SHOWN)
    assert (shown["kind"], shown["text"], shown["cut"], shown["bytes"]) == ("text", "ü" * (SHOWN // 2), True, 2 * SHOWN)
    shown = described(b"a" + "ü".encode() * SHOWN)
    assert shown["text"] == "a" + "ü" * ((SHOWN - 1) // 2)
    shown = described(bytes(range(256)) * 100)
    assert (shown["kind"], len(shown["text"].splitlines()), shown["cut"]) == ("hex", 32, True)


@pytest.mark.parametrize(
    "body", [b"[" * 2000 + b"]" * 2000, b'{"a":' * 500 + b"1" + b"}" * 500, b"9" * 4000, b"[" + b"9" * 4090 + b"]"]
)
def test_json_that_is_nested_deeply_or_has_huge_numbers_is_not_blown_up(body: bytes) -> None:
    shown = described(body)
    assert len(shown["text"]) < 2 * len(body)
    assert shown["text"].replace("\n", "").replace(" ", "") == body.decode()


def test_the_first_records_are_those_that_get_would_take(tmp_path: Path) -> None:
    expected = [json.dumps({"n": number, "pad": "x" * (number % 300)}).encode() for number in range(2000)]

    def texts(number: int) -> list[str]:
        return [one["text"] for one in queue_records(path, number)]

    def shown(records: list[bytes]) -> list[str]:
        return [str(described(one)["text"]) for one in records]

    path = str(tmp_path / "q")
    assert queue_records(path, 3) == []
    with Queue(path, chunk_size=100_000) as queue:  # several chunks; what is new is only in the log
        queue.put_many(expected[:1999])
        queue.get_many(700)
        assert texts(5) == shown(expected[700:705])
        session = queue.session()
        session.get_many(3)
        with queue.session() as other:
            other.get_many(2)
            other.commit()  # gone in the middle of a chunk
        queue.put(expected[1999])
        assert texts(5) == shown([*expected[700:703], *expected[705:707]])
        assert len(queue_records(path, 5000)) == 2000 - 702
        session.rollback()
    assert texts(1) == shown(expected[700:701])


def test_of_a_large_message_only_the_beginning_is_read(tmp_path: Path) -> None:
    large = "ü".encode() * (16 << 20)
    expected = [
        (b'{"n": 1}', '{\n  "n": 1\n}'),
        (large, "ü" * (SHOWN // 2)),
        (b"x" * 100_000, "x" * SHOWN),
        (large[1:], described(large[1:10_000])["text"]),  # in hex
    ]
    path = str(tmp_path / "t")
    with Topic(path, sync="never") as topic, topic.reader("all") as everything, topic.reader("large", "large") as chosen:
        topic.append_many([Message(body, tag="large" if body in (large, large[1:]) else "small") for body, _ in expected])
        batches = [reader.lease("key") for reader in (everything, chosen)]
        topic.reader("waits", "large").close()
    shown = [(number, len(body), text, len(body) > SHOWN) for number, (body, text) in enumerate(expected)]
    del large, expected

    def cells(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(row["number"], row["bytes"], row["text"], row["cut"]) for row in rows]

    sizes = [size for _, size, _, _ in shown]
    tracemalloc.start()
    try:
        assert topic_row(path)["bytes"] == sum(sizes)
        assert inspect_reader(path, "waits").bytes == sum(sizes[1::2])
        assert cells(topic_messages(path, 20, None, None)) == shown
        assert cells(topic_messages(path, 2, None, None)) == shown[:2]
        assert cells(topic_messages(path, 20, 1, None)) == shown[1:]
        assert cells(topic_messages(path, 20, None, "waits")) == shown[1::2]
        for batch, some in zip(batches, (shown, shown[1::2]), strict=True):
            assert batch is not None
            assert cells(batch_records(str(Path(batch.manifest_path).parent), 20)) == some
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def test_the_page_shows_what_a_reader_can_still_deliver(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    with Topic(path, sync="never") as topic, topic.reader("r") as reader:
        topic.append_many([Message(b"%d" % number, tag="even" if number % 2 == 0 else "odd") for number in range(8)])
        read = reader.read_many(6)
        reader.commit(read[2])
        reader.nack(read[1], read[4])
        assert [row["number"] for row in topic_messages(path, 20, None, "r")] == [0, 1, 3, 4, 5, 6, 7]
        reader.set_filter("even")
        assert [row["number"] for row in topic_messages(path, 20, None, "r")] == [0, 4, 6]
        assert [row["number"] for row in topic_messages(path, 2, None, "r")] == [0, 4]
        assert inspect_reader(path, "r").records == 3


def test_a_reader_that_cannot_be_read_has_a_row_that_says_so(tmp_path: Path) -> None:
    """It hides no other. Users who may not read the connection are told the kind alone, see `permissions.told`."""
    with Topic(tmp_path / "t") as topic:
        for name in ("good", "bad"):
            topic.reader(name).close()
    file = tmp_path / "t" / "state" / "bad.lock"
    file.unlink()
    file.mkdir()
    good, bad = topic_row(str(tmp_path / "t"))["readers"]
    assert (good["name"], good["lag"]) == ("good", 0)
    assert bad["name"] == "bad"
    assert bad["error"].startswith(f"BadPath: {file}: a directory is in the way of a file of the reader")
    assert (
        told(bad["error"], "bad", may_read=False) == "BadPath: only users who may read the connection see what is wrong with bad"
    )
