"""What the batch job is to write, checked without Spark: by the job itself, and by Airflow before it leases a batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from qewqew_core.errors import BadArgument

ROW_FORMATS = {"noop", "console", "jdbc"}  # write somewhere else than into a directory
FILE_FORMATS = {"parquet", "orc", "json", "csv", "text", "xml"}  # come with Spark, and need a path


@dataclass(frozen=True)
class Output:
    """One table that the job writes.

    ``path``: where a file format goes, to ``<path>/batch=<id>``; None for a format that has no path
    (`noop`, `console`, `jdbc`), which is appended to. ``sql``: a query over the view ``batch``; None: all of it.
    ``format``: any that this Spark can write. ``partition_by``: columns, as directories below the
    batch's. ``options``: the writer's. Raises `BadArgument`.
    """

    path: str | None = None
    sql: str | None = None
    format: str = "parquet"
    partition_by: Sequence[str] = ()
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        def check(good: bool, name: str, must: str) -> None:
            if not good:
                raise BadArgument(f"output: {name!r} must be {must}, not {getattr(self, name)!r:.200}")

        check(self.path is None or _is_text(self.path), "path", "a path")
        check(self.sql is None or _is_text(self.sql), "sql", "a query")
        check(_is_text(self.format), "format", "the name of a format")
        check(
            isinstance(self.partition_by, (list, tuple)) and all(map(_is_text, self.partition_by)),
            "partition_by",
            "a list of column names",
        )
        check(
            isinstance(self.options, Mapping)
            and all(_is_text(key) and isinstance(value, (str, int, float)) for key, value in self.options.items()),
            "options",
            "an object of texts, numbers and booleans",
        )
        if "path" in map(str.lower, self.options):
            raise BadArgument("output: give 'path' beside 'options', not in it")
        if self.path is None and self.format.lower() in FILE_FORMATS:
            raise BadArgument(f"output: the format {self.format!r} needs a 'path'")
        if self.path is not None and self.format.lower() in ROW_FORMATS:
            raise BadArgument(f"output: the format {self.format!r} takes no 'path'")
        if self.path is not None and not self.path.rstrip("/"):
            raise BadArgument("output: 'path' is the root directory")

    @classmethod
    def from_json(cls, text: str) -> Output:
        """The output in a JSON object with the fields of this class; raises `BadArgument`."""
        try:
            return cls.from_fields(json.loads(text))
        except (ValueError, RecursionError) as error:
            if isinstance(error, BadArgument):
                raise
            raise BadArgument(f"output: not JSON ({error}): {text:.200}") from error

    @classmethod
    def from_fields(cls, body: object) -> Output:
        """The output in a mapping with the fields of this class; raises `BadArgument`."""
        if not isinstance(body, Mapping):
            raise BadArgument(f"output: not an object with fields: {body!r:.200}")
        names = [each.name for each in fields(cls)]
        if unknown := sorted(set(body) - set(names)):
            raise BadArgument(f"output: unknown field {', '.join(map(repr, unknown))}; there are {', '.join(names)}")
        return cls(**body)


def check_outputs(outputs: Sequence[Output], quarantine: str | None, max_bad_records: int | None) -> str:
    """The directory of the quarantine; raises `BadArgument` if outputs or quarantine would overwrite each other."""
    if not outputs:
        raise BadArgument("no output; give at least one")
    if max_bad_records is not None and max_bad_records < 0:
        raise BadArgument(f"max_bad_records is negative: {max_bad_records}")
    paths = [output.path.rstrip("/") for output in outputs if output.path is not None]
    if quarantine is None:
        if not paths:
            raise BadArgument("no output has a path, so say with quarantine where records go that do not decode")
        quarantine = f"{paths[0]}-quarantine"
    quarantine = quarantine.rstrip("/")
    if not quarantine:
        raise BadArgument("the quarantine is no directory, or the root")
    for path in paths:
        if [*paths, quarantine].count(path) > 1:
            raise BadArgument(
                f"two outputs, or an output and the quarantine, have the path {path!r} and would overwrite each other"
            )
    return quarantine


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
