"""Keys of Iceberg's partitions that Spark has no function for. Executors run this: it needs no library."""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Decimal

_MASK = 0xFFFFFFFF
Value = int | str | bytes | bytearray | Decimal


def bucket(count: int) -> Callable[[Value | None], int | None]:
    """Iceberg's transform of that name. Dates and moments are given as numbers, days and microseconds."""
    return lambda value: None if value is None else (murmur3(_hashed(value)) & 0x7FFFFFFF) % count


def truncated(width: int) -> Callable[[Decimal | None], str | None]:
    """Which of the widths a DECIMAL is in; ``width`` counts in its last digit."""
    return lambda value: None if value is None else str(unscaled(value) // width)


def unscaled(value: Decimal) -> int:
    """The digits as a number, whatever the context of decimals is."""
    sign, digits, _ = value.as_tuple()
    number = int("".join(map(str, digits)))
    return -number if sign else number


def _hashed(value: Value) -> bytes:
    match value:
        case str():
            return value.encode()
        case Decimal():
            number = unscaled(value)
            return number.to_bytes((number + (number < 0)).bit_length() // 8 + 1, "big", signed=True)
        case int():
            return struct.pack("<q", value)
    return bytes(value)


def murmur3(data: bytes) -> int:
    """Murmur3 of 32 bits, x86 variant, seed 0."""
    found, whole = 0, len(data) // 4 * 4
    for (word,) in struct.iter_unpack("<I", data[:whole]):
        found ^= _mixed(word)
        found = ((found << 13 | found >> 19) * 5 + 0xE6546B64) & _MASK
    found ^= _mixed(int.from_bytes(data[whole:], "little")) ^ len(data)
    found = (found ^ found >> 16) * 0x85EBCA6B & _MASK
    found = (found ^ found >> 13) * 0xC2B2AE35 & _MASK
    return found ^ found >> 16


def _mixed(word: int) -> int:
    word = word * 0xCC9E2D51 & _MASK
    return (word << 15 | word >> 17) * 0x1B873593 & _MASK
