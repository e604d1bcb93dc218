"""Filters of a topic's readers: which tags they match, by the rules of zbus.

A filter is one or more patterns, separated by ``;``; a message matches if its tag matches one of them. Tags and patterns
have levels, separated by dots: ``*`` stands for any one level, ``#`` for all the rest, also none. An untagged message
matches only the empty filter.
"""

from __future__ import annotations

from qewqew_core.formats import zbus

_REMEMBERED = 1 << 16


class Filter:
    """A filter; the empty one (None, blank) matches every message. Raises `BadArgument` if it has over 127 bytes."""

    def __init__(self, text: str | None) -> None:
        zbus.filter_patch(text)
        self.text = text if text and text.strip() else None
        self._patterns = [_split(pattern, ".") for pattern in _split(self.text or "", ";") if pattern.strip()]
        self._known: dict[bytes, bool] = {}

    def __bool__(self) -> bool:
        """Whether it holds anything back."""
        return bool(self._patterns)

    def matches(self, tag: str | None) -> bool:
        if not self._patterns:
            return True
        if not tag:
            return False
        levels = _split(tag, ".")
        return any(_matches(pattern, levels) for pattern in self._patterns)

    def matches_slot(self, slot: bytes) -> bool:
        """The same for the 128 bytes of the tag in a message; quick for those that were asked for before."""
        known = self._known.get(slot)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[slot] = self.matches(zbus.slot_text(slot, 0, len(slot)))
        return known


def _split(text: str, separator: str) -> list[str]:
    """As Java splits: empty parts at the end are dropped, but a text that is empty is one part."""
    parts = text.split(separator)
    while len(text) and parts and parts[-1] == "":
        parts.pop()
    return parts


def _matches(pattern: list[str], levels: list[str]) -> bool:
    for number, part in enumerate(pattern):
        if part == "#":
            return True
        if number >= len(levels) or part not in ("*", levels[number]):
            return False
    return len(pattern) == len(levels)
