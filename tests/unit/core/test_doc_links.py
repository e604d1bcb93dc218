"""Links of the documentation lead somewhere in the checkout too, as GitHub shows it. mkdocs checks those of the site."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [str(page.relative_to(ROOT)) for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        assert "://" in target or target.startswith("mailto:") or (path.parent / target).exists(), target
