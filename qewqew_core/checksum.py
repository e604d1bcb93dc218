"""crc32 of a part, from that of the whole: a lease does not read the records to give their checksum."""

from __future__ import annotations

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


def _shifted(crc: int, bits: int) -> int:
    """crc·x^bits."""
    power = 1 << 30  # x^1 (the highest bit stands for x^0)
    while bits:
        if bits & 1:
            crc = _multiply(power, crc)
        power = _multiply(power, power)
        bits >>= 1
    return crc


def crc_of_rest(whole: int, front: int, rest_bytes: int) -> int:
    """The crc32 of B, given those of A+B and of A, and the length of B.

    crc(A+B) = crc(A)·x^(8·len B) + crc(B) over GF(2): the identity behind zlib's crc32_combine.
    """
    return whole ^ _shifted(front, 8 * rest_bytes)


def crc_of_front(whole: int, rest: int, rest_bytes: int) -> int:
    """The crc32 of A, given those of A+B and of B, and the length of B."""
    return _shifted(whole ^ rest, -8 * rest_bytes % (2**32 - 1))  # x^(2^32 - 1) is 1
