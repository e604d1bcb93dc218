"""Checksums of parts, without reading them, are those that zlib gives."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import timeit
import zlib
from pathlib import Path

from qewqew_core import checksum
from qewqew_core.crc import crc32

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


def test_the_checksum_of_everything_is_that_of_zlib() -> None:
    some = random.Random(3)
    for size in SIZES:
        data, begun = some.randbytes(size), some.getrandbits(32)
        for view in (data, bytearray(data), memoryview(data)):
            assert crc32(view) == zlib.crc32(data)
            assert crc32(view, begun) == zlib.crc32(data, begun)


SLOWED = """
import sys
sys.path.insert(0, sys.argv[1])
from test_checksum import crc32, time_of_python
before = time_of_python()
for size in (5, 100, 300, 100_000):
    crc32(bytes(size))
    print(round(time_of_python() / before, 2), flush=True)
"""


def time_of_python() -> float:
    front, rest = bytes(20), bytes(100)
    return min(timeit.repeat(lambda: front + rest, number=20_000, repeat=20, timer=time.thread_time))


def test_a_checksum_does_not_slow_down_what_comes_after_it() -> None:
    """It may leave the upper halves of the vector registers in use: then Python takes three times as long from there on."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", SLOWED, str(here)]
    slowed = []
    for _ in range(5):  # something else may begin to run on this processor's other half; a checksum would slow all of them down
        done = subprocess.run(command, cwd=here.parents[2], capture_output=True, text=True, check=True, timeout=300)
        slowed.append(max(map(float, done.stdout.split())))
        if slowed[-1] < 2:
            return
    raise AssertionError(slowed)


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
