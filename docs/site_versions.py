"""Lists the versions of the site for its selector, and leads from the site's address to the newest one.

`./run docs` builds each version into its own folder, then runs this with the folder above as argument.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

DEV = "dev"


def versions(site: Path) -> list[str]:
    """The newest release first, what is not released last."""
    names = [page.parent.name for page in site.glob("*/404.html")]
    return sorted(names, key=lambda name: (name != DEV, [int(number) for number in re.findall("[0-9]+", name)]), reverse=True)


def write(site: Path) -> None:
    names = versions(site)
    # Material for MkDocs reads this file, as the tool mike writes it.
    (site / "versions.json").write_text(json.dumps([{"version": name, "title": name, "aliases": []} for name in names]))
    (site / "index.html").write_text(f'<!doctype html><meta http-equiv="refresh" content="0; url={names[0]}/index.html">')


if __name__ == "__main__":
    write(Path(sys.argv[1]))
