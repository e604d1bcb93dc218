"""Finds typing errors in a schema in Spark's DDL without Spark: when a DAG file is parsed, before Java starts.

Only Spark parses schemas for use. Spark refuses everything that is refused here (a test asks it), and may refuse more.
"""

from __future__ import annotations

import re

from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt

_NAME, _TEXT, _NESTED = "\1", "\2", "\3"  # stand for a quoted name, a quoted text, and a type that is right
_QUOTED = {
    _NAME: re.compile("`(?:[^`]|``)+`"),
    _TEXT: re.compile(r"""'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*\"""", re.DOTALL),
}
_UNIT = "(?:YEAR|MONTH|DAY|HOUR|MINUTE|SECOND)"
_TYPE = (
    r"(?:(?:BOOLEAN|TINYINT|BYTE|SMALLINT|SHORT|INT|INTEGER|BIGINT|LONG|FLOAT|REAL|DOUBLE|DECIMAL|DEC|NUMERIC|STRING|CHAR"
    r"|CHARACTER|VARCHAR|BINARY|DATE|TIME|TIMESTAMP|TIMESTAMP_NTZ|TIMESTAMP_LTZ|VARIANT|VOID|GEOMETRY|GEOGRAPHY)\b"
    rf"(?:\s*\([\s\w,]*\))?(?:\s+COLLATE\s*(?:\w+|{_NAME})|\s+WITH(?:OUT)?\s+(?:LOCAL\s+)?TIME\s+ZONE)?"
    rf"|INTERVAL(?:\s+{_UNIT}(?:\s+TO\s+{_UNIT})?)?|{_NESTED})"
)
_FIELD = rf"\s*(?:\w+(?:\s*:|\s)|{_NAME}\s*:?)\s*{_TYPE}(?:\s*NOT\s+NULL)?(?:\s*COMMENT\s*{_TEXT})?\s*"
_FIELDS = re.compile(rf"{_FIELD}(?:,{_FIELD})*", re.IGNORECASE)
_OUTER = re.compile(
    rf"\b(?:ARRAY\s*<\s*{_TYPE}\s*>|MAP\s*<\s*{_TYPE}\s*,\s*{_TYPE}\s*>|STRUCT\s*<(?:{_FIELDS.pattern}|\s*)>)", re.IGNORECASE
)


def check_schema(schema: str) -> None:
    """Raise `BadArgument`, with the place, for a text that certainly is not a list of columns and their types."""
    text, found = schema, 1
    for mark, pattern in _QUOTED.items():
        text = pattern.sub(lambda quoted, mark=mark: mark.ljust(len(quoted[0])), text)  # type: ignore[misc]
    while found:  # from the innermost types on; what stands for them is as long, so that places stay
        text, found = _OUTER.subn(lambda nested: _NESTED.ljust(len(nested[0])), text)
    if text.strip() == _NESTED or _FIELDS.fullmatch(text):  # the former is what `DataFrame.schema.simpleString()` gives
        return
    right = _FIELDS.match(text)
    rest = schema[right.end() if right else 0 :].lstrip(" ,")
    raise BadArgument(
        f"the schema {excerpt(schema, 200)} is wrong at {excerpt(rest, 42) if rest else 'the end'}: a column and one of Spark's "
        "types are expected there. Write it like 'id BIGINT, tags ARRAY<STRING>'"
    )
