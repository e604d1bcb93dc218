"""What docs/topics.md says of filters is right, and its links lead somewhere; its examples: test_guides.py."""

import re
from pathlib import Path

import pytest

from qewqew_core.formats.tags import Filter

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "topics.md").read_text()


def rows() -> list[tuple[str, str, bool]]:
    """(filter, tag, whether it matches) of the table of filters: what stands in backquotes."""
    table = TEXT[TEXT.index("| filter |") :].split("\n\n")[0].splitlines()[2:]
    found = []
    for row in table:
        chosen, matching, others = (re.findall(r"`([^`]+)`", cell) for cell in row.strip("|").split("|"))
        for tags, expected in ((matching, True), (others, False)):
            found += [(chosen[0], tag, expected) for tag in tags if chosen and "#" not in tag]
    return found


@pytest.mark.parametrize(("chosen", "tag", "expected"), rows())
def test_the_table_of_filters_is_right(chosen, tag, expected):
    assert Filter(chosen).matches(tag) is expected


def test_every_link_leads_somewhere():
    for target, anchor in re.findall(r"\]\(([\w./]*)(?:#([\w-]+))?\)", TEXT):
        path = ROOT / "docs" / target if target else ROOT / "docs" / "topics.md"
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings}, anchor
