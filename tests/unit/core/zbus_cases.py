"""Golden topics, written by the Java original, for whatever test wants one; see tests/data/zbus/README.md."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

from qewqew_core.formats.zbus import Nak

DATA = Path(__file__).parents[2] / "data" / "zbus"


def forget_log(topic: Path) -> None:
    """Leave the files as a zbus server does, which makes no log and nothing that says that there is one."""
    for suffix in (".wal", ".lock"):
        topic.joinpath(topic.name + suffix).unlink()


def cases() -> list[str]:
    return sorted(path.parent.name for path in DATA.glob("*/case.json"))


def case(name: str, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A copy of the case's directory, at the sizes that the original gave its files, and what case.json says of it."""
    body = json.loads((DATA / name / "case.json").read_text())
    queue = tmp_path / body["queue"]  # the index is called as the directory
    shutil.copytree(DATA / name / body["queue"], queue)
    for file, size in body["files"].items():
        assert (queue / file).stat().st_size == size if file.endswith(".zbus") else (queue / file).stat().st_size <= size
        os.truncate(queue / file, size)  # mapped files are stored without the zeros at their end
    assert content(queue).keys() == body["files"].keys()
    for message in body["messages"]:
        if "body_sha256" in message:  # a large body is stored only once, in its block
            block = next(block for block in body["index"]["blocks"] if block["number"] == message["block"])
            at = message["offset"] - block["base_offset"] + 204
            data = (queue / block["file"]).read_bytes()[at : at + message.pop("body_bytes")]
            assert hashlib.sha256(data).hexdigest() == message.pop("body_sha256")
            message["body"] = data.hex()
    return queue, body


def content(queue: Path) -> dict[str, bytes]:
    """The files of a topic, by their paths in its directory."""
    return {path.relative_to(queue).as_posix(): path.read_bytes() for path in queue.rglob("*") if path.is_file()}


# Files .nak, by docs/format/topics.md: only the original writes them


def new_nak(created: int, dialect: str, window: int = 100, timeout: int = 10_000) -> bytes:
    head = struct.pack(">iq", window, timeout).ljust(364, b"\0") + struct.pack(">iqq", 0, created, created)
    return head.ljust(1024 + 1000 * (21 if dialect == "C" else 61), b"\0")


def pack_nak_head(window: int, timeout: int) -> bytes:
    return struct.pack(">iq", window, timeout)


def pack_nak(entry: Nak, dialect: str) -> bytes:
    if dialect == "C":
        return struct.pack(">bqiq", 1, entry.offset, entry.tries, entry.updated)
    id = (entry.id or "").encode()
    return struct.pack(">bq40siq", 1, entry.offset, bytes((len(id),)) + id, entry.tries, entry.updated)


def split(text: str, separator: str) -> list[str]:
    if text == "":
        return [""]
    parts = text.split(separator)
    while parts and parts[-1] == "":
        parts.pop()
    return parts


def reference_matches(filter: str | None, tag: str | None) -> bool:
    """The original's rules, written down as it goes about them."""
    groups = [split(group, ".") for group in split(filter or "", ";") if group.strip() != ""]
    if not groups:
        return True
    if not tag:
        return False
    return any(_match_one(group, split(tag, ".")) for group in groups)


def _match_one(pattern: list[str], levels: list[str]) -> bool:
    for number, part in enumerate(pattern):
        if number >= len(levels):
            return part == "#"
        if part == "*":
            continue
        if part == "#":
            return True
        if part != levels[number]:
            return False
    return len(pattern) == len(levels)
