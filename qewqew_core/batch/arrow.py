"""Records as a table of Arrow, for pandas, polars, DuckDB and others in the same process. Arrow's reader of JSON parses them."""

from __future__ import annotations

import io
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from qewqew_core.errors import BadArgument, BadRecord

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = 10_000  # that are parsed at once


def table_of(records: Iterable[bytes], schema: pa.Schema) -> pa.Table:
    """Records, each one JSON object, as rows with these columns. A field that a record lacks is null, others are left out.

    Raises `BadRecord` with the number, from 0, of the first record that does not fit, and `BadArgument` if pyarrow is
    missing or does not read a type of the schema from JSON.
    """
    try:
        import pyarrow as pa
        import pyarrow.json
    except ImportError as error:
        raise BadArgument("for a table of Arrow, pyarrow is needed; install qewqew[files]") from error
    # Arrow casts texts to days, and does not read them.
    texts = pa.schema([field.with_type(pa.string()) if pa.types.is_date(field.type) else field for field in schema])
    parse = pyarrow.json.ParseOptions(texts, newlines_in_values=True, unexpected_field_behavior="ignore")

    def parsed(records: list[bytes]) -> pa.Table:
        # Else an empty record and one with two objects would pass for two.
        if not all(record.strip().startswith(b"{") and record.rstrip().endswith(b"}") for record in records):
            raise pa.ArrowInvalid("it is not one JSON object")
        text = b"\n".join(records)
        read = pyarrow.json.ReadOptions(block_size=max(len(text), 1))
        table = pyarrow.json.read_json(io.BytesIO(text), read, parse)
        if table.num_rows != len(records):
            raise pa.ArrowInvalid("it is not one JSON object")
        table = table.select(schema.names).cast(schema)
        table.validate(full=True)  # that texts are UTF-8, for example
        return table

    tables, at, rest = [schema.empty_table()], 0, iter(records)
    while part := list(islice(rest, _ROWS)):
        try:
            tables.append(parsed(part))
        except pa.ArrowNotImplementedError as error:
            raise BadArgument(f"the schema has a type that Arrow does not read from JSON: {error}") from error
        except pa.ArrowException:
            for number, record in enumerate(part, at):
                try:
                    parsed([record])
                except pa.ArrowException as error:
                    said = str(error).partition(" in row ")[0]
                    raise BadRecord(f"record {number} does not fit the schema: {said}") from error
            raise
        at += len(part)
    return pa.concat_tables(tables)
