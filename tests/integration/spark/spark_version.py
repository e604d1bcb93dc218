"""What an older Spark cannot do, or does otherwise. docs/versions.md and docs/spark/ tell users the same."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyspark

VERSION = tuple(int(part) for part in pyspark.__version__.split(".")[:2])

# Whether Spark reads for all queries of a DataFrame what it has planned for one of them.
KEEPS_PLANS = VERSION >= (4, 1)
# Whether it writes streams with Arrow, as the sink does.
WRITES_STREAMS = VERSION >= (4, 1)

# Whether it tells a stream where a batch begins and how large it may be. Else a stream has no limits, and must name its reader.
PLANS_BATCHES = VERSION >= (4, 2)
READER = {} if PLANS_BATCHES else {"reader": ""}

SURROGATES = re.compile(rb"\xed[\xa0-\xbf]|\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])")


def read_alike(records: Sequence[bytes]) -> Sequence[bytes]:
    """The records that this Spark's JSON reader and that of 4.2, which ours follows, understand alike.

    The parser of 4.0 does not mind surrogates in UTF-8, nor one alone that is escaped in a name.
    """
    return records if VERSION > (4, 0) else [record for record in records if not SURROGATES.search(record)]
