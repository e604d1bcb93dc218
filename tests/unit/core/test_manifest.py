"""The manifest, read by somebody who does not trust it: every lie is `BadManifest`, which names the file and the field."""

from __future__ import annotations

import json
import struct
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import zbus_cases
from hypothesis import given
from hypothesis import strategies as st

from qewqew_core import BadManifest, Batch, Corrupt, Queue
from qewqew_core.batch import manifest, segments
from qewqew_core.batch.manifest import Manifest, Segment
from qewqew_core.batch.store import Local
from qewqew_core.formats import zbus
from qewqew_core.formats.chunk import split
from qewqew_core.formats.tags import Filter
from qewqew_core.formats.zbus import HEAD, Message

RECORDS = [b"%d" % number for number in range(60)]
DROP = object()


@pytest.fixture
def folder(tmp_path) -> Path:
    """A batch of four segments."""
    with Queue(tmp_path / "q", chunk_size=64) as q:
        q.put_many(RECORDS)
        return Path(q.lease("key").manifest_path).parent


def body_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_bytes())


def write(folder: Path, body: object) -> None:
    (folder / "manifest.json").write_text(json.dumps(body))


def changed(folder: Path, field: str, value: object) -> None:
    """``field``: a name, or segments/NUMBER/NAME."""
    body = body_of(folder)
    holder, *path = body, *field.split("/")
    for step in path[:-1]:
        holder = holder[int(step) if step.isdigit() else step]
    if value is DROP:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    write(folder, body)


def records_of(folder: Path) -> list[bytes]:
    return [
        one
        for segment in manifest.load(folder).segments
        for _, data in segments.read_segment(folder, segment)
        for one in split(data)[0]
    ]


def test_a_batch_is_given_by_its_directory_or_its_manifest(folder):
    assert manifest.load(str(folder)) == manifest.load(str(folder / "manifest.json"))
    body = manifest.load(str(folder))
    assert (body.records, body.attempt, body.key, body.queue) == (60, 1, "key", "q")
    assert records_of(folder) == RECORDS


def test_what_was_written_is_what_is_read(folder):
    body = manifest.load(str(folder))
    assert manifest.parse(json.loads(body.to_json()), "x") == body


def test_the_manifest_of_a_queue_has_the_fields_that_it_always_had(folder):
    body = manifest.load(str(folder))
    assert list(json.loads(body.to_json())) == FIELDS
    assert (folder / "manifest.json").read_bytes() == body.to_json()
    assert (body.layout, body.reader, body.dialect, body.filter) == ("chunk", None, None, None)


def test_unknown_fields_are_ignored_so_that_later_versions_can_add_some(folder):
    changed(folder, "later", {"any": "thing"})
    changed(folder, "segments/0/later", 1)
    assert records_of(folder) == RECORDS


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"NaN", b'{"a": 1} x', b"9" * 5000, b'"\xc3"'], ids=range(8)
)
def test_what_is_not_json_is_refused(folder, content):
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(BadManifest, match=r"manifest\.json: "):
        manifest.load(str(folder))


@pytest.mark.parametrize("body", [None, [], 1, "text", {}, {"version": 1}], ids=str)
def test_json_that_is_no_manifest_is_refused(folder, body):
    write(folder, body)
    with pytest.raises(BadManifest, match="must be"):
        manifest.load(str(folder))


def test_a_missing_manifest_says_what_to_give_instead(folder):
    for path in (folder / "nothing.json", folder.parent):
        with pytest.raises(BadManifest, match=r"give the directory of a batch or its manifest\.json") as caught:
            manifest.load(str(path))
        assert caught.value.path.startswith(str(path))


@pytest.mark.parametrize("version", [0, 2, 1 << 70])
def test_another_version_says_which_program_reads_it(folder, version):
    changed(folder, "version", version)
    with pytest.raises(BadManifest, match=f"version {version}.* use the release of QewQew that wrote it, or a newer one"):
        manifest.load(str(folder))


def test_another_layout_is_refused(folder):
    changed(folder, "layout", "page")
    with pytest.raises(BadManifest, match="layout 'page': this program reads version 1, layouts 'chunk' and 'block'"):
        manifest.load(str(folder))


FIELDS = ["version", "id", "key", "queue", "layout", "created", "attempt", "records", "bytes", "segments"]
OF_SEGMENT = ["file", "start", "end", "records", "crc32"]


@pytest.mark.parametrize("field", FIELDS + [f"segments/1/{name}" for name in OF_SEGMENT])
@pytest.mark.parametrize("value", [DROP, None, True, 1.5, {}, [None]], ids=["missing", "null", "true", "1.5", "{}", "[null]"])
def test_a_field_of_the_wrong_type_is_named(folder, field, value):
    changed(folder, field, value)
    where = "segment 1: " if "/" in field else "segment 0: " if field == "segments" and value == [None] else ""
    with pytest.raises(BadManifest, match=f"{where}'.*' must be") as caught:
        manifest.load(str(folder))
    assert field.rpartition("/")[2] in str(caught.value) or where
    assert caught.value.path == str(folder / "manifest.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("records", 61),
        ("records", -1),
        ("bytes", 7),
        ("bytes", 1 << 80),
        ("attempt", -1),
        ("segments", []),
        ("segments/1/start", 0),
        ("segments/1/start", 9),  # inside the chunk's header
        ("segments/1/start", -1),
        ("segments/1/start", 65),  # past the end
        ("segments/1/end", 11),  # no room for the records
        ("segments/1/end", 65),  # past the file
        ("segments/1/end", 1 << 40),
        ("segments/1/records", 0),
        ("segments/1/records", 1 << 40),
        ("segments/1/crc32", ""),
        ("segments/1/crc32", "DEADBEEF"),
        ("segments/1/crc32", "0x123456"),
        ("segments/1/crc32", "123456789"),
        ("segments/1/boundaries", None),
        ("segments/1/boundaries", {}),
        ("segments/1/boundaries", [1, 2]),
        ("segments/1/boundaries", [[1]]),
        ("segments/1/boundaries", [[20, 1.5]]),
        ("segments/1/boundaries", [[10, 0]]),  # the start is no boundary
        ("segments/1/boundaries", [[64, 3]]),
        ("segments/1/boundaries", [[20, 99]]),
        ("segments/1/boundaries", [[30, 3], [20, 4]]),
        ("segments/1/boundaries", [[20, 3], [30, 3]]),
        ("segments/1/checksums", None),
        ("segments/1/checksums", {}),
        ("segments/1/checksums", ["00000000"]),  # for no boundary
        ("segments/1/file", "q.99"),
        ("segments/1/file", ""),
        ("segments/1/file", "."),
        ("segments/1/file", ".."),
        ("segments/1/file", "../q.wal"),
        ("segments/1/file", "/etc/passwd"),
        ("segments/1/file", "a/../q.30001"),
        ("segments/1/file", "q.30001\0"),
        ("segments/1/file", "\ud800"),
        ("segments/1/file", "x" * 5000),
    ],
)
def test_a_manifest_that_lies_is_refused_before_a_record_is_read(folder, field, value):
    changed(folder, field, value)
    with pytest.raises(BadManifest, match=r"manifest\.json: "):
        manifest.load(str(folder))


@pytest.mark.parametrize("kind", ["link", "directory", "missing", "link to nothing"])
def test_a_segment_that_is_not_a_regular_file_beside_the_manifest_is_refused(folder, kind):
    """A link would make a copied batch, or a job with other rights, read whatever it points to."""
    file = folder / "q.30002"
    file.rename(folder.parent / "moved")
    if kind == "link":
        file.symlink_to(folder.parent / "moved")
    elif kind == "link to nothing":
        file.symlink_to("nothing")
    elif kind == "directory":
        file.mkdir()
    with pytest.raises(BadManifest, match=r"segment file 'q\.30002'"):
        manifest.load(str(folder))


def test_a_segment_that_is_too_short_is_refused(folder):
    data = (folder / "q.30002").read_bytes()
    (folder / "q.30002").write_bytes(data[:-1])
    with pytest.raises(BadManifest, match=rf"'q\.30002' has {len(data) - 1} bytes, the segment ends at {len(data)}"):
        manifest.load(str(folder))


def test_a_wrong_checksum_is_damage_of_the_segment(folder):
    changed(folder, "segments/1/crc32", "00000000")
    with pytest.raises(Corrupt, match=r"q\.30002, offset 10: the checksum .* is [0-9a-f]{8}, but 00000000 was recorded"):
        records_of(folder)


@pytest.fixture
def long(tmp_path) -> tuple[str, Segment, list[bytes]]:
    """A batch of one segment of 3 MB, with boundaries."""
    records = [b"%06d" % number * 20 for number in range(25_000)]
    with Queue(tmp_path / "q", chunk_size=4 << 20, sync="never") as q:
        q.put_many(records)
        folder = Path(q.lease("key").manifest_path).parent
    (segment,) = manifest.load(str(folder)).segments
    return str(folder), segment, records


@pytest.mark.parametrize("run_bytes", [1, 100_000, 1 << 20, 1 << 30])
def test_a_long_segment_is_read_in_runs_of_whole_records(long, run_bytes):
    folder, segment, records = long
    runs = list(segments.read_segment(folder, segment, run_bytes))
    assert [one for _, data in runs for one in split(data)[0]] == records
    assert [count for count, _ in runs] == [len(split(data)[0]) for _, data in runs]
    assert max(len(data) for _, data in runs) < run_bytes + 2 * 65536
    assert len(runs) >= min((segment.end - segment.start) // (run_bytes + 2 * 65536), 30)


def test_the_first_records_come_before_much_is_read(long, counting):
    folder, segment, _ = long
    runs = segments.read_segment(counting(folder), segment, 8 << 20)
    next(runs)
    assert sum(end - start for start, end in counting.read_from) < (256 << 10) + 2 * 65536
    next(runs)
    assert sum(end - start for start, end in counting.read_from) < (2304 << 10) + 3 * 65536


def test_without_boundaries_a_segment_is_one_run(long):
    folder, segment, records = long
    plain = Segment(segment.file, segment.start, segment.end, segment.records, segment.crc32, ())
    ((count, data),) = segments.read_segment(folder, plain)
    assert (count, len(data)) == (len(records), segment.end - segment.start)


def damage(folder: str, segment: Segment, at: int) -> None:
    with (Path(folder) / segment.file).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("place", [0, 1_000_000, -1])
def test_damage_in_a_long_segment_is_found_before_a_record_of_its_run_is_given_out(long, place):
    folder, segment, records = long
    at = segment.start + place if place >= 0 else segment.end + place
    damage(folder, segment, at)
    given: list[bytes] = []
    with pytest.raises(Corrupt, match="damaged after it was written") as caught:
        given.extend(one for _, data in segments.read_segment(folder, segment, 100_000) for one in split(data)[0])
    assert given == records[: len(given)]
    assert caught.value.offset == max(cut for cut in (segment.start, *segment.cuts) if cut <= at), "of the piece"
    assert segment.start + 122 * len(given) <= at, "nothing of the run was given out"


def test_boundaries_without_checksums_are_refused(long):
    folder, _, _ = long
    changed(Path(folder), "segments/0/checksums", DROP)
    with pytest.raises(BadManifest, match="there are 0 checksums for "):
        manifest.load(folder)


def test_each_checksum_is_that_of_the_bytes_up_to_its_boundary(long):
    folder, segment, _ = long
    data = (Path(folder) / segment.file).read_bytes()
    assert len(segment.checksums) == len(segment.boundaries) > 40
    for (offset, _), crc32 in zip(segment.boundaries, segment.checksums, strict=True):
        assert crc32 == f"{zlib.crc32(data[segment.start : offset]):08x}"


@pytest.mark.parametrize("wrong", ["", "0000000g", "ABCDEF00", 7, None, "fewer", "more"])
def test_checksums_of_another_form_or_number_are_refused(long, wrong):
    folder, segment, _ = long
    lying = [*segment.checksums[:-1], *{"fewer": [], "more": ["00000000"] * 2}.get(wrong, [wrong])]
    changed(Path(folder), "segments/0/checksums", lying)
    with pytest.raises(
        BadManifest, match=r"segment 0: (checksum .* is not eight hex digits|there are \d+ checksums for \d+ bound)"
    ):
        manifest.load(folder)


@pytest.mark.parametrize("place", [0, 20, -1])
def test_a_checksum_that_lies_is_damage_although_that_of_the_whole_is_right(long, place):
    folder, segment, _ = long
    lying = list(segment.checksums)
    lying[place] = "00000000"
    changed(Path(folder), "segments/0/checksums", lying)
    (segment,) = manifest.load(folder).segments
    with pytest.raises(Corrupt, match="but 00000000 was recorded"):
        list(segments.read_segment(folder, segment, 1))


def test_a_checksum_of_the_whole_that_lies_is_damage_although_all_others_are_right(long):
    folder, segment, _ = long
    with pytest.raises(Corrupt, match="but 12345678 was recorded"):
        list(segments.read_segment(folder, replace(segment, crc32="12345678")))


class Counting(Local):
    """Remembers what was read."""

    read_from: ClassVar[list[tuple[int, int]]] = []

    @contextmanager
    def open(self, name):
        with super().open(name) as read:
            yield lambda start, end: self.read_from.append((start, end)) or read(start, end)


@pytest.fixture
def counting(monkeypatch) -> Iterator[type[Counting]]:
    Counting.read_from.clear()
    return Counting


def test_a_segment_with_checksums_is_read_once(long, counting):
    folder, segment, _ = long
    list(segments.read_segment(counting(folder), segment))
    assert [start for start, _ in counting.read_from[1:]] == [end for _, end in counting.read_from[:-1]]
    assert (counting.read_from[0][0], counting.read_from[-1][1]) == (segment.start, segment.end)


def parts_of(segment: Segment, cuts: slice) -> list[Segment]:
    return [segment.part(*ends) for ends in pairwise([segment.start, *segment.cuts[cuts], segment.end])]


EACH = slice(None)


@pytest.mark.parametrize("cuts", [EACH, slice(0, 1), slice(1, None, 2), slice(-1, None), slice(0)])
def test_parts_of_a_segment_are_segments_that_are_verified_by_themselves(long, cuts):
    folder, segment, records = long
    data = (Path(folder) / segment.file).read_bytes()
    parts = parts_of(segment, cuts)
    assert len(parts) == 1 + len(segment.cuts[cuts])
    assert (parts[0].start, parts[-1].end) == (segment.start, segment.end)
    assert all(one.end == other.start for one, other in pairwise(parts))
    assert sum(part.records for part in parts) == len(records)
    at = 0
    for part in parts:
        assert f"{zlib.crc32(data[part.start : part.end], int(part.seed, 16)):08x}" == part.crc32
        found = [one for _, run in segments.read_segment(folder, part, 1) for one in split(run)[0]]
        assert found == records[at : at + part.records]
        assert part == part.part(part.start, part.end)
        at += part.records
    assert [one for part in parts for one in parts_of(part, EACH)] == parts_of(segment, EACH), "a part can be cut again"
    last = parts[-1]
    damage(folder, segment, last.start)
    with pytest.raises(Corrupt, match="damaged after it was written"):
        list(segments.read_segment(folder, last))


def test_the_parts_of_a_segment_never_stand_in_a_manifest(long):
    folder, segment, _ = long
    body = manifest.load(folder)
    text = replace(body, segments=tuple(parts_of(segment, slice(0, None, 16)))).to_json()
    assert b"seed" not in text


def batch_of(tmp_path: Path) -> tuple[Queue, Batch]:
    q = Queue(tmp_path / "q", chunk_size=4 << 20)
    q.put_many([b"%06d" % number * 20 for number in range(25_000)])
    return q, q.lease("key")


def test_boundaries_that_lie_between_records_are_damage_and_never_wrong_records(tmp_path):
    """The checksum covers the segment, not where its boundaries lie."""
    q, batch = batch_of(tmp_path)
    with q:
        folder = Path(batch.manifest_path).parent
        boundaries = body_of(folder)["segments"][0]["boundaries"]
        changed(folder, "segments/0/boundaries", [[offset + 3, records] for offset, records in boundaries])
        with pytest.raises((BadManifest, Corrupt), match=r"boundar|record"):
            list(batch)


def test_a_number_of_records_that_is_not_what_the_segment_holds_is_found(tmp_path):
    """Told together with the bytes it can be consistent, and still wrong: a job that counts on it would count wrong."""
    with Queue(tmp_path / "q", chunk_size=4096) as q:
        q.put_many([b"abcdef"] * 10)
        batch = q.lease("key")
        folder = Path(batch.manifest_path).parent
        changed(folder, "records", 20)
        changed(folder, "bytes", 40)
        changed(folder, "segments/0/records", 20)
        with pytest.raises((BadManifest, Corrupt), match="records"):
            list(batch)
        assert q.verify().problems


def test_a_frame_that_runs_past_the_segment_is_found_though_the_checksum_is_right(tmp_path):
    with Queue(tmp_path / "q", chunk_size=4096) as q:
        q.put_many([b"abcdef"] * 10)
        batch = q.lease("key")
        folder = Path(batch.manifest_path).parent
        changed(folder, "segments/0/end", 10 + 8 * 10 - 1)
        changed(folder, "segments/0/crc32", f"{zlib.crc32((folder / 'q.30001').read_bytes()[10 : 10 + 8 * 10 - 1]):08x}")
        changed(folder, "bytes", 59)
        with pytest.raises((BadManifest, Corrupt), match="record"):
            list(batch)


# Batches of a topic

BASE = 7_000_000_000
MESSAGES = [
    Message(
        b"%d" % number * (number % 7), (None, "a.b", "a.c", "ü")[number % 4], None if number % 3 else f"id{number}", number, 5
    )
    for number in range(40)
]


def write_block(folder: Path, messages: Sequence[Message], cuts: Sequence[int] = (), boundaries: bool = True, **fields) -> Path:
    """A batch of one block, in segments that are cut in front of the messages ``cuts``, with a boundary at each other one."""
    folder.mkdir(exist_ok=True)
    dialect, chosen = fields.setdefault("dialect", "B"), Filter(fields.get("filter"))
    data, places, counts, size = b"", [0], [0], 0
    for number, one in enumerate(messages):
        head = (one.timestamp or 0, (one.id or "").encode(), one.corr_offset, number, (one.tag or "").encode(), len(one.body))
        data += zbus.pack_head(dialect, BASE + len(data), *head) + one.body
        matches = chosen.matches(one.tag)
        places.append(len(data))
        counts.append(counts[-1] + matches)
        size += matches * len(one.body)
    segments = []
    edges = sorted({0, *cuts, len(messages)})
    for first, last in pairwise(edges):
        start, end = places[first], places[last]
        inner = tuple((places[one], counts[one] - counts[first]) for one in range(first + 1, last) if boundaries)
        *checksums, crc32 = (f"{zlib.crc32(data[start:stop]):08x}" for stop in (*(offset for offset, _ in inner), end))
        segments.append(Segment(zbus.block_name(BASE), start, end, counts[last] - counts[first], crc32, inner, tuple(checksums)))
    (folder / zbus.block_name(BASE)).write_bytes(data)
    what = "t-1", "key", "t", "2026-11-20T15:00:00Z", 2
    body = Manifest(*what, counts[-1], size, tuple(segments), layout="block", reader="loader", **fields)
    (folder / "manifest.json").write_bytes(body.to_json())
    return folder


def messages_of(folder: Path) -> list[Message]:
    body = manifest.load(str(folder))
    return [one for segment in body.segments for run in segments.read_records(str(folder), body, segment) for one in run]


def expected(messages: Sequence[Message], filter: str | None = None) -> list[Message]:
    """As they come out of a batch, which is in its second attempt."""
    result, at = [], BASE
    for number, one in enumerate(messages):
        if Filter(filter).matches(one.tag):
            result.append(one._replace(timestamp=one.timestamp or 0, number=number, offset=at, attempt=2))
        at += HEAD + len(one.body)
    return result


@pytest.fixture
def topic(tmp_path) -> Path:
    return write_block(tmp_path / "b", MESSAGES, cuts=[10, 11, 30])


def test_the_manifest_of_a_topic_says_what_is_read_and_by_whom(topic):
    body = manifest.load(str(topic))
    assert (body.layout, body.reader, body.dialect, body.filter) == ("block", "loader", "B", None)
    assert (topic / "manifest.json").read_bytes() == body.to_json()
    assert list(body_of(topic))[:8] == ["version", "id", "key", "queue", "reader", "layout", "dialect", "filter"]
    assert {segment.base for segment in body.segments} == {BASE}


@given(
    bodies=st.lists(st.tuples(st.binary(max_size=400), st.sampled_from([None, "a", "a.b", "ü.b", "b"])), max_size=12),
    cuts=st.sets(st.integers(0, 12)),
    dialect=st.sampled_from("BC"),
    filter=st.sampled_from([None, " ", "a", "*.b", "#", "a;b", "nothing"]),
    boundaries=st.booleans(),
    run_bytes=st.sampled_from([1, 300, 1000, 1 << 20]),
)
def test_messages_come_out_as_they_went_in_however_they_are_cut(bodies, cuts, dialect, filter, boundaries, run_bytes):
    messages = [Message(body, tag, timestamp=7) for body, tag in bodies]
    cuts = {cut for cut in cuts if cut < len(messages)}
    with tempfile.TemporaryDirectory() as folder:
        write_block(Path(folder), messages, cuts, boundaries, dialect=dialect, filter=filter)
        assert messages_of(Path(folder)) == expected(messages, filter)
        body = manifest.load(folder)
        assert manifest.parse(json.loads(body.to_json()), "x") == body
        runs = [run for segment in body.segments for run in segments.read_messages(folder, body, segment, run_bytes)]
        assert [one for run in runs for one in run.messages(body)] == expected(messages, filter)
        assert all(run.bounds for run in runs)
        assert all(len(run.data) <= max(run_bytes, HEAD + 400) for run in runs)


@pytest.mark.parametrize("boundaries", [True, False])
def test_a_long_segment_of_a_topic_is_never_read_in_one_piece(tmp_path, boundaries):
    messages = [Message(b"x" * 3000)] * 1000
    messages[500] = Message(b"y" * 3_000_000)
    write_block(tmp_path, messages, boundaries=boundaries)
    body = manifest.load(str(tmp_path))
    runs = list(segments.read_messages(str(tmp_path), body, body.segments[0]))
    assert [one for run in runs for one in run.messages(body)] == expected(messages)
    assert sorted(len(run.data) for run in runs)[-2:] == pytest.approx([1 << 20, HEAD + 3_000_000], rel=0.5)
    assert max(len(run.data) for run in runs if len(run.bounds) > 2) <= 1 << 20
    assert len(runs) < 12


def test_a_large_message_that_the_filter_holds_back_is_never_in_memory(tmp_path, counting):
    write_block(tmp_path, [Message(b"a", "a"), Message(b"y" * 9_000_000, "b"), Message(b"c", "a")], boundaries=False, filter="a")
    body = manifest.load(tmp_path)
    runs = segments.read_messages(counting(str(tmp_path)), body, body.segments[0])
    assert [one.body for run in runs for one in run.messages(body)] == [b"a", b"c"]
    assert max(end - start for start, end in counting.read_from) == 1 << 20


def test_records_of_both_layouts_are_read_by_one_function(folder, topic):
    assert messages_of(folder) == RECORDS
    assert messages_of(topic) == expected(MESSAGES)


@pytest.mark.parametrize("name", zbus_cases.cases())
def test_messages_that_the_original_wrote_are_those_that_its_readers_returned(name, tmp_path):
    queue, what = zbus_cases.case(name, tmp_path)
    dialect, messages = zbus.check_dialect(what["dialect"]), {one["number"]: one for one in what["messages"]}
    for reader in what["readers"]:
        if reader["kind"] != "fresh":
            continue
        segments, size = [], 0
        for block in what["index"]["blocks"]:
            data = (queue / block["file"]).read_bytes()[: block["end_offset"]]
            bodies = [messages[n]["body"] or "" for n in reader["returns"] if messages[n]["block"] == block["number"]]
            file = Path(block["file"]).name
            segments.append(Segment(file, 0, len(data), len(bodies), f"{zlib.crc32(data):08x}", ()))
            size += sum(map(len, bodies)) // 2
        count, filter = len(reader["returns"]), reader["filter"]
        body = Manifest("i", "k", "t", "", 1, count, size, tuple(segments), "block", "r", dialect, filter)
        (queue / "data" / "manifest.json").write_bytes(body.to_json())
        for one, number in zip(messages_of(queue / "data"), reader["returns"], strict=True):
            golden = messages[number]
            assert one.body.hex() == (golden["body"] or "")
            assert (one.tag, one.id, one.timestamp) == (golden["tag"], golden["id"], golden["timestamp"])
            assert (one.number, one.offset, one.corr_offset) == (number, golden["offset"], golden["corr_offset"] or 0)


def test_a_segment_may_hold_messages_of_which_none_matches(tmp_path):
    write_block(tmp_path, MESSAGES, cuts=[1, 4], filter="a.c")
    body = manifest.load(str(tmp_path))
    assert [segment.records for segment in body.segments] == [0, 1, 9]
    assert messages_of(tmp_path) == expected(MESSAGES, "a.c")


OF_TOPIC = ["reader", "dialect", "filter"]


@pytest.mark.parametrize("field", FIELDS + OF_TOPIC + [f"segments/1/{name}" for name in OF_SEGMENT])
@pytest.mark.parametrize("value", [DROP, None, True, 1.5, {}, [None]], ids=["missing", "null", "true", "1.5", "{}", "[null]"])
def test_a_field_of_the_wrong_type_is_named_for_a_topic_too(topic, field, value):
    if (field, value) == ("filter", None):
        return
    changed(topic, field, value)
    where = "segment 1: " if "/" in field else "segment 0: " if field == "segments" and value == [None] else ""
    with pytest.raises(BadManifest, match=f"{where}'.*' must be") as caught:
        manifest.load(str(topic))
    assert field.rpartition("/")[2] in str(caught.value) or where


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dialect", "A"),  # is read as B
        ("dialect", "b"),
        ("dialect", ""),
        ("filter", "x" * 128),
        ("filter", "\ud800"),
        ("records", 41),
        ("bytes", 7),
        ("layout", "chunk"),
        ("segments/1/start", -1),
        ("segments/1/end", 1 << 31),
        ("segments/1/records", 2),
        ("segments/1/records", 0),
        ("segments/2/boundaries", [[5000, 3], [5300, 3]]),
        ("segments/2/boundaries", [[5000, 19]]),
        ("segments/1/file", "00000000007000000001.zbus"),  # not there
        ("segments/1/file", "7000000000.zbus"),
        ("segments/1/file", "0000000000700000000x.zbus"),
        ("segments/1/file", "0000000000700000000².zbus"),
        ("segments/1/file", "00000000007000000000.zbus\n"),
        ("segments/1/file", "00000000007000000000.idx"),
        ("segments/1/file", "99999999999999999999.zbus"),
        ("segments/1/file", "../00000000007000000000.zbus"),
    ],
)
def test_the_manifest_of_a_topic_that_lies_is_refused(topic, field, value):
    changed(topic, field, value)
    with pytest.raises(BadManifest, match=r"manifest\.json: "):
        manifest.load(str(topic))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bytes", 1 << 20),
        ("records", 1),
        ("segments/0/records", 1000),
        ("segments/0/boundaries", [[5000, 3], [5300, 2]]),
        ("segments/0/boundaries", [[5300, 3], [5000, 3]]),
        ("segments/0/boundaries", [[5000, 11]]),
    ],
)
def test_with_a_filter_it_is_still_refused(tmp_path, field, value):
    write_block(tmp_path, MESSAGES, filter="a.c")
    changed(tmp_path, field, value)
    with pytest.raises(BadManifest, match=r"manifest\.json: "):
        manifest.load(str(tmp_path))


def test_a_damaged_byte_is_found_before_the_first_message(topic):
    file = topic / zbus.block_name(BASE)
    data = bytearray(file.read_bytes())
    second = manifest.load(str(topic)).segments[2]
    data[second.end - 1] ^= 1
    file.write_bytes(data)
    body = manifest.load(str(topic))
    with pytest.raises(Corrupt, match=r"\.zbus, offset \d+: the checksum .* damaged after it was written") as caught:
        next(segments.read_records(str(topic), body, second))
    assert (caught.value.path, caught.value.offset) == (str(file), [second.start, *second.cuts][-1])


def mend(folder: Path, at: int, patch: bytes) -> None:
    """Overwrite bytes of the block of one segment, and give the manifest the checksum that it has then."""
    file = folder / zbus.block_name(BASE)
    data = bytearray(file.read_bytes())
    data[at : at + len(patch)] = patch
    file.write_bytes(data)
    changed(folder, "segments/0/crc32", f"{zlib.crc32(data):08x}")


@pytest.mark.parametrize("run_bytes", [1, 500, 1 << 20])
@pytest.mark.parametrize("filter", [None, "a"])
@pytest.mark.parametrize(
    ("at", "patch", "message"),
    [
        (zbus.LENGTH_AT, struct.pack(">i", -1), "its number is 1, its length -1,"),
        (zbus.LENGTH_AT, struct.pack(">i", -300), "its length -300,"),
        (zbus.LENGTH_AT, struct.pack(">i", 411), "its length 411, and messages end at 918"),
        (zbus.LENGTH_AT, b"\x7f\xff\xff\xff", "its length 2147483647,"),
        (zbus.NUMBER_AT, struct.pack(">q", 2), "no message 1 begins here: its number is 2,"),
        (zbus.NUMBER_AT, struct.pack(">q", -1), "no message 1 begins here: its number is -1,"),
    ],
)
def test_messages_that_do_not_fit_are_damage_with_a_place(tmp_path, at, patch, message, filter, run_bytes):
    write_block(tmp_path, [Message(b"x" * 102, "a")] * 3, boundaries=False, filter=filter)
    mend(tmp_path, 306 + at, patch)
    body = manifest.load(str(tmp_path))
    with pytest.raises(Corrupt, match=message) as caught:
        list(segments.read_messages(str(tmp_path), body, body.segments[0], run_bytes))
    assert (caught.value.path, caught.value.offset) == (str(tmp_path / zbus.block_name(BASE)), 306)


def test_bytes_behind_the_last_message_are_damage(tmp_path):
    write_block(tmp_path, [Message(b"x" * 102, "a")] * 3, boundaries=False)
    mend(tmp_path, 612 + zbus.LENGTH_AT, struct.pack(">i", 2))
    with pytest.raises(Corrupt, match="offset 818: the block ends inside the head of a message"):
        messages_of(tmp_path)


def with_boundary(folder: Path, offset: int) -> None:
    """The manifest of one segment says that its second message begins there."""
    data = (folder / zbus.block_name(BASE)).read_bytes()
    changed(folder, "segments/0/boundaries", [[offset, 1]])
    changed(folder, "segments/0/checksums", [f"{zlib.crc32(data[:offset]):08x}"])


@pytest.mark.parametrize("filter", [None, "a"])
def test_another_number_of_messages_than_the_manifest_says_is_found(tmp_path, filter):
    """Also at a boundary. Told together with the bytes it can be consistent, and still wrong."""
    write_block(tmp_path, [Message(b"x" * 300, "a")] * 3, filter=filter)
    with_boundary(tmp_path, 1008)
    body = manifest.load(str(tmp_path))
    with pytest.raises(BadManifest, match=r"the boundaries or the number of records of segment 0+7000000000\.zbus do not match"):
        list(segments.read_messages(str(tmp_path), body, body.segments[0], 100))
    write_block(tmp_path, [Message(b"x" * 300, "a")] * 3, filter=filter, boundaries=False)
    for field, value in {"segments/0/records": 2, "records": 2, "bytes": 900 + HEAD}.items():
        changed(tmp_path, field, value)
    with pytest.raises(BadManifest, match="do not match its records"):
        messages_of(tmp_path)


def test_a_boundary_inside_of_a_message_is_damage_and_never_a_wrong_message(tmp_path):
    write_block(tmp_path, [Message(b"x" * 300)] * 3)
    with_boundary(tmp_path, 800)
    body = manifest.load(str(tmp_path))
    with pytest.raises(
        Corrupt, match="offset 504: no message 1 begins here: its number is 1, its length 300, and messages end at 800"
    ):
        list(segments.read_messages(str(tmp_path), body, body.segments[0], 100))


@given(st.binary(max_size=700), st.sampled_from([None, "a"]), st.sampled_from([1, 300, 1 << 20]))
def test_no_bytes_make_anything_but_messages_or_an_error(data, filter, run_bytes):
    segment = Segment(zbus.block_name(BASE), 0, len(data), 1, f"{zlib.crc32(data):08x}", ())
    body = Manifest("t", "k", "t", "", 1, 1, 0, (segment,), "block", "r", "B", filter)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / segment.file).write_bytes(data)
        try:
            runs = list(segments.read_messages(folder, body, segment, run_bytes))
        except (Corrupt, BadManifest):
            return
        assert sum(len(run.messages(body)) for run in runs) == (1 if data else 0)
