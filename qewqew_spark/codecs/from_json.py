"""JSON objects as rows: the same rows as `spark.read.json` makes of every well-formed record (RFC 8259).

Records go through Arrow's reader, many at once, if Spark would certainly read them the same way. The others go through
Python's `json`, with numbers as they are written, and with Spark's rules for values of another type than their field. A
record that is not well-formed is corrupt as a whole.
"""

from __future__ import annotations

import binascii
import codecs
import json
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import tzinfo
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types

from qewqew_spark.codecs import EMPTY, MALFORMED, MISFIT, NO_OBJECT, NOT_UTF8, Decoded, objects, texts
from qewqew_spark.codecs.arrow_json import MAX_DEPTH, MAX_DIGITS, MAX_NAME, ArrowReader, Runs, odd, readable
from qewqew_spark.codecs.many import Many, many_of
from qewqew_spark.codecs.objects import Column, Fit, Misfit, Unreadable, columns_of, fit_one, shown
from qewqew_spark.codecs.repeated import Object
from qewqew_spark.codecs.unnamed import beyond, names_of, of_json
from qewqew_spark.options import Options

SPACE = b" \t\r\n"
TOGETHER = 64  # records that are decoded as one array
SAMPLE = 16  # records that tell whether numbers are texts


class JsonCodec:
    """See `Codec`; option ``timeZone``: of timestamps without one; ``strict``: a record is one object, else it is corrupt;
    ``fromTexts``: a text in the field of another type counts as `spark.read.csv` reads it, as in rows of CSV that were staged.
    """

    def __init__(self, fields: types.StructType, options: Options) -> None:
        self._zone = texts.zone_option(options.text("timeZone") or "UTC")
        self._strict = options.flag("strict", False)
        self._record = Record()
        from_texts = options.flag("fromTexts", False)

        def fit_of(kind: types.DataType) -> Fit:
            return objects.fit_of(kind, "", lambda leaf, _: leaf_of(leaf, self._zone, self._record, from_texts))

        self._columns = columns_of(fields, [fit_of(field.dataType) for field in fields])
        self._many = [many_of(column.kind, column.type, fit_of, self._zone, from_texts) for column in self._columns]
        self._names = names_of(fields)
        arrow = [pa.field(column.name, column.type) for column in self._columns]
        of_texts = [False, True] if from_texts else [False]
        is_readable = all(readable(field.type) for field in arrow)
        self._readers = [ArrowReader(arrow, self._zone, each) for each in of_texts] if is_readable else []

    def decode(self, values: pa.Array, unnamed: int | None = None) -> Decoded:
        doubtful = odd(values)
        readers = self._readers
        if len(readers) > 1 and not readers[0].suits(values.filter(pa.array(~doubtful))[:SAMPLE]):
            readers = readers[::-1]
        runs = Runs(values, doubtful, readers, unnamed is not None)
        if not runs.left.size and len(runs.pieces) == 1:
            return self._with_unnamed(Decoded(runs.pieces[0], runs.numbers[0]), values, runs, unnamed)
        rows = _Rows(self._strict, self._record)
        left = dict(zip(runs.left.tolist(), values.take(pa.array(runs.left)).to_pylist(), strict=True))
        careful = {number for number, data in left.items() if doubtful[number] or _halves(data)}
        rows.add_plain({number: data for number, data in left.items() if number not in careful})
        for number in sorted(careful):
            rows.add(number, left[number])
        columns = rows.columns(self._columns, self._many)
        records = np.concatenate([*runs.numbers, np.array(rows.numbers, np.int64)])
        before = len(records) - len(rows.numbers)
        order = np.argsort(records, kind="stable")
        found, unseen = beyond(rows.objects, self._names, rows.reasons, unnamed, of_json)
        if not runs.pieces and np.array_equal(order, np.arange(len(order))):
            return Decoded(columns, records, rows.reasons, found, unseen)
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        pieces = zip(*runs.pieces, columns, strict=True)
        columns = [pa.concat_arrays(parts).take(pa.array(order)) for parts in pieces]

        def placed(told: dict[int, Any]) -> dict[int, Any]:
            return {int(places[before + at]): each for at, each in told.items()}

        decoded = Decoded(columns, records[order], placed(rows.reasons), placed(found), unseen)
        return self._with_unnamed(decoded, values, runs, unnamed)

    def _with_unnamed(self, decoded: Decoded, values: pa.Array, runs: Runs, most: int | None) -> Decoded:
        """The same, with what the fields do not name in the records that Arrow has read."""
        if most is None or not (runs.beyond or runs.unsure):
            return decoded
        some = sorted(runs.beyond)[: max(0, most - len(decoded.unnamed))]
        looked = sorted({*some, *runs.unsure})
        objects = [parse(data) for data in values.take(pa.array(looked, pa.int64())).to_pylist()]
        found, _ = beyond(objects, self._names, (), len(looked), of_json)
        rows = np.searchsorted(decoded.records, looked)
        there = {int(rows[at]): each for at, each in found.items()}
        return replace(decoded, unnamed=decoded.unnamed | there, unseen=decoded.unseen + len(runs.beyond) - len(some))


@dataclass
class Record:
    """The record whose values are fitted, as it is written."""

    written: bytes = b""


class _Rows:
    """The rows of records, in the order in which these are added."""

    def __init__(self, strict: bool, record: Record) -> None:
        self._strict = strict
        self._record = record
        self.objects: list[dict[str, Any]] = []  # of each row
        self._records: dict[int, bytes] = {}  # by number
        self.numbers: list[int] = []  # of each row's record
        self.corrupt: dict[int, str] = {}  # reasons, by number of a record

    def add(self, number: int, data: bytes) -> None:
        # A byte order mark alone is too short for Jackson to know it.
        if not self._strict and data != codecs.BOM_UTF8 and not data.removeprefix(codecs.BOM_UTF8).strip(SPACE):
            return  # a blank record gives no row
        found: list[dict[str, Any]] = [{}]
        try:
            if self._strict and not data.lstrip(SPACE).startswith(b"{"):
                data.decode()
                raise Unreadable(NO_OBJECT if data else EMPTY)
            value = parse(data)
            if isinstance(value, dict):
                found = [value]
            elif not isinstance(value, list):
                self.corrupt[number] = f"{NO_OBJECT}: {shown(value)}"
            elif all(isinstance(each, dict) for each in value):
                found = value
            else:
                self.corrupt[number] = f"{MISFIT}: an array must contain only objects to become rows"
        except UnicodeDecodeError as error:
            self.corrupt[number] = f"{NOT_UTF8}: at byte {error.start}"
        except Unreadable as error:
            self.corrupt[number] = str(error)
        self.objects += found
        self.numbers += [number] * len(found)
        self._records[number] = data

    def add_plain(self, records: dict[int, bytes]) -> None:
        """Records that begin and end as an object does, and need not be read carefully."""
        listed = [*records]
        for at in range(0, len(listed), TOGETHER):
            numbers = listed[at : at + TOGETHER]
            found = together([records[number] for number in numbers])
            if found is None:
                for number in numbers:
                    self.add(number, records[number])
            else:
                self.objects += found
                self.numbers += numbers
                self._records |= {number: records[number] for number in numbers}

    @property
    def reasons(self) -> dict[int, str]:
        """By row: of an array of objects, all are corrupt if one is."""
        return {row: self.corrupt[number] for row, number in enumerate(self.numbers) if number in self.corrupt}

    def columns(self, columns: list[Column], many: list[Many]) -> list[pa.Array]:
        """The columns; `corrupt` then has the records in which a value does not fit, too."""
        lost: set[int] = set()
        made = [self._column(column, together, lost) for column, together in zip(columns, many, strict=True)]
        if lost:  # of the array that such a record is, one row is left, of nulls
            gone = np.isin(self.numbers, list(lost))
            left = np.flatnonzero(~gone | np.diff(self.numbers, prepend=-1).astype(bool))
            made = [column.take(pa.array(left, mask=gone[left])) for column in made]
            self.numbers = [self.numbers[row] for row in left]
            self.objects = [self.objects[row] for row in left]
        return made

    def _column(self, column: Column, many: Many, lost: set[int]) -> pa.Array:
        values = [row.get(column.name) for row in self.objects]
        try:
            return many(values)  # nearly always all of them fit
        except (ValueError, TypeError, Inexact, Lost):
            pass
        fitted: list[Any] = []
        for row, value in enumerate(values):
            number = self.numbers[row]
            self._record.written = self._records[number]
            try:
                try:
                    found, misfit = fit_one(column.kind, column.fit, value, column.name)
                except Inexact:
                    self._make_exact(row)
                    found, misfit = fit_one(column.kind, column.fit, self.objects[row].get(column.name), column.name)
            except Lost:
                found, misfit = None, Misfit(value, column.kind, column.name)
                lost.add(number)
            if misfit is not None:
                self.corrupt.setdefault(number, str(misfit))
            fitted.append(found)
        return pa.array(fitted, column.type)

    def _make_exact(self, row: int) -> None:
        """Read the record of the row again, so that what is written in it is known of all its objects and arrays."""
        number = self.numbers[row]
        value = parse(self._records[number], exact=True)
        found = value if isinstance(value, list) else [value]
        first = self.numbers.index(number, max(0, row - len(found) + 1))
        self.objects[first : first + len(found)] = found


class Inexact(Exception):
    """The text of an object or array is wanted, and not known."""


class Lost(Exception):
    """A value that does not fit makes Spark lose the whole record."""


class Array(list[Any]):
    """An array whose text is known."""

    written: str


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else Object(pairs)


def _constant(text: str) -> None:
    raise Unreadable(f"{MALFORMED}: {text} is not a value")


# Numbers as bytes, which tells them from texts, and costs little.
_DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=str.encode,
    parse_float=str.encode,
    parse_constant=_constant,
)


class _ExactDecoder(json.JSONDecoder):
    """Of a well-formed text; tells what is written of each object and array."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=Object, parse_int=str.encode, parse_float=str.encode)
        self.parse_object, self.parse_array = self._object, self._array
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]  # the other one asks for neither

    def _object(self, at: tuple[str, int], *rest: Any) -> tuple[Object, int]:
        found, end = json.decoder.JSONObject(at, *rest)  # type: ignore[attr-defined]
        found.written = at[0][at[1] - 1 : end]
        return found, end

    def _array(self, at: tuple[str, int], *rest: Any) -> tuple[Array, int]:
        values, end = json.decoder.JSONArray(at, *rest)  # type: ignore[attr-defined]
        found = Array(values)
        found.written = at[0][at[1] - 1 : end]
        return found, end


_EXACT = _ExactDecoder()
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a pair


def _halves(data: bytes) -> bool:
    return b"\\" in data and _HALF.search(data) is not None


def parse(data: bytes, exact: bool = False) -> Any:
    """The value, within Jackson's limits; raises `Unreadable` and UnicodeDecodeError."""
    text = data.removeprefix(codecs.BOM_UTF8).decode()
    careful = len(data) > MAX_DIGITS or _halves(data)
    try:
        return _parse(text, careful, exact)
    except RecursionError:
        with _deep_stack():
            return _parse(text, careful, exact)


def _parse(text: str, careful: bool, exact: bool) -> Any:
    try:
        value = (_EXACT if exact else _DECODER).decode(text)
        return _checked(value) if careful else value
    except json.JSONDecodeError as error:
        raise Unreadable(f"{MALFORMED}: at byte {len(text[: error.pos].encode())}: {error.msg.removesuffix(' at')}") from error


def together(records: list[bytes]) -> list[dict[str, Any]] | None:
    """The objects of plain records, which take half the time when they are decoded as one array; None if they are not that.

    A text that nobody knows is between them: else one that is cut could be completed by the next.
    """
    mark = secrets.token_hex(8)
    joined = (b',"%b",' % mark.encode()).join(records).decode()
    try:
        values: list[Any] = _DECODER.decode(f"[{joined}]")
    except (json.JSONDecodeError, Unreadable, RecursionError):
        return None
    found = values[::2]
    return found if len(found) == len(records) and values[1::2] == [mark] * (len(records) - 1) else None


@contextmanager
def _deep_stack() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(limit + 10 * MAX_DEPTH)
    try:
        yield
    except RecursionError as error:
        raise Unreadable(f"{MALFORMED}: nested deeper than {MAX_DEPTH}") from error
    finally:
        sys.setrecursionlimit(limit)


def _checked(value: Any, depth: int = 1) -> Any:
    """The value within Jackson's limits; half of a pair of UTF-16 is a question mark in a text, and not allowed in a name."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, bytes) and len(value.translate(None, b"+-.eE")) > MAX_DIGITS:
        raise Unreadable(f"{MALFORMED}: a number has more than {MAX_DIGITS} digits")
    if not isinstance(value, dict | list):
        return value
    if depth > MAX_DEPTH:
        raise Unreadable(f"{MALFORMED}: nested deeper than {MAX_DEPTH}")
    if isinstance(value, list):
        value[:] = [_checked(each, depth + 1) for each in value]
        return value
    for name in value:
        try:
            if len(name.encode()) > MAX_NAME:
                raise Unreadable(f"{MALFORMED}: a name has more than {MAX_NAME} bytes")
        except UnicodeEncodeError as error:
            raise Unreadable(f"{MALFORMED}: half of a surrogate pair in a name") from error
    if isinstance(value, Object):
        return Object([(name, _checked(each, depth + 1)) for name, each in value.pairs], value.written)
    return {name: _checked(each, depth + 1) for name, each in value.items()}


# Values, as `Fit`: of JSON, numbers are bytes


def leaf_of(kind: types.DataType, zone: tzinfo, record: Record, from_texts: bool = False) -> Fit:
    """How Spark fits a value of the record to a type that holds no others. ``from_texts``: see `JsonCodec`."""
    if from_texts and not isinstance(kind, types.StringType | types.BinaryType):
        return _from_text(kind, leaf_of(kind, zone, record))
    if isinstance(kind, types.BinaryType):
        return lambda value: _binary(value, record)
    if isinstance(kind, types.DecimalType):
        return lambda value: _decimal(value, kind.precision, kind.scale)
    if isinstance(kind, types.TimestampType):
        return lambda value: _timestamp(value, zone)
    return _SCALARS.get(type(kind), objects.refuse)  # `arrow_type` says more of it


def _from_text(kind: types.DataType, fit: Fit) -> Fit:
    """The same, and of a text what `spark.read.csv` makes of it: an empty one is null."""
    of_text = _OF_TEXT.get(type(kind), fit)

    def either(value: Any) -> Any:
        return fit(value) if type(value) is not str else of_text(value) if value else None

    return either


def _whole(bits: int) -> Fit:
    least, beyond = -(1 << bits - 1), 1 << bits - 1

    def fit(value: Any) -> int:
        if type(value) is not bytes:
            raise TypeError(value)
        number = int(value)  # digits alone
        if least <= number < beyond:
            return number
        if bits == 8 and beyond <= number < 256:  # Jackson takes unsigned bytes too
            return number - 256
        raise ValueError(value)

    return fit


_NOT_FINITE = {"NaN": "nan", "+INF": "inf", "+Infinity": "inf", "Infinity": "inf", "-INF": "-inf", "-Infinity": "-inf"}


def _double(value: Any) -> float:
    if type(value) is bytes:
        return float(value) if value != b"-0" else 0.0  # as an integer it has no sign
    return float(_NOT_FINITE.get(_text(value), ""))


def _single(value: Any) -> float:
    if type(value) is bytes and value != b"-0":
        return texts.to_float32(value.decode())
    return _double(value)


def _string(value: Any) -> str:
    if type(value) is str:
        return value
    if type(value) is bytes:
        return value.decode()
    if type(value) is bool:
        return "true" if value else "false"
    if not isinstance(value, dict | list):
        raise TypeError(value)
    written: str | None = getattr(value, "written", None)
    if written is None:
        raise Inexact
    return written


def _text(value: Any) -> str:
    """A text that is not empty."""
    if type(value) is not str or not value:
        raise TypeError(value)
    return value


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(value)
    return value


def _decimal(value: Any, precision: int, scale: int) -> Decimal:
    number = texts.exact_decimal(value.decode()) if type(value) is bytes else texts.to_decimal(_text(value))
    return texts.fit_decimal(number, precision, scale)


def _timestamp(value: Any, zone: tzinfo) -> int:
    if type(value) is bytes:  # seconds; too many of them overflow in Spark
        return int((_whole(64)(value) * 1_000_000 + (1 << 63)) % (1 << 64) - (1 << 63))
    return texts.with_gmt(lambda text: texts.timestamp_micros(text, zone), _text(value))


def _date(value: Any) -> int:
    try:
        return texts.with_gmt(texts.date_days, _text(value))
    except ValueError:
        return texts.stored_days(value)


_BASE64 = re.compile(r"[\x00- ]*[A-Za-z0-9+/]{2}(?:[A-Za-z0-9+/]{2}|[A-Za-z0-9+/]=|==)")
# Behind these, Jackson takes the quote for a character of the four; and it goes on within a character of several bytes.
_CUT = re.compile(r"[A-Za-z0-9+/]|[A-Za-z0-9+/]{2}=")
_WIDE = re.compile(r"[A-Za-z0-9+/]{0,3}[^\x00-\x7f]|[A-Za-z0-9+/]{2}=[^\x00-\x7f]")


def _binary(value: Any, record: Record) -> bytes:
    """Base64. White space may stand in front of each four characters."""
    if type(value) is not str:
        raise TypeError(value)
    found, at = bytearray(), 0
    while (four := _BASE64.match(value, at)) is not None:
        found += binascii.a2b_base64(four.group())
        at = four.end()
    rest = value[at:].lstrip(texts.JAVA_SPACE)
    wide = _WIDE.match(rest)
    if _CUT.fullmatch(rest) or (wide and wide.group().encode(errors="surrogatepass") in record.written):  # not as an escape
        raise Lost
    if rest:
        raise ValueError(value)
    return bytes(found)


_SCALARS: dict[type[types.DataType], Fit] = {
    types.BooleanType: _boolean,
    types.ByteType: _whole(8),
    types.ShortType: _whole(16),
    types.IntegerType: _whole(32),
    types.LongType: _whole(64),
    types.FloatType: _single,
    types.DoubleType: _double,
    types.StringType: _string,
    types.DateType: _date,
    types.TimestampNTZType: lambda value: texts.local_micros(_text(value)),
}

_OF_TEXT: dict[type[types.DataType], Fit] = {
    types.BooleanType: texts.to_boolean,
    types.ByteType: texts.whole_of(8),
    types.ShortType: texts.whole_of(16),
    types.IntegerType: texts.whole_of(32),
    types.LongType: texts.whole_of(64),
    types.FloatType: texts.csv_float32,
    types.DoubleType: texts.csv_float,
    types.DateType: lambda value: texts.with_gmt(texts.date_days, value),  # digits are a year, not a number of days
}
