"""docs/requirements.md is complete: each requirement has a test that bears its number, or a reason why it does not apply."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[3]
IDS = [f"REQ-{number}" for number in range(1, 37)] + [f"DEF-{number}" for number in range(1, 27)]


def rows() -> dict[str, str]:
    """What the tables say about each id."""
    text = (CHECKOUT / "docs" / "requirements.md").read_text()
    found = re.findall(r"^\| ([A-Z]+-?[0-9]+) \| (.+) \|$", text, re.MULTILINE)
    assert len(dict(found)) == len(found), "an id stands there twice"
    return dict(found)


def named() -> dict[str, list[str]]:
    """The tests of each id, in the order of the file."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(Path(__file__).with_name("test_format_requirements.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and (match := re.match(r"test_(req|def)_([0-9]{2})_", node.name)):
            found.setdefault(f"{match[1].upper()}-{int(match[2])}", []).append(node.name)
    return found


@pytest.mark.parametrize("one", IDS)
def test_a_requirement_has_a_test_with_its_number_or_a_reason_why_it_does_not_apply(one):
    row = rows()[one]
    if one in named():
        assert row == ", ".join(f"`{name}`" for name in named()[one])
    else:
        assert row.startswith("does not apply: ")
        assert len(row) > 60


def test_the_tests_stand_in_the_order_of_their_numbers_and_none_has_a_number_that_does_not_exist():
    assert list(named()) == [one for one in IDS if one in named()]
