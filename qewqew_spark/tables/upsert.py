"""Rows that replace or remove the rows of a table with the same keys: what is said of them, and which of a batch is the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import Column, DataFrame, Window, types
from pyspark.sql import functions as F

from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt
from qewqew_spark.tables.evolution import Fold
from qewqew_spark.tables.limits import NO_ORDER, NULL_KEY, refusal
from qewqew_spark.tables.session import quoted

DELETED = "qewqew_deleted"  # the column that says so, and the directory of the keys of such rows
_NUMBER, _FIRST = "qewqew_number", "qewqew_first"
# No float: NaN and -0.0 are equal to others for some readers, and not for some.
_ORDERED = {"tinyint", "smallint", "int", "bigint", "string", "date", "timestamp", "timestamp_ntz"}
_KEYS = {*_ORDERED, "boolean", "binary"}


@dataclass(frozen=True)
class Upsert:
    """Which of the table's rows a batch's row replaces: those with equal ``keys``. Raises `BadArgument`.

    ``order_by``: of rows with equal keys, the one with the greatest value stays, be it the batch's or the table's. ``operation``:
    ``{"column": NAME, "delete": [VALUE, …]}``, by which a row removes instead; the column is not stored.
    """

    keys: Sequence[str]
    order_by: str | None = None
    operation: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.keys, str) or not self.keys:
            raise BadArgument(f"keys must be a list of column names, not {excerpt(self.keys, 80)}")
        if self.operation and ({*self.operation} != {"column", "delete"} or isinstance(self.operation["delete"], str)):
            raise BadArgument(
                f'operation must be like {{"column": "op", "delete": ["D"]}}, not {excerpt(dict(self.operation), 200)}'
            )

    @property
    def named(self) -> list[str]:
        """The columns that say which row stays: the keys and the order."""
        return [*self.keys, *([self.order_by] if self.order_by is not None else [])]

    def stored(self, batch: types.StructType, fold: Fold) -> types.StructType:
        """The columns of the batch that the table gets; raises `BadArgument`."""
        known = {fold(each.name): each.dataType for each in batch}
        operation = fold(self.operation["column"]) if self.operation else None
        for name in [*self.named, *([self.operation["column"]] if self.operation else [])]:
            if fold(name) not in known:
                raise BadArgument(
                    f"the batch has no column {name!r} for keys, order_by or operation, but {', '.join(batch.names)}"
                )
        for name, may in [*((key, _KEYS) for key in self.keys), *((name, _ORDERED) for name in self.named[len(self.keys) :])]:
            kind = known[fold(name)]
            if not isinstance(kind, types.DecimalType) and kind.simpleString() not in may:
                raise BadArgument(f"the column {name!r} is {kind.simpleString()}, which keys and order_by cannot be; cast it")
        folded = list(map(fold, self.named))
        if operation in folded or len({*folded}) < len(folded):
            raise BadArgument("keys, order_by and the column of operation must be different columns")
        return types.StructType([each for each in batch if fold(each.name) != operation])

    def latest(self, rows: DataFrame, fold: Fold) -> DataFrame:
        """One row for each key, with `DELETED` instead of the operation's column. Spark fails as `limits.misfit_in` knows.

        Of rows with equal order, one that deletes stays, or else one of them, the same at each try. Without an order all of one
        key must be equal.
        """
        deleted = F.lit(False)
        if self.operation:
            operation = _column(self.operation["column"])
            deleted = F.coalesce(operation.cast("string").isin(*map(str, self.operation["delete"])), F.lit(False))
            rows = rows.withColumn(DELETED, deleted).drop(self.operation["column"])
        else:
            rows = rows.withColumn(DELETED, deleted)
        keys = {*map(fold, self.keys)}
        for name in [each for each in rows.columns if fold(each) in keys]:
            reason = F.lit(f"{name}: {NULL_KEY}")
            rows = rows.withColumn(name, F.when(_column(name).isNotNull(), _column(name)).otherwise(refusal(reason)))
        mark = F.xxhash64(*(_hashable(each) for each in rows.schema))
        order = [] if self.order_by is None else [_column(self.order_by).desc_nulls_last()]
        window = Window.partitionBy(*map(_column, self.keys)).orderBy(*order, F.col(DELETED).desc(), mark.desc())
        rows = rows.withColumn(_NUMBER, F.row_number().over(window))
        if order:
            return rows.where(F.col(_NUMBER) == 1).drop(_NUMBER)
        key = F.left(F.to_json(F.struct(*map(_column, self.keys))), F.lit(200))
        reason = F.concat(F.lit(f"{', '.join(self.keys)}: different rows of the batch have the same keys, "), key)
        rows = rows.withColumn(_FIRST, F.first(mark).over(window) == mark)
        last = F.when(F.col(_FIRST), F.col(_NUMBER) == 1).otherwise(refusal(F.concat(reason, F.lit(f", {NO_ORDER}"))))
        return rows.where(last).drop(_NUMBER, _FIRST)


def _column(name: str) -> Column:
    return F.col(quoted(name))


def _hashable(column: types.StructField) -> Column:
    """What `xxhash64` takes."""
    return F.to_json(F.struct(_column(column.name))) if "map<" in column.dataType.simpleString() else _column(column.name)
