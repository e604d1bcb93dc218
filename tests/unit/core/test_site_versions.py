"""The site has a folder for each version, a list of them for the selector, and a first page that leads to the newest."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[3] / "docs" / "site_versions.py"


def test_the_newest_release_comes_first_and_what_is_not_released_last(tmp_path: Path) -> None:
    write = runpy.run_path(str(SCRIPT))["write"]
    (tmp_path / "search").mkdir()  # not a version
    for name in ("dev", "1.9.0", "1.10.0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "404.html").touch()  # each site has one
        write(tmp_path)
        listed = [version["version"] for version in json.loads((tmp_path / "versions.json").read_text())]
        assert f"url={listed[0]}/index.html" in (tmp_path / "index.html").read_text()
    assert listed == ["1.10.0", "1.9.0", "dev"]
