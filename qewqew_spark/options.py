"""The options of a read or a write as Spark passes them: strings, under names whose case does not matter; and paths."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping

from qewqew_core import references
from qewqew_core.batch import store
from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_TIME = re.compile(f"([0-9]+)({'|'.join(_UNITS)})?", re.ASCII)
_SIZE = re.compile("([0-9]+)(?:b|([kmgtp])b?)?", re.ASCII)


# The options of every read that say what its rows are, and those of them that one codec alone has.
OPTIONS_OF_CODECS: dict[str, tuple[str, ...]] = {
    "json": ("fromTexts", "strict", "timeZone"),
    "avro": ("avroSchema",),
    "msgpack": (),
}
ROW_OPTIONS = {
    "codec",
    "mode",
    "columnNameOfCorruptRecord",
    "rescued",
    *(name for names in OPTIONS_OF_CODECS.values() for name in names),
}


class Options:
    """Typed access to options; each method raises `BadArgument`, which names option, value and what it must be."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._given

    def text(self, name: str, default: str | None = None) -> str | None:
        return self._given.get(name.lower(), default)

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int | None:
        text = self.text(name)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise BadArgument(f"the option {name!r} must be a whole number, {least} or more, not {excerpt(text, 80)}")
        return value

    def size(self, name: str, default: int | None = None) -> int | None:
        """Bytes, one at least; as everywhere in Spark ``64m`` and ``64mb`` are 64 MiB."""
        text = self.text(name)
        if text is None:
            return default
        found = _SIZE.fullmatch(text.strip().lower())
        if found is None or not int(found[1]):
            raise BadArgument(
                f"the option {name!r} must be a number of bytes, 1 or more, like 67108864, 64m or 1g, not {excerpt(text, 80)}"
            )
        return int(found[1]) << 10 * "bkmgtp".index(found[2] or "b")

    def seconds(self, name: str, default: float) -> float:
        """A time; as everywhere in Spark ``15m`` are minutes, and a bare number is milliseconds."""
        text = self.text(name)
        if text is None:
            return default
        found = _TIME.fullmatch(text.strip().lower())
        if found is None:
            raise BadArgument(f"the option {name!r} must be a time, like 500ms, 30s, 15m or 1h, not {excerpt(text, 80)}")
        return int(found[1]) * _UNITS[found[2] or "ms"]

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name)
        return default if text is None else self.choice(name, ("true", "false"), "") == "true"

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        """One of the choices, whatever its case."""
        text = self.text(name)
        if text is None:
            return default
        for choice in choices:
            if text.lower() == choice.lower():
                return choice
        raise BadArgument(f"the option {name!r} must be one of {', '.join(choices)}, not {excerpt(text, 80)}")

    def under(self, prefix: str) -> dict[str, str]:
        """The options whose names start with ``prefix``, without it, and with the values that they refer to."""
        prefix = prefix.lower()
        found = references.resolved({name: value for name, value in self._given.items() if name.startswith(prefix)})
        return {name[len(prefix) :]: value for name, value in found.items()}

    def check(self, what: str, known: Collection[str], prefixes: Collection[str] = ()) -> None:
        """Refuse options that ``what`` (like "a stream of a topic") does not know."""
        names = {name.lower(): name for name in known}
        for name in sorted(self._given):
            if name not in names and not any(name.startswith(prefix.lower()) for prefix in prefixes):
                parser = {"json": "from_json", "csv": "from_csv"}.get(self._given.get("codec", "").lower())
                more = f". If Spark's {parser} has it: {use_spark(parser)}" if parser else ""
                raise BadArgument(f"{what} has no option {name!r}; {_hint(name, names)}{more}")


def use_spark(parser: str) -> str:
    """What to do where the typed read is not enough."""
    return (
        "read without the option 'codec', and then "
        f"select({parser}(col('value').cast('string'), schema, options).alias('record')).select('record.*')"
    )


# Options that not every read and write has; those that have one say so of the others.
_ELSEWHERE = {
    "endingOffsets": "a read of a topic",
    "endingTimestamp": "a read of a topic",
    "maxRecords": "a read of a queue or a topic",
    "startingOffsets": "a read or a stream of a topic",
    "startingTimestamp": "a read or a stream of a topic",
    "filter": "a read or a stream of a topic",
    "maxOffsetsPerTrigger": "a stream of a topic",
    "minOffsetsPerTrigger": "a stream of a topic",
    "maxBytesPerTrigger": "a stream of a topic",
    "maxTriggerDelay": "a stream of a topic",
    "reader": "a stream of a topic",
    "group": "a stream of a topic, or of a write",
}
_ALIKE = re.compile("records|rows|messages|offsets")


def _hint(name: str, names: Mapping[str, str]) -> str:
    """What the user may mean by an option that is not in ``names`` (keyed by their lower-case forms)."""
    for other, where in _ELSEWHERE.items():
        if name == other.lower():
            return f"{other!r} is an option of {where}; here you can use {', '.join(sorted(names.values()))}"
    same = [_ALIKE.sub(word, name) for word in ("offsets", "records")]
    near = [other for other in same if other in names] or difflib.get_close_matches(name, names, 1)
    return f"did you mean {names[near[0]]!r}?" if near else f"you can use {', '.join(sorted(names.values()))}"


def local_path(path: str) -> str:
    """The absolute form of a local path or `file:` URI, as users of spark-submit write them; any other URL as it is.

    Raises `BadArgument` for a `file:` URI of another host.
    """
    local = store.local_path(path)
    return path if local is None else os.path.abspath(local)
