"""crc32 as zlib has it, by the processor's own instructions where zlib-ng is installed: four to fifteen times as fast.

Spark's executors read batches with this package and the libraries of their own Python; without zlib-ng the values are the same.

Not isal: its AVX-512 code returns without `vzeroupper`, which made all of Python up to four times as slow on some processors.
"""

try:
    from zlib_ng.zlib_ng import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
