"""Each requirement of tests/requirements.txt has a test with its number as a mark ``req``, or a reason not to apply."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[2]


def marks() -> Iterator[str]:
    """The numbers that tests are marked with."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "pytest.mark.req(" not in text:
            continue
        for test in ast.parse(text).body:
            if isinstance(test, ast.FunctionDef):
                for mark in test.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.req":
                        yield from map(ast.literal_eval, mark.args)


def test_each_requirement_has_a_test_or_a_reason_why_it_does_not_apply():
    lines = re.findall(r"^([A-Z]+-?[0-9]+b?) (.+)$", (TESTS / "requirements.txt").read_text(), re.MULTILINE)
    shown = set(marks())
    assert len(dict(lines)) == len(lines) == 36 + 26 + 21 + 26 + 15 + 15, "a number stands there twice, or not at all"
    assert shown <= set(dict(lines)), "a test is marked with a number that stands nowhere"
    assert [number for number, text in lines if number not in shown and "(does not apply: " not in text] == []
