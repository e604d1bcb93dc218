"""A commit becomes true in one place. What is made most often goes there by a short way, and comes to the same."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from test_failed_syncs import contents

import qewqew_core
from qewqew_core import Empty, Full, Queue
from qewqew_core.disk import journal
from qewqew_core.limits import LIMITS

PACKAGE = Path(qewqew_core.__file__).parent


def test_a_commit_is_appended_in_one_place_only() -> None:
    places = []
    for file in PACKAGE.rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                for call in ast.walk(function):
                    if isinstance(call, ast.Call) and call.args and ast.unparse(call.func).endswith(".append"):
                        places += [(file.name, function.name)] * ast.unparse(call.args[0]).endswith("COMMIT")
    assert places == [("engine.py", "happen")]


def test_only_that_place_says_that_a_commit_has_begun() -> None:
    text = "".join(file.read_text() for file in PACKAGE.rglob("*.py"))
    assert text.count("committed = True") == 1


def worked(folder: Path, luck: random.Random, sync: str, bound: int | None) -> tuple[list[object], dict[str, bytes]]:
    """What random puts and takes return, one by one, and the files after them."""
    folder.mkdir()
    said: list[object] = []
    with Queue(folder / "q", chunk_size=300, sync=sync, log_bytes=2000, max_records=bound) as queue:  # type: ignore[arg-type]
        for number in range(400):
            with suppress(Empty, Full):
                said.append(None)
                match luck.randrange(4):
                    case 0 | 1:
                        queue.put(b"%d" % number * luck.randrange(1, 30))
                    case 2:
                        said[-1] = queue.get()
                    case 3:
                        said[-1] = queue.get_if(lambda record: bool(record[0] % 2))
        files = contents(folder)
    return said, files


@pytest.mark.parametrize("sync", ["commit", "never"])
@pytest.mark.parametrize("bound", [None, 20])
@pytest.mark.parametrize("seed", range(3))
def test_the_short_way_writes_and_returns_what_the_long_way_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: object,
    long_way: Callable[[], None],
    sync: str,
    bound: int | None,
    seed: int,
) -> None:
    monkeypatch.setattr(LIMITS, "pending_bytes", 200)
    monkeypatch.setattr(journal, "new_generation", lambda: 7)
    short = worked(tmp_path / "short", random.Random(seed), sync, bound)
    long_way()
    long = worked(tmp_path / "long", random.Random(seed), sync, bound)
    assert short[0] == long[0]
    assert {name: data.rstrip(b"\0") for name, data in short[1].items()} == {
        name: data.rstrip(b"\0") for name, data in long[1].items()
    }
