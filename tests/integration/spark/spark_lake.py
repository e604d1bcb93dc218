"""Where tests have their tables of Iceberg and Delta."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import duckdb
from pyiceberg.catalog import Catalog, load_catalog


def in_a_file(place: Path) -> dict[str, str]:
    """The settings of a catalog."""
    return {"type": "sql", "uri": f"sqlite:///{place}/catalog.db", "warehouse": f"file://{place}/warehouse"}


class Lake:
    """A catalog in a file for Iceberg, a directory for Delta, and a reader that shares no code with the writers."""

    def __init__(self, session: Any, place: Path, **settings: str) -> None:
        """``session``: may be None, if another process writes. ``settings``: of another catalog."""
        self.session = session
        self.place = place
        self.settings = settings or in_a_file(place)
        self.environment: dict[str, str] = {}  # what another driver needs of it
        for name, value in self.settings.items() if session is not None else ():
            session.conf.set(f"spark.sql.catalog.lake.{name}", value)

    @property
    def catalog(self) -> Catalog:
        return load_catalog("lake", **self.settings)

    def name(self, kind: str, name: str = "orders") -> str:
        return f"lake.shop.{name}" if kind == "iceberg" else f"{self.place}/{name}"

    def rows(self, kind: str, columns: str = "*", name: str = "orders") -> list[tuple[Any, ...]]:
        """As DuckDB reads them."""
        if kind == "iceberg":
            where = f"iceberg_scan('{self.catalog.load_table(f'shop.{name}').metadata_location}')"
        else:
            where = f"delta_scan('{self.name(kind, name)}')"
        with self.database() as database:
            return sorted(database.execute(f"SELECT {columns} FROM {where}").fetchall(), key=repr)  # noqa: S608

    @staticmethod
    def database() -> duckdb.DuckDBPyConnection:
        return _database().cursor()


@cache
def _database() -> duckdb.DuckDBPyConnection:
    """One for all tests of the process: to load its extensions takes longer than to read a table."""
    database = duckdb.connect()
    for extension in "avro", "iceberg", "delta":
        module = __import__(f"duckdb_extension_{extension}")
        (file,) = Path(module.__path__[0]).rglob(f"{extension}.duckdb_extension")
        database.load_extension(str(file))
    database.execute("SET GLOBAL TimeZone = 'UTC'")
    return database
