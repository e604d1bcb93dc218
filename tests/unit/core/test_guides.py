"""The Python examples of the guides, one after the other in one directory: they print what their comments say."""

from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from qewqew_core import Queue

ROOT = Path(__file__).parents[3]
GUIDES = {"api.md": 1, "howto.md": 1, "moving.md": 2, "operations.md": 1, "topics.md": 2}  # and how many examples they have


@pytest.mark.parametrize("guide", GUIDES)
def test_the_examples_print_what_they_say(guide: str, tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / guide).read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) == GUIDES[guide]
    for example in examples:
        expected = re.findall(r"  # → (.*)$", example, re.MULTILINE)
        assert expected, f"nothing to be compared:\n{example}"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", example],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert (done.stdout.splitlines(), done.stderr) == (expected, ""), example


def test_the_tests_that_the_security_review_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "threats.md").read_text()))
    files = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(named) > 40
    assert named <= set(re.findall(r"^def (test_\w+)\(", "\n".join(files), re.MULTILINE))


def test_a_program_that_is_killed_between_write_and_acknowledgement_has_written_once(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "exactly-once.md").read_text().replace('"/data/', f'"{tmp_path}/')
    [example] = [text for text in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "sqlite3" in text]
    defined, _, _ = example.partition("\nwith Queue(")  # the function, and not yet its use
    acknowledge = "        queue.batch(batch.id).ack()\n"
    assert defined.count(acknowledge) == 1
    killed = "import os, signal\n" + defined.replace(acknowledge, "        os.kill(os.getpid(), signal.SIGKILL)\n")
    with Queue(tmp_path / "shop.qew") as queue:
        queue.put_many([b'{"id": 1, "shop": "eu"}', b'{"id": 2, "shop": "us"}'])

    def rows() -> list[tuple[int, str]]:
        return sqlite3.connect(tmp_path / "shop.db").execute("SELECT * FROM orders ORDER BY id").fetchall()

    for program, status in ((killed, -signal.SIGKILL), (killed, -signal.SIGKILL), (defined, 0)):
        run = [sys.executable, "-c", f"{program}\nload('run 42')"]
        done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
        assert (done.returncode, done.stderr, rows()) == (status, "", [(1, "eu"), (2, "us")])
    with Queue(tmp_path / "shop.qew") as queue:
        assert [batch.state for batch in queue.acknowledged()] == ["acked"]
