"""How the columns of a batch may differ from those of the table that it goes to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from pyspark.sql import types

from qewqew_core.errors import BadArgument

Fold = Callable[[str], str]  # makes names equal that are one for Spark
Same = Callable[[types.DataType, types.DataType], bool]
# Each holds what those before it hold.
_WIDER: list[list[types.DataType]] = [
    [types.ByteType(), types.ShortType(), types.IntegerType(), types.LongType()],
    [types.FloatType(), types.DoubleType()],
]


class Contradiction(ValueError):
    """Two types cannot be those of one column."""


Difference = tuple[str, types.DataType | None, types.DataType | None]  # column, type in the table, type in the batch


def new_columns(
    there: types.StructType,
    batch: types.StructType,
    policy: str,
    what: str,
    fold: Fold,
    same: Same = types.DataType.__eq__,
    *,
    into_structs: bool = False,
) -> list[types.StructField]:
    """The columns of the batch that the table ``what`` lacks, to be added or left out.

    Raises `BadArgument` for a column of another type (``same`` decides), under the policy "fail" for a column that only the
    table or only the batch has, and under "rescue" for one that only the batch has. ``into_structs``: compare fields of structs
    like columns, but for the case of their names, which no reader reads over; otherwise a struct with other fields is another
    type.
    """
    found = list(differences(there, batch, fold, same, into_structs=into_structs))
    _refuse(found, policy, what)
    known = {fold(field.name) for field in there}
    return [field for field in batch if fold(field.name) not in known]


def _refuse(found: Iterable[Difference], policy: str, what: str, widens: Same = lambda there, batch: False) -> None:
    """Raise `BadArgument` for a type that cannot become the batch's, and, as the policy says, for what only one has."""
    for name, old, now in found:
        if old is not None and now is not None and not (policy == "merge" and widens(old, now)):
            raise BadArgument(
                f"{what}: the column {name!r} is {old.simpleString()} there and {now.simpleString()} in this batch; "
                "cast it with 'sql', or write to another place"
            )
    if policy == "fail" and (told := [f"{name!r} is {'new' if old is None else 'missing'}" for name, old, _ in found]):
        raise BadArgument(
            f"{what}: this batch has other columns than the table, and schema_evolution is 'fail': {', '.join(told)}"
        )
    if policy == "rescue" and (new := [name for name, old, _ in found if old is None]):
        raise BadArgument(
            f"{what}: {', '.join(map(repr, new))} is new, and schema_evolution is 'rescue', which keeps new fields of records, "
            "and no new columns of a query"
        )


def differences(
    there: types.DataType, batch: types.DataType, fold: Fold, same: Same, at: str = "", *, into_structs: bool, cases: bool = True
) -> Iterator[Difference]:
    """The columns, and fields of columns, by which two types differ. Nullability does not count, nor, unless ``cases``, the case
    of names that are equal for Spark.
    """
    deeper = partial(differences, fold=fold, same=same, into_structs=into_structs, cases=cases)
    match there, batch:
        case (types.StructType(), types.StructType()) if into_structs or not at:
            old, now = ({fold(field.name): field for field in struct} for struct in (there, batch))
            if cases and at and any(old[key].name != now[key].name for key in old.keys() & now.keys()):
                yield at, there, batch
                return
            for key, field in (old | now).items():
                where = f"{at}.{field.name}" if at else field.name
                if key in old and key in now:
                    yield from deeper(old[key].dataType, field.dataType, at=where)
                else:
                    yield where, old[key].dataType if key in old else None, field.dataType if key in now else None
        case types.ArrayType(), types.ArrayType():
            yield from deeper(there.elementType, batch.elementType, at=f"{at}.element")
        case types.MapType(), types.MapType():
            yield from deeper(there.keyType, batch.keyType, at=f"{at}.key")
            yield from deeper(there.valueType, batch.valueType, at=f"{at}.value")
        case _ if not same(there, batch):
            yield at, there, batch


def evolved(
    there: types.StructType, batch: types.StructType, policy: str, what: str, fold: Fold, widens: Same
) -> tuple[types.StructType, list[str]]:
    """The columns that the table ``what`` must have to hold those of the batch, and what is left out, under the policy "ignore".

    Fields of structs are compared like columns, also in arrays and in values of maps. New ones are added, and a type becomes
    wider where ``widens`` says that the format can do that. Raises `BadArgument` as `new_columns`.
    """
    found = list(differences(there, batch, fold, fits, into_structs=True, cases=False))
    _refuse(found, policy, what, widens)
    if policy == "ignore":
        return there, [name for name, old, _ in found if old is None]
    joined = _joined(there, batch, fold)
    assert isinstance(joined, types.StructType)
    return joined, []


def _joined(there: types.DataType, batch: types.DataType, fold: Fold) -> types.DataType:
    """The type of the table with what the batch adds."""
    match there, batch:
        case types.StructType(), types.StructType():
            rest = {fold(field.name): field for field in batch}
            fields = []
            for field in there:
                kind = _joined(field.dataType, rest.pop(fold(field.name), field).dataType, fold)
                fields.append(types.StructField(field.name, kind, field.nullable, field.metadata))
            return types.StructType([*fields, *relaxed(types.StructType([*rest.values()]))])
        case types.ArrayType(), types.ArrayType():
            return types.ArrayType(_joined(there.elementType, batch.elementType, fold), there.containsNull)
        case types.MapType(), types.MapType():
            key, value = _joined(there.keyType, batch.keyType, fold), _joined(there.valueType, batch.valueType, fold)
            return types.MapType(key, value, there.valueContainsNull)
    return there if fits(there, batch) else batch


def merged(one: types.DataType, other: types.DataType, fold: Fold) -> types.DataType:
    """The type that has the fields of both, all nullable, without their metadata; raises `Contradiction`."""
    match one, other:
        case types.StructType(), types.StructType():
            rest = {fold(field.name): field for field in other}
            fields = []
            for field in one:
                same = rest.pop(fold(field.name), field)
                fields.append(types.StructField(field.name, merged(field.dataType, same.dataType, fold)))
            return types.StructType(
                fields + [types.StructField(new.name, merged(new.dataType, new.dataType, fold)) for new in rest.values()]
            )
        case types.ArrayType(), types.ArrayType():
            return types.ArrayType(merged(one.elementType, other.elementType, fold))
        case types.MapType(), types.MapType():
            return types.MapType(merged(one.keyType, other.keyType, fold), merged(one.valueType, other.valueType, fold))
    if one != other:
        raise Contradiction(f"{one.simpleString()} and {other.simpleString()}")
    return one


def all_columns(known: Iterable[types.StructType], fold: Fold) -> types.StructType:
    """The columns of all; raises `Contradiction`."""
    found: types.DataType = types.StructType([])
    for columns in known:
        found = merged(found, columns, fold)
    assert isinstance(found, types.StructType)
    return found


def fits(there: types.DataType, batch: types.DataType) -> bool:
    """Can a column of the table hold every value of a column of the batch, which is then cast?"""
    if isinstance(there, types.DecimalType) and isinstance(batch, types.DecimalType):
        return there.scale == batch.scale and there.precision >= batch.precision
    return there == batch or any(there in kinds and batch in kinds[: kinds.index(there)] for kinds in _WIDER)


def holds(there: types.DataType, batch: types.DataType) -> bool:
    """Can a column hold values that were inferred to be of another type? None at all is `NullType`."""
    whole = isinstance(there, types.DoubleType) and isinstance(batch, types.IntegralType)
    return fits(there, batch) or whole or isinstance(batch, types.NullType)


def same_in_a_database(there: types.DataType, batch: types.DataType) -> bool:
    """Do both hold the same kind of value? Each database has types of its own: a BIGINT of Spark is a NUMBER(19) of Oracle."""
    kinds = (types.NumericType, types.BooleanType), (types.TimestampType, types.TimestampNTZType)
    return type(there) is type(batch) or any(isinstance(there, kind) and isinstance(batch, kind) for kind in kinds)


def relaxed(columns: types.StructType) -> types.StructType:
    """The same columns, all nullable: the next batch may lack what this one has in each row. Without their metadata."""
    return types.StructType([types.StructField(field.name, field.dataType) for field in columns.toNullable()])
