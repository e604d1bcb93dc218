"""JSON objects in which a name stands several times."""

from __future__ import annotations

from typing import Any


class Object(dict[str, Any]):
    """A JSON object in which a name appears several times, or whose text is known. A repeated name has `Several` values."""

    def __init__(self, pairs: list[tuple[str, Any]], written: str | None = None) -> None:
        super().__init__(pairs)
        self.pairs, self.written = pairs, written
        if len(self) < len(pairs):
            found: dict[str, Several] = {}
            for name, value in pairs:
                found.setdefault(name, Several()).values.append(value)
            self.update((name, several) for name, several in found.items() if len(several.values) > 1)


class Several:
    """The values of a name that stands several times in an object. The last one counts that fits."""

    def __init__(self) -> None:
        self.values: list[Any] = []
