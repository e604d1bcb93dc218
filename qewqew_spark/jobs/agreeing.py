"""The schema of the records, where the places of the outputs already have columns for the fields.

An inferred schema takes the types that are there: a value that does not fit them makes its record bad, and never the column
another one. Under the policy "rescue", fields that are not there are no fields.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from qewqew_spark.jobs.output import BATCH
from qewqew_spark.jobs.writing import Sink
from qewqew_spark.tables.evolution import Fold


def agreed(record: StructType, sinks: Iterable[Sink], policy: str, inferred: bool) -> StructType:
    """The fields of the records for the places that take them as they are; raises `BadArgument`."""
    for sink in sinks:
        if sink.output.is_plain and sink.agrees and (there := sink.known(record, inferred)) is not None:
            fold = sink.fold
            # Of files they are names of directories, which nobody keeps.
            parts = {fold(name) for name in (*(sink.output.partition_columns if sink.of_files else ()), BATCH)}
            apart = StructType([field for field in record if fold(field.name) in parts])
            rest = StructType([field for field in record if fold(field.name) not in parts])
            found = _agreed(rest, there, fold, new=policy != "rescue", types=inferred, all=inferred and policy != "fail")
            assert isinstance(found, StructType)
            kept = {field.name: field for field in (*found, *apart)}
            record = StructType([kept[field.name] for field in record if field.name in kept])
    return record


def _agreed(kind: DataType, there: DataType, fold: Fold, *, new: bool, types: bool, all: bool, top: bool = True) -> DataType:
    """``new``: with fields that are not there; ``types``: with the types there; ``all``: with all fields of structs there."""

    def inner(kind: DataType, there: DataType) -> DataType:
        return _agreed(kind, there, fold, new=new, types=types, all=all, top=False)

    match kind, there:
        case StructType(), StructType():
            known = {fold(field.name): field for field in there}
            fields = []
            for field in kind:
                if (same := known.pop(fold(field.name), None)) is not None:
                    name = field.name if top or not types else same.name
                    fields.append(StructField(name, inner(field.dataType, same.dataType)))
                elif new:
                    fields.append(field)
            return StructType([*fields, *(StructField(each.name, each.dataType) for each in known.values() if all and not top)])
        case ArrayType(), ArrayType():
            return ArrayType(inner(kind.elementType, there.elementType))
        case MapType(), MapType():
            return MapType(kind.keyType, inner(kind.valueType, there.valueType))
    return there if types else kind
