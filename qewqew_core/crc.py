"""crc32 as zlib has it, by the processor's own instructions where isal is installed: six to ten times as fast.

The executors of Spark read batches with this package and what their Python has: without isal the values are the same.
"""

try:
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

__all__ = ["crc32"]
