"""crc32 as zlib has it, by the processor's own instructions where isal is installed: six to ten times as fast.

The executors of Spark read batches with this package and what their Python has: without isal the values are the same. Of a few
bytes zlib is faster: a call of isal takes as long as one of zlib with a hundred bytes.
"""

from zlib import crc32 as short_crc32

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32", "short_crc32"]
