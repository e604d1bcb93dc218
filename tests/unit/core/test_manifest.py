"""The manifest, read by somebody who does not trust it: every lie is `BadManifest`, which names the file and the field."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from qewqew_core import BadManifest, Batch, CorruptQueue, Queue, manifest
from qewqew_core.chunk import split
from qewqew_core.manifest import Segment

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
        for _, data in manifest.read_segment(folder, segment)
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
    changed(folder, "layout", "block")
    with pytest.raises(BadManifest, match="layout 'block'"):
        manifest.load(str(folder))


FIELDS = ["version", "layout", "id", "key", "queue", "created", "attempt", "records", "bytes", "segments"]
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
        ("segments/1/file", "q.99"),
        ("segments/1/file", ""),
        ("segments/1/file", "."),
        ("segments/1/file", ".."),
        ("segments/1/file", "../q.log"),
        ("segments/1/file", "/etc/passwd"),
        ("segments/1/file", "a/../q.1"),
        ("segments/1/file", "q.1\0"),
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
    file = folder / "q.2"
    file.rename(folder.parent / "moved")
    if kind == "link":
        file.symlink_to(folder.parent / "moved")
    elif kind == "link to nothing":
        file.symlink_to("nothing")
    elif kind == "directory":
        file.mkdir()
    with pytest.raises(BadManifest, match=r"segment file 'q\.2'"):
        manifest.load(str(folder))


def test_a_segment_that_is_too_short_is_refused(folder):
    data = (folder / "q.2").read_bytes()
    (folder / "q.2").write_bytes(data[:-1])
    with pytest.raises(BadManifest, match=rf"'q\.2' has {len(data) - 1} bytes, the segment ends at {len(data)}"):
        manifest.load(str(folder))


def test_a_wrong_checksum_is_damage_of_the_segment(folder):
    changed(folder, "segments/1/crc32", "00000000")
    with pytest.raises(CorruptQueue, match=r"q\.2, offset 10: the checksum .* is [0-9a-f]{8}, the manifest says 00000000"):
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
    runs = list(manifest.read_segment(folder, segment, run_bytes))
    assert [one for _, data in runs for one in split(data)[0]] == records
    assert [count for count, _ in runs] == [len(split(data)[0]) for _, data in runs]
    assert max(len(data) for _, data in runs) < run_bytes + 2 * 65536
    assert len(runs) >= min((segment.end - segment.start) // (run_bytes + 2 * 65536), 30)


def test_without_boundaries_a_segment_is_one_run(long):
    folder, segment, records = long
    plain = Segment(segment.file, segment.start, segment.end, segment.records, segment.crc32, ())
    ((count, data),) = manifest.read_segment(folder, plain)
    assert (count, len(data)) == (len(records), segment.end - segment.start)


def test_damage_anywhere_in_a_long_segment_is_found_before_its_first_record(long):
    folder, segment, _ = long
    with (Path(folder) / segment.file).open("r+b") as file:
        file.seek(segment.end - 1)
        file.write(b"X")
    with pytest.raises(CorruptQueue, match="damaged after it was written"):
        next(manifest.read_segment(folder, segment))


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
        with pytest.raises((BadManifest, CorruptQueue), match=r"boundar|record"):
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
        with pytest.raises((BadManifest, CorruptQueue), match="records"):
            list(batch)
        assert q.verify().problems


def test_a_frame_that_runs_past_the_segment_is_found_though_the_checksum_is_right(tmp_path):
    with Queue(tmp_path / "q", chunk_size=4096) as q:
        q.put_many([b"abcdef"] * 10)
        batch = q.lease("key")
        folder = Path(batch.manifest_path).parent
        changed(folder, "segments/0/end", 10 + 8 * 10 - 1)
        changed(folder, "segments/0/crc32", f"{zlib.crc32((folder / 'q.1').read_bytes()[10 : 10 + 8 * 10 - 1]):08x}")
        changed(folder, "bytes", 59)
        with pytest.raises((BadManifest, CorruptQueue), match="record"):
            list(batch)
