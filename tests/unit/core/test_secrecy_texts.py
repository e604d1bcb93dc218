"""Texts as programs write them: a secret is not shown, whatever the form, and ordinary ones stay whole."""

from __future__ import annotations

from pathlib import Path

import pytest
from secret_forms import SECRET
from secret_texts import FIRST, LAST, LINES, LISTED, OTHERS, texts

from qewqew_core.secrecy import hide

ORDINARY = (Path(__file__).parents[2] / "ordinary_texts.txt").read_text()


def test_no_secret_is_shown_in_any_form():
    tried = 0
    for what, text in texts():
        tried += 1
        shown = hide(text)
        assert LAST not in shown, f"{what}: {text!r} is shown as {shown!r}"
        assert FIRST not in shown, f"{what}: {text!r} is shown as {shown!r}"
        assert hide(shown) == shown, f"{what}: {text!r} is hidden again"
    assert tried > 3000


@pytest.mark.parametrize("text", [*LISTED, *OTHERS])
def test_a_secret_is_hidden_in_more_forms(text):
    for around in "{}", "it says {}", "a\n{}\nb", "'{}'", '["{}"]':
        shown = hide(around.format(text))
        assert SECRET not in shown, shown


@pytest.mark.parametrize("line", LINES)
def test_a_line_may_be_a_name_and_a_secret(line):
    for around in "{}", "x\n{}\ny", "x\n  {}":
        assert SECRET not in hide(around.format(line))


def test_ordinary_texts_stay_whole():
    assert hide(ORDINARY) == ORDINARY
    for each in ORDINARY.splitlines():
        assert hide(each) == each
    assert ORDINARY.count("\n") > 150


@pytest.mark.parametrize("token", [f"dapi{'0123456789abcdef' * 2}", f"AIza{'aB3dE' * 7}"])
def test_a_token_is_hidden_in_a_text_without_other_signs(token):
    assert hide(f"it says {token} here") == "it says … here"
