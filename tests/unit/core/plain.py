"""Small queues, copied as a kill leaves them, and read by one who knows nothing but the plain format."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

from disk import NoSync

from qewqew_core import Queue
from qewqew_core.queue import paths

POINTERS = struct.Struct(">iiH")  # of a chunk: head, tail, next


def numbers(begin: int, end: int) -> list[bytes]:
    """Records of one to four bytes: they fit into every chunk size tested."""
    return [b"%d" % number for number in range(begin, end)]


def chunks(path: Path) -> dict[int, list[bytes]]:
    """What each chunk of a closed queue holds, by its id, read by one who knows the header, the chunk files, and nothing else."""
    found: dict[int, list[bytes]] = {}
    current = int.from_bytes(path.read_bytes()) if path.exists() else 0
    while current:
        assert current not in found, "the chain goes round"
        data = path.with_name(f"{path.name}.{current}").read_bytes()
        at, tail, following = POINTERS.unpack_from(data)
        assert 10 <= at < tail <= len(data), "the original mistakes an empty chunk in the chain for a record"
        records = found[current] = []
        while at < tail:
            length = int.from_bytes(data[at : at + 2])
            records.append(data[at + 2 : at + 2 + length])
            at += 2 + length
        assert at == tail, "the last record runs past the tail"
        current = following
    return found


def plain_read(path: Path) -> list[bytes]:
    """The records of a closed queue."""
    return [record for records in chunks(path).values() for record in records]


def plain(path: Path) -> list[bytes]:
    """The same of a queue that QewQew alone has used: no other chunk file lies there."""
    ids = [*chunks(path)]
    files = {file.name for file in path.parent.glob(f"{path.name}.*") if file.suffix[1:].isdecimal()}
    assert files == {f"{path.name}.{chunk_id}" for chunk_id in ids}, "chunk files outside the chain"
    assert not ids or ids[-1] % 65534 + 1 not in ids, "the original would overwrite the chunk after the last"
    return plain_read(path)


def crashed(folder: Path, name: str = "image") -> Path:
    """The queue as a killed process would leave it now."""
    image = folder.with_name(f"{folder.name}.{name}")
    shutil.rmtree(image, ignore_errors=True)
    shutil.copytree(folder, image)
    return image / "q"


def forget_log(path: Path) -> None:
    """Leave header and chunks of a queue alone, as a Java program leaves them."""
    for suffix in (paths.LOG, paths.STAMP):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def is_plain(path: Path, expected: list[bytes]) -> None:
    """A closed queue is these records in the plain format: with its log and without it, and an empty one is no file at all."""
    assert plain(path) == expected
    assert not path.with_name("q.spill").exists()
    with Queue(path, _files=NoSync()) as q:
        assert list(q) == expected
        assert q.verify().problems == q.verify().orphans == []
    assert plain(path) == expected
    without_log = crashed(path.parent, "nolog")
    forget_log(without_log)
    with Queue(without_log, _files=NoSync()) as q:
        assert list(q) == expected
    shutil.rmtree(without_log.parent)
