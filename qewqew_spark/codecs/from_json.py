"""JSON objects as rows: what `spark.read.json` makes of the same texts.

Records go through Arrow's reader, many at once, but for those that could be understood differently there: they are looked for
before and after. They go through `plain_json`, and the odd ones through `jackson`, with the rules of Spark's JacksonParser for
values that do not fit.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from datetime import tzinfo
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
from pyspark.sql import types

from qewqew_spark.codecs import EMPTY, MALFORMED, MISFIT, NO_OBJECT, NOT_UTF8, SEVERAL, Decoded, jackson, merged, texts
from qewqew_spark.codecs.columns import arrays, arrow_fields
from qewqew_spark.codecs.jackson import (
    ARRAY,
    END_ARRAY,
    END_OBJECT,
    FALSE,
    FLOAT,
    INTEGER,
    NAME,
    NULL,
    OBJECT,
    SPACE,
    STRING,
    TRUE,
    Malformed,
    Reader,
)  # fmt: skip
from qewqew_spark.codecs.moments import Mask, dates, timestamps
from qewqew_spark.codecs.plain_json import PlainRecords
from qewqew_spark.options import Options

OPTIONS = frozenset(["timeZone", "strict"])
FEW = 64  # records that are not worth another call of Arrow's reader
TRIES = 4  # times as many records as there are go into calls that fail
JOINED = 1 << 26  # bytes that are given to Arrow's reader at once

Convert = Callable[[Reader], Any]
Row = list[Any]


class JsonCodec:
    """See `Codec`; option ``timeZone``: of timestamps without one; ``strict``: a record is one object, else it is corrupt."""

    def __init__(self, fields: types.StructType, options: Options) -> None:
        self._fields = arrow_fields(fields)
        zone = texts.zone_option(options.text("timeZone") or "UTC")
        self._fast = _Fast(self._fields, zone) if all(_fast_type(field.type) for field in self._fields) else None
        self._plain = PlainRecords(fields, zone)
        records = _Records(fields, zone)
        self._read = records.strict if options.flag("strict", False) else records.lenient

    def decode(self, values: pa.Array) -> Decoded:
        pieces, numbers, slow = self._read_runs(values)
        rows: list[Row] = []
        of_rows: list[int] = []
        bad: dict[int, str] = {}  # by number in `rows`
        for number in slow:
            data = values[number].as_py()
            row = self._plain.read(data)
            found, reason = self._read(data) if row is None else ([row], None)
            for row in found:
                if reason is not None:
                    bad[len(rows)] = reason
                rows.append(row)
                of_rows.append(number)
        if not slow and len(pieces) == 1:
            return Decoded(pieces[0])
        return merged([*pieces, arrays(rows, self._fields)], [*numbers, np.array(of_rows, np.int64)], bad)

    def _read_runs(self, values: pa.Array) -> tuple[list[list[pa.Array]], list[npt.NDArray[np.int64]], list[int]]:
        """Columns of what Arrow has read, the numbers of the records in them, and of those that it has not."""
        pieces, numbers = [], []
        slow = np.ones(len(values), bool)
        runs = [] if self._fast is None else [np.flatnonzero(~odd(values))]
        patience = TRIES * len(values)
        while runs and self._fast is not None:
            records = runs.pop()
            if not records.size or patience <= 0:
                continue
            found = self._fast.read(values if records.size == len(values) else values.take(pa.array(records)))
            if found is not None:
                columns, certain = found
                pieces.append(columns)
                numbers.append(records[certain])
                slow[records[certain]] = False
            elif records.size > FEW:
                patience -= records.size
                runs += reversed(np.array_split(records, 2))
        return pieces, numbers, np.flatnonzero(slow).tolist()


def _fast_type(kind: pa.DataType) -> bool:
    """Does Arrow's reader give this type, or what it is made of here?"""
    if pa.types.is_struct(kind):
        return all(_fast_type(kind.field(at).type) for at in range(kind.num_fields))
    if pa.types.is_list(kind):
        return _fast_type(kind.value_type)
    return not (pa.types.is_map(kind) or pa.types.is_binary(kind))


class _Fast:
    """Arrow's reader, for records of which it is certain that Spark would read the same."""

    def __init__(self, fields: list[pa.Field], zone: tzinfo) -> None:
        self._types = [field.type for field in fields]
        self._zone = zone
        self._options = pj.ParseOptions(
            explicit_schema=pa.schema([pa.field(field.name, _read_as(field.type)) for field in fields]),
            unexpected_field_behavior="ignore",
        )

    def read(self, values: pa.Array) -> tuple[list[pa.Array], Mask] | None:
        """Columns of the records that are not `odd` and of which the reading is certain, and which these are; None: of none."""
        certain = np.ones(len(values), bool)
        table = self._table(values)
        if isinstance(table, list):  # without these it should go well
            certain[table] = False
            table = self._table(values.filter(pa.array(certain)))
        if not isinstance(table, pa.Table):
            return None
        doubtful = np.zeros(len(table), bool)
        columns = []
        for kind, column in zip(self._types, table.columns, strict=True):
            made, doubts = self._made(column.combine_chunks(), kind)
            columns.append(made)
            if doubts is not None:
                doubtful |= doubts
        if doubtful.any():
            certain[np.flatnonzero(certain)[doubtful]] = False
            columns = [column.filter(pa.array(~doubtful)) for column in columns]
        return columns, certain

    def _table(self, values: pa.Array) -> pa.Table | list[int] | None:
        """What Arrow reads; if it cannot, the records at which it stops; None if it does not say where."""
        if not len(values):
            return self._options.explicit_schema.empty_table()
        ends = np.cumsum(np.asarray(pc.binary_length(values)) + np.int64(1))
        if ends[-1] > JOINED and len(values) > 1:
            return None
        line = pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)
        joined = pc.binary_join(line, b"\n")[0].as_buffer()
        stops: list[int] = []
        begin = 0
        while begin < len(values):
            rest = joined.slice(int(ends[begin - 1]) if begin else 0)
            options = pj.ReadOptions(use_threads=False, block_size=len(rest) + 1)
            try:
                table = pj.read_json(pa.BufferReader(rest), options, self._options)
                break
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                row = _ROW.search(str(error))
                if row is None or begin + int(row[1]) >= len(values):
                    return None
                begin += int(row[1])
            stops.append(begin)
            begin += 1
            if len(stops) > len(values) // FEW:  # what is behind may be as wrong
                stops += range(begin, len(values))
                break
        return stops or (table if len(table) == len(values) else None)

    def _made(self, column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Mask | None]:
        """The column as Spark wants it of the one that was read, and in which rows it may be wrong (None: in none)."""
        if isinstance(column, pa.ChunkedArray):
            column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        if pa.types.is_date(kind):
            return dates(column)
        if pa.types.is_timestamp(kind):
            return timestamps(column, None if kind.tz is None else self._zone)
        if pa.types.is_floating(kind):
            # Of a number beyond the largest one becomes infinity; Spark takes -0 for 0, and -0.0 for -0.0.
            numbers = np.asarray(column.fill_null(1))
            return column, ~np.isfinite(numbers) | ((numbers == 0) & np.signbit(numbers))
        if pa.types.is_decimal(kind):
            # Arrow does not check the precision here.
            limit = pa.scalar(Decimal(10) ** (kind.precision - kind.scale), pa.decimal256(76, kind.scale))
            large = pc.greater_equal(pc.abs(column.cast(pa.decimal256(76, kind.scale))), limit)
            return column.cast(kind, safe=False), np.asarray(large.fill_null(False))
        if pa.types.is_struct(kind):
            found = [self._made(column.field(at), kind.field(at).type) for at in range(kind.num_fields)]
            inner = [mask for _, mask in found if mask is not None]
            made = pa.StructArray.from_arrays([each for each, _ in found], fields=list(kind), mask=column.is_null())
            return made, np.logical_or.reduce(inner) & np.asarray(column.is_valid()) if inner else None
        if pa.types.is_list(kind):
            values, mask = self._made(column.flatten(), kind.value_type)
            rows = None
            if mask is not None:
                rows = np.zeros(len(column), bool)
                rows[np.asarray(pc.list_parent_indices(column))[mask]] = True
            offsets = pc.list_value_length(column).fill_null(0)
            bounds = np.concatenate([[0], np.cumsum(np.asarray(offsets))]).astype(np.int32)
            return pa.ListArray.from_arrays(pa.array(bounds), values, type=kind, mask=column.is_null()), rows
        return column, None


def _read_as(kind: pa.DataType) -> pa.DataType:
    """The type as which Arrow's reader is to read a column: dates and timestamps are made of texts, see `moments`."""
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_decimal(kind):
        return pa.decimal128(38, kind.scale)
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _read_as(each.type)) for each in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", _read_as(kind.value_type)))
    return kind


_ROW = re.compile(r" in row ([0-9]+)$")
_AFTER_OBJECT = np.zeros(256, bool)
_AFTER_OBJECT[list(b",}]")] = True
# Behind an object within another one, white space may precede what may stand there.
_BEHIND = re.compile(rb"[ \t\r\n]*[,}\]]")
_INF = re.compile(rb"[:\[,][ \t\r\n]*-?Inf(?!inity)")
_IN_NUMBER = np.zeros(256, bool)
_IN_NUMBER[list(b"0123456789.eE+-")] = True
_LONG_NUMBER = re.compile(rb"(?<![0-9.eE+-])[0-9.eE+-]{%d}" % jackson.MAX_DIGITS)
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"{[")], _STEPS[list(b"}]")] = 1, -1
_SAMPLES = 16  # that are taken of the digits of a long number


def odd(values: pa.Array) -> Mask:
    """The records that Arrow's reader might read differently from Jackson, or not survive.

    It reads object after object, whatever is between them: two of one record, or one in the place of an empty record. It stops
    at a NUL byte, and crashes on some values that are no objects. So each record must begin and end as an object does, and
    behind a closing brace there must be what goes on within an object or array, or the next record.
    """
    lengths = np.asarray(pc.binary_length(values))
    if not lengths.any():
        return np.ones(len(values), bool)
    bounds = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    whole = values.buffers()[2].slice(int(bounds[0]), int(bounds[-1] - bounds[0]))
    data, begins, ends = np.frombuffer(whole, np.uint8), bounds[:-1] - bounds[0], bounds[1:] - bounds[0]

    # Of an empty record these are other bytes.
    wrong: Mask = (begins == ends) | (data[np.minimum(begins, data.size - 1)] != ord("{")) | (data[ends - 1] != ord("}"))
    same = np.empty(len(data), bool)  # used again and again: fresh memory costs more than the comparison
    closing = np.flatnonzero(np.equal(data, ord("}"), out=same)[:-1])
    inner = closing[~_AFTER_OBJECT[data[closing + 1]]]
    if not np.array_equal(inner, ends[:-1] - 1):
        for at in np.setdiff1d(inner, ends - 1).tolist():
            record = np.searchsorted(ends, at, "right")
            wrong[record] |= _BEHIND.match(whole, at + 1, int(ends[record])) is None
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        wrong |= [not _is_utf8(record) for record in values.to_pylist()]
    capitals = np.flatnonzero(np.equal(data, ord("I"), out=same)[:-1])
    if (data[capitals + 1] == ord("n")).any():
        wrong[np.searchsorted(ends, [found.start() for found in _INF.finditer(whole)], "right")] = True
    if lengths.max() > jackson.MAX_DIGITS:
        wrong |= _beyond_limits(whole, data, begins, ends)
    return wrong


def _beyond_limits(whole: pa.Buffer, data: npt.NDArray[np.uint8], begins: Any, ends: Any) -> Mask:
    """In which records may there be a name, a nesting or a number that is too long for Jackson?"""
    wrong, lengths = np.zeros(len(ends), bool), ends - begins
    for record in np.flatnonzero(lengths > jackson.MAX_NAME).tolist():
        text = data[begins[record] : ends[record]]
        quotes = np.flatnonzero((text[1:] == ord('"')) & (text[:-1] != ord("\\")))
        wrong[record] |= quotes.size > 1 and np.diff(quotes).max() > jackson.MAX_NAME
    if lengths.max() > 2 * jackson.MAX_DEPTH:  # what opens closes, too
        opening = np.searchsorted(ends, np.flatnonzero((data == ord("{")) | (data == ord("["))), "right")
        for record in np.flatnonzero(np.bincount(opening, minlength=len(ends)) > jackson.MAX_DEPTH).tolist():
            steps = _STEPS[data[begins[record] : ends[record]]]
            wrong[record] |= np.cumsum(steps, dtype=np.int64).max() > jackson.MAX_DEPTH
    samples = _IN_NUMBER[data[:: jackson.MAX_DIGITS // _SAMPLES]].tobytes()
    if b"\1" * _SAMPLES in samples:
        wrong[np.searchsorted(ends, [found.start() for found in _LONG_NUMBER.finditer(whole)], "right")] = True
    return wrong


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class _Misfit(ValueError):
    """A value is not of the type of its field."""


class _Partial(Exception):
    """Something in an array, a map or a struct does not fit; ``value`` is what is left of it."""

    def __init__(self, value: Any, reason: str) -> None:
        super().__init__(reason)
        self.value = value
        self.reason = reason


class _Records:
    """Reads record by record, as Spark's JacksonParser does."""

    def __init__(self, fields: types.StructType, zone: tzinfo) -> None:
        self._zone = zone
        self._null: Row = [None] * len(fields.names)
        self._object = self._object_reader(fields)

    def lenient(self, data: bytes) -> tuple[list[Row], str | None]:
        """The rows of a record, and why it is corrupt (None: it is not)."""
        try:
            reader = _reader(data)
            if reader.next() is None:
                return [], None  # a blank line is none
            return self._root(reader)
        except Malformed:
            return [self._null], MALFORMED
        except _Misfit:
            return [self._null], MISFIT

    def strict(self, data: bytes) -> tuple[list[Row], str | None]:
        """As `lenient`, but one row always: a record is one object in UTF-8."""
        if not data:
            return [self._null], EMPTY
        if not _is_utf8(data):
            return [self._null], NOT_UTF8
        if not data.lstrip(SPACE).startswith(b"{"):
            return [self._null], NO_OBJECT
        reader = Reader(data)
        try:
            reader.next()
            rows, reason = self._root(reader)
            rest = data[reader.at :].strip(SPACE)
            if not rest and reason != MALFORMED:
                return rows, reason
            if reason is None and rest.startswith(b",") and _is_json(b"[" + rest[1:] + b"]"):
                return [self._null], SEVERAL
        except Malformed:
            pass
        return [self._null], MALFORMED

    def _root(self, reader: Reader) -> tuple[list[Row], str | None]:
        if reader.token == OBJECT:
            row, reason = self._object(reader)
            return [row], reason
        if reader.token != ARRAY:
            return [self._null], NO_OBJECT
        rows, reason = [], None
        while reader.next() not in (None, END_ARRAY):
            if reader.token != OBJECT:
                raise _Misfit("not an object")
            row, trouble = self._object(reader)
            rows.append(row)
            reason = reason or trouble
        return rows, reason

    def _object_reader(self, struct: types.StructType) -> Callable[[Reader], tuple[Row, str | None]]:
        """Reads the fields of an object, and gives the reason if not all of them fit."""
        readers: dict[str | None, tuple[int, Convert]] = {
            field.name: (at, self._converter(field.dataType)) for at, field in enumerate(struct)
        }

        def read(reader: Reader) -> tuple[Row, str | None]:
            row: Row = [None] * len(readers)
            reason = None
            while reader.next() not in (None, END_OBJECT):
                found = readers.get(reader.name)
                if found is None:
                    reader.skip()
                    continue
                at, convert = found
                try:
                    row[at] = convert(reader)
                except _Partial as partial:
                    row[at] = partial.value
                    reason = reason or partial.reason
                except ValueError as error:
                    # As Spark does it, also in the midst of an array, or where the text is no JSON.
                    reason = reason or (MALFORMED if isinstance(error, Malformed) else MISFIT)
                    reader.skip()
            return row, reason

        return read

    def _converter(self, kind: types.DataType) -> Convert:
        """Reads a value of a type; raises `_Misfit`, `_Partial` or `Malformed`."""
        accept = self._acceptor(kind)

        def convert(reader: Reader) -> Any:
            token = reader.next() if reader.token == NAME else reader.token
            while token == NAME:
                token = reader.next()
            return None if token is None or token == NULL else accept(reader, token)

        return convert

    def _acceptor(self, kind: types.DataType) -> Callable[[Reader, str], Any]:
        if isinstance(kind, types.StructType):
            return self._struct(kind)
        if isinstance(kind, types.ArrayType):
            return self._list(kind)
        if isinstance(kind, types.MapType):
            return self._map(kind)
        if isinstance(kind, types.DecimalType):
            return lambda reader, token: _decimal(reader, token, kind.precision, kind.scale)
        if isinstance(kind, types.TimestampType):
            return lambda reader, token: _timestamp(reader, token, self._zone)
        return _SCALARS[type(kind)]

    def _struct(self, kind: types.StructType) -> Callable[[Reader, str], Any]:
        read, names = self._object_reader(kind), kind.names

        def accept(reader: Reader, token: str) -> dict[str, Any]:
            if token != OBJECT:
                raise _misfit(reader)
            row, reason = read(reader)
            value = dict(zip(names, row, strict=True))
            if reason is not None:
                raise _Partial(value, reason)
            return value

        return accept

    def _list(self, kind: types.ArrayType) -> Callable[[Reader, str], Any]:
        convert = self._converter(kind.elementType)

        def accept(reader: Reader, token: str) -> list[Any]:
            if token != ARRAY:
                raise _misfit(reader)
            values, reason = [], None
            while reader.next() not in (None, END_ARRAY):
                try:
                    values.append(convert(reader))
                except _Partial as partial:
                    values.append(partial.value)
                    reason = reason or partial.reason
            if reason is not None:
                raise _Partial(values, reason)
            return values

        return accept

    def _map(self, kind: types.MapType) -> Callable[[Reader, str], Any]:
        convert = self._converter(kind.valueType)

        def accept(reader: Reader, token: str) -> list[tuple[str, Any]]:
            if token != OBJECT:
                raise _misfit(reader)
            entries: list[tuple[str, Any]] = []
            reason, wrong = None, None
            while reader.next() not in (None, END_OBJECT):
                key = jackson.text_of(reader.name or "")
                try:
                    entries.append((key, convert(reader)))
                except _Partial as partial:
                    entries.append((key, partial.value))
                    reason = reason or partial.reason
                except ValueError as error:
                    wrong = wrong or error
                    reader.skip()
            if wrong is not None:
                raise wrong
            if reason is not None:
                raise _Partial(entries, reason)
            return entries

        return accept


def _reader(data: bytes) -> Reader:
    """A reader of what may begin with a byte order mark, or be UTF-16 or UTF-32, which Jackson detects by the zeros in it."""
    if data.startswith(codecs.BOM_UTF8):
        return Reader(data, 3)
    start = (*data[:4], 1, 1, 1, 1)[:4]
    zeros = tuple(not byte for byte in start)
    for encoding, mark, pattern in _WIDE:
        if data.startswith(mark) or (len(data) >= len(mark) and zeros[: len(pattern)] == pattern):
            begin = len(mark) if data.startswith(mark) else 0
            return Reader(data[begin:].decode(encoding, "replace").encode())
    return Reader(data)


_WIDE = [
    ("utf-32-be", codecs.BOM_UTF32_BE, (True, True, True)),
    ("utf-32-le", codecs.BOM_UTF32_LE, (False, True, True, True)),
    ("utf-16-be", codecs.BOM_UTF16_BE, (True,)),
    ("utf-16-le", codecs.BOM_UTF16_LE, (False, True)),
]


def _is_json(data: bytes) -> bool:
    reader = Reader(data)
    try:
        while reader.next() is not None:
            reader.text()
    except Malformed:
        return False
    return True


def _misfit(reader: Reader) -> _Misfit:
    return _Misfit(reader.text())  # Spark reads a string to its end for the message


def _boolean(reader: Reader, token: str) -> bool:
    if token not in (TRUE, FALSE):
        raise _misfit(reader)
    return token == TRUE


def _whole(bits: int) -> Callable[[Reader, str], int]:
    least, beyond = -(1 << bits - 1), 1 << bits - 1

    def accept(reader: Reader, token: str) -> int:
        if token != INTEGER:
            raise _misfit(reader)
        value = int(reader.text())
        if bits == 8 and beyond <= value < 256:  # Jackson takes unsigned bytes too
            return value - 256
        if not least <= value < beyond:
            raise _Misfit("out of range")
        return value

    return accept


# Of texts and, without quotes, of numbers.
_NOT_FINITE = {"NaN": "nan", "+INF": "inf", "+Infinity": "inf", "Infinity": "inf", "-INF": "-inf", "-Infinity": "-inf"}


def _floating(parse: Callable[[str], float]) -> Callable[[Reader, str], float]:
    def accept(reader: Reader, token: str) -> float:
        text = reader.text()
        if token == INTEGER and len(text) < 20:
            return parse(str(int(text)))  # of integers, -0 is 0
        if token in (INTEGER, FLOAT):
            return parse(_NOT_FINITE.get(text, text))
        if token == STRING and text in _NOT_FINITE:
            return float(_NOT_FINITE[text])
        raise _misfit(reader)

    return accept


def _string(reader: Reader, token: str) -> str:
    return jackson.text_of(reader.text()) if token == STRING else texts.java_text(reader.raw())


def _binary(reader: Reader, token: str) -> bytes:
    if token != STRING:
        raise _misfit(reader)
    return reader.base64()


def _decimal(reader: Reader, token: str, precision: int, scale: int) -> Decimal:
    if token not in (INTEGER, FLOAT, STRING):
        raise _misfit(reader)
    text = jackson.text_of(reader.text())
    return texts.fit_decimal(texts.to_decimal(text if token == STRING else text.replace(",", "x")), precision, scale)


def _text(reader: Reader, token: str) -> str:
    """A text that is not empty."""
    if token != STRING or not reader.text():
        raise _misfit(reader)
    return jackson.text_of(reader.text())


def _timestamp(reader: Reader, token: str, zone: tzinfo) -> int:
    if token == INTEGER:  # seconds; too many of them overflow in Spark
        seconds = _whole(64)(reader, token)
        return (seconds * 1_000_000 + (1 << 63)) % (1 << 64) - (1 << 63)
    return texts.with_gmt(lambda text: texts.timestamp_micros(text, zone), _text(reader, token))


def _local(reader: Reader, token: str) -> int:
    return texts.local_micros(_text(reader, token))


def _date(reader: Reader, token: str) -> int:
    text = _text(reader, token)
    try:
        return texts.with_gmt(texts.date_days, text)
    except ValueError:
        return texts.stored_days(text)


_SCALARS: dict[type[types.DataType], Callable[[Reader, str], Any]] = {
    types.BooleanType: _boolean,
    types.ByteType: _whole(8),
    types.ShortType: _whole(16),
    types.IntegerType: _whole(32),
    types.LongType: _whole(64),
    types.FloatType: _floating(texts.to_float32),
    types.DoubleType: _floating(float),
    types.StringType: _string,
    types.BinaryType: _binary,
    types.DateType: _date,
    types.TimestampNTZType: _local,
}
