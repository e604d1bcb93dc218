"""The bytes of a topic: what the Java original wrote is read as it meant it, and written as it did."""

from __future__ import annotations

import array
from typing import Any

import pytest
import zbus_cases
from hypothesis import given
from hypothesis import strategies as st
from zbus_cases import cases, content, reference_matches

from qewqew_core import BadArgument, BadRecord, Corrupt, RecordTooLarge
from qewqew_core.formats import zbus
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import Entry, Index, Message, Nak

CASES = cases()


@pytest.fixture(params=CASES)
def case(request, tmp_path):
    queue, body = zbus_cases.case(request.param, tmp_path)
    return content(queue), body


def test_the_golden_cases_cover_all_dialects_and_a_nak_file(tmp_path):
    """The tests below say little if the cases are not there."""
    bodies = [zbus_cases.case(name, tmp_path / name)[1] for name in CASES]
    assert len(bodies) == 16
    assert {body["dialect"] for body in bodies} == {"A", "B", "C"}
    assert any(op["op"] == "nak_add" for body in bodies for op in body["operations"])


# Reading


def test_the_index_of_a_golden_case_is_read(case):
    files, body = case
    expected = body["index"]
    data = files["queue.idx"]
    assert len(data) == zbus.INDEX_SIZE
    index = zbus.unpack_index(data, "queue.idx")
    assert index == (expected["version"], expected["block_count"], expected["block_start"], expected["message_number"])
    assert index == zbus.unpack_index(data[: zbus.INDEX_HEAD], "queue.idx")  # the head is enough
    blocks = range(index.start, index.start + index.blocks)
    assert [
        {
            "number": block,
            "file": "data/" + zbus.block_name(entry.base),
            "created": entry.created,
            "base_offset": entry.base,
            "end_offset": entry.end,
            "updated": entry.updated,
        }
        for block in blocks
        for entry in [zbus.unpack_entry(data, zbus.entry_at(block))]
    ] == expected["blocks"]
    assert {f"data/{zbus.block_name(entry['base_offset'])}" for entry in expected["blocks"]} == {
        file for file in files if file.startswith("data/")
    }


def test_the_common_header_of_a_golden_index_is_read(case):
    files, body = case
    common = zbus.unpack_common(files["queue.idx"])
    assert (common.mask, common.created, common.updated) == tuple(body["index"][key] for key in ("mask", "created", "updated"))
    assert common.creator == (body["index"]["creator"] or "")
    assert common.ext == tuple(text or "" for text in body["index"]["ext"])


def test_the_messages_of_a_golden_case_are_read(case):
    files, body = case
    dialect = body["dialect"]
    assert [fields(*found, dialect) for found in heads(files)] == [
        {"checksum": None} | message | {"corr_offset": message["corr_offset"] or 0} for message in body["messages"]
    ]


def test_only_messages_of_dialect_c_carry_the_right_checksum(case):
    """It is how a wrong dialect can be noticed: nothing in the files says which one they are in."""
    files, body = case
    assert {zbus.crc_is_right(data, at) for _, _, data, at in heads(files)} == {body["dialect"] == "C"}


def test_the_reader_files_of_a_golden_case_are_read(case):
    files, body = case
    found = {}
    for file in files:
        if file.endswith(".rdx"):
            assert len(files[file]) == zbus.READER_SIZE
            block, offset = zbus.unpack_position(files[file])
            common = zbus.unpack_common(files[file])
            assert common.ext == ("", "", "", "")
            found[file.removeprefix("reader/").removesuffix(".rdx")] = {
                "block_number": block,
                "offset": offset,
                "filter": zbus.unpack_filter(files[file]),
                "mask": common.mask,
                "creator": common.creator or None,
            }
    assert found == body["reader_files"]


def test_the_nak_file_of_a_golden_case_is_read(tmp_path):
    """Three were added, and the one in the middle removed again."""
    queue, _ = zbus_cases.case("header-fields", tmp_path)
    data = (queue / "reader" / "r.nak").read_bytes()
    assert len(data) == zbus.nak_size("B") == 62_024
    assert zbus.unpack_nak_head(data) == (5, 2500)
    assert (
        zbus.unpack_naks(data, "B")
        == zbus.unpack_naks(data, "A")
        == {
            0: Nak(0, "h0", 1, 1_500_000_000_600),
            2: Nak(410, "h2", 1, 1_500_000_000_800),
        }
    )
    assert zbus.unpack_common(data)[:3] == (0, 1_500_000_000_500, 1_500_000_000_500)


def test_filters_pass_the_messages_of_a_golden_case_that_the_original_delivered(case):
    """Whether the slots of real messages and Filter go together; stored readers go on from their position."""
    files, body = case
    start = body["index"]["block_start"]
    ends = {block["number"]: block for block in body["index"]["blocks"]}
    for reader in body["readers"]:
        block, offset, text = start, 0, reader["filter"]
        if reader["kind"] == "stored":
            data = files[f"reader/{reader['name']}.rdx"]
            (block, offset), text = zbus.unpack_position(data), zbus.unpack_filter(data)
            assert (block, offset, text) == (reader["block_number"], reader["offset"], reader["filter"])
        one = Filter(text)
        assert [
            zbus.number_at(data, at)
            for number, _, data, at in heads(files)
            if (number, at) >= (block, offset) and one.matches_slot(data[at + zbus.TAG_AT : at + zbus.LENGTH_AT])
        ] == reader["returns"]
        if after := reader.get("after"):
            last = max(ends)
            assert (after["block_number"], after["offset"]) == (last, ends[last]["end_offset"])


def heads(files: dict[str, bytes]) -> list[tuple[int, int, bytes, int]]:
    """Of every message, in order: block, base offset of the block, its bytes, and where in them the message begins."""
    index = zbus.unpack_index(files["queue.idx"], "queue.idx")
    found = []
    for block in range(index.start, index.start + index.blocks):
        entry = zbus.unpack_entry(files["queue.idx"], zbus.entry_at(block))
        data = files["data/" + zbus.block_name(entry.base)]
        assert len(data) == entry.end
        at = 0
        while at < entry.end:
            found.append((block, entry.base, data, at))
            at += zbus.HEAD + zbus.length_at(data, at)
        assert at == entry.end
    return found


def fields(block: int, base: int, data: bytes, at: int, dialect: str) -> dict[str, Any]:
    """A message as case.json has it."""
    message = zbus.unpack_message(data, at, base, dialect)
    assert message.attempt == 1
    assert message.number == zbus.number_at(data, at)
    assert message.timestamp == zbus.timestamp_at(data, at, dialect)
    assert len(message.body) == zbus.length_at(data, at)
    return {
        "number": message.number,
        "block": block,
        "offset": message.offset,
        "stored_offset": int.from_bytes(data[at : at + 8]),
        "timestamp": message.timestamp,
        "id": message.id,
        "corr_offset": message.corr_offset,
        "checksum": int.from_bytes(data[at + 8 : at + 16]) if dialect == "C" else None,
        "tag": message.tag,
        "body": message.body.hex(),
    }


# Writing


@pytest.mark.parametrize("name", [name for name in CASES if name != "history-dropped"])  # that one was changed by hand
def test_repeating_the_operations_of_a_golden_case_writes_the_same_bytes(name, tmp_path):
    queue, body = zbus_cases.case(name, tmp_path)
    topic = Topic(body)
    for operation in body["operations"]:
        arguments = {key: value for key, value in operation.items() if key != "op"}
        getattr(topic, operation["op"])(**arguments)
    expected = content(queue)
    assert topic.files.keys() == expected.keys()
    for file, data in expected.items():
        assert bytes(topic.files[file]) == data, file


class Topic:
    """The simplest writer and reader there can be, on files in memory."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.dialect = body["dialect"]
        self.block_size = body["block_max_size"]
        self.messages = {message["number"]: message for message in body["messages"]}
        self.now = body["clock_start"]
        self.files: dict[str, bytearray] = {}
        self.filters: dict[str, str | None] = {}

    def patch(self, file: str, at: int, data: bytes) -> None:
        assert at + len(data) <= len(self.files[file])
        self.files[file][at : at + len(data)] = data

    def index(self) -> Index:
        return zbus.unpack_index(self.files["queue.idx"], "queue.idx")

    def entry(self, block: int) -> Entry:
        return zbus.unpack_entry(self.files["queue.idx"], zbus.entry_at(block))

    def clock(self, ms: int) -> None:
        self.now = ms

    def open(self) -> None:
        self.files.setdefault("queue.idx", bytearray(zbus.new_index(self.now)))

    def close(self) -> None:
        pass

    def open_writer(self) -> None:
        """It leaves a block that is full, as a write does; the first block is there without a write."""
        index = self.index()
        base = 0
        if index.blocks:
            last = self.entry(index.blocks - 1)
            if last.end < self.block_size:
                return
            base = last.base + last.end
        self.files["data/" + zbus.block_name(base)] = bytearray()
        self.patch("queue.idx", zbus.entry_at(index.blocks), zbus.pack_entry(Entry(self.now, base, 0, self.now)))
        self.patch("queue.idx", 0, zbus.pack_index(index._replace(blocks=index.blocks + 1)))

    def write(self, numbers: list[int]) -> None:
        self.open_writer()
        index = self.index()
        entry = self.entry(index.blocks - 1)
        block = self.files["data/" + zbus.block_name(entry.base)]
        for number in numbers:
            was = self.messages[number]
            body = bytes.fromhex(was["body"])
            message = Message(body, was["tag"], was["id"], was["corr_offset"] or 0, was["timestamp"])
            id, tag = zbus.check_message(message, self.dialect)
            offset = len(block) if self.dialect == "A" else entry.base + len(block)
            arguments = (was["timestamp"], id, message.corr_offset, number, tag, len(body))
            block += zbus.pack_head(self.dialect, offset, *arguments) + body
        entry = entry._replace(end=len(block), updated=self.now)
        self.patch("queue.idx", zbus.entry_at(index.blocks - 1), zbus.pack_entry(entry))
        self.patch("queue.idx", 0, zbus.pack_index(index._replace(number=index.number + len(numbers))))

    def open_reader(self, reader: str) -> None:
        self.files.setdefault(f"reader/{reader}.rdx", bytearray(zbus.new_reader(self.now, self.index().start, 0)))

    def copy_reader(self, source: str, reader: str) -> None:
        block, offset = zbus.unpack_position(self.files[f"reader/{source}.rdx"])
        self.files[f"reader/{reader}.rdx"] = bytearray(zbus.new_reader(self.now, block, offset))

    def set_filter(self, reader: str, filter: str | None) -> None:
        self.patch(f"reader/{reader}.rdx", *zbus.filter_patch(filter))

    def read(self, reader: str, count: int | str) -> None:
        file = f"reader/{reader}.rdx"
        text = zbus.unpack_filter(self.files[file])
        left = count if isinstance(count, int) else 1 << 30
        while left:
            block, offset = zbus.unpack_position(self.files[file])
            entry = self.entry(block)
            if offset >= entry.end:
                block, offset = block + 1, 0
                if block >= self.index().blocks:
                    return
                entry = self.entry(block)
            data = bytes(self.files["data/" + zbus.block_name(entry.base)])
            message = zbus.unpack_message(data, offset, entry.base, self.dialect)
            self.patch(file, 0, zbus.pack_position(block, offset + zbus.HEAD + len(message.body)))
            left -= reference_matches(text, message.tag)

    def set_mask(self, mask: int) -> None:
        self.patch("queue.idx", *zbus.mask_patch(mask))

    def set_creator(self, creator: str) -> None:
        self.patch("queue.idx", *zbus.creator_patch(creator))

    def set_ext(self, index: int, value: str | None) -> None:
        self.patch("queue.idx", *zbus.ext_patch(index, value))

    def set_reader_mask(self, reader: str, mask: int) -> None:
        self.patch(f"reader/{reader}.rdx", *zbus.mask_patch(mask))

    def set_reader_creator(self, reader: str, creator: str) -> None:
        self.patch(f"reader/{reader}.rdx", *zbus.creator_patch(creator))

    def nak(self, reader: str) -> str:
        file = f"reader/{reader}.nak"
        self.files.setdefault(file, bytearray(zbus_cases.new_nak(self.now, self.dialect)))
        return file

    def nak_set_window(self, reader: str, window: int) -> None:
        file = self.nak(reader)
        self.patch(file, 0, zbus_cases.pack_nak_head(window, zbus.unpack_nak_head(self.files[file])[1]))

    def nak_set_timeout(self, reader: str, timeout: int) -> None:
        file = self.nak(reader)
        self.patch(file, 0, zbus_cases.pack_nak_head(zbus.unpack_nak_head(self.files[file])[0], timeout))

    def nak_add(self, reader: str, offset: int, id: str, retry: int | None) -> None:
        file = self.nak(reader)
        used = zbus.unpack_naks(bytes(self.files[file]), self.dialect)
        free = next(number for number in range(zbus.NAK_ENTRIES) if number not in used)
        entry = Nak(offset, id, 1 if retry is None else retry + 1, self.now)
        self.patch(file, zbus.nak_entry_at(free, self.dialect), zbus_cases.pack_nak(entry, self.dialect))

    def nak_remove(self, reader: str, offset: int) -> None:
        """Only the first byte goes; the rest stays as it was."""
        file = self.nak(reader)
        for number, entry in zbus.unpack_naks(bytes(self.files[file]), self.dialect).items():
            if entry.offset == offset:
                self.patch(file, zbus.nak_entry_at(number, self.dialect), b"\0")


# The head of a message

NUMBERS = st.integers(0, (1 << 63) - 1)


def packed(dialect: str, message: Message) -> bytes:
    id, tag = zbus.check_message(message, dialect)
    arguments = (message.timestamp or 0, id, message.corr_offset, message.number, tag, len(message.body))
    return zbus.pack_head(dialect, message.offset, *arguments) + message.body


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
@given(data=st.data())
def test_a_message_is_read_as_it_was_written(dialect, data):
    text = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)
    message = Message(
        data.draw(st.binary(max_size=300)),
        data.draw(text),
        data.draw(text),
        0 if dialect == "C" else data.draw(st.integers(-(1 << 63), (1 << 63) - 1)),
        data.draw(NUMBERS),
        data.draw(NUMBERS),
        1007,
    )
    stored = packed(dialect, message)
    assert len(stored) == zbus.HEAD + len(message.body)
    assert zbus.unpack_message(b"\xee" * 7 + stored + b"\xee", 7, 1000, dialect) == message
    assert zbus.crc_is_right(b"\xee" * 7 + stored, 7) is (dialect == "C")


@pytest.mark.req("Z5", "ZD9")
@pytest.mark.parametrize("dialect", ["A", "B", "C"])
@pytest.mark.parametrize("text", ["größe", "日本語", "🐘", "é" * 19])
def test_non_ascii_text_is_read_as_it_was_written(dialect, text):
    """The original stored the number of characters and then the bytes, so it lost the end of such a text."""
    message = Message(b"x", text, text, timestamp=1, number=0, offset=0)
    stored = packed(dialect, message)
    assert (stored[16], stored[zbus.TAG_AT]) == (len(text.encode()), len(text.encode()))
    assert zbus.unpack_message(stored, 0, 0, dialect) == message


def test_text_that_the_original_cut_is_read_with_a_replacement_character():
    stored = bytearray(packed("B", Message(b"", "abc", "abc", timestamp=1, number=0, offset=0)))
    stored[16:20] = b"\x01\xc3\xa9\x00"  # what it wrote for `é`: one character, two bytes
    stored[zbus.TAG_AT : zbus.TAG_AT + 4] = b"\x02a\xc3\xa9"
    message = zbus.unpack_message(bytes(stored), 0, 0, "B")
    assert (message.id, message.tag) == ("\ufffd", "a\ufffd")
    reader = bytearray(zbus.new_reader(1, 0, 0))
    for at in (zbus.FILTER_AT, zbus.CREATOR_AT, 512, 896):
        reader[at : at + 3] = b"\x01\xc3\xa9"
    assert zbus.unpack_filter(reader) == "\ufffd"
    common = zbus.unpack_common(reader)
    assert (common.creator, common.ext) == ("\ufffd", ("\ufffd", "", "", "\ufffd"))


def test_a_length_byte_beyond_its_slot_reads_no_more_than_the_slot():
    stored = bytearray(packed("B", Message(b"body", "t" * 127, "i" * 39, timestamp=1, number=0, offset=0)))
    stored[16] = stored[zbus.TAG_AT] = 255
    assert zbus.unpack_message(bytes(stored), 0, 0, "B")[:3] == (b"body", "t" * 127, "i" * 39)
    reader = bytearray(zbus.new_reader(1, 0, 0))
    put(reader, zbus.ext_patch(0, "a" * 127))
    put(reader, zbus.ext_patch(1, "b"))
    reader[512] = 255
    assert zbus.unpack_common(reader).ext == ("a" * 127, "b", "", "")


def test_the_checksum_of_dialect_c_covers_id_to_tag_and_nothing_else():
    stored = packed("C", Message(b"body", "tag", "id", timestamp=1, number=7, offset=3))
    for at in range(len(stored)):
        changed = bytearray(stored)
        changed[at] ^= 0x10
        assert zbus.crc_is_right(bytes(changed), 0) is not (8 <= at < zbus.LENGTH_AT), at


def test_the_stored_offset_of_dialect_a_is_not_believed():
    stored = packed("A", Message(b"", timestamp=1, number=7, offset=999))
    assert zbus.unpack_message(stored, 0, 5000, "A").offset == 5000


# Limits


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
@pytest.mark.parametrize(
    ("field", "text", "size"),
    [
        ("id", "i" * 39, 39),
        ("id", "é" * 19 + "i", 39),
        ("id", "日" * 13, 39),
        ("tag", "t" * 127, 127),
        ("tag", "é" * 63 + "t", 127),
        ("tag", "日" * 42 + "t", 127),
    ],
)
def test_the_longest_texts_fill_their_slots(dialect, field, text, size):
    message = Message(b"", timestamp=1, number=0, offset=0)._replace(**{field: text})
    assert [len(data) for data in zbus.check_message(message, dialect)] == ([size, 0] if field == "id" else [0, size])
    assert zbus.unpack_message(packed(dialect, message), 0, 0, dialect) == message


@pytest.mark.req("Z5", "ZD15")
@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("id", "i" * 40),
        ("id", "é" * 20),  # 20 characters
        ("id", "日" * 13 + "i"),
        *(("id", "i" * size) for size in range(256, 260)),  # the original stored 258 as 2: it looked at one byte of the length
        ("id", "é" * 129),
        pytest.param("id", "i" * (1 << 20), id="a long id"),
        ("tag", "t" * 128),
        ("tag", "é" * 64),
        *(("tag", "t" * size) for size in range(256, 260)),
        ("tag", "é" * 129),
        pytest.param("tag", "t" * (1 << 20), id="a long tag"),
    ],
)
def test_a_text_that_is_too_long_is_refused_at_any_length(field, text):
    limit = {"id": 39, "tag": 127}[field]
    with pytest.raises(BadArgument, match=rf"{field} has {len(text.encode())} bytes of UTF-8, at most {limit} fit"):
        zbus.check_message(Message(b"")._replace(**{field: text}), "B")


@pytest.mark.parametrize("field", ["id", "tag"])
@pytest.mark.parametrize("text", [5, b"bytes", "\ud800"], ids=repr)
def test_an_id_or_tag_that_is_no_text_is_refused(field, text):
    with pytest.raises(BadArgument, match=field):
        zbus.check_message(Message(b"")._replace(**{field: text}), "B")


def test_an_empty_id_or_tag_is_none():
    stored = packed("B", Message(b"", "", "", timestamp=1, number=0, offset=0))
    assert stored == packed("B", Message(b"", None, None, timestamp=1, number=0, offset=0))
    assert zbus.unpack_message(stored, 0, 0, "B")[1:3] == (None, None)


class Long(bytes):
    """Says that it has as many bytes as the test wants, and takes no memory for it."""

    size = 0

    def __len__(self) -> int:
        return self.size


def test_the_largest_body_fills_a_block_to_what_an_end_offset_can_say():
    assert zbus.LARGEST_BODY == (1 << 31) - 1 - 204
    body = Long()
    body.size = zbus.LARGEST_BODY
    zbus.check_message(Message(body), "B")
    body.size += 1
    with pytest.raises(RecordTooLarge, match="2,147,483,444 bytes, at most 2,147,483,443"):
        zbus.check_message(Message(body), "B")


def test_the_size_of_a_view_is_that_of_its_bytes(monkeypatch):
    """len() of a view is the number of its items."""
    monkeypatch.setattr(zbus, "LARGEST_BODY", 15)
    zbus.check_message(Message(memoryview(bytes(15))), "B")
    with pytest.raises(RecordTooLarge, match="16 bytes"):
        zbus.check_message(Message(memoryview(array.array("q", [0, 0]))), "B")


@pytest.mark.parametrize("body", [None, "text", 5, [1], array.array("q", [0])], ids=repr)
def test_a_body_that_is_not_bytes_is_refused(body):
    with pytest.raises(BadRecord):
        zbus.check_message(Message(body), "B")


@pytest.mark.parametrize(
    "body", [b"x", bytearray(b"x"), memoryview(b"x"), b""], ids=lambda body: f"{type(body).__name__}-{len(body)}"
)
def test_a_body_of_bytes_is_taken(body):
    assert zbus.check_message(Message(body), "C") == (b"", b"")


@pytest.mark.parametrize("value", [1, -1, 1 << 40])
def test_dialect_c_has_no_corr_offset(value):
    zbus.check_message(Message(b"", corr_offset=value), "B")
    zbus.check_message(Message(b"", corr_offset=value), "A")
    with pytest.raises(BadArgument, match="dialect C has no corr_offset"):
        zbus.check_message(Message(b"", corr_offset=value), "C")
    zbus.check_message(Message(b"", corr_offset=0), "C")


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, 1.0, True, None, "1"], ids=repr)
def test_a_corr_offset_that_does_not_fit_is_refused(value):
    with pytest.raises(BadArgument, match="corr_offset"):
        zbus.check_message(Message(b"", corr_offset=value), "B")


@pytest.mark.parametrize("value", [1 << 63, -1, 1.0, True, "1"], ids=repr)
def test_a_timestamp_that_is_no_time_is_refused(value):
    with pytest.raises(BadArgument, match="timestamp"):
        zbus.check_message(Message(b"", timestamp=value), "B")


@pytest.mark.parametrize("value", [None, 0, (1 << 63) - 1])
def test_any_time_that_fits_is_taken(value):
    zbus.check_message(Message(b"", timestamp=value), "B")


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
def test_a_dialect_is_named_by_its_letter(dialect):
    assert zbus.check_dialect(dialect) == {"A": "B"}.get(dialect, dialect)  # A is written, and read, as B


@pytest.mark.parametrize("dialect", ["a", "D", "", "AB", None, 1, [], b"A"], ids=repr)
def test_a_dialect_that_does_not_exist_is_refused(dialect):
    with pytest.raises(BadArgument, match="dialect"):
        zbus.check_dialect(dialect)


# The common header


@pytest.mark.parametrize("mask", [0, 1, 64, 127, (1 << 31) - 1, -(1 << 31), -1])
def test_a_mask_of_32_bits_is_stored(mask):
    data = bytearray(zbus.new_reader(5, 0, 0))
    put(data, zbus.mask_patch(mask))
    assert zbus.unpack_common(data) == (mask, 5, 5, "", ("", "", "", ""))


@pytest.mark.parametrize("mask", [1 << 31, -(1 << 31) - 1, 1.0, True, None, "1"], ids=repr)
def test_a_mask_that_does_not_fit_is_refused(mask):
    with pytest.raises(BadArgument, match="mask"):
        zbus.mask_patch(mask)


def test_the_bits_of_masks_are_those_of_the_original():
    names = (zbus.DISK, zbus.MEMORY, zbus.RPC, zbus.PROXY, zbus.PAUSE, zbus.EXCLUSIVE, zbus.DELETE_ON_EXIT, zbus.ACK_REQUIRED)
    assert names == (0, 1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize("number", [-1, 4, 1.0, True, None, "0"], ids=repr)
def test_an_extension_of_another_number_is_refused(number):
    with pytest.raises(BadArgument, match="extensions have the numbers 0 to 3"):
        zbus.ext_patch(number, "x")


@pytest.mark.req("ZD9")
def test_extensions_creator_and_filter_hold_127_bytes_each_and_leave_their_neighbours_alone():
    data = bytearray(zbus.new_reader(5, 2, 3))
    texts = ["a" * 127, "é" * 63 + "b", "日" * 42 + "c", "d" * 127]
    for number, text in enumerate(texts):
        put(data, zbus.ext_patch(number, text))
    put(data, zbus.creator_patch("e" * 127))
    put(data, zbus.filter_patch("é" * 63 + "f"))
    assert len(data) == zbus.READER_SIZE
    assert zbus.unpack_common(data) == (0, 5, 5, "e" * 127, tuple(texts))
    assert zbus.unpack_filter(data) == "é" * 63 + "f"
    assert zbus.unpack_position(data) == (2, 3)
    put(data, zbus.ext_patch(1, None))
    put(data, zbus.creator_patch(""))
    assert zbus.unpack_common(data) == (0, 5, 5, "", (texts[0], "", texts[2], texts[3]))


@pytest.mark.req("Z5", "ZD9")
@pytest.mark.parametrize(
    "text",
    ["x" * 128, "é" * 64, *("x" * size for size in range(256, 260)), "é" * 129, "x" * (1 << 20), 5, b"x", "\ud800"],
    ids=lambda text: repr(text)[:12],
)
def test_an_extension_creator_or_filter_that_does_not_fit_is_refused(text):
    with pytest.raises(BadArgument, match="extension 3"):
        zbus.ext_patch(3, text)
    with pytest.raises(BadArgument, match="creator"):
        zbus.creator_patch(text)
    with pytest.raises(BadArgument, match="filter"):
        zbus.filter_patch(text)


def test_a_shorter_text_leaves_the_end_of_the_longer_one_behind_and_is_read_without_it():
    """As in the original: whoever reads must go by the length."""
    data = bytearray(zbus.new_reader(5, 0, 0))
    put(data, zbus.filter_patch("a.long.filter"))
    put(data, zbus.filter_patch("b"))
    assert zbus.unpack_filter(data) == "b"
    assert b".long.filter" in data
    put(data, zbus.filter_patch("  "))
    assert zbus.unpack_filter(data) is None


def put(data: bytearray, patch: tuple[int, bytes]) -> None:
    at, new = patch
    data[at : at + len(new)] = new


# The index


def test_a_new_index_is_empty_and_has_its_times():
    data = zbus.new_index(1234)
    assert len(data) == zbus.INDEX_SIZE == 287_744
    assert zbus.unpack_index(data, "x") == (1, 0, 0, 0)
    assert zbus.unpack_common(data) == (0, 1234, 1234, "", ("", "", "", ""))
    assert not any(data[zbus.HEADER :])


def test_entries_form_a_ring():
    assert [zbus.entry_at(block) for block in (0, 1, 10_239, 10_240, 20_481)] == [1024, 1052, 287_716, 1024, 1052]
    assert zbus.entry_at(10_239) + zbus.ENTRY == zbus.INDEX_SIZE


def test_a_block_is_called_by_its_base_offset():
    assert zbus.block_name(0) == "0" * 20 + ".zbus"
    assert zbus.block_name((1 << 63) - 1) == "09223372036854775807.zbus"


@pytest.mark.parametrize("version", [2, 0, -1])
def test_an_index_of_another_version_is_refused(version):
    data = version.to_bytes(4, signed=True) + zbus.new_index(1)[4:]
    with pytest.raises(Corrupt, match=rf"/t/t\.idx, offset 0: this is not the index of a topic: version {version}") as caught:
        zbus.unpack_index(data, "/t/t.idx")
    assert (caught.value.path, caught.value.offset) == ("/t/t.idx", 0)


@pytest.mark.parametrize("size", [0, 1, 23])
def test_an_index_that_is_cut_short_is_refused(size):
    with pytest.raises(Corrupt, match="cut short") as caught:
        zbus.unpack_index(zbus.new_index(1)[:size], "/t/t.idx")
    assert (caught.value.path, caught.value.offset) == ("/t/t.idx", size)


@pytest.mark.parametrize(
    "index",
    [Index(1, -1, 0, 0), Index(1, 0, -1, 0), Index(1, 0, 0, -1), Index(1, -(1 << 31), 0, 0), Index(1, zbus.RING + 1, 0, 0)],
    ids=str,
)
def test_an_index_with_impossible_counts_is_refused(index):
    with pytest.raises(Corrupt, match="contradicts itself") as caught:
        zbus.unpack_index(zbus.pack_index(index), "/t/t.idx")
    assert caught.value.path == "/t/t.idx"


@pytest.mark.parametrize("index", [Index(1, zbus.RING, 0, 0), Index(1, 3, 1 << 40, (1 << 63) - 1)], ids=str)
def test_an_index_with_large_counts_is_read(index):
    """A ring without a free entry; and a topic whose history was dropped often."""
    assert zbus.unpack_index(zbus.pack_index(index), "x") == index


# Messages that were handed out and not acknowledged


@pytest.mark.parametrize(("dialect", "size"), [("A", 62_024), ("B", 62_024), ("C", 22_024)])
def test_a_new_nak_file_has_the_original_s_size_and_defaults(dialect, size):
    data = zbus_cases.new_nak(77, dialect)
    assert len(data) == zbus.nak_size(dialect) == size
    assert zbus.unpack_nak_head(data) == (100, 10_000)
    assert zbus.unpack_common(data)[:3] == (0, 77, 77)
    assert zbus.unpack_naks(data, dialect) == {}
    assert zbus.unpack_nak_head(zbus_cases.new_nak(77, dialect, 5, 6)) == (5, 6)


@pytest.mark.parametrize("dialect", ["A", "B", "C"])
def test_entries_are_read_where_they_were_written(dialect):
    """In dialect C too, where the original forgets them all: it reads entries without their first byte."""
    data = bytearray(zbus_cases.new_nak(1, dialect))
    entries = {
        0: Nak(0, "i" * 39, 1, 5),
        17: Nak(1 << 40, "é" * 19, (1 << 31) - 1, (1 << 63) - 1),
        999: Nak(204, None, 2, 6),
    }
    for number, entry in entries.items():
        put(data, (zbus.nak_entry_at(number, dialect), zbus_cases.pack_nak(entry, dialect)))
    assert len(data) == zbus.nak_size(dialect)
    if dialect == "C":
        entries = {number: entry._replace(id=None) for number, entry in entries.items()}  # it has no room for it
    assert zbus.unpack_naks(bytes(data), dialect) == entries
    cut = bytes(data[: zbus.nak_entry_at(18, dialect)])
    assert zbus.unpack_naks(cut, dialect).keys() == {0, 17}


@pytest.mark.parametrize("status", [0, 2, 255])
def test_only_an_entry_of_status_1_is_in_use(status):
    data = bytearray(zbus_cases.new_nak(1, "B"))
    put(data, (zbus.nak_entry_at(3, "B"), zbus_cases.pack_nak(Nak(9, "id", 1, 5), "B")))
    data[zbus.nak_entry_at(3, "B")] = status
    assert zbus.unpack_naks(bytes(data), "B") == {}
