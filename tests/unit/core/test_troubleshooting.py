"""docs/troubleshooting.md has an entry for every error that we raise by name, and for no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_error_has_its_entry() -> None:
    # As text: Airflow's errors cannot be imported where there is no Airflow.
    named = {
        name
        for module in ("qewqew_core", "qewqew_airflow")
        for name in re.findall(r"^class (\w+)\(", (ROOT / module / "errors.py").read_text(), re.MULTILINE)
    }
    entries = re.findall(r"^### (\w+)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(named) > 25
    assert sorted(entries) == sorted(named - {"QewQewError"})
