"""Which records the places of the outputs cannot hold, although they decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from qewqew_spark.jobs.output import Output
from qewqew_spark.jobs.routing import Routed, unroutable
from qewqew_spark.jobs.writing import Sink
from qewqew_spark.tables.evolution import Fold
from qewqew_spark.tables.limits import beyond_column, beyond_part, beyond_years, first_of


def unfit(
    outputs: Sequence[Output], sinks: Iterable[Sink], fold: Fold, fields: StructType, column: Callable[[str], Column]
) -> Column | None:
    """Why the places cannot hold a record, as `records.Unfit`. Of what a query makes of it, only the times are known.

    ``sinks``: of the outputs, and none as long as the routes are not known.
    """

    reasons = [*unroutable(outputs, fields, column, fold)]
    if any(output.appends for output in outputs):
        reasons += [beyond_years(column(field.name), field.dataType, field.name) for field in fields]
    for sink in sinks:
        there = {sink.fold(field.name): field for field in sink.limited()}
        known = [(each.name, there[sink.fold(each.name)]) for each in fields if sink.fold(each.name) in there]
        parts = {sink.fold(name): width for name, width in sink.parts().items()}
        limits = first_of(
            [
                *(beyond_column(column(name), name, field, str(sink.output.place)) for name, field in known),
                *(
                    beyond_part(column(each.name), each.dataType, each.name, parts[sink.fold(each.name)])
                    for each in fields
                    if sink.fold(each.name) in parts
                ),
            ]
        )
        if limits is not None and isinstance(sink.output, Routed):
            limits = F.when(sink.output.takes(column), limits)
        reasons.append(limits)
    return first_of(reasons)
