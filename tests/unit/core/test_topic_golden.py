"""Topics that the Java original wrote, opened with `Topic`: read as the original reads them, and written as it does."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import zbus_cases
from disk import NoSync
from zbus_cases import cases, content

from qewqew_core import Empty, Message, Reader, Topic
from qewqew_core.formats import zbus
from qewqew_core.limits import LIMITS

CASES = cases()


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    return zbus_cases.case(request.param, tmp_path)


def opened(queue: Path, body: dict[str, Any], **more: Any) -> Topic:
    return Topic(queue, dialect=body["dialect"], block_size=body["block_max_size"], _files=NoSync(), **more)


def fields(message: Message) -> dict[str, Any]:
    return {
        "number": message.number,
        "offset": message.offset,
        "timestamp": message.timestamp,
        "id": message.id,
        "corr_offset": message.corr_offset,
        "tag": message.tag,
        "body": message.body.hex(),
    }


def expected(body: dict[str, Any]) -> list[dict[str, Any]]:
    wanted = ("number", "offset", "timestamp", "id", "corr_offset", "tag", "body")
    return [{key: message[key] for key in wanted} | {"corr_offset": message["corr_offset"] or 0} for message in body["messages"]]


def of_zbus(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files that zbus servers know."""
    return {name: data for name, data in files.items() if name.endswith((".idx", ".zbus", ".rdx", ".nak"))}


# Reading


def test_all_messages_of_a_golden_case_are_read_with_all_their_fields(case):
    queue, body = case
    with opened(queue, body) as topic:
        assert [fields(message) for message in topic] == expected(body)
        assert len(topic) == len(body["messages"])
        with topic.reader("ours", auto_commit=True) as one:
            assert [fields(message) for message in one.read_many(1000)] == expected(body)
        with topic.reader("one by one", auto_commit=True) as one:
            assert [fields(message) for message in one] == expected(body)


def test_the_header_and_the_counts_of_a_golden_case_are_what_the_index_says(case):
    queue, body = case
    index = body["index"]
    with opened(queue, body) as topic:
        header = topic.header()
        assert (header.mask, header.created, header.updated) == (index["mask"], index["created"], index["updated"])
        assert (header.creator, header.ext) == (index["creator"] or "", tuple(text or "" for text in index["ext"]))
        stats = topic.stats()
        assert (stats.messages, stats.next, stats.blocks) == (
            len(body["messages"]),
            index["message_number"],
            len(index["blocks"]),
        )
        assert stats.first == body["messages"][0]["number"]
        assert stats.bytes == sum(len(message["body"]) // 2 for message in body["messages"])
        assert stats.oldest.timestamp() * 1000 == pytest.approx(body["messages"][0]["timestamp"])
        assert set(stats.readers) == set(body["reader_files"])
        report = topic.verify()
        assert report.ok
        assert (report.records, report.bytes, report.files) == (stats.messages, stats.bytes, stats.blocks)
        # The original keeps no checksums: ours says so, and does not pretend that it has checked what it cannot.
        assert report.unchecked == sum(block["end_offset"] for block in index["blocks"])


def test_each_reader_of_a_golden_case_returns_what_the_original_returned_and_stands_where_it_stood(case):
    """With auto_commit, which is when the original stores the position. Stored readers go on from theirs."""
    queue, body = case
    with opened(queue, body) as topic:
        assert set(topic.readers()) == set(body["reader_files"])
        for number, wanted in enumerate(body["readers"]):
            stored = wanted["kind"] == "stored"
            name = wanted["name"] if stored else f"fresh{number}"
            nak = queue / "reader" / f"{name}.nak"
            nak.unlink(missing_ok=True)  # its messages come again: see below
            with topic.reader(name, None if stored else wanted["filter"], auto_commit=True) as one:
                assert one.filter == (wanted["filter"] if wanted["filter"] and wanted["filter"].strip() else None)
                assert [message.number for message in one] == wanted["returns"]
                assert one.lag() == 0
                if after := wanted.get("after"):
                    place = (after["block_number"], after["offset"], after["last_number"] + 1)
                    assert one.position() == place
                    assert after["remaining"] == 0
                    assert zbus.unpack_position((queue / "reader" / f"{name}.rdx").read_bytes()) == place[:2]


def test_readers_that_commit_themselves_return_the_same_and_stand_there_once_they_have(case):
    queue, body = case
    with opened(queue, body) as topic:
        for number, wanted in enumerate(body["readers"]):
            if wanted["kind"] == "fresh":
                with topic.reader(f"fresh{number}", wanted["filter"]) as one:
                    messages = list(one)
                    assert [message.number for message in messages] == wanted["returns"]
                    if messages:
                        assert one.position().number == messages[0].number
                    assert one.commit() == len(messages)
                    assert one.position().number == body["index"]["message_number"]


def test_opening_reading_and_closing_changes_no_byte_of_the_files_of_zbus(case):
    """A topic of a zbus server may be looked at: the server finds what it left."""
    queue, body = case
    before = content(queue)
    with opened(queue, body) as topic:
        assert len(list(topic)) == len(body["messages"])
        assert topic.verify().ok
    assert of_zbus(content(queue)) == before
    with opened(queue, body) as topic:
        for name in topic.readers():
            with topic.reader(name) as one, contextlib.suppress(Empty):
                one.peek()
    if body["name"] == "history-dropped":  # the original, too, moves a reader whose block is no more when it opens it
        before["reader/behind.rdx"] = zbus.pack_position(2, 0) + before["reader/behind.rdx"][12:]
    if body["name"] == "header-fields":  # its mask has DELETE_ON_EXIT: as on a server, it ends with its last consumer
        del before["reader/r.rdx"], before["reader/r.nak"]
    assert of_zbus(content(queue)) == before


@pytest.mark.req("Z2")
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("dialect-c")])
def test_the_stored_offset_of_a_and_b_is_ignored(name, tmp_path):
    queue, body = zbus_cases.case(name, tmp_path)
    luck = random.Random(2)
    blocks = {block["number"]: block for block in body["index"]["blocks"]}
    for message in body["messages"]:
        block = blocks[message["block"]]
        with (queue / block["file"]).open("r+b") as file:
            file.seek(message["offset"] - block["base_offset"])
            file.write(luck.randbytes(8))
    with opened(queue, body) as topic, topic.reader("ours") as one:
        assert [fields(message) for message in one] == expected(body)
        for message in body["messages"]:
            one.seek(offset=message["offset"])
            assert one.read().number == message["number"]


@pytest.mark.req("ZD1")
def test_the_empty_last_block_that_stops_the_original_is_the_end_and_filled_by_the_next_append(tmp_path):
    """Where ours must be right and the original is not: it raises an error for a reader that comes to the empty block."""
    queue, body = zbus_cases.case("empty-last-block", tmp_path)
    assert not body["java_agrees"]
    with opened(queue, body) as topic:
        with topic.reader("r", auto_commit=True) as at_end, topic.reader("r2", auto_commit=True) as partway:
            assert [message.number for message in at_end] == []
            assert [message.number for message in partway] == [2, 3, 4, 5]
            assert topic.append(b"the seventh") == 6
            assert (at_end.read().number, partway.read().number) == (6, 6)
        assert topic.stats().blocks == 3
    assert topic_file(queue, 2).stat().st_size == 204 + 11


def topic_file(queue: Path, block: int) -> Path:
    entry = zbus.unpack_entry((queue / f"{queue.name}.idx").read_bytes(), zbus.entry_at(block))
    return queue / "data" / zbus.block_name(entry.base)


@pytest.mark.req("Z9")
def test_messages_in_a_nak_file_are_delivered_again_when_the_reader_is_opened_for_the_first_time(tmp_path):
    """A zbus server had handed them out without an acknowledgement: not to deliver them would lose them."""
    queue, body = zbus_cases.case("header-fields", tmp_path)
    lasting(queue)
    before = bytearray((queue / "reader" / "r.nak").read_bytes())
    assert list(zbus.unpack_naks(before, "B")) == [0, 2]
    with opened(queue, body) as topic:
        with topic.reader("r") as one:
            # Entries for messages 0 and 2; the reader stands at 2, which is still to be delivered anyway.
            assert [(message.number, message.attempt) for message in one] == [(0, 2), (2, 1), (3, 1)]
            assert one.commit() == 3
        with topic.reader("r") as one:
            assert list(one) == []
    # They are ours now: a server that opens the topic later must not deliver them once more.
    before[1024] = before[1024 + 2 * 61] = 0
    assert (queue / "reader" / "r.nak").read_bytes() == before


def test_messages_that_were_taken_over_from_a_nak_file_lie_behind_what_the_rdx_says_until_they_are_committed(tmp_path):
    """They no longer stand in the NAK file, so a server that goes on must find them by the position."""
    queue, body = zbus_cases.case("header-fields", tmp_path)
    lasting(queue)

    def place() -> tuple[int, int]:
        return zbus.unpack_position((queue / "reader" / "r.rdx").read_bytes())

    assert place() == (0, 410)
    with opened(queue, body) as topic, topic.reader("r") as one:
        assert place() == (0, 0)
        first, *others = one.read_many(3)
        one.commit(first)
        assert place() == (0, 410)
        one.commit(*others)
        assert place() == (1, 205)


def test_a_reader_that_a_server_deletes_at_its_end_is_there_until_a_consumer_of_ours_has_closed_it(tmp_path):
    """Its consumers may come back to the server: appending does not delete it."""
    queue, body = zbus_cases.case("header-fields", tmp_path)
    with opened(queue, body) as topic:
        topic.append(b"more")
        assert topic.trim() == 0
        assert topic.readers() == ["r"]
        with topic.reader("r") as one, topic.reader("r"):
            assert one.read().number == 0
        assert topic.readers() == []


def lasting(queue: Path) -> None:
    """The reader of "header-fields" has DELETE_ON_EXIT in its mask, and would be gone once it is closed."""
    file = queue / "reader" / "r.rdx"
    data = bytearray(file.read_bytes())
    at, mask = zbus.mask_patch(0)
    data[at : at + 4] = mask
    file.write_bytes(data)


# Going on where the original stopped


@pytest.mark.req("Z15")
def test_what_is_appended_goes_on_with_numbers_and_offsets_and_reaches_the_stored_readers(case):
    queue, body = case
    with opened(queue, body) as topic:
        assert topic.append_many([b"one", Message(b"two", tag="added.here")]) == 2
        numbers = [body["index"]["message_number"] + more for more in (0, 1)]
        assert [message.number for message in topic][-2:] == numbers
        for name, stored in body["reader_files"].items():
            (queue / "reader" / f"{name}.nak").unlink(missing_ok=True)
            returns = next(one["returns"] for one in body["readers"] if one.get("name") == name)
            with topic.reader(name) as one:
                assert [message.number for message in one] == returns + ([] if stored["filter"] else numbers)
    with opened(queue, body) as topic:
        report = topic.verify()
        assert report.ok
        assert [message.body for message in topic][-2:] == [b"one", b"two"]
        assert report.unchecked == sum(block["end_offset"] for block in body["index"]["blocks"])


# Repeating what the original did


class Replay:
    """Repeats the operations of a case by `Topic` and `Reader`, at the times of the case."""

    def __init__(self, queue: Path, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.queue, self.body = queue, body
        self.messages = {message["number"]: message for message in body["messages"]}
        self.now = body["clock_start"]
        self.readers: dict[str, Reader] = {}
        self.after: list[tuple[str, int, bytes]] = []  # what the API has no call for: file, place, bytes
        self.done: list[str] = []
        monkeypatch.setattr(LIMITS, "clock", lambda: self.now * 1_000_000)

    def run(self) -> None:
        for operation in self.body["operations"]:
            arguments = {key: value for key, value in operation.items() if key != "op"}
            getattr(self, operation["op"])(**arguments)

    def clock(self, ms: int) -> None:
        self.now = ms

    def open(self) -> None:
        self.topic = opened(self.queue, self.body)

    def open_writer(self) -> None:
        pass  # `Topic` makes the first block at once, and others when there is something to write

    def close(self) -> None:
        for one in self.readers.values():
            one.close()
        self.readers.clear()
        self.topic.close()

    def write(self, numbers: list[int]) -> None:
        messages = []
        for number in numbers:
            # Of the messages that were dropped from "history-dropped", only the sizes are known.
            was = self.messages.get(number) or {"tag": None, "id": None, "timestamp": None, "body": "00" * (5 + number)}
            corr_offset = was.get("corr_offset") or 0
            messages.append(Message(bytes.fromhex(was["body"]), was["tag"], was["id"], corr_offset, was["timestamp"]))
        assert self.topic.append_many(messages) == len(numbers)

    def open_reader(self, reader: str) -> None:
        self.readers[reader] = self.topic.reader(reader, auto_commit=True)

    def copy_reader(self, source: str, reader: str) -> None:
        self.topic.copy_reader(source, reader)
        self.open_reader(reader)

    def set_filter(self, reader: str, filter: str | None) -> None:
        self.readers[reader].set_filter(filter)

    def read(self, reader: str, count: int | str) -> None:
        one = self.readers[reader]
        if count == "all":
            list(one)
        else:
            assert [one.read() for _ in range(count)]

    def set_mask(self, mask: int) -> None:
        self.topic.set_mask(mask)

    def set_creator(self, creator: str) -> None:
        self.topic.set_creator(creator)

    def set_ext(self, index: int, value: str | None) -> None:
        self.topic.set_extension(index, value)

    def set_reader_mask(self, reader: str, mask: int) -> None:
        self.after.append((f"reader/{reader}.rdx", *zbus.mask_patch(mask)))

    def set_reader_creator(self, reader: str, creator: str) -> None:
        self.after.append((f"reader/{reader}.rdx", *zbus.creator_patch(creator)))

    def _only_servers(self, **arguments: Any) -> None:
        """NAK files are not written: what was delivered stands in the log of the reader."""

    nak_set_window = nak_set_timeout = nak_add = nak_remove = _only_servers

    def crafted(self, what: str) -> None:
        """Blocks 0 and 1 were removed by hand, as the original meant to do."""
        with opened(self.queue, self.body, max_records=9, slow_readers="move") as topic:
            assert topic.trim() == 6


@pytest.mark.req("Z1", "Z3", "Z4", "ZD14")
@pytest.mark.parametrize("name", CASES)
def test_repeating_the_operations_of_a_golden_case_through_the_api_writes_the_same_bytes(name, tmp_path, monkeypatch):
    """Files are interchangeable only if they are the same to the byte, also after `close`."""
    golden, body = zbus_cases.case(name, tmp_path)
    wanted = content(golden)
    queue = tmp_path / "ours" / golden.name
    queue.parent.mkdir()
    replay = Replay(queue, body, monkeypatch)
    replay.run()
    found = {file: bytearray(data) for file, data in of_zbus(content(queue)).items()}
    for file, at, data in replay.after:
        found[file][at : at + len(data)] = data
    wanted.pop("reader/r.nak", None)
    if body["dialect"] == "A":  # ours writes B: the same, but the offset is that in the topic
        for message in body["messages"]:
            block = next(one for one in body["index"]["blocks"] if one["number"] == message["block"])
            at = message["offset"] - block["base_offset"]
            assert found[block["file"]][at : at + 8] == message["offset"].to_bytes(8)
            found[block["file"]][at : at + 8] = message["stored_offset"].to_bytes(8)
    if name == "history-dropped":  # their bodies are not known, and the files are gone
        assert not any(file.endswith("00000.zbus") for file in found)
    if name == "empty-last-block":  # the defect that is the point of this case: ours adds no empty block
        block = body["index"]["blocks"][2]
        assert wanted.pop(block["file"]) == b""
        entry = zbus.Entry(block["created"], block["base_offset"], 0, block["updated"])
        found["queue.idx"][zbus.entry_at(2) : zbus.entry_at(2) + zbus.ENTRY] = zbus.pack_entry(entry)
        assert int.from_bytes(found["queue.idx"][4:8]) == 2
        found["queue.idx"][4:8] = (3).to_bytes(4)
    assert found.keys() == wanted.keys()
    for file, data in wanted.items():
        assert bytes(found[file]) == data, file
