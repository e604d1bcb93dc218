"""The rows of the format `qewqew`: the columns of a source, and how the user's schema changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

from qewqew_core.errors import BadArgument
from qewqew_spark.options import ROW_OPTIONS

if TYPE_CHECKING:
    import pyarrow as pa

    from qewqew_spark.options import Options

# Of a queue, and of a batch of one.
SCHEMA = StructType(
    [
        StructField("value", BinaryType()),
        StructField("offset", LongType()),
        StructField("segment", StringType()),
    ]
)
# Of a topic, and of a batch of one.
TOPIC_SCHEMA = StructType(
    [
        StructField("value", BinaryType()),
        StructField("tag", StringType()),
        StructField("id", StringType()),
        StructField("offset", LongType()),
        StructField("number", LongType()),
        StructField("corr_offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("topic", StringType()),
    ]
)


class Rows:
    """What a read delivers of the columns of a source; travels from the driver to the executors.

    Without the option ``codec`` that is any of the source's columns, in any order; with it, the values as ``schema`` types them
    (see `decoding`). Raises `BadArgument` if the schema does not fit.
    """

    def __init__(self, source: StructType, schema: StructType, options: Options) -> None:
        self.schema = schema
        self.decoding = None
        if "codec" in options:
            from qewqew_spark.source.decoding import METADATA, Decoding  # late: it needs Arrow

            metadata = next((field.dataType for field in schema if field.name == METADATA), None)
            wanted = metadata if isinstance(metadata, StructType) else StructType()
            _check(wanted, source, f"the column {METADATA!r} can have")
            self.decoding = Decoding(schema, options)
            self.needs = frozenset(["value", *wanted.names])
        else:
            if lost := sorted(name for name in ROW_OPTIONS if name in options):
                raise BadArgument(f"the option {lost[0]!r} needs the option 'codec', which says what the records are")
            _check(schema, source, "without the option 'codec', a read has")
            if not schema.names:
                raise BadArgument(f"the schema has no columns; name at least one of {', '.join(source.names)}")
            self.needs = frozenset(schema.names)

    def batch(self, raw: pa.RecordBatch, path: str, place: Callable[[int], int]) -> pa.RecordBatch:
        """The rows made of ``raw``, which has at least the columns ``needs``, under the source's names and types.

        ``place(i)``: the offset in the file ``path`` of the i-th raw row, for error messages. Raises `Corrupt` if a record
        does not decode and the options make that an error.
        """
        if self.decoding is not None:
            return self.decoding.batch(raw, path, place)
        import pyarrow as pa  # late: the driver plans reads without it

        columns = [raw.column(field.name) for field in self.schema]
        schema = pa.schema([raw.schema.field(field.name).with_nullable(field.nullable) for field in self.schema])
        if all(field.nullable for field in self.schema):
            return pa.RecordBatch.from_arrays(columns, schema=schema)
        from qewqew_spark.source.not_null import kept

        return kept(columns, schema, False, path, place)


def schema_of(source: StructType, options: Options) -> StructType:
    """The schema of a read whose user gave none. Raises `BadArgument` if one is needed."""
    if "codec" in options:
        raise BadArgument("the option 'codec' needs the fields of the records: call .schema('id BIGINT, …')")
    return source


def _check(wanted: StructType, there: StructType, what: str) -> None:
    types = {field.name: field.dataType for field in there}
    if any(types.get(field.name) != field.dataType for field in wanted) or len(set(wanted.names)) < len(wanted.names):
        raise BadArgument(f"{what} the columns {ddl(there)}, or some of them, not {ddl(wanted)}")


def ddl(fields: Iterable[StructField]) -> str:
    return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in fields) or "none"
