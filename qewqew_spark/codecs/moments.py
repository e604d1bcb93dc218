"""Columns of strings as dates and timestamps, many at once; strings that are not in a plain ISO form are left to `texts`."""

from __future__ import annotations

from datetime import UTC, tzinfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qewqew_spark.codecs.texts import DAY, utc_micros

Mask = npt.NDArray[np.bool_]
Longs = npt.NDArray[np.int64]
Ints = npt.NDArray[np.int32]
Chars = npt.NDArray[np.uint8]  # of many texts of one length: a row of their first characters, one of the second …
_DATE, _SECONDS, _OFFSET = 10, 19, 6  # lengths of 2020-02-29, 2020-02-29T12:30:00 and +01:00
_LONGEST = _SECONDS + 10 + _OFFSET
# Of each month of the years 0 to 9999, and of the next one, the first day: asking numpy for each text takes longer than all else.
_FIRST_DAYS = np.arange(-1970 * 12, 8030 * 12 + 1).astype("M8[M]").astype("M8[D]").astype(np.int64)


def dates(column: pa.Array) -> tuple[pa.Array, Mask]:
    """Strings as dates, and which of them are left undone."""
    micros, done = _read(column, UTC, range(_DATE, _DATE + 1))
    days = pa.array((micros // DAY).astype(np.int32), mask=~done)
    return days.view(pa.date32()), np.asarray(column.is_valid()) & ~done


def timestamps(column: pa.Array, zone: tzinfo | None) -> tuple[pa.Array, Mask]:
    """Strings as timestamps, those without a zone in ``zone``, and which are left undone; None: timestamps without a zone."""
    micros, done = _read(column, zone, range(_DATE, _LONGEST + 1))
    kind = pa.timestamp("us") if zone is None else pa.timestamp("us", "UTC")
    return pa.array(micros, mask=~done).view(kind), np.asarray(column.is_valid()) & ~done


def _read(column: pa.Array, zone: tzinfo | None, lengths: range) -> tuple[Longs, Mask]:
    """The microseconds since the epoch of each string, and for which strings they are known."""
    micros, done = np.zeros(len(column), np.int64), np.zeros(len(column), bool)
    found = np.asarray(pc.binary_length(column).fill_null(0))
    for length in np.unique(found):
        if length in lengths:
            rows = np.flatnonzero(found == length)
            texts = column if rows.size == len(column) else column.take(pa.array(rows))
            begin = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset]
            chars = np.frombuffer(texts.buffers()[2], np.uint8, rows.size * length, begin).reshape(rows.size, length)
            chars = np.ascontiguousarray(chars.T)
            zulu = chars[-1] == ord("Z")
            offset = ((chars[-_OFFSET] == ord("+")) | (chars[-_OFFSET] == ord("-"))) & (length > _SECONDS)
            for these, width in (~zulu & ~offset, 0), (zulu, 1), (offset, _OFFSET):
                if these.any() and not (width and zone is None):
                    those = chars if these.all() else chars[:, these]
                    micros[rows[these]], done[rows[these]] = _moments(those, width, zone)
    return micros, done


def _moments(chars: Chars, zone_width: int, zone: tzinfo | None) -> tuple[Longs, Mask]:
    """Microseconds since the epoch of strings of one length, which end with a zone or have none, and which of them are right."""
    rows, length = chars.shape[1], len(chars) - zone_width
    digits = chars - ord("0")  # wraps around below 0
    right = np.ones(rows, bool)

    def number(begin: int, end: int) -> Ints:
        value = np.zeros(rows, np.int32)
        for digit in digits[begin:end]:
            require(digit < 10)
            value *= 10
            value += digit
        return value

    def require(condition: Mask) -> None:
        np.logical_and(right, condition, out=right)

    if not (length == _SECONDS or _SECONDS + 1 < length <= _SECONDS + 10 or (length == _DATE and not zone_width)):
        return np.zeros(rows, np.int64), np.zeros(rows, bool)
    year, month, day = number(0, 4), number(5, 7), number(8, 10)
    require((chars[4] == ord("-")) & (chars[7] == ord("-")) & (month >= 1) & (month <= 12) & (day >= 1))
    months = np.where(right, year * 12 + month - 1, 0)
    days = _FIRST_DAYS[months] + day - 1
    require(days < _FIRST_DAYS[months + 1])
    micros = days * DAY
    if length >= _SECONDS:
        hour, minute, second = number(11, 13), number(14, 16), number(17, 19)
        require((chars[10] == ord("T")) | (chars[10] == ord(" ")))
        require((chars[13] == ord(":")) & (chars[16] == ord(":")) & (hour < 24) & (minute < 60) & (second < 60))
        micros += ((hour * 60 + minute) * 60 + second) * np.int64(1_000_000)
    if length > _SECONDS:
        require(chars[_SECONDS] == ord("."))
        fraction, cut = number(_SECONDS + 1, length), length - _SECONDS - 1 - 6  # those behind the sixth are cut off
        micros += fraction // 10**cut if cut > 0 else fraction * 10**-cut
    if zone_width == _OFFSET:
        hours, minutes = number(length + 1, length + 3), number(length + 4, length + 6)
        require((chars[length + 3] == ord(":")) & (hours < 18) & (minutes < 60))
        micros -= np.where(chars[length] == ord("-"), -60_000_000, 60_000_000) * (hours * 60 + minutes)
    elif not zone_width and zone is not None and zone is not UTC:
        micros[right] = [utc_micros(local, zone) for local in micros[right].tolist()]
    return micros, right
