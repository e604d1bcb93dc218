"""The Python examples of the guides, one after the other in one directory: they print what their comments say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GUIDES = ["moving.md", "operations.md", "topics.md"]


@pytest.mark.parametrize("guide", GUIDES)
def test_the_examples_print_what_they_say(guide: str, tmp_path: Path) -> None:
    examples = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / guide).read_text(), re.MULTILINE | re.DOTALL)
    assert len(examples) >= 3
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
            timeout=60,
        )
        assert (done.stdout.splitlines(), done.stderr) == (expected, ""), example
