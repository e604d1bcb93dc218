"""One output that goes to several tables: each row to the one that its field ``route`` names.

The routes of a batch are found in the pass that decodes it; only then is it known which tables there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, NullType, StructField, StructType

from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt
from qewqew_spark.jobs.output import Output
from qewqew_spark.tables.evolution import Fold
from qewqew_spark.tables.session import conformed, quoted

MOST = 100  # routes of one batch: of a column that is a key, and not a kind of record, each value would become a table
_SAFE = r"\A[A-Za-z0-9][A-Za-z0-9_-]{0,99}\z"  # cannot leave the directory, nor be hidden in it
_WHAT = "a route is 1 to 100 letters (A to Z), digits, '_' and '-', and begins with a letter or a digit"


@dataclass(frozen=True)
class Routed(Output):
    """What an output is for one route."""

    by: str = ""  # the column
    value: str = ""  # its text, in small letters
    kind: StructType = field(default_factory=StructType)  # of the rows, with `NullType` for fields that none of them has

    def takes(self, column: Callable[[str], Column]) -> Column:
        """Has a row the route? ``column`` gives what the row has by a name."""
        return F.lower(_text(column(self.by))) == self.value

    def rows(self, table: DataFrame) -> DataFrame:
        """Those with the route. A field that none of them has is left without a type, which the table may know: see `untyped`."""
        columns = [
            conformed(_column(each.name), each.dataType, to.dataType, str).alias(each.name)
            for each, to in zip(table.schema, self.kind, strict=True)
        ]
        return table.where(self.takes(_column)).select(columns)


def unroutable(
    outputs: Sequence[Output], record: StructType, column: Callable[[str], Column], fold: Fold
) -> Iterator[Column | None]:
    """Why a record has no route, for each output that takes the records as they are; null if it has one."""
    for output in outputs:
        if output.route is not None and output.is_plain:
            name = _named(output.route, record.names, fold)
            value = F.lit(None).cast("string") if name is None else _text(column(name))
            shown = F.coalesce(F.concat(F.lit("'"), F.left(value, F.lit(80)), F.lit("'")), F.lit("null"))
            reason = F.concat(F.lit(f"no route: {output.route} is "), shown, F.lit(f", and {_WHAT}"))
            yield F.when(~_is_safe(value), reason)


def routed(output: Output, table: DataFrame, fold: Fold) -> list[Routed]:
    """The output for each route of the rows, which are computed; raises `BadArgument`.

    Its place has the route in place of the column's name in braces, in small letters: many catalogs know no others.
    """
    assert output.route is not None
    by = _named(output.route, table.columns, fold)
    if by is None:
        raise BadArgument(f"output: no column {output.route!r} to route by; the columns are {', '.join(table.columns)}")
    # Have their type, whatever is in them.
    kept = {fold(name) for name in (by, *output.partition_columns, *output.named)}
    value = _text(_column(by))
    safe = _is_safe(value)
    counts = [F.count(leaf) for each in table.schema if fold(each.name) not in kept for leaf in _leaves(each)]
    groups = table.groupBy(safe.alias("safe"), F.when(safe, F.lower(value)).otherwise(value).alias("value")).agg(
        F.count(F.lit(1)), *counts
    )
    found = groups.orderBy("safe", "value").limit(MOST + 1).collect()
    if found and not found[0]["safe"]:
        shown = "null" if found[0]["value"] is None else excerpt(found[0]["value"], 80)
        raise BadArgument(f"output: a row has {output.route} = {shown}, and {_WHAT}")
    if len(found) > MOST:
        raise BadArgument(f"output: {output.route} has more than {MOST} routes in this batch; is it a kind of record?")
    made = []
    for _, route, _, *numbers in found:
        filled = iter(numbers)
        kind = [each if fold(each.name) in kept else _without_empty(each, filled) for each in table.schema]
        body = {each.name: getattr(output, each.name) for each in fields(Output)}
        for name in "path", "table":
            body[name] = body[name] and body[name].replace(f"{{{output.route}}}", route)
        made.append(Routed(**{**body, "route": None}, by=by, value=route, kind=StructType(kind)))
    return made


def _named(name: str, names: Sequence[str], fold: Fold) -> str | None:
    return next((each for each in names if fold(each) == fold(name)), None)


def _column(name: str) -> Column:
    return F.col(quoted(name))


def _text(value: Column) -> Column:
    return value.cast("string")


def _is_safe(value: Column) -> Column:
    return F.coalesce(value.rlike(_SAFE), F.lit(False))


def _leaves(field: StructField, value: Column | None = None) -> Iterator[Column]:
    """The column, or the fields of a struct, however deep."""
    value = _column(field.name) if value is None else value
    if isinstance(field.dataType, StructType) and field.dataType.fields:
        for each in field.dataType:
            yield from _leaves(each, value[each.name])
    else:
        yield value


def _without_empty(field: StructField, filled: Iterator[int]) -> StructField:
    """The field, with `NullType` for each of `_leaves` that is never there. ``filled``: how often each is."""
    kind: DataType = field.dataType
    if isinstance(kind, StructType) and kind.fields:
        kind = StructType([_without_empty(each, filled) for each in kind])
    elif not next(filled):
        kind = NullType()
    return StructField(field.name, kind)
