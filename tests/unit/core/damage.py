"""Files that are damaged in place, again and again, and mended: a byte changed, cut, or missing."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@contextlib.contextmanager
def in_time(seconds: int = 300) -> Iterator[None]:
    """What takes longer is a hang, and fails."""

    def hang(*_: object) -> None:
        raise AssertionError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Change:
    offset: int
    mask: int

    def of(self, data: bytes) -> bytes:
        return data[: self.offset] + bytes([data[self.offset] ^ self.mask]) + data[self.offset + 1 :]


@dataclass(frozen=True)
class Cut:
    """To this many bytes; None if the file is missing."""

    size: int | None

    def of(self, data: bytes) -> bytes | None:
        return None if self.size is None else data[: self.size]


Damage = Change | Cut


def grows_over_few_zeros(old: bytes, new: bytes | None) -> bool:
    """Whether the tail of a chunk, and nothing else, is that after a few empty records."""
    if new is None:
        return False
    was, now = int.from_bytes(old[4:8]), int.from_bytes(new[4:8])
    return (old[:4], old[8:]) == (new[:4], new[8:]) and was < now <= was + 8


def written(data: bytes) -> int:
    """Behind that is allocated space, and little of it is enough."""
    return min(len(data), len(data.rstrip(b"\0")) + 8)


def changes(data: bytes) -> list[Damage]:
    """Each byte changed, and each bit of each sixteenth and of the first ten, which are the pointers of a chunk."""
    bits = [1 << bit for bit in range(8)]
    return [
        Change(offset, mask)
        for offset in range(written(data))
        for mask in (bits if offset < 10 or offset % 16 == 0 else [(0x01, 0x10, 0x80, 0xFF)[offset % 4]])
    ]


def cuts(data: bytes) -> list[Damage]:
    return [Cut(size) for size in (None, *range(written(data)))]


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """What is below the folder, by name: the bytes of files, the target of links, None for anything else."""
    found: dict[str, bytes | str | None] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            link = entry.is_symlink()
            found[entry.name] = os.readlink(entry.path) if link else Path(entry).read_bytes() if entry.is_file() else None
            if entry.is_dir(follow_symlinks=False):
                found |= {f"{entry.name}/{name}": data for name, data in tree(Path(entry)).items()}
    return found


def write(file: Path, data: bytes | None) -> None:
    """In place: making files and removing them, thousands of times, is slow on a real disk."""
    if data is None:
        file.unlink()
        return
    with file.open("r+b" if file.exists() else "wb") as target:
        target.write(data)
        target.truncate(len(data))


def flip(file: Path, offset: int, mask: int = 1) -> None:
    write(file, Change(offset, mask).of(file.read_bytes()))


class Copy:
    """A copy of a directory, of which one file after the other is damaged, and mended. Names of one file stay so."""

    def __init__(self, made: Path, folder: Path) -> None:
        self.folder, self.made = folder, tree(made)
        self.files = {name: data for name, data in self.made.items() if isinstance(data, bytes)}
        first: dict[int, str] = {}
        self.first = {name: first.setdefault((made / name).stat().st_ino, name) for name in self.files}
        shutil.copytree(made, folder)
        self.mend()

    @contextlib.contextmanager
    def damaged(self, name: str, damage: Damage) -> Iterator[None]:
        """The block, which may change what it likes, has this file damaged; it must not take a minute."""
        write(self.folder / name, damage.of(self.files[name]))
        try:
            with in_time():
                yield
        except BaseException as error:
            error.add_note(f"{name}: {damage}")
            raise
        self.mend()

    def mend(self) -> None:
        found = tree(self.folder)
        for name in sorted(found.keys() - self.made.keys(), reverse=True):
            (self.folder / name).rmdir() if found[name] is None else (self.folder / name).unlink()
        for name in self.made.keys() - self.files.keys() - found.keys():
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for name, data in self.files.items():
            file, first = self.folder / name, self.folder / self.first[name]
            if file != first and not (name in found and file.samefile(first)):
                file.unlink(missing_ok=True)
                file.hardlink_to(first)
            elif found.get(name) != data:
                write(file, data)
