"""Arrow's JSON reader, used only for records that Spark would certainly read the same way; and which records those are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import tzinfo
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from qewqew_spark.codecs.moments import Mask, dates, timestamps

Counts = npt.NDArray[np.int64]

FEW = 64  # records that are not worth another call of Arrow's reader
STOPS = 8  # of Arrow's reader, at the first records, before these are left alone
TRIES = 4  # times as many records as there are go into calls that fail
PART = 4096  # records; of more, all are read in parts of about this many if it fails
JOINED = 1 << 26  # bytes that are given to Arrow's reader at once
DECIMAL_DIGITS = 28  # with a scale of 38 and an exponent of 9, one less than Arrow's decimals of 76 digits have room for
MAX_DEPTH, MAX_DIGITS, MAX_NAME = 1000, 1000, 50_000  # limits of Jackson, Spark's reader of JSON


class Runs:
    """What Arrow has read of some records, and which are left over. Each reader gets what those before it have left."""

    def __init__(self, values: pa.Array, odd: Mask, readers: Sequence[ArrowReader], unnamed: bool = False) -> None:
        self.beyond: list[int] = []  # if ``unnamed``: the records that have values without a field
        self.unsure: list[int] = []  # or that may have some
        self.pieces: list[list[pa.Array]] = []  # columns
        self.numbers: list[npt.NDArray[np.int64]] = []  # of the records in each piece
        left = np.ones(len(values), bool)
        counted = names_in(values) if unnamed and readers else None
        unsure = left if counted is None else readers[0].unsure(values)
        for reader in readers:
            runs = [np.flatnonzero(left & ~(odd | reader.unfit(values)))]
            patience = (1 + TRIES) * len(values)
            while runs:
                records = runs.pop()
                if not records.size or patience <= 0:
                    continue
                some = values if records.size == len(values) else values.take(pa.array(records))
                found = reader.read(some, counted is not None)
                if found is not None:
                    columns, certain, named = found
                    numbers = records[certain]
                    self.pieces.append(columns)
                    self.numbers.append(numbers)
                    left[numbers] = False
                    if counted is not None and named is not None:
                        self.beyond += numbers[(counted[numbers] > named) & ~unsure[numbers]].tolist()
                        self.unsure += numbers[unsure[numbers]].tolist()
                elif records.size > FEW:
                    patience -= records.size
                    runs += reversed(np.array_split(records, max(2, records.size // PART)))
        self.left = np.flatnonzero(left)


def _has_decimal(kind: pa.DataType) -> bool:
    return pa.types.is_decimal(kind) or any(_has_decimal(kind.field(at).type) for at in range(kind.num_fields))


def _names_in(field: pa.Field) -> list[str]:
    inner = [field.type.field(at) for at in range(field.type.num_fields)]
    return [field.name, *(name for each in inner for name in _names_in(each))]


def readable(kind: pa.DataType) -> bool:
    """Does Arrow's reader give this type, or what it is made of here?"""
    if pa.types.is_struct(kind):
        return all(readable(kind.field(at).type) for at in range(kind.num_fields))
    if pa.types.is_list(kind):
        return readable(kind.value_type)
    return not (pa.types.is_map(kind) or pa.types.is_binary(kind))


class ArrowReader:
    """Arrow's reader, for records that Spark would certainly read the same way. ``from_texts``: for those in which all numbers
    and booleans are texts.
    """

    def __init__(self, fields: list[pa.Field], zone: tzinfo, from_texts: bool = False) -> None:
        self._types = [field.type for field in fields]
        self._zone = zone
        self._decimals = any(map(_has_decimal, self._types)) and not from_texts
        self._countable = not any(":" in name for field in fields for name in _names_in(field))
        self._options = pj.ParseOptions(
            explicit_schema=pa.schema([pa.field(field.name, _read_as(field.type, from_texts)) for field in fields]),
            unexpected_field_behavior="ignore",
        )

    def unfit(self, values: pa.Array) -> Mask:
        """The records that it does not survive, beyond those that are `odd`."""
        return large_numbers(values) if self._decimals else np.zeros(len(values), bool)

    def unsure(self, values: pa.Array) -> Mask:
        """The records in which `names_in` may be wrong."""
        return escaped(values) if self._countable else np.ones(len(values), bool)

    def suits(self, values: pa.Array) -> bool:
        """Whether it can read most of these, none of which may be `odd`."""
        found = self.read(values.filter(pa.array(~self.unfit(values))))
        return found is not None and 2 * int(np.count_nonzero(found[1])) > len(values)

    def read(self, values: pa.Array, named: bool = False) -> tuple[list[pa.Array], Mask, Counts | None] | None:
        """Columns of the records that were certainly read right, and which records these are; None if there are none.

        If ``named``, also what `names_in` counts in each of them if nothing is without a field.

        ``values``: none of them may be `odd`.
        """
        certain = np.ones(len(values), bool)
        table = self._table(values)
        if isinstance(table, list):  # without these it should go well
            certain[table] = False
            table = self._table(values.filter(pa.array(certain)))
        if not isinstance(table, pa.Table):
            return None
        doubtful = np.zeros(len(table), bool)
        columns = []
        counts = np.zeros(len(table), np.int64) if named else None
        for kind, column in zip(self._types, table.columns, strict=True):
            read = column.combine_chunks()
            if counts is not None:
                counts += _names_of(read)
            made, doubts = self._made(read, kind)
            columns.append(made)
            if doubts is not None:
                doubtful |= doubts
        if doubtful.any():
            certain[np.flatnonzero(certain)[doubtful]] = False
            columns = [column.filter(pa.array(~doubtful)) for column in columns]
            counts = None if counts is None else counts[~doubtful]
        return columns, certain, counts

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
            if len(stops) > STOPS + begin // FEW:  # what is behind may be as wrong
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
        if pa.types.is_string(column.type) and not pa.types.is_string(kind):
            return _of_texts(column, kind)
        if pa.types.is_floating(kind):
            # Of a number beyond the largest one becomes infinity; Spark takes -0 for 0, and -0.0 for -0.0.
            numbers = np.asarray(column.fill_null(1))
            return column, ~np.isfinite(numbers) | ((numbers == 0) & np.signbit(numbers))
        if pa.types.is_decimal(kind):
            # Arrow does not check the precision here.
            limit = pa.scalar(Decimal(10) ** (kind.precision - kind.scale), column.type)
            large = pc.greater_equal(pc.abs(column), limit)
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


_PLAIN_WHOLE, _PLAIN_NUMBER = "^-?[0-9]{1,18}$", r"^-?[0-9]{1,17}(\.[0-9]{1,17})?$"


def _of_texts(column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, Mask]:
    """Numbers or booleans that are plainly written in texts, and which ones take a closer look."""
    if pa.types.is_boolean(kind):
        plain = pc.is_in(column, pa.array(["true", "false"]))
    else:
        plain = pc.match_substring_regex(column, _PLAIN_WHOLE if pa.types.is_integer(kind) else _PLAIN_NUMBER)
    sure = pc.if_else(plain, column, pa.scalar(None, pa.string()))
    if pa.types.is_integer(kind):
        whole = sure.cast(pa.int64())
        made = whole.cast(kind, safe=False)
        sure = pc.if_else(pc.equal(whole, made.cast(pa.int64())), column, pa.scalar(None, pa.string()))
    elif pa.types.is_decimal(kind):
        exact = sure.cast(pa.decimal128(36, 18))
        fits = pc.less(pc.abs(exact), pa.scalar(Decimal(10) ** min(17, kind.precision - kind.scale), exact.type))
        made = pc.if_else(fits, exact, pa.scalar(None, exact.type)).cast(kind, safe=False)
        sure = pc.if_else(pc.equal(made.cast(exact.type, safe=False), exact), column, pa.scalar(None, pa.string()))
    else:
        made = sure.cast(kind)
    return made, np.asarray(pc.and_(column.is_valid(), sure.is_null()))


def _read_as(kind: pa.DataType, from_texts: bool) -> pa.DataType:
    """The type as which Arrow's reader reads a column. Dates and timestamps are read as strings, see `moments`."""
    if pa.types.is_temporal(kind) or (from_texts and not pa.types.is_nested(kind)):
        return pa.string()
    if pa.types.is_decimal(kind):
        return pa.decimal256(76, kind.scale)  # has room for what does not fit; for what has none there, see `large_numbers`
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, _read_as(each.type, from_texts)) for each in kind])
    if pa.types.is_list(kind):
        return pa.list_(pa.field("element", _read_as(kind.value_type, from_texts)))
    return kind


_ROW = re.compile(r" in row ([0-9]+)$")
_AFTER_OBJECT = np.zeros(256, bool)
_AFTER_OBJECT[list(b",}]")] = True
# Behind an object within another one, white space may precede what may stand there.
_BEHIND = re.compile(rb"[ \t\r\n]*[,}\]]")
_NOT_FINITE = re.compile(rb"[:\[,][ \t\r\n]*(?:-?Inf|NaN)")
_IN_NUMBER = np.zeros(256, bool)
_IN_NUMBER[list(b"0123456789.eE+-")] = True
_LONG_NUMBER = re.compile(rb"(?<![0-9.eE+-])[0-9.eE+-]{%d}" % MAX_DIGITS)
_EXPONENT = re.compile(rb"[eE][+-]?[0-9]{2}")
_DIGITS = re.compile(rb"[0-9]{%d}" % DECIMAL_DIGITS)
_IS_DIGIT = np.zeros(256, bool)
_IS_DIGIT[list(b"0123456789")] = True
_DIGIT_SAMPLES = 4  # that are taken of this many digits
_IS_SPACE = np.zeros(256, bool)
_IS_SPACE[list(b" \t\r\n")] = True
_COLON = re.compile(rb"\\u003[aA]")
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"{[")], _STEPS[list(b"}]")] = 1, -1
_SAMPLES = 16  # that are taken of the digits of a long number


def odd(values: pa.Array) -> Mask:
    """The records that Arrow's reader might read differently from Jackson, or not survive.

    Arrow reads object after object, whatever stands between them: two objects in one record, or one in place of an empty
    record. It stops at a NUL byte and crashes on some values that are not objects. So each record must start and end like an
    object, and only what may follow inside an object or array, or the next record, may follow a closing brace.
    """
    lengths = np.asarray(pc.binary_length(values))
    if not lengths.any():
        return np.ones(len(values), bool)
    whole, begins, ends = _bytes_of(values)
    data = np.frombuffer(whole, np.uint8)

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
        wrong |= [record.decode("utf-8", "replace").encode() != record for record in values.to_pylist()]
    for word in b"Inf", b"NaN":  # which Arrow's reader takes for numbers, and RFC 8259 does not
        begin, middle, end = word
        capitals = np.flatnonzero(np.equal(data, begin, out=same)[:-2])
        if ((data[capitals + 1] == middle) & (data[capitals + 2] == end)).any():
            found = [match.start() for match in _NOT_FINITE.finditer(whole)]
            wrong[np.searchsorted(ends, found, "right")] = True
    if lengths.max() > MAX_DIGITS:
        wrong |= _beyond_limits(whole, data, begins, ends)
    return wrong


def large_numbers(values: pa.Array) -> Mask:
    """Records with numbers that are too large for Arrow's decimals, which then wrap around, or read wild memory.

    These are exponents of two digits or more, and numbers of more digits than have room once they are multiplied.
    """
    found = np.zeros(len(values), bool)
    if not len(values) or not values.buffers()[2]:
        return found
    whole, _, ends = _bytes_of(values)
    data = np.frombuffer(whole, np.uint8)
    at = np.flatnonzero((data | 0x20) == ord("e"))
    at = at[(at > 0) & (at < len(data) - 1)]
    at = at[_IN_NUMBER[data[at - 1]] & _IN_NUMBER[data[at + 1]]]
    there = [place for place in at.tolist() if _EXPONENT.match(whole, place)]
    if b"\1" * _DIGIT_SAMPLES in _IS_DIGIT[data[:: DECIMAL_DIGITS // _DIGIT_SAMPLES]].tobytes():
        there += [match.start() for match in _DIGITS.finditer(whole)]
    found[np.searchsorted(ends, there, "right")] = True
    return found


def names_in(values: pa.Array) -> Counts:
    """Of each text, how many colons it has that stand before anything but a null: one for each name that has a value.

    Those within strings are counted, too; there, each that an n follows is taken for one before a null.
    """
    if not len(values) or not values.buffers()[2]:
        return np.zeros(len(values), np.int64)
    whole, begins, ends = _bytes_of(values)
    data = np.frombuffer(whole, np.uint8)
    at = np.flatnonzero(data == ord(":"))
    if not at.size:
        return np.zeros(len(values), np.int64)
    last = data.size - 1
    following = data[np.minimum(at + 1, last)]
    doubtful = np.flatnonzero((following == ord("n")) | _IS_SPACE[following])
    if doubtful.size:
        limits = ends[np.searchsorted(ends, at[doubtful], "right")]
        behind = at[doubtful] + 1
        while (spaces := (behind < limits) & _IS_SPACE[data[np.minimum(behind, last)]]).any():
            behind += spaces
        null = (behind < limits) & (data[np.minimum(behind, last)] == ord("n"))
        at = np.delete(at, doubtful[null])
    return np.diff(np.searchsorted(at, np.append(begins[:1], ends)))


def escaped(values: pa.Array) -> Mask:
    """The records that may have a colon which is written as an escape."""
    found = np.zeros(len(values), bool)
    if len(values) and values.buffers()[2]:
        whole, _, ends = _bytes_of(values)
        if (np.frombuffer(whole, np.uint8) == ord("\\")).any():
            found[np.searchsorted(ends, [match.start() for match in _COLON.finditer(whole)], "right")] = True
    return found


def _names_of(column: pa.Array) -> Counts | int:
    """What `names_in` counts of a field, for each row: of its name where it has a value, and of what is within."""
    present = np.asarray(column.is_valid()).astype(np.int64) if column.null_count else 1
    return present + _names_within(column)


def _names_within(column: pa.Array) -> Counts | int:
    kind = column.type
    if pa.types.is_string(kind):
        return names_in(column)
    if pa.types.is_struct(kind):
        return sum((_names_of(each) for each in column.flatten()), start=np.zeros(len(column), np.int64))
    if pa.types.is_list(kind):
        inner = _names_within(column.flatten())
        if isinstance(inner, int):
            return 0
        return np.bincount(np.asarray(pc.list_parent_indices(column)), inner, len(column)).astype(np.int64)
    return 0


def _bytes_of(values: pa.Array) -> tuple[pa.Buffer, npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The bytes of all records, and where each record starts and ends in them."""
    bounds = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
    whole = values.buffers()[2].slice(int(bounds[0]), int(bounds[-1] - bounds[0]))
    return whole, bounds[:-1] - bounds[0], bounds[1:] - bounds[0]


def _beyond_limits(whole: pa.Buffer, data: npt.NDArray[np.uint8], begins: Any, ends: Any) -> Mask:
    """In which records may there be a name, a nesting or a number that is too long for Jackson?"""
    wrong, lengths = np.zeros(len(ends), bool), ends - begins
    for record in np.flatnonzero(lengths > MAX_NAME).tolist():
        text = data[begins[record] : ends[record]]
        quotes = np.flatnonzero((text[1:] == ord('"')) & (text[:-1] != ord("\\")))
        wrong[record] |= quotes.size > 1 and np.diff(quotes).max() > MAX_NAME
    if lengths.max() > 2 * MAX_DEPTH:  # what opens closes, too
        opening = np.searchsorted(ends, np.flatnonzero((data == ord("{")) | (data == ord("["))), "right")
        for record in np.flatnonzero(np.bincount(opening, minlength=len(ends)) > MAX_DEPTH).tolist():
            steps = _STEPS[data[begins[record] : ends[record]]]
            wrong[record] |= np.cumsum(steps, dtype=np.int64).max() > MAX_DEPTH
    samples = _IN_NUMBER[data[:: MAX_DIGITS // _SAMPLES]].tobytes()
    if b"\1" * _SAMPLES in samples:
        wrong[np.searchsorted(ends, [found.start() for found in _LONG_NUMBER.finditer(whole)], "right")] = True
    return wrong
