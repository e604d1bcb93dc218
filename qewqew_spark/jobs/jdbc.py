"""A table of a database: a batch's rows in one transaction."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from qewqew_core.errors import BadArgument
from qewqew_core.secrecy import excerpt
from qewqew_spark.jobs.explaining import explain
from qewqew_spark.jobs.output import BATCH, Output
from qewqew_spark.jobs.writing import Sink
from qewqew_spark.tables.evolution import Fold, same_in_a_database


class Jdbc(Sink):
    """A table of a database with a column `batch`; it is made if it does not exist.

    Spark writes through many connections, so a failure would leave a part. It therefore writes to a staging table, and the
    driver moves the rows in one transaction: readers see what an earlier run wrote, or everything that this one did.
    """

    staged = True
    agrees = False  # a database has types of its own
    same = staticmethod(same_in_a_database)

    def __init__(self, spark: SparkSession, output: Output, batch: str, schema_evolution: str) -> None:
        super().__init__(spark, output, batch, schema_evolution)
        # Spark takes options whatever the case of their names, a Scala map does not.
        self.options = {name.lower(): value for name, value in self.options.items()}
        self.name = str(self.options["dbtable"])
        # What lies before the last dot is the schema: names may be quoted, in the ways of the databases, and hold dots.
        found = re.fullmatch(r'(.*\.)?("[^"]+"|`[^`]+`|\[[^\]]+\]|[^\s."`\[\]()]+)', self.name)
        if not found:
            raise BadArgument(f"output: the option 'dbtable' must be the name of a table, not {excerpt(self.name, 80)}")
        # Of this batch and table only, and the same in each run, which so replaces what a killed one left.
        self.staging = f"{found[1] or ''}qewqew_{zlib.crc32(f'{self.name} {batch}'.encode()):08x}"
        jvm: Any = spark.sparkContext._jvm
        self._jdbc = jvm.org.apache.spark.sql.execution.datasources.jdbc
        texts = {name: str(value) for name, value in self.options.items()}
        try:
            self._jvm_options = self._jdbc.JdbcOptionsInWrite(jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(texts))
        except Py4JJavaError as error:
            raise BadArgument(f"output: table {self.name}: {explain(error)}; is the database's driver among --jars?") from error
        self._dialect = jvm.org.apache.spark.sql.jdbc.JdbcDialects.get(texts["url"])

    @property
    def place(self) -> dict[str, str | None]:
        return {"path": None, "table": self.name}

    def check(self, table: DataFrame) -> None:
        for field in table.schema:
            self._quoted(field.name)
            self._type(field)
        super().check(table)

    def there(self) -> StructType | None:
        try:
            with self._connection() as connection:
                exists = self._jdbc.JdbcUtils.tableExists(connection, self._jvm_options)
        except Py4JJavaError as error:
            raise BadArgument(f"output: table {self.name}: cannot connect to the database: {explain(error)}") from error
        if not exists:
            return None
        columns = self._columns()
        if BATCH not in map(str.lower, columns.names):
            raise BadArgument(
                f"output: table {self.name} has no column {BATCH!r}, by which a repeated run finds its rows; add one, a "
                "VARCHAR(255) with an index"
            )
        return columns

    @property
    def fold(self) -> Fold:
        return str.lower  # names that nobody quoted are capitals in some databases

    def write(self, rows: DataFrame) -> None:
        rows = self.with_batch(rows)
        self._written = rows.schema
        self.writer(rows).options(**self._create(), dbtable=self.staging).mode("overwrite").save()

    def _create(self) -> dict[str, str]:
        # Without a length a text is a CLOB in some databases, which can neither be compared nor have an index.
        types = [str(self.options[name]) for name in ("createtablecolumntypes",) if name in self.options]
        return {"createTableColumnTypes": ", ".join([*types, f"{BATCH} VARCHAR(255)"])}

    def abort(self) -> None:
        self._execute(f"DROP TABLE {self.staging}")

    def commit(self) -> None:
        if self.existing is None:
            self.writer(self.nothing(self._written)).options(**self._create()).mode("ignore").save()
        elif self.new and self.schema_evolution == "merge":
            self._execute(*map(self._add_column, self.new))
        columns = {name.lower(): name for name in self._columns().names}
        into = ", ".join(self._quoted(columns[column.lower()]) for column in self._written.names)
        what = ", ".join(map(self._quoted, self._written.names))
        self._execute(
            # The id can be the name of a directory, so it has no quotes.
            f"DELETE FROM {self.name} WHERE {self._quoted(columns[BATCH])} = '{self.batch}'",  # noqa: S608
            f"INSERT INTO {self.name} ({into}) SELECT {what} FROM {self.staging}",  # noqa: S608
        )
        self._execute(f"DROP TABLE {self.staging}")

    def _execute(self, *statements: str) -> None:
        """Execute the statements in one transaction."""
        with self._connection() as connection:
            connection.setAutoCommit(False)
            try:
                for text in statements:
                    statement = connection.createStatement()
                    statement.executeUpdate(text)
                    statement.close()
                connection.commit()
            except BaseException:
                with suppress(Py4JJavaError):  # the connection is gone, and with it the transaction
                    connection.rollback()
                raise

    def _add_column(self, field: StructField) -> str:
        return str(self._dialect.getAddColumnQuery(self.name, field.name, self._type(field).databaseTypeDefinition()))

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        connection = self._dialect.createConnectionFactory(self._jvm_options).apply(-1)
        try:
            yield connection
        finally:
            connection.close()

    def _columns(self) -> StructType:
        names = "url", "dbtable", "driver", "user", "password"  # others may be for writing only
        options = {name: value for name, value in self.options.items() if name.lower() in names}
        return self.spark.read.format("jdbc").options(**options).load().schema

    def _quoted(self, name: str) -> str:
        """The name as this database quotes it; raises `BadArgument` if it would end early, and be SQL from there on."""
        made = str(self._dialect.quoteIdentifier(name))
        end = made[-1:]
        if made != f"{made[:1]}{name.replace(end, 2 * end)}{end}" and not re.fullmatch(r"\w+", name):
            raise BadArgument(
                f"output: table {self.name}: Spark {self.spark.version} cannot quote the column {name!r} for this database; "
                "rename it with 'sql', or give a schema without it"
            )
        return made

    def _type(self, field: StructField) -> Any:
        """The type in this database, as Java's object; raises `BadArgument` if it has none."""
        kind = self.spark._jsparkSession.parseDataType(field.dataType.json())
        for found in self._dialect.getJDBCType(kind), self._jdbc.JdbcUtils.getCommonJDBCType(kind):
            if found.isDefined():
                return found.get()
        raise BadArgument(
            f"output: table {self.name}: the database has no type for the column {field.name!r}, "
            f"{field.dataType.simpleString()}; make a string of it with 'sql': to_json(...)"
        )
