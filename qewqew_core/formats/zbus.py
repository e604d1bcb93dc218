"""The bytes of a topic: zbus's disk queue, by rushmore (MIT licence), and nothing else knows them.

All integers are big-endian and signed; times are milliseconds since the epoch. A text is a length byte and that many
bytes of UTF-8 in a slot of fixed size. ``NAME.idx``, ``reader/R.rdx`` and ``reader/R.nak`` begin with 1,024 bytes::

     0                          364     368       376       384       512     640     768     896     1024
    ┌──────────────────────────┬───────┬─────────┬─────────┬─────────┬───────┬───────┬───────┬───────┐
    │ of the owner (below)     │ mask  │ updated │ created │ creator │ ext 0 │ ext 1 │ ext 2 │ ext 3 │
    └──────────────────────────┴───────┴─────────┴─────────┴─────────┴───────┴───────┴───────┴───────┘

    .idx  version u32 = 1, number of blocks, first block u64, number of the next message u64; from 1,024 on a ring of
          10,240 entries, that of block n at n mod 10,240: created, base offset, end offset i32, updated
    .rdx  block, offset i32 in it (of the next message), filter (128 bytes)
    .nak  window i32, time-out; then 1,000 entries: in use u8, offset, id (40 bytes; not in dialect C), tries i32, updated

    data/<base offset, 20 digits>.zbus, a block: messages without padding, each

     0        8           16       56            64       72        200      204
    ┌────────┬───────────┬────────┬─────────────┬────────┬─────────┬────────┬──────┐
    │ offset │ timestamp │ id     │ corr_offset │ number │ tag     │ length │ body │   dialects A and B
    ├────────┼───────────┼────────┼─────────────┼────────┼─────────┼────────┼──────┤
    │ offset │ crc32     │ id     │ timestamp   │ number │ tag     │ length │ body │   C; crc of the bytes 16..200
    └────────┴───────────┴────────┴─────────────┴────────┴─────────┴────────┴──────┘

``offset`` is that in the topic: base offset of the block, and place in the block. Dialect A has only the latter, so it is
not believed. The files do not say which dialect they are in.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import accumulate, chain, count, repeat
from typing import NamedTuple

from qewqew_core.crc import crc32
from qewqew_core.errors import BadArgument, BadRecord, Corrupt, RecordTooLarge
from qewqew_core.secrecy import excerpt

VERSION = 1
RING = 10_240
HEADER = 1024
INDEX_SIZE = HEADER + RING * 28
READER_SIZE = 1024
NAK_ENTRIES = 1000
BLOCK_SIZE = 64 << 20  # a block is left when it has reached this, unless the caller wants another size
HEAD = 204  # bytes of a message before its body
LARGEST_BLOCK = (1 << 31) - 1
LARGEST_BODY = LARGEST_BLOCK - HEAD
LARGEST = 1 << 62  # no topic gets so far: a larger offset or number that a server has left is damaged, and soon would not fit
ID_BYTES, TAG_BYTES, TEXT_BYTES = 39, 127, 127
ID_AT, ID_SLOT, NUMBER_AT, TAG_AT, LENGTH_AT = 16, 40, 64, 72, 200  # in the head of a message
TIMESTAMP_AT = {"A": 8, "B": 8, "C": 56}
CORR_OFFSET_AT = 56  # not in C

DISK, MEMORY, RPC, PROXY, PAUSE, EXCLUSIVE, DELETE_ON_EXIT, ACK_REQUIRED = 0, 1, 2, 4, 8, 16, 32, 64  # bits of masks

_INDEX = struct.Struct(">iiqq")
BLOCKS_AT, START_AT = 4, 8  # in the index
_ENTRY = struct.Struct(">qqiq")
_COMMON = struct.Struct(">iqq")
_COMMON_AT, CREATOR_AT, _EXT_AT, SLOT = 364, 384, 512, 128
_HEAD_B = struct.Struct(">qq40sqq128sI")  # number, tag and length have the same place in both; a length is never below zero
_HEAD_C = struct.Struct(">qQ40sqq128sI")
_READER = struct.Struct(">qi")
FILTER_AT = _READER.size
_NAK = struct.Struct(">iq")
_NAK_ENTRIES = {"A": struct.Struct(">bq40siq"), "B": struct.Struct(">bq40siq"), "C": struct.Struct(">bqiq")}
_NO_ID = bytes(40)
_NUMBER = struct.Struct(">q")
keys_at = struct.Struct(">q128si").unpack_from  # at NUMBER_AT of a message: number, slot of the tag, length: all to pass it over
_LENGTH = struct.Struct(">i")
_LENGTHS = [bytes((number,)) for number in range(128)]
_tuple = tuple.__new__


class Message(NamedTuple):
    """One message of a topic, as it was read or will be appended.

    ``tag`` has at most 127 bytes of UTF-8, ``id`` at most 39; an empty one counts as missing. ``timestamp``: milliseconds since
    the epoch; None in an append: now. ``corr_offset`` is for the application (not in dialect C). The topic assigns ``number``
    (from 0) and ``offset``; ``attempt`` says how often a reader has delivered the message.
    """

    body: bytes
    tag: str | None = None
    id: str | None = None
    corr_offset: int = 0
    timestamp: int | None = None
    number: int = -1
    offset: int = -1
    attempt: int = 1


class Index(NamedTuple):
    """What the index says of the whole topic; this many `blocks` are there, from block `start` on."""

    version: int
    blocks: int
    start: int
    number: int  # of the next message


class Entry(NamedTuple):
    """What the index says of one block."""

    created: int
    base: int  # offset in the topic of its first message; the name of its file
    end: int  # bytes of messages
    updated: int


class Common(NamedTuple):
    """What index, reader and NAK files have in common."""

    mask: int
    updated: int
    created: int
    creator: str
    ext: tuple[str, str, str, str]


class Nak(NamedTuple):
    """A message that was handed out and not acknowledged."""

    offset: int
    id: str | None
    tries: int
    updated: int


def check_dialect(dialect: object) -> str:
    if dialect not in ("A", "B", "C"):
        raise BadArgument(f'dialect must be "A", "B" or "C", not {excerpt(dialect, 60)}')
    return "B" if dialect == "A" else str(dialect)  # B's readers and A's do not look at the offset, all else is the same


def base_of(name: str) -> int | None:
    """The base of the block with this name; None if it is the name of no block."""
    base = int(name[:20]) if re.fullmatch(r"[0-9]{20}[.]zbus", name) else 1 << 63
    return base if base < 1 << 63 else None


def block_name(base: int) -> str:
    return f"{base:020d}.zbus"


def text_bytes(name: str, text: object, limit: int) -> bytes:
    """A text for a slot; raises `BadArgument` before anything is written."""
    if text is None:
        return b""
    if not isinstance(text, str):
        raise BadArgument(f"{name} must be a str, not {type(text).__name__}")
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise BadArgument(f"{name} {excerpt(text, 100)} is not valid text: {error.reason}") from error
    if len(data) > limit:
        raise BadArgument(f"{name} has {len(data)} bytes of UTF-8, at most {limit} fit: {excerpt(text, 100)}. Nothing was stored")
    return data


def _slot(data: bytes) -> bytes:
    return bytes((len(data),)) + data


def slot_text(data: bytes, at: int, size: int) -> str:
    """The text of a slot. The original wrote non-ASCII text cut short: such bytes become U+FFFD."""
    return data[at + 1 : at + 1 + min(data[at], size - 1)].decode(errors="replace")


# Index


def new_index(created: int) -> bytes:
    return _INDEX.pack(VERSION, 0, 0, 0).ljust(_COMMON_AT, b"\0") + _COMMON.pack(0, created, created).ljust(
        INDEX_SIZE - 364, b"\0"
    )


def pack_index(index: Index) -> bytes:
    """For the start of the index."""
    return _INDEX.pack(*index)


def damaged_index(what: str, path: str, offset: int) -> Corrupt:
    return Corrupt(
        f"{what}. Nothing was changed; restore the index, or let `qewqew repair` (repair_topic) rebuild it",
        path=path,
        offset=offset,
    )


def check_index_size(size: int, path: str) -> None:
    """Raise `Corrupt` if an index has lost its end: it has all its entries from the beginning, used or not."""
    if size < INDEX_SIZE:
        raise damaged_index(f"the index was cut short: it has {size:,} bytes, not {INDEX_SIZE:,}", path, size)


def unpack_index(data: bytes, path: str) -> Index:
    """The head of an index. Raises `Corrupt`."""
    if len(data) < _INDEX.size:
        check_index_size(len(data), path)
    index = Index(*_INDEX.unpack_from(data))
    if index.version != VERSION:
        raise damaged_index(f"this is not the index of a topic: version {index.version}, not {VERSION}", path, 0)
    if not (0 <= index.blocks <= RING and index.start >= 0 and index.number >= 0):
        raise damaged_index(f"the index contradicts itself: {index}", path, 0)
    return index


INDEX_HEAD = _INDEX.size


def entry_at(block: int) -> int:
    """Where the entry of a block is."""
    return HEADER + _ENTRY.size * (block % RING)


def pack_entry(entry: Entry) -> bytes:
    return _ENTRY.pack(*entry)


def unpack_entry(data: bytes, at: int = 0) -> Entry:
    return Entry(*_ENTRY.unpack_from(data, at))


ENTRY = _ENTRY.size


# The common header


def unpack_common(data: bytes) -> Common:
    mask, updated, created = _COMMON.unpack_from(data, _COMMON_AT)
    e0, e1, e2, e3 = (slot_text(data, _EXT_AT + SLOT * number, SLOT) for number in range(4))
    return Common(mask, updated, created, slot_text(data, CREATOR_AT, SLOT), (e0, e1, e2, e3))


def mask_patch(mask: int) -> tuple[int, bytes]:
    """(where, bytes) to write."""
    if type(mask) is not int or not -(1 << 31) <= mask < 1 << 31:
        raise BadArgument(f"a mask is a whole number of 32 bits, not {excerpt(mask, 60)}")
    return _COMMON_AT, mask.to_bytes(4, signed=True)


def creator_patch(text: str | None) -> tuple[int, bytes]:
    return CREATOR_AT, _slot(text_bytes("creator", text, TEXT_BYTES))


def ext_patch(number: int, text: str | None) -> tuple[int, bytes]:
    if type(number) is not int or not 0 <= number < 4:
        raise BadArgument(f"extensions have the numbers 0 to 3, not {excerpt(number, 60)}")
    return _EXT_AT + SLOT * number, _slot(text_bytes(f"extension {number}", text, TEXT_BYTES))


# Messages


def check_message(message: Message, dialect: str) -> tuple[bytes, bytes]:
    """The bytes of id and tag of a message that is to be stored; raises what is wrong with it."""
    body, tag, id, corr_offset, timestamp, _, _, _ = message
    if not isinstance(body, (bytes, bytearray, memoryview)):
        raise BadRecord(f"a body must be bytes-like, not {type(body).__name__}. Nothing was stored")
    size = body.nbytes if isinstance(body, memoryview) else len(body)
    if size > LARGEST_BODY:
        raise RecordTooLarge(f"the body has {size:,} bytes, at most {LARGEST_BODY:,} fit into a block. Nothing was stored")
    if type(corr_offset) is not int or not -(1 << 63) <= corr_offset < 1 << 63:
        raise BadArgument(f"corr_offset must be a whole number of 64 bits, not {excerpt(corr_offset, 60)}")
    if corr_offset and dialect == "C":
        raise BadArgument("dialect C has no corr_offset")
    if timestamp is not None and (type(timestamp) is not int or not 0 <= timestamp < 1 << 63):
        raise BadArgument(f"timestamp must be milliseconds since the epoch, not {excerpt(timestamp, 60)}")
    return b"" if id is None else text_bytes("id", id, ID_BYTES), check_tag(tag)


def check_tag(tag: object) -> bytes:
    return text_bytes("tag", tag, TAG_BYTES)


def pack_head(
    dialect: str, offset: int, timestamp: int, id: bytes, corr_offset: int, number: int, tag: bytes, length: int
) -> bytes:
    id_slot = _LENGTHS[len(id)] + id if id else b""
    tag_slot = _LENGTHS[len(tag)] + tag if tag else b""
    if dialect != "C":
        return _HEAD_B.pack(offset, timestamp, id_slot, corr_offset, number, tag_slot, length)
    head = _HEAD_C.pack(offset, 0, id_slot, timestamp, number, tag_slot, length)
    return head[:8] + crc32(head[16:LENGTH_AT]).to_bytes(8) + head[16:]


def pack_heads(
    dialect: str,
    offset: int,
    number: int,
    time: int,
    bodies: Sequence[Sized],
    tags: Sequence[str | None],
    ids: Sequence[str | None],
    corr_offsets: Sequence[int],
    timestamps: Sequence[int | None],
) -> Iterable[bytes]:
    """The heads of messages that were checked and lie side by side; those without a timestamp have this ``time``.

    ``offset`` and ``number`` are those of the first. Column by column: `pack_head` for each takes twice the time.
    """
    if len(bodies) == 1:
        ((tag,), (id,), (corr_offset,), (timestamp,)) = tags, ids, corr_offsets, timestamps
        slots = id.encode() if id else b"", tag.encode() if tag else b""
        at = time if timestamp is None else timestamp
        return [pack_head(dialect, offset, at, slots[0], corr_offset, number, slots[1], len(bodies[0]))]
    lengths = [*map(len, bodies)]
    offsets = accumulate(map(HEAD.__add__, lengths), initial=offset)
    no_times = timestamps.count(None) == len(timestamps)
    times = repeat(time) if no_times else [time if timestamp is None else timestamp for timestamp in timestamps]
    if dialect == "C":
        id_bytes, tag_bytes = _encoded(ids, bytes), _encoded(tags, bytes)
        return map(pack_head, repeat(dialect), offsets, times, id_bytes, corr_offsets, count(number), tag_bytes, lengths)
    return map(_HEAD_B.pack, offsets, times, _encoded(ids, _slot), corr_offsets, count(number), _encoded(tags, _slot), lengths)


def _encoded(texts: Sequence[str | None], made: Callable[[bytes], bytes]) -> Iterable[bytes]:
    """What ``made`` makes of the bytes of each text; it is called once for those that are alike."""
    found = {text: made((text or "").encode()) for text in {*texts}}
    return repeat(*found.values()) if len(found) == 1 else map(found.__getitem__, texts)


def crc_is_right(data: bytes, at: int) -> bool:
    """Whether the head at ``at`` is one of dialect C."""
    return int.from_bytes(data[at + 8 : at + 16]) == crc32(data[at + 16 : at + LENGTH_AT])


def check_head(data: bytes, start: int, at: int, end: int, number: int | None, dialect: str, path: str) -> tuple[int, int]:
    """The end and number of the message at ``at`` of the block ``path``; ``data`` are its bytes from ``start`` on.

    Raises `Corrupt` unless it fits in front of ``end`` and has ``number`` (None: any), that after the one of its forerunner
    (or, where a zbus server was killed, the same) and, in dialect C, its checksum.
    """
    if at - start + HEAD > len(data):
        raise Corrupt("the block ends inside the head of a message", path=path, offset=at)
    found, _, length = keys_at(data, at - start + NUMBER_AT)
    after = at + HEAD + length
    follows = number is None or (number - 1 <= found <= number and (found >= 0 or number < 0))
    if length < 0 or after > end or not follows:
        raise Corrupt(
            f"no message{'' if number is None else f' {number}'} begins here: its number is {found}, its length {length}, and "
            f"messages end at {end}",
            path=path,
            offset=at,
        )
    if dialect == "C" and not crc_is_right(data, at - start):
        raise Corrupt("the checksum of the message's head is wrong (dialect C)", path=path, offset=at)
    return after, found


def number_at(data: bytes, at: int) -> int:
    """The number of the message that begins at ``at``."""
    return int(_NUMBER.unpack_from(data, at + NUMBER_AT)[0])


def stored_offset_at(data: bytes, at: int) -> int:
    return int(_NUMBER.unpack_from(data, at)[0])


def length_at(data: bytes, at: int) -> int:
    return int(_LENGTH.unpack_from(data, at + LENGTH_AT)[0])


def timestamp_at(data: bytes, at: int, dialect: str) -> int:
    return int(_NUMBER.unpack_from(data, at + TIMESTAMP_AT[dialect])[0])


def unpack_message(data: bytes, at: int, base: int, dialect: str, attempt: int = 1) -> Message:
    """The message at ``at`` of bytes that begin at the offset ``base`` of the topic and hold all of it."""
    heads = unpack_heads(dialect, data, [at])
    body = data[at + HEAD : at + HEAD + heads.lengths[0]]
    return messages_of(heads, [body], [base + at], attempt)[0]


class Heads(NamedTuple):
    """Heads of messages, in columns: a list of objects for each of them would keep the collector of garbage busy."""

    tags: list[bytes]  # their slots
    ids: list[bytes]  # the same
    corr_offsets: list[int]
    timestamps: list[int]
    numbers: list[int]
    lengths: list[int]

    def first(self, count: int) -> Heads:
        return self._make([column[:count] for column in self])  # type: ignore[arg-type, call-arg]


def unpack_heads(dialect: str, data: bytes, places: Iterable[int]) -> Heads:
    """The heads that begin at these places."""
    unpack = (_HEAD_C if dialect == "C" else _HEAD_B).unpack_from
    fields = list(chain.from_iterable(map(unpack, repeat(data), places)))
    _, second, ids, fourth, numbers, tags, lengths = (fields[column::7] for column in range(7))
    corr_offsets, timestamps = ([0] * len(ids), fourth) if dialect == "C" else (fourth, second)
    return Heads(tags, ids, corr_offsets, timestamps, numbers, lengths)


def messages_of(heads: Heads, bodies: Iterable[bytes], offsets: Iterable[int], attempt: int = 1) -> list[Message]:
    """The messages with these heads; column by column, which takes a third of the time of one by one."""
    texts = {slot: _text(slot) for slot in {*heads.tags}}  # tags are few
    no_ids = heads.ids.count(_NO_ID) == len(heads.ids)
    ids: Iterable[str | None] = repeat(None) if no_ids else map(_text, heads.ids)
    tags = map(texts.__getitem__, heads.tags)
    columns = zip(bodies, tags, ids, heads.corr_offsets, heads.timestamps, heads.numbers, offsets, repeat(attempt))
    return list(map(_tuple, repeat(Message), columns))


def _text(slot: bytes) -> str | None:
    return slot_text(slot, 0, len(slot)) or None


# Readers


def new_reader(created: int, block: int, offset: int) -> bytes:
    head = _READER.pack(block, offset).ljust(_COMMON_AT, b"\0")
    return head + _COMMON.pack(0, created, created).ljust(READER_SIZE - _COMMON_AT, b"\0")


def is_whole_reader(data: bytes) -> bool:
    """Whether it has its size and says when it was made, as a server always does, else it was cut short, or is zeros; and whether
    its filter, which no message would pass, has no zero byte: else a byte was changed.
    """
    slot = data[FILTER_AT : FILTER_AT + SLOT]
    return len(data) >= READER_SIZE and unpack_common(data).created != 0 and not (slot[0] < SLOT and 0 in slot[1 : 1 + slot[0]])


def whole_reader(data: bytes, created: int) -> bytes:
    """The file with its whole size, made at this time."""
    at, image = _COMMON_AT + _COMMON.size - 8, data.ljust(READER_SIZE, b"\0")
    return image[:at] + created.to_bytes(8, signed=True) + image[at + 8 :]


def pack_position(block: int, offset: int) -> bytes:
    """For the start of the reader's file."""
    return _READER.pack(block, offset)


def unpack_position(data: bytes) -> tuple[int, int]:
    block, offset = _READER.unpack_from(data)
    return block, offset


def filter_patch(text: str | None) -> tuple[int, bytes]:
    blank = isinstance(text, str) and not text.strip()
    return FILTER_AT, _slot(text_bytes("filter", None if blank else text, TAG_BYTES))


def unpack_filter(data: bytes) -> str | None:
    if data[FILTER_AT] > TEXT_BYTES:  # one that was too long for the slot: no filter, as the original reads it
        return None
    text = slot_text(data, FILTER_AT, SLOT)
    while len(text.encode()) > TEXT_BYTES:  # U+FFFD for a byte or two that were cut off
        text = text[:-1]
    return text or None


# Messages that were handed out and not acknowledged


def nak_size(dialect: str) -> int:
    return HEADER + NAK_ENTRIES * _NAK_ENTRIES[dialect].size


def unpack_nak_head(data: bytes) -> tuple[int, int]:
    """Window (messages) and time-out (milliseconds)."""
    window, timeout = _NAK.unpack_from(data)
    return window, timeout


def nak_entry_at(number: int, dialect: str) -> int:
    return HEADER + number * _NAK_ENTRIES[dialect].size


def unpack_naks(data: bytes, dialect: str) -> dict[int, Nak]:
    """Entries in use, by their place."""
    found = {}
    for number in range(NAK_ENTRIES):
        at = nak_entry_at(number, dialect)
        if at + _NAK_ENTRIES[dialect].size > len(data):
            break
        if data[at] == 1:
            _, offset, *id, tries, updated = _NAK_ENTRIES[dialect].unpack_from(data, at)
            found[number] = Nak(offset, (slot_text(id[0], 0, 40) or None) if id else None, tries, updated)
    return found
