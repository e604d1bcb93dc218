"""Checksums of parts, without reading them, are those that zlib gives."""

from __future__ import annotations

import random
import zlib

from qewqew_core.disk import checksum

SIZES = (0, 1, 13, 255, 256, 257, 1023, 1025, 4096, 70_001)


def test_the_checksum_of_any_part_is_that_of_zlib() -> None:
    some = random.Random(1)
    for size in SIZES:
        data = some.randbytes(size)
        parts = checksum.Parts(data)
        for _ in range(300):
            start = some.randint(0, size)
            end, begun = some.randint(start, size), some.getrandbits(32)
            assert parts.crc(start, end, begun) == zlib.crc32(data[start:end], begun)


def test_what_a_crc_is_before_and_behind_other_bytes() -> None:
    some = random.Random(2)
    for size in SIZES:
        data = some.randbytes(size)
        at = sorted(some.randint(0, size) for _ in range(3))
        front, *ends = [(offset, zlib.crc32(data[:offset])) for offset in at]
        wanted = [zlib.crc32(data[front[0] : offset]) for offset, _ in ends]
        assert checksum.crcs_of_rest(front[1], front[0], ends) == wanted
        assert checksum.crc_of_front(ends[0][1], wanted[0], ends[0][0] - front[0]) == front[1]


def test_any_number_of_bytes_can_follow() -> None:
    some = random.Random(3)
    for _ in range(500):
        crc, first, second = some.getrandbits(32), some.getrandbits(33), some.getrandbits(33)
        assert checksum._shifted(checksum._shifted(crc, first), second) == checksum._shifted(crc, first + second)
    for size in (300, 70_000, 20_000_000):  # one digit more each
        zeros = bytes(size)
        assert checksum._shifted(0x12345678, size) == zlib.crc32(zeros, 0x12345678) ^ zlib.crc32(zeros)
