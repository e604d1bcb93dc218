"""What the bytes of a record become: one module per codec, and what several of them share. `source.decoding` uses them.

May import `options`, and no more of this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# Why a record is corrupt: one of these, and mostly a colon and what is particular to this record.
EMPTY = "empty record"
NOT_UTF8 = "not valid UTF-8"
NO_OBJECT = "not a JSON object"
MALFORMED = "malformed JSON"
MISFIT = "a value does not fit the schema"

Places = list[tuple[str, str]]  # of values, each with its text as JSON


@dataclass(frozen=True)
class Decoded:
    """The rows that some records have become, in the order of the records."""

    columns: list[pa.Array]  # the fields, in the order of the schema
    records: npt.NDArray[np.int64]  # of each row the number of its record
    reasons: dict[int, str] = field(default_factory=dict)  # of rows of corrupt records: why they are
    # Of rows of other records: what the fields do not name. Empty unless `decode` is asked for it.
    unnamed: dict[int, Places] = field(default_factory=dict)
    unseen: int = 0  # rows that have some, too, and were not looked at


class Codec(Protocol):
    """Made of the fields to decode and the options, it raises `BadArgument`."""

    def decode(self, values: pa.Array, unnamed: int | None = None) -> Decoded:
        """The rows of records, a binary array without nulls.

        ``unnamed``: look for what the fields do not name, in this many records at least of those that have some; None: in none.
        """
