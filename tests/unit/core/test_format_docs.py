"""docs/format shows a small queue byte by byte, and the files of a lease: they are as the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import Clock
from disk import JournalDisk, image

from qewqew_core import Queue
from qewqew_core.disk import journal
from qewqew_core.disk.files import Files
from qewqew_core.disk.reserve import RESERVE
from qewqew_core.limits import LIMITS
from qewqew_core.queue import json_operations, recovery
from qewqew_core.queue import log as logs
from qewqew_core.topic import topic_recovery

PAGES = Path(__file__).parents[3] / "docs" / "format"
BLOCK = re.compile(r"^```text\n(\S+): ([0-9,]+) bytes\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)(?:  .*)?")
STEP = re.compile(r"^[0-9]+\. \*\*.*?\*\* \((`\w+`(?:, `\w+`)*)\)", re.MULTILINE)


def test_the_page_has_all_kinds_of_frames_and_all_operations_in_json() -> None:
    page = (PAGES / "index.md").read_text()
    kinds = {int(kind): name.replace("-", " ") for kind, name in re.findall(r"\bframe\(([0-9]+), ([a-z-]+)\)", page)}
    assert kinds == logs.KIND_NAMES
    shown = re.findall(r"^\* `([a-z_]+)`(?: \((.*)\))?: ", page[page.index("### Operations in JSON") :], re.MULTILINE)
    operations = {name: ", ".join(f"`{field}`" for field in kind._fields) for kind, name in json_operations._NAMES.items()}
    assert dict(shown) == operations


class Fixed(Files):
    """The real disk, on which what a log says of the files and the machine is the same each time."""

    def identity(self, path: str) -> tuple[int, int]:
        return (23 if path.endswith(".wal") else 17), 1_800_000_000_000_000_000

    def boot(self) -> bytes:
        return b"3c8e5a70-1f6b-4d29-9e04-7b2d18c6fa35"


def test_a_small_queue_has_the_bytes_that_the_page_explains(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (PAGES / "index.md").read_text()
    monkeypatch.setattr(journal, "new_generation", lambda: 0x5EED1234)
    monkeypatch.setattr(LIMITS, "boot_clock", lambda: 3_600_000_000_000)
    monkeypatch.chdir(tmp_path)
    [example] = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(compile(example, "docs/format/index.md", "exec"), {"Queue": lambda path: Queue(path, _files=Fixed())})  # noqa: S102

    shown: dict[str, bytes] = {}
    for name, size, lines in BLOCK.findall(page):
        found = [match for line in lines.splitlines() if (match := LINE.fullmatch(line.rstrip()))]
        data = b""
        for match in found:
            assert int(match[1], 16) == len(data), f"{name}: the line at {match[1]} does not follow the one before"
            data += bytes.fromhex(match[2])
        shown[name] = data.ljust(int(size.replace(",", "")), b"\0")
    assert sorted(shown) == sorted(path.name for path in tmp_path.iterdir() if path.suffix != RESERVE)
    for name, data in shown.items():
        assert data.hex(" ") == (tmp_path / name).read_bytes().hex(" "), f"docs/format/index.md shows other bytes of {name}"


def listing(directory: Path) -> list[str]:
    """Names and sizes, but for the log's, which keeps room behind its end while the queue is open."""
    lines = []
    for path in sorted(path for path in directory.rglob("*") if path.is_file() and path.parent.suffix != RESERVE):
        name, size = str(path.relative_to(directory)), path.stat().st_size
        note = f"  first: {int.from_bytes(path.read_bytes())}" if name == "orders.qew" else ""
        lines.append(name if name.endswith(".wal") else f"{name:<60}{size:>3}{note}")
    return lines


def test_a_lease_moves_the_files_that_the_page_lists(tmp_path: Path, clock: Clock) -> None:
    page = (PAGES / "batches.md").read_text()
    before, after = (
        re.findall(rf"^```text\n{when}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[0] for when in ("before", "after")
    )
    with Queue(tmp_path / "orders.qew", chunk_size=64) as queue:
        queue.put_many(b"record %013d" % number for number in range(5))
    assert listing(tmp_path) == before.splitlines()
    with Queue(tmp_path / "orders.qew", chunk_size=64) as queue:
        assert queue.lease("run 42", max_records=3) is not None
        assert listing(tmp_path) == after.splitlines()


def test_a_kill_in_a_lease_leaves_the_states_that_the_page_numbers(tmp_path: Path) -> None:
    page = (PAGES / "batches.md").read_text()
    rows = re.search(r"^\*\*A lease\*\*\n\n\| \| on disk .*\n\|[-|]*\|\n((?:\| [0-9] \|.*\n)*)", page, re.MULTILINE)
    assert rows is not None
    numbers = [int(row.split("|")[1]) for row in rows[1].splitlines()]
    root = tmp_path / "queue"
    root.mkdir()
    with Queue(root / "orders.qew", chunk_size=64) as queue:
        queue.put_many(b"record %013d" % number for number in range(5))
    disk = JournalDisk(str(root))
    queue = Queue(root / "orders.qew", chunk_size=64, _files=disk)
    begin = len(disk.calls)
    assert queue.lease("run 42", max_records=3) is not None
    calls = disk.calls[:]
    queue.close()
    states = []
    for stop in range(begin, len(calls) + 1):
        path = tmp_path / str(stop) / "orders.qew"
        image(calls[:stop], str(root), path.parent, None)
        states.append(state_of(path))
        with Queue(path, chunk_size=64) as queue:
            assert not path.with_name("orders.qew.lease").exists()
            assert (len(queue), [batch.records for batch in queue.batches()]) == ((5, []) if states[-1] == 1 else (2, [3]))
    assert states == sorted(states)
    assert sorted(set(states)) == numbers


def state_of(path: Path) -> int:
    """The number that the page gives to what a kill has left of a lease."""
    log = path.with_name("orders.qew.wal")
    making = path.with_name("orders.qew.lease")
    if not logs.replay(log.read_bytes(), str(log)).state.batches:
        assert list(path.parent.glob("orders.qew.batches/*")) == []
        return 1
    if not making.exists():
        [directory] = path.parent.glob("orders.qew.batches/*")
        assert sorted(file.name for file in directory.iterdir()) == ["manifest.json", "orders.qew.30001", "orders.qew.30002"]
        return 4
    return 2 if path.with_name("orders.qew.30001").exists() else 3


@pytest.mark.parametrize(
    ("page", "module", "steps"), [("recovery.md", recovery, 10), ("topics.md", topic_recovery, 7)], ids=("queue", "topic")
)
def test_the_steps_of_recovery_are_functions(page: str, module: object, steps: int) -> None:
    named = STEP.findall((PAGES / page).read_text())
    assert len(named) == steps
    code = Path(str(vars(module)["__file__"])).read_text()
    for function in re.findall(r"\w+", " ".join(named)):
        assert re.search(rf"\b{function}\(", code), function
