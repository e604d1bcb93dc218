"""crc32 of a part, computed from checksums of the whole. So a lease gives the checksum of records without reading them, and a
search for frames in a damaged log does not read the same bytes again for each place where one might begin.

crc(A+B) = crc(A)·x^(8·len B) + crc(B), over GF(2): the identity behind zlib's crc32_combine.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from functools import cache

from qewqew_core.crc import crc32

_POLYNOMIAL = 0xEDB88320  # of zlib.crc32, bits reversed: the highest bit stands for x^0, and 1 << 30 for x^1
_PERIOD = 2**32 - 1  # x^(2^32 - 1) is 1
_STEP = 256


def _multiply(a: int, b: int) -> int:
    """a·b modulo the polynomial."""
    product, bit = 0, 1 << 31
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


_SQUARES = [1 << 30]  # x^1, x^2, x^4, x^8 …; the square of the last is the first again
for _ in range(31):
    _SQUARES.append(_multiply(_SQUARES[-1], _SQUARES[-1]))


@cache
def _products(level: int, digit: int) -> tuple[array[int], ...]:
    """What each value of each byte of a crc, the lowest first, is when it is multiplied by x^(8·digit·256^level)."""
    bits, power = [], 1 << 31
    for bit in range(8):
        if digit >> bit & 1:
            power = _multiply(power, _SQUARES[(3 + 8 * level + bit) % 32])
    for _ in range(32):  # of x^0, x^1, …
        bits.append(power)
        power = power >> 1 ^ _POLYNOMIAL if power & 1 else power >> 1
    tables = []
    for byte in range(4):
        table = array("I", [0])
        for bit in range(8):
            product = bits[31 - 8 * byte - bit]
            table.extend([crc ^ product for crc in table])
        tables.append(table)
    return tuple(tables)


def _shifted(crc: int, size: int) -> int:
    """crc·x^(8·size): what it adds to the checksum when ``size`` bytes follow. At most four steps, however many they are."""
    level, size = 0, size % _PERIOD
    while size:
        if digit := size & 255:
            a, b, c, d = _products(level, digit)
            crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24]
        level, size = level + 1, size >> 8
    return crc


def crcs_of_rest(front: int, start: int, ends: Iterable[tuple[int, int]]) -> list[int]:
    """The crc32 of the bytes from ``start`` to each of the ends, given that of all before ``start``.

    ``ends``, which rise: (offset, crc32 of all before it).
    """
    result = []
    for offset, whole in ends:
        front, start = _shifted(front, offset - start), offset
        result.append(whole ^ front)
    return result


def crc_of_front(whole: int, rest: int, rest_bytes: int) -> int:
    """The crc32 of A, given those of A+B and of B, and the length of B."""
    return _shifted(whole ^ rest, -rest_bytes)


class Parts:
    """The crc32 of any part of ``data``. All of it is read once; then no part takes longer than one of a KiB."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._before = array("I", [crc := 0])  # crc32 of all before each multiple of `_STEP`
        for at in range(0, len(data) - _STEP + 1, _STEP):
            crc = crc32(self._data[at : at + _STEP], crc)
            self._before.append(crc)

    def crc(self, start: int, end: int, begun: int) -> int:
        """Of the bytes from ``start`` to ``end``, begun with this one."""
        if end - start <= 4 * _STEP:
            return crc32(self._data[start:end], begun)
        return self._front(end) ^ _shifted(self._front(start) ^ begun, end - start)

    def _front(self, end: int) -> int:
        step = end // _STEP
        return crc32(self._data[step * _STEP : end], self._before[step])
