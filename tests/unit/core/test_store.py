"""A store is a place and options: it can be sent to another process, and its errors name the file and no secret."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from qewqew_core import BadArgument, StoreError
from qewqew_core.batch import manifest
from qewqew_core.batch.published import FILES
from qewqew_core.batch.store import Local, Remote, Store, local_path, store_of


@pytest.fixture
def memory() -> Iterator[str]:
    url = "memory://store/at/depth"
    yield url
    system = fsspec.filesystem("memory")
    if system.exists("/store"):
        system.rm("/store", recursive=True)


@pytest.fixture(params=["directory", "file:", "memory:"])
def store(request, tmp_path, memory) -> Store:
    path = str(tmp_path / "at" / "depth")
    return store_of({"directory": path, "file:": f"file://{path}", "memory:": memory}[request.param])


def test_what_was_written_is_read_in_any_process(store):
    store.write("a", [b"0123", b"", b"456789"])
    store.write("empty", [])
    copy = pickle.loads(pickle.dumps(store))  # noqa: S301 - as Spark does
    assert copy == store
    assert (copy.read("a"), copy.size("a"), copy.read("empty"), copy.size("empty")) == (b"0123456789", 10, b"", 0)
    with copy.open("a") as read:
        assert [read(2, 5), read(0, 10), read(5, 5), read(8, 20), read(10, 20), read(30, 40)] == [
            *(b"234", b"0123456789", b""),
            *(b"89", b"", b""),
        ]
    store.write("a", [b"other"])
    assert store.read("a") == b"other"


def test_what_is_not_there_is_named(store):
    for look in (store.read, store.size):
        with pytest.raises(FileNotFoundError) as caught:
            look("a")
        assert caught.value.filename == store.locate("a")

    def read() -> None:
        with store.open("a") as some:
            some(0, 1)

    with pytest.raises(FileNotFoundError) as caught:
        read()
    assert caught.value.filename == store.locate("a")


def test_files_are_found_by_a_pattern_also_in_the_path(store):
    for name in "a.json", "b.json", "c", ".hidden.json":
        store.write(name, [b"x"])
    wide = store_of(store.path.replace("/at/", "/a*/"))
    assert [os.path.basename(found) for found in store.glob("[ab]*.json")] == ["a.json", "b.json"]
    assert wide.glob("a.json") == store.glob("a.json")
    found = store_of(os.path.dirname(store.glob("a.json")[0]))
    assert found.read("a.json") == b"x"
    assert store.glob("nothing*") == []


def test_a_store_is_removed_with_all_that_is_in_it(store):
    store.check()
    store.write("manifest.json", [b"x"])
    store.remove(FILES)
    with pytest.raises(FileNotFoundError):
        store.read("manifest.json")
    store.remove(FILES)  # nothing is there: nothing to do


def test_a_store_that_cannot_be_used_says_so_before_it_is():
    with pytest.raises(BadArgument, match="fsspec's documentation says which package"):
        store_of("nowhere://bucket/x").check()


def failing() -> Iterator[bytes]:
    yield b"0123"
    raise KeyError("the writer failed")


def test_a_file_whose_writing_fails_is_not_there_and_what_was_there_stays(tmp_path):
    store = Local(str(tmp_path / "new"))
    with pytest.raises(KeyError, match="the writer failed"):
        store.write("a", failing())
    assert os.listdir(store.path) == []
    store.write("a", [b"first"])
    with pytest.raises(KeyError, match="the writer failed"):
        store.write("a", failing())
    assert (os.listdir(store.path), store.read("a")) == (["a"], b"first")


def test_files_and_directories_are_for_their_owner_only(tmp_path):
    store = Local(str(tmp_path / "new" / "newer"))
    store.write("a", [b"x"])
    assert [Path(store.path).stat().st_mode & 0o777, Path(store.path).parent.stat().st_mode & 0o777] == [0o700, 0o700]
    assert Path(store.locate("a")).stat().st_mode & 0o777 == 0o600


def test_what_a_killed_writer_has_left_is_removed_and_nothing_else(tmp_path):
    program = (
        "import os, sys, qewqew_core.batch.store as s\ns.Local(sys.argv[1]).write('a', (os.kill(os.getpid(), 9) for _ in (1,)))"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    (left,) = os.listdir(tmp_path)
    for name in (".other", "b.tmp", "manifest.json"):
        (tmp_path / name).touch()
    Local(str(tmp_path)).clean()
    assert sorted(os.listdir(tmp_path)) == [".other", "b.tmp", "manifest.json"]
    assert left.startswith(".")
    Local(str(tmp_path / "nothing")).clean()


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_in_a_directory_only_a_plain_file_is_one(tmp_path, kind):
    """A link would make a job with other rights read whatever it points to; a pipe would never end."""
    (tmp_path / "there").write_bytes(b"x")
    make = {"link": lambda path: path.symlink_to("there"), "directory": Path.mkdir, "pipe": os.mkfifo}
    make[kind](tmp_path / "a")
    store = Local(str(tmp_path))
    with pytest.raises(OSError, match=r"not a regular file|symbolic links"):
        store.size("a")
    with pytest.raises(OSError, match=r"not a regular file|symbolic links|directory"), store.open("a"):
        pass


@pytest.mark.parametrize(
    ("path", "local"),
    [
        ("batches/a", "batches/a"),
        ("/data/a b", "/data/a b"),
        ("C:/a", "C:/a"),
        ("a:b", "a:b"),
        ("file:/data/a", "/data/a"),
        ("file:///data/a%20b", "/data/a b"),
        ("FILE://localhost/data/a", "/data/a"),
        ("s3://bucket/a", None),
        ("simplecache::s3://bucket/a", None),
        ("memory://a", None),
    ],
)
def test_a_path_is_local_or_a_url(path, local):
    assert local_path(path) == local


def test_the_path_of_a_file_uri_is_taken_literally_if_that_is_there(tmp_path):
    (tmp_path / "a%20b").mkdir()
    assert local_path(f"file:{tmp_path}/a%20b") == f"{tmp_path}/a%20b"


@pytest.mark.parametrize("path", ["file://elsewhere/data", "file://"])
def test_a_file_uri_of_another_host_is_refused(path):
    with pytest.raises(BadArgument, match="give an absolute path of this machine"):
        store_of(path)


def test_a_password_in_a_url_is_refused_and_not_repeated():
    for url in ("sftp://me:hushhush@host/a", "simplecache::sftp://me:hushhush@host/a"):
        with pytest.raises(BadArgument, match="contains a password") as caught:
            manifest.load(url)
        assert "hushhush" not in str(caught.value)


def test_a_query_is_refused_and_not_repeated():
    """It may be a signature; and names of files go behind the URL."""
    with pytest.raises(BadArgument, match=r"https://host/a.* does not name a directory") as caught:
        store_of("https://host/a?sig=hushhush")
    assert "hushhush" not in str(caught.value)


def test_options_that_look_like_json_are_json():
    given = {
        "anon": "true",
        "key": "123",
        "client_kwargs": '{"region_name": "x"}',
        "list": "[1]",
        "profile": "a",
        "use_ssl": False,
    }
    store = store_of("s3://bucket", given)
    assert isinstance(store, Remote)
    assert store.options == {
        **given,
        "anon": True,
        "client_kwargs": {"region_name": "x"},
        "list": [1],
    }
    with pytest.raises(BadArgument, match="option 'client_kwargs' of the store begins like JSON but is not valid") as caught:
        store_of("s3://bucket", {"client_kwargs": "{'secret': 'hushhush'}"})
    assert "hushhush" not in str(caught.value)


def test_options_with_secrets_are_in_no_text(tmp_path):
    options = {"secret": "hushhush", "target_options": {"password": "quietquiet"}, "endpoint_url": "http://127.0.0.1:9"}
    store = store_of("s3://bucket", options)
    assert isinstance(store, Remote)
    assert "hush" not in f"{store} {store!r}"

    def fail() -> None:
        with store._errors("a", 7):
            raise ValueError("hushhush and quietquiet do not open http://127.0.0.1:9")

    with pytest.raises(StoreError) as caught:
        fail()
    assert str(caught.value) == "s3://bucket/a, offset 7: ValueError: … and … do not open http://127.0.0.1:9"
    assert caught.value.__suppress_context__


def test_a_scheme_that_nobody_knows_is_named():
    with pytest.raises(BadArgument, match=r"^nothing://bucket: .*nothing"):
        store_of("nothing://bucket").size("a")


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("fsspec", r"s3://bucket: a URL needs the package fsspec: pip install 'qewqew\[fsspec\]'"),
        ("s3fs", r"s3://bucket: .*s3:// needs the package s3fs: pip install 'qewqew\[fsspec\]' s3fs"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_to_do(missing, message):
    program = (
        "import sys\n"
        "sys.modules[sys.argv[1]] = None\n"
        "from qewqew_core import BadArgument\nfrom qewqew_core.batch import manifest\n"
        "try:\n"
        "    manifest.load('s3://bucket')\n"
        "except BadArgument as error:\n"
        "    print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", program, missing], check=True, capture_output=True, text=True).stdout
    assert re.match(message, out)


def test_a_directory_needs_no_fsspec(tmp_path):
    program = (
        "import sys\n"
        "sys.modules['fsspec'] = None\n"
        "from qewqew_core import BadManifest\nfrom qewqew_core.batch import manifest\n"
        "try:\n"
        "    manifest.load('file://' + sys.argv[1])\n"
        "except BadManifest as error:\n"
        "    print(error)\n"
    )
    out = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, capture_output=True, text=True).stdout
    assert out.startswith(f"{tmp_path}/manifest.json: there is no manifest")
