"""Checks a schema in Spark's DDL without Spark, so that a typing error is found when a DAG file is parsed, before Java
starts.

Only Spark parses schemas for use. Spark refuses everything that is refused here (a test asks it), and may refuse more.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from qewqew_core.errors import BadArgument

_TOKEN = re.compile(
    r"""\s*(?:
        (?P<word>\w+)
      | `(?P<quoted>(?:[^`]|``)+)`
      | (?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")
      | (?P<sign>[<>(),:])
    )""",
    re.VERBOSE | re.DOTALL,
)
_SIMPLE = {
    *("BOOLEAN", "TINYINT", "BYTE", "SMALLINT", "SHORT", "INT", "INTEGER", "BIGINT", "LONG", "FLOAT", "REAL", "DOUBLE"),
    *("DECIMAL", "DEC", "NUMERIC", "STRING", "CHAR", "CHARACTER", "VARCHAR", "BINARY", "DATE", "TIME", "TIMESTAMP"),
    *("TIMESTAMP_NTZ", "TIMESTAMP_LTZ", "VARIANT", "VOID", "GEOMETRY", "GEOGRAPHY"),
}
_DECIMAL, _MAX_PRECISION = ("DECIMAL", "DEC", "NUMERIC"), 38
_UNITS = ("YEAR", "MONTH", "DAY", "HOUR", "MINUTE", "SECOND")


def check_schema(schema: str) -> None:
    """Raise `BadArgument`, with the place, for a text that certainly is not a list of columns and their types."""
    _Reader(schema).read()


class _Reader:
    def __init__(self, schema: str) -> None:
        self._schema = schema
        self._tokens: list[tuple[str, str, int]] = []  # kind, text, and where it begins
        at = 0
        while schema[at:].strip():
            found = _TOKEN.match(schema, at)
            if found is None:
                self._refuse("this is not a name, a type or a sign", len(schema) - len(schema[at:].lstrip()))
            kind = str(found.lastgroup)
            self._tokens.append((kind, found[kind], found.start(kind)))
            at = found.end()
        self._at = 0

    def read(self) -> None:
        if not self._tokens:
            self._refuse("it has no columns", 0)
        if [text.upper() for _, text, _ in self._tokens[:2]] == ["STRUCT", "<"]:  # as `DataFrame.schema.simpleString()` has it
            self._type()
            if self._at < len(self._tokens):
                self._refuse("there is more after the last >")
        else:
            self._fields(lambda: self._peek() == "")

    def _fields(self, ends: Callable[[], bool]) -> None:
        while True:
            self._name()
            self._take(":")
            self._type()
            if self._take("NOT"):
                self._need("NULL")
            if self._take("COMMENT") and not self._next("text"):
                self._refuse("COMMENT needs a text in quotes after it")
            if ends():
                return
            self._need(",")

    def _name(self) -> None:
        if not (self._next("word") or self._next("quoted")):
            self._refuse("a column name is expected here")

    def _type(self) -> None:
        name = self._peek()
        if not self._next("word"):
            self._refuse("a type is expected here")
        if name in ("ARRAY", "MAP"):
            self._need("<")
            self._type()
            if name == "MAP":
                self._need(",")
                self._type()
            self._need(">")
        elif name == "STRUCT":
            self._need("<")
            if not self._take(">"):
                self._fields(lambda: self._peek() == ">")
                self._need(">")
        elif name == "INTERVAL":
            if self._peek() in _UNITS:
                self._next("word")
                if self._take("TO") and not (self._peek() in _UNITS and self._next("word")):
                    self._refuse("TO needs a unit of time after it")
        elif name in _SIMPLE:
            self._length(name)
            if self._take("COLLATE"):
                self._name()
            elif name in ("TIME", "TIMESTAMP") and (self._take("WITH") or self._take("WITHOUT")):
                self._take("LOCAL")
                self._need("TIME")
                self._need("ZONE")
        else:
            self._at -= 1
            self._refuse("Spark has no such type")

    def _length(self, name: str) -> None:
        if not self._take("("):
            return
        numbers: list[int] = []
        while not self._take(")"):
            number = self._peek()
            if not self._next("word"):
                self._refuse("a number or ) is expected here")
            most = numbers[0] if numbers else _MAX_PRECISION
            if name in _DECIMAL and number.isdecimal() and int(number) > most:
                self._at -= 1
                self._refuse(f"the {'scale' if numbers else 'precision'} of a {name} is at most {most}")
            numbers.append(int(number) if number.isdecimal() else most)
            self._take(",")

    def _peek(self) -> str:
        """The next word or sign, in capitals; empty at the end and for anything in quotes."""
        kind, text, _ = self._tokens[self._at] if self._at < len(self._tokens) else ("", "", 0)
        return text.upper() if kind in ("word", "sign") else "\0" if kind else ""

    def _next(self, kind: str) -> bool:
        found = self._at < len(self._tokens) and self._tokens[self._at][0] == kind
        self._at += found
        return found

    def _take(self, what: str) -> bool:
        found = self._peek() == what
        self._at += found
        return found

    def _need(self, what: str) -> None:
        if not self._take(what):
            self._refuse(f"{what} is expected here")

    def _refuse(self, why: str, at: int | None = None) -> NoReturn:
        if at is None:
            at = self._tokens[self._at][2] if self._at < len(self._tokens) else len(self._schema)
        rest = repr(self._schema[at : at + 40]) if at < len(self._schema) else "the end"
        raise BadArgument(
            f"the schema {self._schema!r:.200} is wrong at {rest}: {why}. Write it like 'id BIGINT, tags ARRAY<STRING>'"
        )
