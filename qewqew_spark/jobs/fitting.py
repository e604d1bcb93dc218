"""Which records the places of the outputs cannot hold, although they decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pyspark.sql import Column
from pyspark.sql.types import StructType

from qewqew_spark.jobs.records import Unfit
from qewqew_spark.jobs.writing import Sink
from qewqew_spark.tables.limits import beyond_column, beyond_years, first_of


def unfit(sinks: Sequence[Sink]) -> Unfit:
    """Why the places cannot hold a record, for `records.read`. Of what a query makes of it, only the times are known."""

    def reason(fields: StructType, column: Callable[[str], Column]) -> Column | None:
        reasons: list[Column | None] = []
        if any(sink.output.appends for sink in sinks):
            reasons += [beyond_years(column(field.name), field.dataType, field.name) for field in fields]
        for sink in sinks:
            there = {sink.fold(field.name): field for field in sink.limited()}
            known = [(each.name, there[sink.fold(each.name)]) for each in fields if sink.fold(each.name) in there]
            reasons += [beyond_column(column(name), name, field, str(sink.output.place)) for name, field in known]
        return first_of(reasons)

    return reason
