"""Text as a terminal may show it: foreign names and records must not move its cursor, hide text or turn its direction."""

from __future__ import annotations

import json


def visible(text: str, besides: str = "") -> str:
    """The text, with escapes for what is not printable (as `str.isprintable` says), besides these characters."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in besides else repr(letter)[1:-1] for letter in text)


def json_text(value: object) -> str:
    """The value as JSON in one line of printable characters. The others are escapes of JSON, so the value is the same."""
    text = json.dumps(value, ensure_ascii=False)
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else json.dumps(letter)[1:-1] for letter in text)
