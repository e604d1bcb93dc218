"""The options of a read or a write, as Spark hands them over: texts, under names whose case does not matter; and paths."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping

from qewqew_core.batch import store
from qewqew_core.errors import BadArgument


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
            raise BadArgument(f"the option {name!r} must be a whole number, {least} or more, not {text!r:.80}")
        return value

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
        raise BadArgument(f"the option {name!r} must be one of {', '.join(choices)}, not {text!r:.80}")

    def under(self, prefix: str) -> dict[str, str]:
        """The options that begin with ``prefix``, without it."""
        prefix = prefix.lower()
        return {name[len(prefix) :]: value for name, value in self._given.items() if name.startswith(prefix)}

    def check(self, what: str, known: Collection[str], prefixes: Collection[str] = ()) -> None:
        """Refuse options that ``what`` (like "a stream of a topic") does not know."""
        names = {name.lower(): name for name in known}
        self._check_parser(names)
        for name in sorted(self._given):
            if name not in names and not any(name.startswith(prefix.lower()) for prefix in prefixes):
                near = difflib.get_close_matches(name, names, 1)
                hint = f"did you mean {names[near[0]]!r}?" if near else f"there are {', '.join(sorted(known))}"
                raise BadArgument(f"{what} has no option {name!r}; {hint}")

    def _check_parser(self, names: Collection[str]) -> None:
        """Refuse options of Spark's own parsers in a typed read, and say where they belong."""
        codec = self._given.get("codec", "").lower()
        parser = {"json": "from_json", "csv": "from_csv"}.get(codec)
        for name in self._given if parser else ():
            if name not in names and (codec == "csv" or name in _OF_FROM_JSON):
                raise BadArgument(
                    f"the typed read has no option {name!r}, but Spark's {parser} has: read without the option 'codec', and then "
                    f"select({parser}(col('value').cast('string'), schema, options).alias('record')).select('record.*')"
                )


# In small letters.
_OF_FROM_JSON = {
    *("dateformat", "timestampformat", "timestampntzformat", "enabledatetimeparsingfallback", "locale", "primitivesasstring"),
    *("timeformat", "prefersdecimal", "dropfieldifallnull", "infertimestamp", "allowcomments"),
    *("allowunquotedfieldnames", "allowsinglequotes", "allownumericleadingzeros", "allownonnumericnumbers"),
    *("allowbackslashescapinganycharacter", "allowunquotedcontrolchars"),
}


def local_path(path: str) -> str:
    """The absolute path of what is given by path or `file:` URI, as spark-submit's users write it; another URL as it is.

    Raises `BadArgument` for a `file:` URI of another host.
    """
    local = store.local_path(path)
    return path if local is None else os.path.abspath(local)
