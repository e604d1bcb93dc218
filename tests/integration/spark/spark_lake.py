"""Where tests have their tables of Iceberg and Delta."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        """``settings``: of another catalog."""
        self.session = session
        self.place = place
        self.settings = settings or in_a_file(place)
        for name, value in self.settings.items():
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
    @contextmanager
    def database() -> Iterator[duckdb.DuckDBPyConnection]:
        with duckdb.connect() as database:
            for extension in "avro", "iceberg", "delta":
                module = __import__(f"duckdb_extension_{extension}")
                (file,) = Path(module.__path__[0]).rglob(f"{extension}.duckdb_extension")
                database.load_extension(str(file))
            database.execute("SET TimeZone = 'UTC'")
            yield database
