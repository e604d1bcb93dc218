"""A batch is published whole or not at all, by whoever tries again."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from test_planted import PLANTED

from qewqew_core import (
    BadArgument,
    BadManifest,
    BadPath,
    Batch,
    BatchExpired,
    Corrupt,
    DiskFull,
    Message,
    Queue,
    StoreError,
    Topic,
)
from qewqew_core.batch import manifest, published, segments
from qewqew_core.batch.publishing import publish
from qewqew_core.batch.store import Local, Remote, store_of

RECORDS = [b"%06d" % number * 20 for number in range(20_000)]  # 2.4 MB in three files


@pytest.fixture
def queue(tmp_path) -> Iterator[Queue]:
    with Queue(tmp_path / "q", chunk_size=1 << 20, sync="never") as q:
        q.put_many(RECORDS)
        yield q


@pytest.fixture
def batch(queue) -> Batch:
    return queue.lease("key")


@pytest.fixture(params=["directory", "file:", "memory:"])
def url(request, tmp_path) -> Iterator[str]:
    path = str(tmp_path / "published" / "here")
    yield {"directory": path, "file:": f"file://{path}", "memory:": "memory://published/here"}[request.param]
    system = fsspec.filesystem("memory")
    if system.exists("/published"):
        system.rm("/published", recursive=True)


def folder_of(batch: Batch) -> Path:
    return Path(batch.manifest_path).parent


def records_of(path: str) -> list[bytes | Message]:
    body, store = manifest.load(path), store_of(path)
    return [one for segment in body.segments for some in segments.read_records(store, body, segment) for one in some]


def sent_by(monkeypatch) -> list[str]:
    """The names that are written from now on."""
    names: list[str] = []
    for kind in (Local, Remote):
        original = kind.write
        monkeypatch.setattr(
            kind, "write", lambda self, name, parts, original=original: names.append(name) or original(self, name, parts)
        )
    return names


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_published_batch_is_read_where_it_lies(batch, url):
    told: list[tuple[int, int]] = []
    path = batch.publish(url, progress=lambda *both: told.append(both))
    assert path.endswith(f"/published/here/{batch.id}")
    assert records_of(path) == RECORDS == list(batch)
    body = manifest.load(path)
    assert body == manifest.load(batch.manifest_path)
    total = sum(body.files().values())
    assert told == sorted(told)
    assert len(told) >= 3
    assert told[-1] == (total, total)
    store = store_of(path)
    for name, size in body.files().items():
        assert store.read(name) == (folder_of(batch) / name).read_bytes()[:size]


def test_the_manifest_is_written_last(batch, url, monkeypatch):
    names = sent_by(monkeypatch)
    batch.publish(url)
    assert names == ["q.30001", "q.30002", "q.30003", "manifest.json"]


def test_published_twice_is_published_once(batch, url, monkeypatch):
    path = batch.publish(url)
    names, told = sent_by(monkeypatch), []
    assert batch.publish(url, progress=lambda *both: told.append(both)) == path
    assert names == ["manifest.json"]
    assert told[-1][0] == told[-1][1], "what is there is done"
    assert records_of(path) == RECORDS


def test_a_batch_that_is_leased_again_is_published_with_its_new_attempt(queue, batch, url):
    batch.publish(url)
    batch.nack()
    again = queue.lease("another key")
    body = manifest.load(again.publish(url))
    assert (body.id, body.key, body.attempt) == (batch.id, "another key", 2)


def test_published_by_its_directory_the_queue_need_not_be_open(batch, queue, tmp_path):
    queue.close()
    for one in (folder_of(batch), batch.manifest_path, f"file://{folder_of(batch)}"):
        assert records_of(publish(one, str(tmp_path / "p"))) == RECORDS


def test_offsets_in_files_stay_what_they_are(queue, url):
    """The first segment begins behind records that were taken; in the last file others follow."""
    queue.get_many(3)
    batch = queue.lease("key", max_records=10_000)
    body = manifest.load(batch.publish(url))
    assert body.segments[0].start == 10 + 3 * 122
    assert records_of(batch.publish(url)) == RECORDS[3:10_003]


@pytest.mark.parametrize("filter", [None, "a"])
def test_a_batch_of_a_topic_with_several_segments_in_a_block(tmp_path, url, filter):
    with Topic(tmp_path / "t", block_size=1 << 20) as topic:
        reader = topic.reader("loader", start="oldest", filter=filter, redeliver_after=None)
        for count, tag in (5_000, "a"), (1_000, "b"), (1_000, "a"):
            topic.append_many([Message(b"%d" % number * 100, tag) for number in range(count)])
        held = reader.read_many(100)
        reader.commit(*held[20:40])
        reader.nack(*held[:20], *held[40:])
        batch = reader.lease("key", max_records=5_500)
        body = manifest.load(batch.publish(url))
        assert len(body.segments) > len(body.files())
        assert records_of(batch.publish(url)) == list(batch.messages())
        assert [one.body for one in batch.messages()] == list(batch)


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_damaged_segment_is_never_published(batch, url, place):
    body = manifest.load(batch.manifest_path)
    segment = body.segments[1]
    at = {"first": segment.start, "middle": (segment.start + segment.end) // 2, "last": segment.end - 1}[place]
    flip(folder_of(batch) / segment.file, at)
    with pytest.raises(Corrupt, match=rf"{segment.file}, offset \d+: the checksum") as caught:
        batch.publish(url)
    assert caught.value.offset <= at < caught.value.offset + 2 * 65536
    path = url.removeprefix("file://") + "/" + batch.id
    with pytest.raises(BadManifest, match="there is no manifest"):
        manifest.load(path)
    if not url.startswith("memory:"):
        assert sorted(os.listdir(path)) == ["q.30001"], "nothing of the one that is damaged"


@pytest.mark.parametrize("lie", ["crc32", "checksums"])
def test_a_manifest_whose_checksums_lie_is_never_published(batch, url, lie):
    body = json.loads(Path(batch.manifest_path).read_bytes())
    segment = body["segments"][1]
    if lie == "crc32":
        segment["crc32"] = "00000000"
    else:
        segment["checksums"][3] = "00000000"
    Path(batch.manifest_path).write_text(json.dumps(body))
    with pytest.raises(Corrupt, match="but 00000000 was recorded"):
        batch.publish(url)


def test_a_segment_that_is_missing_or_short_is_never_published(batch, url):
    file = folder_of(batch) / "q.30002"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(BadManifest, match=r"'q\.30002' has"):
        batch.publish(url)
    file.unlink()
    with pytest.raises(Corrupt, match=r"q\.30002: the files of batch .* are missing"):
        batch.publish(url)


def test_what_was_damaged_at_the_target_is_sent_again(batch, tmp_path, monkeypatch):
    path = Path(batch.publish(str(tmp_path / "p")))
    flip(path / "q.30002", 2)  # in the header, which no checksum of the manifest covers
    (path / "q.30003").write_bytes((path / "q.30003").read_bytes()[:-1])
    (path / "manifest.json").write_bytes(b'{"torn')
    names = sent_by(monkeypatch)
    batch.publish(str(tmp_path / "p"))
    assert names == ["q.30002", "q.30003", "manifest.json"]
    assert records_of(str(path)) == RECORDS


def test_damage_is_found_also_where_the_target_has_the_file(batch, url):
    path = batch.publish(url)
    flip(folder_of(batch) / "q.30002", 5_000)
    with pytest.raises(Corrupt, match=r"q\.30002, offset"):
        batch.publish(url)
    assert records_of(path) == RECORDS, "what was published stays"


def test_another_batch_at_the_target_is_not_touched(queue, tmp_path, url, monkeypatch):
    """The same key has the same id again, once the batch was put back."""
    first = queue.lease("key", max_records=100)
    path = first.publish(url)
    first.put_back()
    second = queue.lease("key", max_records=200)
    if second.made == first.made:
        pytest.skip("in the same millisecond")
    with pytest.raises(BadPath, match=r"is the manifest of a batch of 'q' that was made .* Nothing was written"):
        second.publish(url)
    assert records_of(path) == RECORDS[:100]


def test_an_empty_batch_is_published_as_its_manifest(tmp_path, url):
    body = manifest.Manifest("q-1", "key", "q", "2026-11-20T15:00:00Z", 1, 0, 0, ())
    (tmp_path / "manifest.json").write_bytes(body.to_json())
    assert manifest.load(publish(tmp_path, url)) == body


@pytest.mark.parametrize("name", ["", "..", ".", "a/b", "../x", "a?b", "x\0", ".hidden"])
def test_an_id_that_is_no_name_of_a_directory_is_refused(tmp_path, url, name):
    body = manifest.Manifest(name, "key", "q", "2026-11-20T15:00:00Z", 1, 0, 0, ())
    (tmp_path / "manifest.json").write_bytes(body.to_json())
    with pytest.raises(BadManifest, match="cannot be the name of a directory"):
        publish(tmp_path, url)


def test_files_that_are_gone_say_so(queue, batch, url):
    batch.put_back()
    with pytest.raises(BatchExpired, match="are gone"):
        batch.publish(url)


def test_a_url_with_a_password_is_refused_before_anything_is_sent(batch):
    with pytest.raises(BadArgument, match="contains a password"):
        batch.publish("sftp://me:hushhush@host/a")


def test_a_store_that_loses_bytes_is_found_out(batch, tmp_path, monkeypatch):
    write = Local.write
    monkeypatch.setattr(Local, "write", lambda self, name, parts: write(self, name, list(parts)[:-1]))
    with pytest.raises(StoreError, match=r"q\.30001: it has \d+ bytes after \d+ were written; nothing is published"):
        batch.publish(str(tmp_path / "p"))
    assert os.listdir(tmp_path / "p" / batch.id) == ["q.30001"]


def test_a_full_disk_is_named(batch, tmp_path):
    """A limit of the size of files stands for it: the errno is another, the way it takes the same."""
    program = (
        "import resource, signal, sys\n"
        "from qewqew_core.errors import DiskFull\n"
        "from qewqew_core.batch.publishing import publish\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))\n"
        "try:\n"
        "    publish(sys.argv[1], sys.argv[2])\n"
        "except DiskFull as error:\n"
        "    print(error)\n"
    )
    target = tmp_path / "p"
    run = [sys.executable, "-c", program, str(folder_of(batch)), str(target)]
    out = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    assert out.startswith(f"{target}/{batch.id}/q.30001: no room on the file system")
    assert issubclass(DiskFull, OSError)
    assert os.listdir(target / batch.id) == []


@pytest.mark.parametrize("error", [errno.EROFS, errno.EIO])
def test_a_directory_that_cannot_be_written_is_named(batch, tmp_path, monkeypatch, error):
    def fails(*_: object, **__: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "mkdir", fails)  # stands for a file system that is mounted to be read, or whose disk is bad
    with pytest.raises(BadPath, match=rf"{tmp_path}/p.*: cannot be written: {os.strerror(error)}. Nothing was added"):
        batch.publish(f"{tmp_path}/p")


@pytest.mark.parametrize("after", [0, 1, 800_000, 1_500_000, 2_400_000])
def test_a_kill_while_it_is_published_leaves_no_batch_and_the_next_call_goes_on(batch, tmp_path, monkeypatch, after):
    program = (
        "import os, signal, sys\n"
        "from qewqew_core.batch.publishing import publish\n"
        "def progress(done, total):\n"
        "    if done > int(sys.argv[3]):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "publish(sys.argv[1], sys.argv[2], progress=progress)\n"
    )
    target = tmp_path / "p"
    run = [sys.executable, "-c", program, str(folder_of(batch)), str(target), str(after)]
    assert subprocess.run(run, check=False).returncode == -signal.SIGKILL
    there = {name for name in os.listdir(target / batch.id) if not name.startswith(".")}
    for name in there:
        assert (target / batch.id / name).read_bytes() == (folder_of(batch) / name).read_bytes(), "whole or not there"
    with pytest.raises(BadManifest, match="there is no manifest"):
        manifest.load(target / batch.id)
    names = sent_by(monkeypatch)
    path = batch.publish(str(target))
    assert set(names) == {"q.30001", "q.30002", "q.30003", "manifest.json"} - there
    assert records_of(path) == RECORDS
    assert sorted(os.listdir(path)) == ["manifest.json", "q.30001", "q.30002", "q.30003"], "nothing is left over"


def test_each_checksum_of_a_lease_is_right_however_much_of_the_first_file_was_taken(tmp_path):
    """The lease computes them from the index of the queue, and reads one piece at most."""
    with Queue(tmp_path / "q", chunk_size=4 << 20, sync="never") as q:
        for taken in (0, 1, 999, 4_000):
            q.put_many(RECORDS)
            q.get_many(taken) if taken else None
            batch = q.lease(f"key {taken}")
            for segment in manifest.load(batch.manifest_path).segments:
                data = (folder_of(batch) / segment.file).read_bytes()
                assert len(segment.checksums) == len(segment.boundaries) > 20
                for (offset, _), crc32 in zip(segment.boundaries, segment.checksums, strict=True):
                    assert crc32 == f"{zlib.crc32(data[segment.start : offset]):08x}"
                assert segment.crc32 == f"{zlib.crc32(data[segment.start : segment.end]):08x}"
            assert list(batch) == RECORDS[taken:]


# The command


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qewqew_core", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_publishes_a_batch_and_says_where(queue, batch, tmp_path):
    queue.close()
    path = f"{tmp_path}/p/{batch.id}"
    done = run("publish", tmp_path / "q", batch.id, tmp_path / "p")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path} has 20,000 records\n", "")
    done = run("publish", tmp_path / "q", batch.id, f"file://{tmp_path}/p", "--json")
    assert json.loads(done.stdout) == {"id": batch.id, "url": path, "records": 20_000}
    assert records_of(path) == RECORDS


def test_the_command_publishes_a_batch_of_a_reader(tmp_path):
    with Topic(tmp_path / "t") as topic:
        topic.append_many([Message(b"one"), Message(b"two")])
        batch = topic.reader("loader", start="oldest").lease("key")
    done = run("publish", tmp_path / "t", batch.id, tmp_path / "p", "--reader", "loader")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/p/{batch.id} has 2 records\n")


def test_the_command_hands_options_to_the_store(queue, batch, tmp_path):
    queue.close()
    done = run("publish", tmp_path / "q", batch.id, "memory://x", "--option", "no_such=hush", "--option", "client={")
    assert (done.returncode, "option 'client' of the store begins like JSON" in done.stderr) == (2, True)
    done = run("publish", tmp_path / "q", batch.id, "memory://x", "--option", "=x")
    assert (done.returncode, "--option must be NAME=VALUE" in done.stderr) == (2, True)


def test_the_command_fails_with_the_exit_codes_of_all_commands(queue, batch, tmp_path):
    file = folder_of(batch) / "q.30002"
    queue.close()
    assert run("publish", tmp_path / "q", "q-0", tmp_path / "p").returncode == 3
    assert run("publish", tmp_path / "none", batch.id, tmp_path / "p").returncode == 3
    flip(file, 5_000)
    done = run("publish", tmp_path / "q", batch.id, tmp_path / "p")
    assert (done.returncode, f"Corrupt: {file}, offset" in done.stderr) == (5, True)


def test_what_is_complete_under_a_prefix_is_listed_loaded_and_removed(queue, url):
    assert published.complete(url) == []
    batches = [queue.lease(f"key {number}", 10) for number in range(3)]
    for batch in batches:
        batch.publish(url)
    ids = sorted(batch.id for batch in batches)
    store_of(f"{url}/half").write("orders.qew.1", [b"the manifest is not there yet"])
    store_of(f"{url}/deeper/{ids[0]}").write(manifest.MANIFEST, [b"{}"])
    store_of(url).write("a file", [b"x"])
    assert published.complete(url) == ids
    assert [(body.id, body.records) for body in published.load(url, ids)] == [(each, 10) for each in ids]

    for _ in range(2):  # the second time somebody else has removed them
        published.remove(url, ids[:2])
        assert published.complete(url) == ids[2:]
    with pytest.raises(BadManifest, match="there is no manifest"):
        published.load(url, ids)
    assert records_of(f"{url}/{ids[2]}")
    assert "half/orders.qew.1" in store_of(url).below()


@pytest.mark.parametrize("act", [published.remove, published.load])
def test_a_text_is_no_list_of_ids(url, act):
    with pytest.raises(BadArgument, match=r"ids is a list of ids, not 'orders-1'; for a single one pass \[ID\]"):
        act(url, "orders-1")


def test_what_a_store_does_not_remove_without_a_word_is_noticed(batch, url, monkeypatch):
    batch.publish(url)
    for kind in Local, Remote:
        monkeypatch.setattr(kind, "remove", lambda self, ours: None)
    with pytest.raises(StoreError, match=r"1 batch\(es\) cannot be removed; is there the right to delete"):
        published.remove(url, [batch.id])
    published.remove(url, [])


def test_a_copy_under_another_name_does_not_pass_for_another_batch(batch, url):
    batch.publish(url)
    copy = store_of(f"{url}/copy")
    for name in (*manifest.load(f"{url}/{batch.id}").files(), manifest.MANIFEST):
        copy.write(name, [store_of(f"{url}/{batch.id}").read(name)])
    assert published.complete(url) == sorted([batch.id, "copy"])
    with pytest.raises(BadManifest, match=f"is of batch {batch.id}; the directory must have this name"):
        published.load(url, ["copy"])


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("of", ["manifest", "a segment", "the batch"])
def test_what_is_in_the_way_of_a_published_file_is_named_and_stays_or_gives_way(batch, tmp_path, kind, of):
    (aside := tmp_path / "aside").mkdir()
    (aside / "thesis.txt").write_bytes(b"precious")
    (aside / "empty").touch()
    place = Path(batch.publish(tmp_path / "published"))
    planted = {"manifest": place / manifest.MANIFEST, "a segment": min(place.glob("q.*")), "the batch": place}[of]
    planted.rename(tmp_path / "moved")
    PLANTED[kind](planted, aside)
    there, said = planted.lstat(), None
    try:
        batch.publish(tmp_path / "published")
    except (BadPath, BadManifest) as error:
        said = str(error)
    assert (said is None) == (kind == ("directory" if of == "the batch" else "file")), (
        said
    )  # which take the batch, and are replaced
    if said is not None:
        assert str(planted) in said
        assert re.search("move it away|is a directory|not a regular file", said)
        assert (planted.lstat().st_ino, planted.lstat().st_mode) == (there.st_ino, there.st_mode)
        planted.rename(tmp_path / "moved away")
        batch.publish(tmp_path / "published")
    assert records_of(str(place)) == RECORDS
    assert (aside / "thesis.txt").read_bytes() == b"precious"


@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_directory_that_goes_while_a_batch_is_published_into_it(batch, tmp_path, how):
    place, left = tmp_path / "published" / batch.id, 1  # as by a drain that has taken an earlier copy

    def go(done, total):
        nonlocal left
        if done and left:
            left -= 1
            shutil.rmtree(place) if how == "removed" else shutil.move(place, tmp_path / f"moved {left}")

    assert records_of(batch.publish(place.parent, progress=go)) == RECORDS
    shutil.rmtree(place)
    left = 1000
    with pytest.raises((BadPath, StoreError), match=r"it is gone after it was written|this directory was moved or removed"):
        batch.publish(place.parent, progress=go)
    assert not (place / manifest.MANIFEST).exists()
    assert records_of(batch.publish(place.parent)) == RECORDS


@pytest.mark.parametrize("drained", [False, True])
def test_what_two_publish_at_once_is_never_mixed(batch, url, drained):
    """The second one begins and ends while the first one writes, as when that was cut off; and a drain takes what it finds."""
    others = iter([lambda: publish(batch.manifest_path, url)])

    def other(done, total):
        if done and (act := next(others, None)):
            act()
            if drained:
                assert records_of(published.place(url, batch.id)) == RECORDS
                published.remove(url, [batch.id])

    store = store_of(batch.publish(url, progress=other))
    assert published.complete(url) == [batch.id]
    for name in store.below():  # what a drain has taken may be missing now, and the next drain knows the batch
        assert name == manifest.MANIFEST or store.read(name) == (folder_of(batch) / name).read_bytes()
    published.remove(url, [batch.id])
    assert published.complete(url) == []


def test_a_copy_may_have_a_name_of_its_own(batch, url):
    name = f"{batch.id}-{batch.made:x}"
    path = batch.publish(url, name=name)
    assert (path.rpartition("/")[2], published.complete(url), manifest.load(path).id) == (name, [name], name)
    assert (records_of(path), published.load(url, [name])[0].records) == (RECORDS, len(RECORDS))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", ".hidden", "a b", 7])
def test_a_name_that_cannot_be_that_of_a_directory_is_refused(batch, tmp_path, name):
    with pytest.raises(BadArgument, match="name is letters, digits"):
        batch.publish(tmp_path / "published", name=name)
    assert not (tmp_path / "published").exists()
