"""What the batch job is to do, checked without Spark: by the job itself, and by Airflow before it leases a batch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from qewqew_core import references, secrecy
from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt
from qewqew_spark.jobs.ddl import check_schema

BATCH = "batch"  # the view, the column, and the level of directories that have a batch's records under its id

CODECS = ("json", "csv", "avro", "msgpack", "text", "bytes")
NAMED = {"json", "avro", "msgpack"}  # those whose records name their fields
WHOLE = {"text", "bytes"}  # the codecs without fields, and so without a schema
# Options of the data source that the job sets, so that each record is either good or bad.
OWN_OPTIONS = {"codec", "mode", "rescued", "strict", "columnnameofcorruptrecord", "path", "paths"}
SCHEMA_EVOLUTIONS = ("merge", "fail", "ignore", "rescue")

SHOWN_FORMATS = {"noop", "console"}  # keep nothing
FILE_FORMATS = {"parquet", "orc", "json", "csv", "text", "xml"}  # come with Spark
TABLE_FORMATS = {"iceberg", "delta"}  # to which a batch is appended once
COMMITS = ("driver", "spark")  # what commits to these

Option = str | Mapping[str, str]  # the latter: {"env": NAME} or {"file": PATH}, which is read when the job runs


@dataclass(frozen=True)
class Output:
    """One table that the job writes, under the batch's id: the fields of docs/spark/job.md. Raises `BadArgument`.

    A value of ``options`` may be a reference, see `Option`.
    """

    path: str | None = None
    table: str | None = None
    sql: str | None = None
    transform: str | None = None
    format: str = "parquet"
    partition_by: Sequence[str] = ()
    # Not in the repr: a password that is passed from Python would get into a log.
    options: Mapping[str, Option | int | float | bool] = field(default_factory=dict, repr=False)
    commit: str = "driver"
    route: str | None = None
    branch: str | None = None
    keys: Sequence[str] = ()
    order_by: str | None = None
    operation: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def check(good: bool, name: str, must: str) -> None:
            if not good:
                raise BadArgument(f"output: {name!r} must be {must}, not {excerpt(getattr(self, name), 200)}")

        check(self.path is None or _is_text(self.path), "path", "a path")
        check(self.table is None or _is_text(self.table), "table", "the name of a table")
        check(self.sql is None or _is_text(self.sql), "sql", "a query")
        check(
            self.transform is None or (_is_text(self.transform) and bool(re.fullmatch(r"[\w.]+:[\w.]+", self.transform))),
            "transform",
            "'module:function'",
        )
        check(_is_text(self.format), "format", "the name of a format")
        check(self.commit in COMMITS, "commit", f"one of {', '.join(COMMITS)}")
        check(self.route is None or _is_text(self.route), "route", "the name of a column")
        check(
            isinstance(self.partition_by, (list, tuple)) and all(map(_is_text, self.partition_by)),
            "partition_by",
            "a list of column names",
        )
        check(self.branch is None or _is_text(self.branch), "branch", "the name of a branch")
        check(isinstance(self.keys, (list, tuple)) and all(map(_is_text, self.keys)), "keys", "a list of column names")
        check(self.order_by is None or _is_text(self.order_by), "order_by", "the name of a column")
        check(not self.operation or _is_operation(self.operation), "operation", 'like {"column": "op", "delete": ["D"]}')
        if not isinstance(self.options, Mapping) or not all(map(_is_text, self.options)):
            raise BadArgument("output: 'options' must be an object of strings, numbers and booleans")
        for name, value in self.options.items():
            if not isinstance(value, (str, int, float)) and not references.is_reference(value):
                raise BadArgument(
                    f"output: the option {name!r} must be a string, a number, a boolean, "
                    'or {"env": "NAME"} or {"file": "PATH"}, from which the value is read'
                )
        self._check_place()

    def _check_place(self) -> None:
        kind, options = self.format.lower(), {name.lower() for name in self.options}
        if self.sql is not None and self.transform is not None:
            raise BadArgument("output: give 'sql' or 'transform', not both; the transform can call spark.sql")
        if self.path is not None and self.table is not None:
            raise BadArgument("output: give 'path' or 'table', not both")
        if "path" in options:
            raise BadArgument("output: give 'path' next to 'options', not in it")
        if "partitionby" in options:
            raise BadArgument("output: 'partitionBy' is not an option; give 'partition_by' next to 'options'")
        if "mode" in options:
            raise BadArgument("output: 'mode' is not an option: the job replaces what it wrote of this batch, and nothing else")
        if kind in SHOWN_FORMATS | {"jdbc"}:
            if self.path is not None or self.table is not None:
                raise BadArgument(f"output: the format {self.format!r} takes no 'path' and no 'table'")
            if self.partition_by:
                raise BadArgument(f"output: the format {self.format!r} takes no 'partition_by'")
        if kind in FILE_FORMATS and self.path is None and self.table is None:
            raise BadArgument(f"output: the format {self.format!r} needs a 'path' or a 'table'")
        if kind == "iceberg" and (self.table is None or self.table.count(".") < 2):
            raise BadArgument("output: the format 'iceberg' needs a 'table' with its catalog, like 'lake.db.orders'")
        if kind == "delta" and self.path is None:
            raise BadArgument("output: the format 'delta' needs the 'path' of the table")
        if self.commit != "driver" and not self.appends:
            raise BadArgument(f"output: 'commit' is for the formats {' and '.join(sorted(TABLE_FORMATS))}, not {self.format!r}")
        if not self.keys and (self.order_by is not None or self.operation):
            raise BadArgument("output: 'order_by' and 'operation' need 'keys'")
        if self.keys and not self.appends:
            raise BadArgument(f"output: 'keys' is for the formats {' and '.join(sorted(TABLE_FORMATS))}, not {self.format!r}")
        if self.branch is not None and (kind != "iceberg" or self.commit != "driver"):
            raise BadArgument("output: 'branch' is for the format 'iceberg', with 'commit': 'driver'")
        if self.keys and self.commit != "driver":
            raise BadArgument("output: with 'keys' the driver commits, so leave 'commit' out")
        if kind == "jdbc" and (missing := {"url", "dbtable"} - options):
            raise BadArgument(f"output: the format 'jdbc' needs the option {min(missing)!r}")
        if self.path is not None and not self.path.rstrip("/"):
            raise BadArgument("output: 'path' is the root directory")
        if self.path is not None:
            check_url("output", "path", self.path)
        if self.route is not None:
            self._check_route(f"{{{self.route}}}")

    def _check_route(self, mark: str) -> None:
        if self.path is None and self.format.lower() != "iceberg":
            raise BadArgument("output: 'route' needs a 'path', or a table of Iceberg")
        if self.commit != "driver":
            raise BadArgument("output: 'route' is for tables that the driver commits to, not for 'commit': 'spark'")
        *above, last = str(self.path or self.table).rsplit("/" if self.path is not None else ".", 1)
        if last.count(mark) != 1 or any(mark in part for part in above):
            like = "/lake/" if self.path is not None else "lake.shop."
            raise BadArgument(
                f"output: with 'route', the last part of {'path' if self.path else 'table'!r} has the name of the column in "
                f"braces, once, like '{like}{mark}', not {excerpt(self.path or self.table, 200)}"
            )

    @classmethod
    def from_json(cls, text: str) -> Output:
        """The output in a JSON object with the fields of this class, as `from_fields`; raises `BadArgument`."""
        try:
            return cls.from_fields(json.loads(text))
        except (ValueError, RecursionError) as error:
            if isinstance(error, BadArgument):
                raise
            raise BadArgument(f"output: not JSON ({error})") from error  # without the text, which may hold a password

    @classmethod
    def from_fields(cls, body: object) -> Output:
        """The output described by a mapping with the fields of this class, which is or will be part of a command line.

        Raises `BadArgument`, also for a secret in clear text, because every user of the machine can read a command line.
        """
        if not isinstance(body, Mapping):
            raise BadArgument(f"output: must be an object with fields, not {type(body).__name__}")
        names = [each.name for each in fields(cls)]
        if unknown := sorted(map(str, set(body) - set(names))):
            raise BadArgument(f"output: unknown field {', '.join(map(repr, unknown))}; the fields are {', '.join(names)}")
        output = cls(**body)
        references.refuse_in_clear("output", output.options)
        return output

    def resolved_options(self) -> dict[str, str | int | float | bool]:
        """The options with the values that they refer to; raises `BadArgument`, which names no value."""
        return references.resolved(self.options)

    @property
    def appends(self) -> bool:
        """Is it a table to which each batch is appended once, without a column for its id?"""
        return self.format.lower() in TABLE_FORMATS

    @property
    def is_plain(self) -> bool:
        """Does it have the records as they are?"""
        return self.sql is None and self.transform is None

    @property
    def named(self) -> list[str]:
        """The columns that say which rows are replaced and removed."""
        return [*self.keys, *filter(None, [self.order_by, str(self.operation.get("column", ""))])]

    @property
    def partition_columns(self) -> list[str]:
        """The columns in ``partition_by``, also those inside a transform of Iceberg: `month(day)`."""
        if self.format.lower() != "iceberg":
            return list(self.partition_by)
        return [re.sub(r"^\w+\((?:\s*\d+\s*,)?\s*(.+?)\s*\)$", r"\1", text) for text in self.partition_by]

    @property
    def place(self) -> str | None:
        """The place to which no other output may write; None if the format keeps nothing."""
        if self.path is not None:
            return _spelled(self.path)
        if self.table is not None:
            return f"table {self.table.lower()}"
        options = {name.lower(): value for name, value in self.options.items()}
        return secrecy.hide(f"table {options['dbtable']} of {options['url']}") if self.format.lower() == "jdbc" else None


def check_arguments(
    outputs: Sequence[Output],
    *,
    codec: str = "json",
    schema: str | None = None,
    read_options: Mapping[str, Option] | None = None,
    quarantine: str | None = None,
    max_bad_records: int | None = None,
    schema_evolution: str = "merge",
    rescued: str | None = None,
) -> str:
    """The directory of the quarantine; raises `BadArgument` if the arguments contradict each other."""
    if not outputs:
        raise BadArgument("no output; give at least one")
    if codec not in CODECS:
        raise BadArgument(f"codec must be one of {', '.join(CODECS)}, not {excerpt(codec, 80)}")
    if codec in WHOLE and schema is not None:
        raise BadArgument(f"the codec {codec!r} takes no schema: its records have no fields")
    if codec not in WHOLE and codec != "json" and schema is None:
        raise BadArgument(f"the codec {codec!r} needs a schema; only that of JSON records can be inferred")
    if schema is not None:
        check_schema(schema)
    read_options = {} if read_options is None else read_options
    if not isinstance(read_options, Mapping) or not all(
        isinstance(name, str) and (isinstance(value, str) or references.is_reference(value))
        for name, value in read_options.items()
    ):
        raise BadArgument('read_options must be an object of strings, or of {"env": "NAME"} and {"file": "PATH"}')
    for name in read_options:
        if name.lower() in OWN_OPTIONS:
            raise BadArgument(f"the read option {name!r} is set by the job itself")
    if schema_evolution not in SCHEMA_EVOLUTIONS:
        raise BadArgument(f"schema_evolution must be one of {', '.join(SCHEMA_EVOLUTIONS)}, not {excerpt(schema_evolution, 80)}")
    if schema_evolution == "rescue" and rescued is None:
        raise BadArgument("schema_evolution 'rescue' needs 'rescued', the column that takes what is new in the records")
    if schema_evolution == "rescue" and any(output.route for output in outputs):
        raise BadArgument("schema_evolution 'rescue' takes no output with 'route': its tables may have other columns each")
    if rescued is not None and not _is_text(rescued):
        raise BadArgument(f"rescued must be the name of a column, not {excerpt(rescued, 80)}")
    if rescued is not None and codec not in NAMED:
        raise BadArgument(f"the codec {codec!r} takes no 'rescued': its records have no names of fields")
    if max_bad_records is not None and max_bad_records < 0:
        raise BadArgument(f"max_bad_records is negative: {max_bad_records}")
    if quarantine is None:
        path = next((output.path for output in outputs if output.path is not None and output.route is None), None)
        if path is None:
            raise BadArgument("no output has a path (without a route), so set quarantine to where records go that do not decode")
        quarantine = f"{path.rstrip('/')}-quarantine"
    quarantine = quarantine.rstrip("/")
    if not quarantine:
        raise BadArgument("the quarantine must be a directory, and not the root")
    check_url("quarantine", "quarantine", quarantine)
    check_places(outputs, quarantine)
    return quarantine


def check_drained(outputs: Sequence[Output]) -> None:
    """Raise `BadArgument` unless a drain can write these."""
    if len(outputs) != 1 or not outputs[0].appends or outputs[0].route:
        raise BadArgument("a drain writes one output, a table of Iceberg or Delta, where one commit has all batches")


def check_places(outputs: Sequence[Output], quarantine: str) -> None:
    """Raise `BadArgument` if two go to one place."""
    places = [_spelled(quarantine), *filter(None, [output.place for output in outputs])]
    for place in places:
        if places.count(place) > 1:
            raise BadArgument(f"two outputs, or an output and the quarantine, go to {place!r} and would overwrite each other")


def _spelled(path: str) -> str:
    """The place in one spelling: without `file:`, which Hadoop takes for the same where no other store is the default."""
    return re.sub("(?i)^file:(?://(?:localhost)?)?(?=/)", "", path).rstrip("/")


def check_url(what: str, name: str, url: str) -> None:
    """Raise `BadArgument` for a URL with a secret in it, which logs and command lines would show."""
    references.refuse_in_clear(what, {name: url}, "take it out of the URL, and give it to the store's client or to Hadoop")


def _is_operation(value: object) -> bool:
    if not isinstance(value, Mapping) or {*value} != {"column", "delete"}:
        return False
    values = value["delete"]
    return _is_text(value["column"]) and isinstance(values, (list, tuple)) and bool(values) and all(map(_is_text, values))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
