"""What a session is used for apart from queries: names, temporary settings, and directories where Spark writes."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, NullType, StructField, StructType

from qewqew_spark.tables.evolution import Fold


def folding(spark: SparkSession) -> Fold:
    """Makes names equal that are one for this session."""
    return str if spark.conf.get("spark.sql.caseSensitive") == "true" else str.lower


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def conformed(value: Column, kind: DataType, to: DataType, fold: Fold) -> Column:
    """The value in another type, as of a table's column: with more fields, fewer, wider ones, in another case or order.

    What is without a type, or is to be, is null.
    """
    match kind, to:
        case _ if kind == to:
            return value
        case (NullType(), _) | (_, NullType()):
            return F.lit(None).cast(to)
        case StructType(), StructType():
            known = {fold(field.name): field for field in kind}
            fields = [
                conformed(value[known[key].name], known[key].dataType, each.dataType, fold)
                if (key := fold(each.name)) in known
                else F.lit(None).cast(each.dataType)
                for each in to
            ]
            made = F.struct(*(field.alias(each.name) for field, each in zip(fields, to, strict=True)))
            return F.when(value.isNotNull(), made)
        case ArrayType(), ArrayType():
            return F.transform(value, lambda element: conformed(element, kind.elementType, to.elementType, fold))
        case MapType(), MapType():
            values = F.transform_values(value, lambda _, each: conformed(each, kind.valueType, to.valueType, fold))
            return values if kind.keyType == to.keyType else values.cast(to)
    return value.cast(to)


def ddl(kind: DataType) -> str:
    """The type as Spark's SQL has it. Names of fields come from records, so each is quoted; in `simpleString` none is."""
    match kind:
        case StructType():
            return f"STRUCT<{columns_ddl(kind)}>"
        case ArrayType():
            return f"ARRAY<{ddl(kind.elementType)}>"
        case MapType():
            return f"MAP<{ddl(kind.keyType)}, {ddl(kind.valueType)}>"
    return kind.simpleString()


def columns_ddl(columns: Iterable[StructField]) -> str:
    """The columns as Spark's SQL has them, all nullable: see `ddl`."""
    return ", ".join(f"{quoted(field.name)} {ddl(field.dataType)}" for field in columns)


@contextmanager
def copy_of(spark: SparkSession) -> Iterator[SparkSession]:
    """A session with the same settings, views, functions, catalogs and current namespace; what it is used for is its own.

    So threads that share ``spark`` do not see each other's views and settings. Within, it is the session that is active in the
    JVM (for PySpark that is one of the process). SQL variables are not copied.
    """
    sessions: Any = spark.sparkContext._jvm.org.apache.spark.sql.classic.SparkSession  # type: ignore[union-attr]
    before = sessions.getActiveSession()
    made = SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())
    sessions.setActiveSession(made._jsparkSession)
    try:
        catalog, namespace = spark.catalog.currentCatalog(), spark.catalog.currentDatabase()
        if catalog != made.catalog.currentCatalog():  # Spark copies the namespace of its own catalog only
            made.catalog.setCurrentCatalog(catalog)
            if namespace:
                made.catalog.setCurrentDatabase(namespace)
        yield made
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


_within: dict[tuple[object, str], tuple[int, str | None]] = {}  # how many threads are within, and what was before
_counting = Lock()


@contextmanager
def setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Sets the session's setting to ``value`` inside the block: until the last of the threads that want it has left."""
    place = spark._jsparkSession.sessionUUID(), name
    with _counting:
        count, before = _within.get(place, (0, spark.conf.get(name, None)))
        _within[place] = count + 1, before
        spark.conf.set(name, value)
    try:
        yield
    finally:
        with _counting:
            count, before = _within.pop(place)
            if count > 1:
                _within[place] = count - 1, before
            elif before is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, before)


def missing_format(spark: SparkSession, name: str) -> Exception | None:
    """What Spark raises if it does not know the format."""
    try:
        # Reading a path that cannot exist is the only public way to look a format up; any other failure does not matter here.
        spark.read.format(name).schema("x INT").load("/nonexistent/qewqew")
    except (PySparkException, Py4JJavaError) as error:
        return error if re.search("Failed to find (the )?data source", str(error)) else None
    return None


def delete(spark: SparkSession, path: str, *, empty: bool = False) -> None:
    """Remove a directory in whatever file system Spark writes to; it need not exist. ``empty``: raise if it holds anything."""
    target, system = _hadoop(spark, path)
    system.delete(target, not empty)


def literal(path: str) -> str:
    """The path for a read of Spark, which takes it for a pattern."""
    return re.sub(r"([][{}*?\\])", r"\\\1", path)


def exists(spark: SparkSession, path: str) -> bool:
    target, system = _hadoop(spark, path)
    return bool(system.exists(target))


def make_private(spark: SparkSession, path: str, *, below: bool = False) -> None:
    """Make the directory, if it is not there, for its owner alone; does nothing where there are no modes.

    ``below``: with all that is in it, which nobody else may be changing. Hadoop takes no notice of the umask of the process.
    """
    target, system = _hadoop(spark, path)
    permission: Any = spark.sparkContext._jvm.org.apache.hadoop.fs.permission.FsPermission  # type: ignore[union-attr]
    if not system.exists(target):
        system.mkdirs(target, permission("700"))
    system.setPermission(target, permission("700"))
    for status in system.listStatus(target) if below else ():
        if status.isDirectory():
            make_private(spark, str(status.getPath()), below=True)
        else:
            system.setPermission(status.getPath(), permission("600"))


def rename(spark: SparkSession, path: str, new: str) -> None:
    """Give a directory another name, replacing what has that name now."""
    target, system = _hadoop(spark, new)
    system.delete(target, True)
    if not system.rename(_hadoop(spark, path)[0], target):
        raise OSError(f"{path} could not be renamed to {new}")


def listed(spark: SparkSession, path: str) -> list[str]:
    """The names in a directory, in whatever file system Spark writes to; none if it does not exist."""
    target, system = _hadoop(spark, path)
    return [str(status.getPath().getName()) for status in system.listStatus(target)] if system.exists(target) else []


def newest(spark: SparkSession, path: str, prefix: str, count: int) -> list[str]:
    """Of the entries of a directory whose names begin so, those ``count`` that changed last; none if it does not exist."""
    target, system = _hadoop(spark, path)
    statuses = system.listStatus(target) if system.exists(target) else []
    found = [(int(status.getModificationTime()), str(status.getPath().getName())) for status in statuses]
    return [name for _, name in sorted(each for each in found if each[1].startswith(prefix))[-count:]]


def older(spark: SparkSession, path: str, seconds: float) -> list[str]:
    """The names in a directory that have not changed for this long; none if it does not exist."""
    target, system = _hadoop(spark, path)
    statuses = system.listStatus(target) if system.exists(target) else []
    limit = (time.time() - seconds) * 1000
    return [str(status.getPath().getName()) for status in statuses if int(status.getModificationTime()) < limit]


def read_bytes(spark: SparkSession, path: str) -> bytes | None:
    """A small file, whole; None if there is none, nothing if its checksum is wrong."""
    target, system = _hadoop(spark, path)
    jvm: Any = spark.sparkContext._jvm
    try:
        opened = system.open(target)
    except Py4JJavaError as error:
        if "FileNotFoundException" in str(error):
            return None
        raise
    try:
        return bytes(jvm.org.apache.hadoop.io.IOUtils.readFullyToByteArray(opened))
    except Py4JJavaError as error:
        if "ChecksumException" in str(error):
            return b""
        raise
    finally:
        opened.close()


def write_bytes(spark: SparkSession, path: str, content: bytes) -> None:
    """Write a small file that has this content or is not there; one that has the name already stays as it is."""
    target, system = _hadoop(spark, path)
    temporary = _hadoop(spark, f"{path}.{uuid.uuid4().hex[:12]}")[0]
    written = system.create(temporary, False)
    try:
        written.write(content)
    finally:
        written.close()
    if not system.rename(temporary, target):
        system.delete(temporary, False)
        if not system.exists(target):
            raise OSError(f"{path} could not be written")


def files_below(spark: SparkSession, path: str, suffix: str) -> list[tuple[str, int]]:
    """The files below a directory whose names end so: their places below it and their bytes, in order."""
    target, system = _hadoop(spark, path)
    top = str(system.makeQualified(target))
    found: list[tuple[str, int]] = []
    statuses = system.listFiles(target, True)
    while statuses.hasNext():
        status = statuses.next()
        name = str(status.getPath())
        if name.endswith(suffix):
            found.append((name.removeprefix(f"{top}/"), int(status.getLen())))
    return sorted(found)


def _hadoop(spark: SparkSession, path: str) -> tuple[Any, Any]:
    jvm: Any = spark.sparkContext._jvm  # the only way to Hadoop's file systems from Python
    target = jvm.org.apache.hadoop.fs.Path(path)
    return target, target.getFileSystem(spark.sparkContext._jsc.hadoopConfiguration())
