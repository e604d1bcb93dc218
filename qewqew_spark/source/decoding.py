"""The typed read: records, in one of several codecs, as the columns of a schema that the user gives.

The driver plans with a `Decoding`, and the executors decode with it. A codec (`qewqew_spark.codecs`) turns a record into a
row; this module decides about records that do not decode, and makes the columns that are not fields.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import types

from qewqew_core.errors import BadArgument, Corrupt
from qewqew_spark.codecs import Codec, Decoded
from qewqew_spark.codecs.columns import arrow_type
from qewqew_spark.codecs.texts import java_text
from qewqew_spark.codecs.unnamed import written
from qewqew_spark.options import OPTIONS_OF_CODECS, Options, use_spark
from qewqew_spark.source.not_null import kept, promises

MODES = ("PERMISSIVE", "DROPMALFORMED", "FAILFAST")
REASON, METADATA = "_corrupt_reason", "_metadata"
UNNAMED = "_unnamed_fields"  # in one row of each array: in how many records the fields do not name all, and which, as JSON
LOOKED = 20  # records of an array, if no column takes what is found
NAMES, NAME = 100, 200  # the most names, and characters of one, that are told
# The types that the columns besides the fields may have.
_CORRUPT: list[type[types.DataType]] = [types.StringType, types.BinaryType]
_BESIDE: dict[str, list[type[types.DataType]]] = {
    REASON: [types.StringType],
    UNNAMED: [types.StringType],
    METADATA: [types.StructType],
}


class Decoding:
    """Decodes records to the rows of ``schema``; see docs/spark/types.md for its columns and the options.

    Raises `BadArgument` for whatever cannot be decoded. It can be pickled.
    """

    def __init__(self, schema: types.StructType, options: Options) -> None:
        self._given = schema, options
        if (options.text("codec") or "").lower() == "csv":
            raise BadArgument(f"the typed read has no codec csv; for Spark's from_csv, {use_spark('from_csv')}")
        codec = options.choice("codec", OPTIONS_OF_CODECS, "json")
        self._mode = options.choice("mode", MODES, "PERMISSIVE")
        self._record = options.text("columnNameOfCorruptRecord") or "_corrupt_record"
        self._rescued = options.text("rescued")
        if self._rescued is not None and self._rescued not in schema.names:
            raise BadArgument(f"the option 'rescued' names no column of the schema: {self._rescued!r}")
        beside = {self._record, REASON, METADATA, UNNAMED, *([self._rescued] if self._rescued else ())}
        self._unnamed = UNNAMED in schema.names
        fields = [field for field in schema if field.name not in beside]
        for other, own in OPTIONS_OF_CODECS.items():
            if other != codec and (wrong := [name for name in own if name in options]):
                raise BadArgument(f"the codec {codec} has no option {wrong[0]!r}")
        self._codec = _codec(codec, types.StructType(fields).toNullable(), options)
        self._columns, self.schema = _arrow_schema(schema.toNullable()), _arrow_schema(schema)
        self._promises = any(promises(field) for field in self.schema)
        if len(set(schema.names)) < len(schema.names):
            raise BadArgument(f"the schema names a column twice: {', '.join(schema.names)}")
        for field in schema:
            if field.name in beside:
                wanted = [types.StringType] if field.name == self._rescued else _BESIDE.get(field.name, _CORRUPT)
                if type(field.dataType) not in wanted:
                    names = " or ".join(kind.typeName().upper() for kind in wanted)
                    raise BadArgument(f"the column {field.name!r} must be {names}, not {field.dataType.simpleString().upper()}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Decoding, self._given

    def batch(self, raw: pa.RecordBatch, path: str, place: Callable[[int], int]) -> pa.RecordBatch:
        """The rows of raw records, in the layout of the schema.

        ``raw``: the column ``value``, and those that the column ``_metadata`` has as its fields. ``place(i)``: the offset in
        ``path`` of the i-th raw row. Raises `Corrupt` in the mode FAILFAST, for the first record that is corrupt.
        """
        values = raw.column("value")
        decoded = self._codec.decode(values, len(values) if self._rescued else LOOKED if self._unnamed else None)
        if decoded.reasons and self._mode == "FAILFAST":
            row = min(decoded.reasons)
            raise Corrupt(
                f"this record does not decode: {decoded.reasons[row]}; the mode PERMISSIVE would make a row of it",
                path=path,
                offset=place(int(decoded.records[row])),
            )
        if decoded.reasons and self._mode == "DROPMALFORMED":
            decoded = _without_corrupt(decoded)
        fields, rows = iter(decoded.columns), len(decoded.records)
        columns = []
        for field in self._columns:
            if field.name == self._record:
                columns.append(self._corrupt(values, decoded, field.type))
            elif field.name == REASON:
                columns.append(_sparse(decoded.reasons, rows, field.type))
            elif field.name == self._rescued:
                texts = {row: written(found) for row, found in decoded.unnamed.items()}
                columns.append(_sparse(texts, rows, field.type))
            elif field.name == UNNAMED:
                columns.append(_sparse(_summary(decoded), rows, field.type))
            elif field.name == METADATA:
                columns.append(_metadata(raw, decoded, field.type))
            else:
                columns.append(next(fields))
        if not columns:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
        if self._promises:
            drop = self._mode == "DROPMALFORMED"
            return kept(columns, self.schema, drop, path, lambda row: place(int(decoded.records[row])))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _corrupt(self, values: pa.Array, decoded: Decoded, kind: pa.DataType) -> pa.Array:
        """The bytes of each corrupt record, in its rows; in a string, bytes that are not UTF-8 become U+FFFD."""
        found: dict[int, Any] = {}
        for row in decoded.reasons:
            data = values[int(decoded.records[row])].as_py()
            found[row] = data if pa.types.is_binary(kind) else java_text(data)
        return _sparse(found, len(decoded.records), kind)


def _codec(name: str, fields: types.StructType, options: Options) -> Codec:
    """Each is imported where it is used: Spark plans each read in a new process, where imports take longer than all else."""
    if name == "json":
        from qewqew_spark.codecs.from_json import JsonCodec

        return JsonCodec(fields, options)
    if name == "avro":
        from qewqew_spark.codecs.from_avro import AvroCodec

        return AvroCodec(fields, options)
    from qewqew_spark.codecs.from_msgpack import MsgpackCodec

    return MsgpackCodec(fields, options)


def _arrow_schema(schema: types.StructType) -> pa.Schema:
    return pa.schema([pa.field(field.name, arrow_type(field.dataType, field.name), field.nullable) for field in schema])


def _without_corrupt(decoded: Decoded) -> Decoded:
    good = np.ones(len(decoded.records), bool)
    good[list(decoded.reasons)] = False
    places = np.cumsum(good) - 1
    found = {int(places[row]): each for row, each in decoded.unnamed.items()}
    return Decoded([each.filter(pa.array(good)) for each in decoded.columns], decoded.records[good], {}, found, decoded.unseen)


def _summary(decoded: Decoded) -> dict[int, str]:
    """`UNNAMED`, by row."""
    if not decoded.unnamed and not decoded.unseen:
        return {}
    names = Counter[str]()
    for found in decoded.unnamed.values():
        names.update({_PLACES.sub(_anywhere, place)[:NAME] for place, _ in found})
    told = {"records": len(decoded.unnamed) + decoded.unseen, "fields": dict(names.most_common(NAMES))}
    return {0: json.dumps(told)}


# In a place: an element, a value in a map, or a name that is spelled as a text.
_PLACES = re.compile(r"""\[\d+\]|\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}|"(?:[^"\\]|\\.)*\"""")


def _anywhere(place: re.Match[str]) -> str:
    return place[0] if place[0].startswith('"') else place[0][0] + place[0][-1]


def _sparse(values: dict[int, Any], rows: int, kind: pa.DataType) -> pa.Array:
    if not values:
        return pa.nulls(rows, kind)
    return pa.array([values.get(row) for row in range(rows)], kind)


def _metadata(raw: pa.RecordBatch, decoded: Decoded, kind: pa.StructType) -> pa.Array:
    columns = [raw.column(field.name) for field in kind]
    if not np.array_equal(decoded.records, np.arange(len(raw))):
        columns = [column.take(pa.array(decoded.records)) for column in columns]
    return pa.StructArray.from_arrays(columns, fields=list(kind))
