"""docs/requirements.md has the tests that say of themselves, with the mark ``req``, which requirements they show.

``python tests/unit/core/test_requirements.py`` writes them into its tables.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

CHECKOUT = Path(__file__).parents[3]
PAGE = CHECKOUT / "docs" / "requirements.md"
ROW = re.compile(r"^\| ([A-Z]+-?[0-9]+b?) \| (.+) \| (.+) \|$", re.MULTILINE)


def marks() -> Iterator[tuple[str, str]]:
    """Each requirement that a test is marked with, and where that test is."""
    for path in sorted((CHECKOUT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "pytest.mark.req(" not in text:
            continue
        for test in ast.parse(text).body:
            if isinstance(test, ast.FunctionDef):
                for mark in test.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.req":
                        for one in mark.args:
                            yield ast.literal_eval(one), f"`{path.stem}::{test.name}`"


def with_the_tests(page: str) -> str:
    """The page with the tests of each requirement in its row."""
    tests: dict[str, list[str]] = {}
    for one, test in marks():
        tests.setdefault(one, []).append(test)
    return ROW.sub(lambda row: f"| {row[1]} | {row[2]} | {', '.join(tests[row[1]])} |" if row[1] in tests else row[0], page)


def test_the_page_has_the_tests_that_are_marked_so():
    page = PAGE.read_text()
    assert with_the_tests(page) == page, f"python {Path(__file__).relative_to(CHECKOUT)} writes docs/requirements.md anew"


def test_each_requirement_has_a_test_or_a_reason_why_it_does_not_apply():
    rows = [(one, cell) for one, _, cell in ROW.findall(PAGE.read_text())]
    shown = {one for one, _ in marks()}
    assert len(dict(rows)) == len(rows) == 36 + 26 + 21 + 26 + 15 + 15, "an id stands there twice, or not at all"
    assert shown <= set(dict(rows)), "a test is marked with what is no requirement"
    assert [one for one, cell in rows if one not in shown and not re.match(r"does not apply: .{40}", cell)] == []


if __name__ == "__main__":
    PAGE.write_text(with_the_tests(PAGE.read_text()))
