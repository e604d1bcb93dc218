"""A disk that can be stopped after any call: what a process, or the power, leaves when it dies there.

`JournalDisk` is the real file system and writes down every call. `image` then builds, in another directory, what
the first ``n`` calls leave behind:

- after a kill: all of it (the page cache survives);
- after a power cut: what was synced, and of the rest each write and each change of a directory independently kept,
  dropped or (writes) torn. A rename needs the sync of both directories to be sure.

Hard links are names of one file: a sync of it, by whatever name, is one of all.
"""

from __future__ import annotations

import os
import random
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from qewqew_core.disk.files import Files


class OneWrite(Files):
    """All that is written goes through `write`, which a test can stop, count or make fail."""

    def write_all(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        self.write(fd, b"".join(buffers), offset)


class NoSync(OneWrite):
    """The real disk without waiting for it, where durability is not the point: an fsync costs more than all the rest."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


@dataclass
class Call:
    kind: str  # write, truncate, allocate, sync; link, unlink, rename, mkdir, rmdir, sync_directory
    node: int = -1
    data: bytes = b""
    offset: int = 0
    path: str = ""
    target: str = ""


@dataclass
class JournalDisk(OneWrite):
    root: str
    calls: list[Call] = field(default_factory=list)
    _nodes: dict[str, int] = field(default_factory=dict)  # path → file; files keep their number when renamed
    _count: int = 0
    begin: int = 0  # calls that stand for what was there before, all of it durable
    follows: tuple[list[Call], str] | None = None  # or: the calls that made what is there, below another directory

    def __post_init__(self) -> None:
        if self.follows is not None:
            calls, root = self.follows
            moved = [(call.path.replace(root, self.root, 1), call.target.replace(root, self.root, 1)) for call in calls]
            self.calls += [replace(call, path=path, target=target) for call, (path, target) in zip(calls, moved, strict=True)]
            self._nodes |= {path: node for path, node in _names(self.calls, None).items() if node != DIRECTORY}
            self.begin, self._count = len(self.calls), len(self.calls)
            return
        inodes: dict[int, int] = {}
        for folder, directories, files in os.walk(self.root):
            self.calls += [Call("mkdir", path=os.path.join(folder, name)) for name in directories]
            for name in files:
                path = os.path.join(folder, name)
                inode = os.stat(path).st_ino
                if inode in inodes:
                    self._name(path, inodes[inode])
                    continue
                inodes[inode] = node = self._new_node(path)
                self.calls += [Call("write", node, Path(path).read_bytes()), Call("sync", node)]
            self.calls.append(Call("sync_directory", path=folder))
        self.begin = len(self.calls)

    def _new_node(self, path: str) -> int:
        self._count += 1
        return self._name(path, self._count)

    def _name(self, path: str, node: int) -> int:
        self._nodes[path] = node
        self.calls.append(Call("link", node, path=path))
        return node

    def _node(self, fd: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.endswith(" (deleted)"):
            return NAMELESS
        return self._nodes[path] if path in self._nodes else self._new_node(path)

    def open(self, path: str, *, new: bool = False) -> int:
        fd = super().open(path, new=new)
        if path not in self._nodes:
            self._new_node(path)
        return fd

    def open_into(
        self, descriptors: MutableSequence[int], path: str, *, make: bool = False, new: bool = False, follow: bool = False
    ) -> None:
        super().open_into(descriptors, path, make=make, new=new, follow=follow)
        self._node(descriptors[-1])

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self.calls.append(Call("write", self._node(fd), bytes(data), offset))
        super().write(fd, data, offset)

    def allocate(self, fd: int, size: int) -> None:
        self.calls.append(Call("allocate", self._node(fd), offset=size))
        super().allocate(fd, size)

    def truncate(self, fd: int, size: int) -> None:
        self.calls.append(Call("truncate", self._node(fd), offset=size))
        super().truncate(fd, size)

    def sync(self, fd: int) -> None:
        self.calls.append(Call("sync", self._node(fd)))

    def boot(self) -> bytes:
        return b"before the power cut"

    def sync_directory(self, path: str) -> None:
        self.calls.append(Call("sync_directory", path=path))

    def rename(self, source: str, target: str) -> None:
        super().rename(source, target)
        self.calls.append(Call("rename", self._nodes.get(source, DIRECTORY), path=source, target=target))
        for path in [path for path in self._nodes if path == source or path.startswith(source + "/")]:
            self._nodes[target + path[len(source) :]] = self._nodes.pop(path)

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self._name(target, self._nodes[source])

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.calls.append(Call("unlink", path=path))
        self._nodes.pop(path, None)

    def make_directory(self, path: str) -> None:
        self.calls.append(Call("mkdir", path=path))
        super().make_directory(path)

    def remove_directory(self, path: str) -> None:
        super().remove_directory(path)  # which fails where it is not empty
        self.calls.append(Call("rmdir", path=path))


DIRECTORY = -2
NAMELESS = -3  # files that were unlinked, and are still open
ATOMIC = 8  # bytes that a disk writes whole or not at all; real ones promise 512


def image(calls: list[Call], root: str, target: Path, luck: random.Random | None) -> None:
    """Build below ``target`` what these calls leave of ``root``: all of it, or with ``luck`` what a power cut leaves."""
    names = _names(calls, luck)
    contents = _contents(calls, luck)
    target.mkdir(exist_ok=True)
    made: dict[int, Path] = {}
    for path, node in sorted(names.items()):
        place = target / os.path.relpath(path, root)
        if not place.parent.is_dir():
            continue
        if node == DIRECTORY:
            place.mkdir(mode=0o700)
        elif node in made:
            os.link(made[node], place)
        else:
            place.write_bytes(contents.get(node, b""))
            made[node] = place


def _names(calls: list[Call], luck: random.Random | None) -> dict[str, int]:
    """The directory tree: path → file or DIRECTORY."""
    last_sync: dict[str, int] = {}
    for number, call in enumerate(calls):
        if call.kind == "sync_directory":
            last_sync[call.path] = number
    names: dict[str, int] = {}
    for number, call in enumerate(calls):
        if call.kind not in ("link", "unlink", "rename", "mkdir", "rmdir"):
            continue
        parents = {os.path.dirname(path) for path in (call.path, call.target) if path}
        sure = all(last_sync.get(parent, -1) > number for parent in parents)
        if luck is not None and not sure and luck.random() < 0.5:
            continue
        if call.kind in ("link", "mkdir"):
            names[call.path] = call.node if call.kind == "link" else DIRECTORY
        elif call.kind in ("unlink", "rmdir"):
            names.pop(call.path, None)
        elif call.kind == "rename" and call.node != DIRECTORY:  # of that file, whatever else bore its name
            if names.get(call.path) == call.node:
                del names[call.path]
            names[call.target] = call.node
        elif call.path in names:
            for path in [path for path in names if path == call.path or path.startswith(call.path + "/")]:
                names[call.target + path[len(call.path) :]] = names.pop(path)
    return names


def _contents(calls: list[Call], luck: random.Random | None) -> dict[int, bytes]:
    last_sync: dict[int, int] = {}
    for number, call in enumerate(calls):
        if call.kind == "sync":
            last_sync[call.node] = number
    contents: dict[int, bytearray] = {}
    for number, call in enumerate(calls):
        if call.kind not in ("write", "truncate", "allocate"):
            continue
        data = call.data
        if luck is not None and last_sync.get(call.node, -1) < number:
            fate = luck.random()
            if fate < 0.4:
                continue
            if fate < 0.6:
                end = call.offset + luck.randrange(len(data) + 1)
                data = data[: max(0, end // ATOMIC * ATOMIC - call.offset)]
        content = contents.setdefault(call.node, bytearray())
        if call.kind == "write":
            content.extend(bytes(max(0, call.offset + len(data) - len(content))))
            content[call.offset : call.offset + len(data)] = data
        elif call.kind == "truncate":
            del content[call.offset :]
            content.extend(bytes(call.offset - len(content)))
        else:
            content.extend(bytes(max(0, call.offset - len(content))))
    return {node: bytes(content) for node, content in contents.items()}
