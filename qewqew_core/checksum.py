"""crc32 of a part, from that of the whole: a lease does not read the records to give their checksum."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # of zlib.crc32, bits reversed


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


_SQUARES = [1 << 30]  # x^1, x^2, x^4, x^8 … (the highest bit stands for x^0)
for _ in range(31):
    _SQUARES.append(_multiply(_SQUARES[-1], _SQUARES[-1]))


@lru_cache(1024)  # boundaries of an index often lie equally far apart
def _power(exponent: int) -> int:
    """x^exponent."""
    power = 1 << 31
    for square in _SQUARES:
        if exponent & 1:
            power = _multiply(square, power)
        exponent >>= 1
    return power


def _shifted(crc: int, bits: int) -> int:
    """crc·x^bits."""
    return _multiply(crc, _power(bits % (2**32 - 1)))  # x^(2^32 - 1) is 1


def crcs_of_rest(front: int, start: int, ends: Iterable[tuple[int, int]]) -> list[int]:
    """The crc32 of the bytes from ``start`` to each of the ends, given that of all before ``start``.

    ``ends``, which rise: (offset, crc32 of all before it). crc(A+B) = crc(A)·x^(8·len B) + crc(B) over GF(2): the identity
    behind zlib's crc32_combine.
    """
    result = []
    for offset, whole in ends:
        front, start = _shifted(front, 8 * (offset - start)), offset
        result.append(whole ^ front)
    return result


def crc_of_front(whole: int, rest: int, rest_bytes: int) -> int:
    """The crc32 of A, given those of A+B and of B, and the length of B."""
    return _shifted(whole ^ rest, -8 * rest_bytes)
