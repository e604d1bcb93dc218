"""JSON objects as rows: what `spark.read.json` makes of every record that is well-formed (RFC 8259).

Records go through Arrow's reader, many at once, where it is certain that Spark would read the same. The others go through
Python's `json`, with numbers as they are written, and with Spark's rules for values that are not of the type of their field. A
record that is not well-formed is corrupt as a whole.
"""

from __future__ import annotations

import binascii
import codecs
import json.decoder
import json.scanner
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import tzinfo
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types

from qewqew_spark.codecs import EMPTY, MALFORMED, MISFIT, NO_OBJECT, NOT_UTF8, Decoded, objects, texts
from qewqew_spark.codecs.arrow_json import MAX_DEPTH, MAX_DIGITS, MAX_NAME, ArrowReader, Runs, odd, readable
from qewqew_spark.codecs.moments import dates, timestamps
from qewqew_spark.codecs.objects import Column, Fit, Misfit, Object, Unreadable, columns_of, fit_one, shown
from qewqew_spark.options import Options

OPTIONS = frozenset(["timeZone", "strict"])
SPACE = b" \t\r\n"


class JsonCodec:
    """See `Codec`; option ``timeZone``: of timestamps without one; ``strict``: a record is one object, else it is corrupt."""

    def __init__(self, fields: types.StructType, options: Options) -> None:
        self._zone = texts.zone_option(options.text("timeZone") or "UTC")
        self._strict = options.flag("strict", False)
        self._columns = columns_of(fields, [fit_of(field.dataType, self._zone) for field in fields])
        self._ascii = {field.name: fit_of(field.dataType, self._zone, ascii_only=True) for field in fields}
        arrow = [pa.field(column.name, column.type) for column in self._columns]
        self._arrow = ArrowReader(arrow, self._zone) if all(readable(field.type) for field in arrow) else None

    def decode(self, values: pa.Array) -> Decoded:
        doubtful = odd(values)
        runs = Runs(values, doubtful, self._arrow)
        if not runs.left.size and len(runs.pieces) == 1:
            return Decoded(runs.pieces[0])
        rows = _Rows(self._strict, self._ascii)
        left = values.take(pa.array(runs.left)).to_pylist()
        for number, data, careful in zip(runs.left.tolist(), left, doubtful[runs.left].tolist(), strict=True):
            rows.add(number, data, careful)
        pieces = [*runs.pieces, rows.columns(self._columns, self._zone)]
        numbers = [*runs.numbers, np.array(rows.numbers, np.int64)]
        records = np.concatenate(numbers)
        order = np.argsort(records, kind="stable")
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        before = len(records) - len(rows.numbers)
        columns = [pa.concat_arrays(parts).take(pa.array(order)) for parts in zip(*pieces, strict=True)]
        return Decoded(columns, records[order], {int(places[before + at]): reason for at, reason in rows.reasons.items()})


class _Rows:
    """The rows of records, which are added one after the other."""

    def __init__(self, strict: bool, ascii_fits: Mapping[str, Fit]) -> None:
        self._strict = strict
        self._ascii_fits = ascii_fits
        self._objects: list[dict[str, Any]] = []  # of each row
        self._records: dict[int, bytes] = {}  # by number
        self.numbers: list[int] = []  # of each row's record
        self.corrupt: dict[int, str] = {}  # reasons, by number of a record

    def add(self, number: int, data: bytes, careful: bool) -> None:
        if not self._strict and not data.strip(SPACE):
            return  # a blank record is no row
        found: list[dict[str, Any]] = [{}]
        try:
            if self._strict and not data.lstrip(SPACE).startswith(b"{"):
                data.decode()
                raise Unreadable(NO_OBJECT if data else EMPTY)
            value = parse(data, careful)
            if isinstance(value, dict):
                found = [value]
            elif not isinstance(value, list):
                self.corrupt[number] = f"{NO_OBJECT}: {shown(value)}"
            elif all(isinstance(each, dict) for each in value):
                found = value
            else:
                self.corrupt[number] = f"{MISFIT}: an array with something else than objects in it is no rows"
        except UnicodeDecodeError as error:
            self.corrupt[number] = f"{NOT_UTF8}: at byte {error.start}"
        except Unreadable as error:
            self.corrupt[number] = str(error)
        self._objects += found
        self.numbers += [number] * len(found)
        self._records[number] = data

    @property
    def reasons(self) -> dict[int, str]:
        """By row: of an array of objects, all are corrupt if one is."""
        return {row: self.corrupt[number] for row, number in enumerate(self.numbers) if number in self.corrupt}

    def columns(self, columns: list[Column], zone: tzinfo) -> list[pa.Array]:
        """The columns; `corrupt` then has the records in which a value does not fit, too."""
        lost: set[int] = set()
        made = [self._column(column, zone, lost) for column in columns]
        if lost:
            gone = np.isin(self.numbers, list(lost))
            made = [column.take(pa.array(np.arange(len(gone)), mask=gone)) for column in made]
        return made

    def _column(self, column: Column, zone: tzinfo, lost: set[int]) -> pa.Array:
        values = [row.get(column.name) for row in self._objects]
        if pa.types.is_temporal(column.type):
            plain = pa.array([value if type(value) is str else None for value in values], pa.string())
            read = dates(plain) if pa.types.is_date(column.type) else timestamps(plain, zone if column.type.tz else None)
            done = read[0].is_valid().to_numpy(zero_copy_only=False)
            rest = [row for row, value in enumerate(values) if value is not None and not done[row]]
            if not rest:
                return read[0]
            fitted = read[0].view(pa.int32() if pa.types.is_date(column.type) else pa.int64()).to_pylist()
        else:
            fitted, rest = values, list(range(len(values)))
        try:
            if len(rest) == len(values):  # nearly always all of them fit
                return pa.array([None if value is None else column.fit(value) for value in values], column.type)
        except (ValueError, TypeError, Inexact, Lost):
            pass
        for row in rest:
            number, fit = self.numbers[row], column.fit
            if self._records[number].isascii():
                fit = self._ascii_fits[column.name]
            try:
                try:
                    fitted[row], misfit = fit_one(column.kind, fit, values[row], column.name)
                except Inexact:
                    self._make_exact(number)
                    fitted[row], misfit = fit_one(column.kind, fit, self._objects[row].get(column.name), column.name)
            except Lost:
                fitted[row], misfit = None, Misfit(values[row], column.kind, column.name)
                lost.add(number)
            if misfit is not None:
                self.corrupt.setdefault(number, str(misfit))
        return pa.array(fitted, column.type)

    def _make_exact(self, number: int) -> None:
        """Read the record again, so that what is written in it is known of all its objects and arrays."""
        value = parse(self._records[number], careful=True, exact=True)
        first = bisect_left(self.numbers, number)
        found = value if isinstance(value, list) else [value]
        self._objects[first : first + len(found)] = found


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
    raise Unreadable(f"{MALFORMED}: {text} is no value")


class _Exact(json.JSONDecoder):
    """Knows what is written, and is some times slower than the scanner in C."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=Object, **_NUMBERS)
        # The parts of Python's scanner that is not in C are not in the descriptions of types.
        scan: Any = json.scanner
        parts: Any = json.decoder
        self.parse_object = self._kept(parts.JSONObject, lambda value: value)
        self.parse_array = self._kept(parts.JSONArray, Array)
        self.scan_once = scan.py_make_scanner(self)

    @staticmethod
    def _kept(parse: Callable[..., Any], made: Callable[[Any], Any]) -> Callable[..., Any]:
        def kept(begin: tuple[str, int], *more: Any) -> tuple[Any, int]:
            value, end = parse(begin, *more)
            value = made(value)
            value.written = begin[0][begin[1] - 1 : end]
            return value, end

        return kept


# Numbers as bytes, which tells them from texts, and costs little.
_NUMBERS: Any = {"parse_int": str.encode, "parse_float": str.encode, "parse_constant": _constant}
_DECODER, _EXACT = json.JSONDecoder(object_pairs_hook=_object, **_NUMBERS), _Exact()
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a pair


def parse(data: bytes, careful: bool, exact: bool = False) -> Any:
    """The value; raises `Unreadable` and UnicodeDecodeError. ``careful``: it may be beyond a limit of Jackson's."""
    text = data.removeprefix(codecs.BOM_UTF8).decode()
    careful = careful or (b"\\u" in data and _HALF.search(data) is not None)
    try:
        return _parse(text, careful, exact)
    except RecursionError:
        with _deep_stack():
            return _parse(text, careful, exact)


def _parse(text: str, careful: bool, exact: bool) -> Any:
    try:
        value = (_EXACT if exact else _DECODER).decode(text)
    except json.JSONDecodeError as error:
        raise Unreadable(f"{MALFORMED}: at byte {len(text[: error.pos].encode())}: {error.msg.removesuffix(' at')}") from error
    return _checked(value) if careful else value


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


def fit_of(kind: types.DataType, zone: tzinfo, ascii_only: bool = False) -> Fit:
    """What Spark makes of a value for a type; ``ascii_only``: any other character is written as an escape."""
    if isinstance(kind, types.StructType):
        return objects.struct(kind, [fit_of(field.dataType, zone, ascii_only) for field in kind])
    if isinstance(kind, types.ArrayType):
        return objects.array(kind, fit_of(kind.elementType, zone, ascii_only))
    if isinstance(kind, types.MapType):
        return objects.mapping(kind, fit_of(kind.valueType, zone, ascii_only))
    if isinstance(kind, types.BinaryType):
        return lambda value: _binary(value, ascii_only)
    if isinstance(kind, types.DecimalType):
        return lambda value: _decimal(value, kind.precision, kind.scale)
    if isinstance(kind, types.TimestampType):
        return lambda value: _timestamp(value, zone)
    return _SCALARS.get(type(kind), objects.refuse)  # `arrow_type` says more of it


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


def _binary(value: Any, ascii_only: bool) -> bytes:
    """Base64. White space may stand in front of each four characters."""
    if type(value) is not str:
        raise TypeError(value)
    found, at = bytearray(), 0
    while (four := _BASE64.match(value, at)) is not None:
        found += binascii.a2b_base64(four.group())
        at = four.end()
    rest = value[at:].lstrip(texts.JAVA_SPACE)
    if _CUT.fullmatch(rest) or (_WIDE.match(rest) and not ascii_only):
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
