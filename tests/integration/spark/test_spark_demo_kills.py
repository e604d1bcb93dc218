"""`./run demo --kill`: what it shows is so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_killed_processes_double_records_with_plain_files_and_none_with_qewqew(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "demo.kills", "--json", "--svg", str(tmp_path / "x.svg")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "plain files": {"produced": 6000, "rows": 12_500, "ids": 6000},
        "QewQew": {"produced": 6000, "rows": 6000, "ids": 6000},
    }
    picture = (tmp_path / "x.svg").read_text()
    assert "12,500" in picture
    assert "url(" not in picture.replace("url(#", "")
