"""Records that are one line of CSV each: what `spark.read.csv` makes of the same lines.

Lines without anything odd in them, all of the right number of fields, go through Arrow's reader as texts, and columns of texts in
plain forms become numbers at once; other lines are split as univocity-parsers does it for Spark, and typed value by value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv
from pyspark.sql import types

from qewqew_core.errors import BadArgument
from qewqew_spark.codecs import MISFIT, Decoded, merged, texts
from qewqew_spark.codecs.columns import arrays, arrow_fields
from qewqew_spark.codecs.moments import Mask, dates, timestamps
from qewqew_spark.options import Options

OPTIONS = frozenset(["timeZone", "sep", "delimiter", "quote", "escape", "nullValue"])
TOO_FEW, TOO_MANY = "too few fields", "too many fields"

Parse = Callable[[str], Any]  # raises ValueError


class CsvCodec:
    """See `Codec`. Fields are found by their place; without ``nullValue``, an empty one is null."""

    def __init__(self, fields: types.StructType, options: Options) -> None:
        if "sep" in options and "delimiter" in options:
            raise BadArgument("the options 'sep' and 'delimiter' are the same; give one")
        sep = _char(options, "delimiter" if "delimiter" in options else "sep", ",")
        quote, escape = _char(options, "quote", '"'), _char(options, "escape", "\\")
        if not sep or sep in (quote, escape, "\n", "\r"):
            raise BadArgument("the option 'sep' must be one character, and another than those of 'quote' and 'escape'")
        self._zone = texts.zone_option(options.text("timeZone") or "UTC")
        self._null = options.text("nullValue") or ""
        self._fields = arrow_fields(fields)
        self._parse = [self._parser(field.dataType, field.name) for field in fields]
        self._split = Splitter(sep, quote, escape)
        odd = re.escape(sep + quote + "\r\n\0")
        field = f"[^{odd}]*"
        # Of quoted fields, an empty one is not null if ``nullValue`` is another text: Arrow's reader cannot tell.
        if quote and not self._null:
            field = f"(?:{field}|{quote}[^{re.escape(quote + escape)}\r\n\0]*{quote})"
        more = len(self._fields) - 1
        # RE2 repeats at most a thousand times, Arrow's reader takes one byte; a blank line is no record.
        self._plain = None
        if 0 < more <= 1000 and " " < sep < "\x7f" and quote.isascii():
            self._plain = f"^{field}(?:{re.escape(sep)}{field}){{{more}}}$"
        self._parsing = pcsv.ParseOptions(delimiter=sep, quote_char=quote or False, double_quote=False, escape_char=False)
        self._names = [str(at) for at in range(len(self._fields))]
        self._converting = pcsv.ConvertOptions(
            column_types=dict.fromkeys(self._names, pa.string()),
            null_values=["", self._null],
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
        )

    def decode(self, values: pa.Array) -> Decoded:
        fast = np.zeros(len(values), bool)
        columns: list[pa.Array] = [pa.array([], field.type) for field in self._fields]
        if self._plain is not None and len(values):
            fast, columns = self._fast(values)
        rows: list[list[Any]] = []
        numbers: list[int] = []
        bad: dict[int, str] = {}
        for number in np.flatnonzero(~fast).tolist():
            line = texts.java_text(values[number].as_py())
            if line.strip(texts.JAVA_SPACE):
                row, reason = self._row(self._split(line))
                if reason is not None:
                    bad[len(rows)] = reason
                rows.append(row)
                numbers.append(number)
        if fast.all():
            return Decoded(columns)
        slow = arrays(rows, self._fields)
        return merged([columns, slow], [np.flatnonzero(fast), np.array(numbers, np.int64)], bad)

    def _fast(self, values: pa.Array) -> tuple[Mask, list[pa.Array]]:
        """Which records are read here, and the columns of those."""
        good = np.zeros(len(values), bool)
        try:
            lines = values.cast(pa.string())
        except pa.ArrowInvalid:  # not UTF-8, as it seldom is
            return good, [pa.array([], field.type) for field in self._fields]
        good = np.asarray(pc.match_substring_regex(lines, self._plain)).copy()
        chosen = lines if good.all() else lines.filter(pa.array(good))
        if not good.any():
            return good, [pa.array([], field.type) for field in self._fields]
        joined = pc.binary_join(pa.ListArray.from_arrays(pa.array([0, len(chosen)], pa.int32()), chosen), "\n")[0].as_buffer()
        reading = pcsv.ReadOptions(use_threads=False, block_size=len(joined) + 1, column_names=self._names)
        table = pcsv.read_csv(pa.BufferReader(joined), reading, self._parsing, self._converting)
        assert len(table) == len(chosen)
        doubtful = np.zeros(len(chosen), bool)
        columns = []
        for field, column in zip(self._fields, table.columns, strict=True):
            made, doubts = self._column(pa.concat_arrays(column.chunks), field.type)
            columns.append(made)
            doubtful |= doubts
        if doubtful.any():
            good[np.flatnonzero(good)[doubtful]] = False
            columns = [column.filter(pa.array(~doubtful)) for column in columns]
        return good, columns

    def _column(self, column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Mask]:
        """Texts as a column of a type, and which of them are not in a plain form, and left undone."""
        if pa.types.is_string(kind) or pa.types.is_binary(kind):
            return column.cast(kind), np.zeros(len(column), bool)
        if pa.types.is_date(kind):
            return dates(column)
        if pa.types.is_timestamp(kind):
            return timestamps(column, None if kind.tz is None else self._zone)
        if pa.types.is_boolean(kind):
            form = "^(?:true|false)$"
        elif pa.types.is_integer(kind):
            form = f"^-?[0-9]{{1,{ {8: 2, 16: 4, 32: 9, 64: 18}[kind.bit_width] }}}$"
        elif pa.types.is_floating(kind):
            form = r"^-?[0-9]{1,17}(?:\.[0-9]{1,17})?$"
        else:
            whole, scale = kind.precision - kind.scale, kind.scale
            form = (f"^-?[0-9]{{1,{whole}}}" if whole else "^-?0") + (rf"(?:\.[0-9]{{1,{scale}}})?$" if scale else "$")
        plain = pc.match_substring_regex(column, form)
        undone = np.asarray(column.is_valid()) & ~np.asarray(plain.fill_null(True))
        kept = pc.if_else(plain, column, pa.scalar(None, pa.string())) if undone.any() else column
        return kept.cast(kind), undone

    def _row(self, tokens: list[str | None]) -> tuple[list[Any], str | None]:
        found, wanted = len(tokens), len(self._fields)
        reason = TOO_FEW if found < wanted else TOO_MANY if found > wanted else None
        row: list[Any] = [None] * wanted
        for at, token in enumerate(tokens[:wanted]):
            if token is not None and token != self._null:
                try:
                    row[at] = self._parse[at](token)
                except ValueError:
                    reason = reason or MISFIT
        return row, reason

    def _parser(self, kind: types.DataType, where: str) -> Parse:
        if isinstance(kind, types.DecimalType):
            return lambda text: texts.fit_decimal(texts.to_decimal(text), kind.precision, kind.scale)
        if isinstance(kind, types.TimestampType):
            return self._timestamp
        if type(kind) not in _PARSERS:
            raise BadArgument(f"the field {where} is of the type {kind.simpleString().upper()}, which a field of CSV cannot be")
        return _PARSERS[type(kind)]

    def _timestamp(self, text: str) -> int:
        return texts.with_gmt(lambda form: texts.timestamp_micros(form, self._zone), text)


def _char(options: Options, name: str, default: str) -> str:
    """One character, or none."""
    text = options.text(name, default)
    assert text is not None
    if len(text) > 1:
        raise BadArgument(f"the option {name!r} must be one character, not {text!r:.80}")
    return text


def _whole(bits: int) -> Parse:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or not -(1 << bits - 1) <= int(text) < 1 << bits - 1:
            raise ValueError(text)
        return int(text)

    return parse


# What Java takes for a number, between white space; a letter behind it may say its type.
_FLOAT = re.compile(r"([+-]?(?:NaN|Infinity|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?(?=[fFdD]?$)))[fFdD]?")
_HEX = re.compile(r"[+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+(?=[fFdD]?$)")
_NAMED = {"NaN": "nan", "Inf": "inf", "-Inf": "-inf"}


def _floating(parse: Callable[[str], float]) -> Parse:
    def convert(text: str) -> float:
        if text in _NAMED:
            return float(_NAMED[text])
        text = text.strip(texts.JAVA_SPACE)
        if found := _HEX.match(text):
            return parse(repr(float.fromhex(found.group())))
        if (found := _FLOAT.fullmatch(text)) is None:
            raise ValueError(text)
        return parse(found.group(1))

    return convert


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


def _date(text: str) -> int:
    return texts.with_gmt(texts.date_days, text)


_PARSERS: dict[type[types.DataType], Parse] = {
    types.BooleanType: _boolean,
    types.ByteType: _whole(8),
    types.ShortType: _whole(16),
    types.IntegerType: _whole(32),
    types.LongType: _whole(64),
    types.FloatType: _floating(texts.to_float32),
    types.DoubleType: _floating(float),
    types.StringType: str,
    types.BinaryType: str.encode,
    types.DateType: _date,
    types.TimestampNTZType: texts.local_micros,
}


class _End(Exception):
    """Of the line."""


class Splitter:
    """Splits a line into fields as the CSV parser of Spark does, univocity-parsers, with quotes that are not escaped left in.

    A field is None where nothing is between two separators.
    """

    def __init__(self, sep: str, quote: str, escape: str) -> None:
        self._sep, self._quote, self._escape = sep, quote, escape
        self._fields: list[str | None] = []
        self._escape_escape = "" if escape == quote else escape

    def __call__(self, line: str) -> list[str | None]:
        if (not self._quote or self._quote not in line) and "\n" not in line:
            return [field or None for field in line.split(self._sep)]
        self._line, self._at, self._found, self._fields = line, 0, "", []
        self._char = self._before = ""
        self._unescaped = False
        self._ends = (self._sep, "\n")
        try:
            self._split()
        except _End:
            self._at_end()
        return self._fields

    def _next(self) -> None:
        if self._at >= len(self._line):
            raise _End
        self._char = self._line[self._at]
        self._at += 1

    def _append_until(self, stops: tuple[str, ...]) -> None:
        begin = self._at - 1
        end = min((at for stop in stops if stop and (at := self._line.find(stop, begin)) >= 0), default=len(self._line))
        self._found += self._line[begin:end]
        self._at = end
        self._next()  # at the end of the line, the current character remains the first of the value, as there

    def _emit(self) -> None:
        self._fields.append(self._found)
        self._found = ""

    def _split(self) -> None:
        self._next()
        while self._char != "\n":
            if self._char == self._sep:
                self._fields.append(None)
            else:
                self._unescaped, self._before = False, ""
                if self._char == self._quote:
                    self._quoted()
                else:
                    self._append_until(self._ends)
                self._emit()
            if self._char != "\n":
                self._next()
                if self._char == "\n":
                    self._fields.append(None)

    def _at_end(self) -> None:
        whole = self._char == self._quote and self._before == self._quote
        if not whole:
            if self._char == self._quote and not self._unescaped:
                self._found += self._quote
            whole = self._before != "" and self._char not in self._ends
        if self._found or whole:
            self._emit()
        else:
            self._fields.append(None)

    def _quoted(self) -> None:
        if self._before:  # behind a quote that was not escaped: all up to the separator, quotes included
            self._found = self._quote + self._found
            self._next()
            self._append_until(self._ends)
            return
        self._next()
        while self._before != self._quote or not (self._char <= " " or self._char in self._ends):
            if self._char not in (self._quote, self._escape):
                if self._before == self._quote:
                    self._unescaped = True
                    self._found += self._quote + self._char
                    self._before = self._char
                    return self._quoted()
                if self._before == self._escape:
                    self._found += self._escape
                self._append_until((self._quote, self._escape, self._escape_escape))
                self._before = self._char
                self._next()
            else:
                self._escaped()
                self._before = self._char
                self._next()
                if self._unescaped and self._char in self._ends:
                    return None
        if self._char in self._ends:
            return None
        space = ""
        while self._char <= " " and self._char != self._sep:
            space += self._char
            self._next()
            if self._char == "\n":
                return None
        if self._char != self._sep:
            self._found += self._quote + space + self._char
            self._before = self._char
            self._quoted()
        return None

    def _escaped(self) -> None:
        if self._char == self._escape and self._before == self._escape_escape != "":
            self._found += self._escape
            self._char = ""
        elif self._before == self._escape:
            if self._char == self._quote:
                self._found += self._quote
                self._char = ""
            else:
                self._found += self._before
        elif self._char == self._quote and self._before == self._quote:
            self._found += self._quote
        elif self._before == self._quote:
            self._quote_in_value()

    def _quote_in_value(self) -> None:
        self._found += self._quote
        self._before = self._char
        while self._char not in self._ends:
            if self._char not in (self._quote, self._escape):
                if self._before == self._quote:
                    return self._quote_in_value()
                self._found += self._char
            else:
                self._escaped()
            self._before = self._char
            self._next()
        return None
