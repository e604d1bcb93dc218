"""Where the batch job writes: a batch that is processed again leaves one result, on each kind of sink."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
from spark_batches import make_batch

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs import jdbc
from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.output import Output
from qewqew_spark.tables.session import quoted


def lines(*objects: object) -> list[bytes]:
    return [json.dumps(each).encode() for each in objects]


# A database: Derby, which comes with Spark.


@pytest.fixture
def database(tmp_path) -> str:
    return f"jdbc:derby:{tmp_path}/database;create=true"


def orders(url: str, **more: object) -> Output:
    return Output(format="jdbc", options={"url": url, "dbtable": "orders", **more})


def rows(spark, url: str, table: str = "orders") -> list[tuple]:
    frame = spark.read.format("jdbc").options(url=url, dbtable=table).load()
    return sorted(map(tuple, frame.collect()), key=repr)


@contextmanager
def connected(spark, url: str) -> Iterator:
    connection = spark.sparkContext._jvm.java.sql.DriverManager.getConnection(url)
    try:
        yield connection
    finally:
        connection.close()


def execute(spark, url: str, *statements: str) -> None:
    with connected(spark, url) as connection:
        for each in statements:
            connection.createStatement().execute(each)


def tables(spark, url: str) -> set[str]:
    with connected(spark, url) as connection:
        found = connection.getMetaData().getTables(None, None, "%", None)
        names = set()
        while found.next():
            if found.getString("TABLE_TYPE") == "TABLE":
                names.add(found.getString("TABLE_NAME"))
        return names


SCHEMA = "id BIGINT, name STRING, price DECIMAL(10,2), at TIMESTAMP, ok BOOLEAN"


def test_a_table_of_a_database_has_each_batch_once(spark, tmp_path, database):
    first = make_batch(tmp_path / "b1", lines({"id": 1, "name": "a'b\"c", "price": 1.25}, {"id": 2, "ok": True}), [b"x"])
    second = make_batch(tmp_path / "b2", lines({"id": 3, "at": "2026-01-02T03:04:05Z"}), batch_id="orders-ffff")
    aside = str(tmp_path / "aside")
    for batch in first, second, first:
        result = run(spark, str(batch), [orders(database)], schema=SCHEMA, quarantine=aside)
    assert (result["good"], result["bad"], result["reasons"]) == (2, 1, {"not a JSON object": 1})
    assert result["outputs"] == [{"path": None, "table": "orders", "format": "jdbc", "written": 2, "left_out": []}]
    found = spark.read.format("jdbc").options(url=database, dbtable="orders").load()
    assert sorted(
        tuple(row) for row in found.selectExpr("id", "name", "price + 0", "unix_seconds(at)", "ok", "batch").collect()
    ) == [
        (1, "a'b\"c", pytest.approx(1.25), None, None, "orders-1a2b"),
        (2, None, None, None, True, "orders-1a2b"),
        (3, None, None, 1_767_323_045, None, "orders-ffff"),
    ]
    assert tables(spark, database) == {"ORDERS"}  # no staging table is left


def test_a_run_that_fails_between_two_statements_leaves_what_was_there(spark, tmp_path, database):
    batch = make_batch(tmp_path / "b", lines({"id": 1}, {"id": 2}))
    output, aside = [orders(database)], str(tmp_path / "aside")
    run(spark, str(batch), output, schema="id INT", quarantine=aside)
    before = rows(spark, database)
    # The rows of the first run are deleted, and then one that the table does not take is inserted.
    execute(spark, database, 'ALTER TABLE orders ADD CONSTRAINT positive CHECK ("id" > 0)')
    changed = make_batch(tmp_path / "c", lines({"id": 5}, {"id": -1}))
    with pytest.raises(Exception, match="POSITIVE"):
        run(spark, str(changed), output, schema="id INT", quarantine=aside)
    assert rows(spark, database) == before == [(1, "orders-1a2b"), (2, "orders-1a2b")]
    # What it staged is replaced and removed by the next run.
    assert len(tables(spark, database)) == 2
    execute(spark, database, "ALTER TABLE orders DROP CONSTRAINT positive")
    run(spark, str(changed), output, schema="id INT", quarantine=aside)
    assert rows(spark, database) == [(-1, "orders-1a2b"), (5, "orders-1a2b")]
    assert tables(spark, database) == {"ORDERS"}


class Killed(BaseException):
    pass


def test_a_run_that_is_killed_at_any_point_leaves_the_old_rows_or_the_new_ones(spark, tmp_path, database, monkeypatch):
    old, new = make_batch(tmp_path / "b", lines({"id": 1}, {"id": 2})), make_batch(tmp_path / "c", lines({"id": 3}, {"id": 4}))
    execute_all = jdbc.Jdbc._execute

    def write(batch, point: str = "") -> list[int]:
        def execute(self, *statements):
            with self._connection() as connection:
                connection.setAutoCommit(False)
                for each in statements:
                    if each.startswith(point):
                        connection.rollback()  # as the database does when its client is gone
                        raise Killed
                    connection.createStatement().executeUpdate(each)
            pytest.fail("not killed")

        with monkeypatch.context() as patch:
            if point:
                patch.setattr(
                    jdbc.Jdbc,
                    "_execute",
                    lambda self, *each: (execute if point in "".join(each) else execute_all)(self, *each),
                )
            with pytest.raises(Killed) if point else nullcontext():
                run(spark, str(batch), [orders(database)], schema="id INT", quarantine=str(tmp_path / "aside"))
        return [row[0] for row in rows(spark, database)]

    assert write(old, "DELETE") == []  # the table was made, and is empty
    assert write(old) == [1, 2]
    for point, left in ("DELETE", [1, 2]), ("INSERT", [1, 2]), ("DROP", [3, 4]):
        assert write(new, point) == left
        assert len(tables(spark, database)) == 2  # the staging table of the killed run
    assert write(old) == [1, 2]
    assert tables(spark, database) == {"ORDERS"}


def test_names_of_a_database_may_be_capitals_or_quoted_or_have_a_schema(spark, tmp_path, database):
    execute(
        spark, database, "CREATE SCHEMA shop", 'CREATE TABLE shop."my orders" (ID BIGINT, "or der" VARCHAR(9), BATCH VARCHAR(99))'
    )
    batch = make_batch(tmp_path / "b", lines({"id": 1, "or der": "x"}))
    output = orders(database, dbtable='shop."my orders"')
    for _ in range(2):
        run(spark, str(batch), [output], schema="id INT, `or der` STRING", quarantine=str(tmp_path / "aside"))
    assert rows(spark, database, 'shop."my orders"') == [(1, "x", "orders-1a2b")]
    assert tables(spark, database) == {"my orders"}


@pytest.mark.parametrize(
    ("made", "schema", "message"),
    [
        ("id INT", "id INT", "table orders has no column 'batch'"),
        ("id VARCHAR(9), batch VARCHAR(99)", "id INT", "the column 'id' is string there and int in this batch"),
        (None, "id INT, s STRUCT<a: INT>", "the database has no type for the column 's', struct<a:int>"),
    ],
)
def test_a_table_that_cannot_take_the_rows_is_refused_before_anything_is_written(
    spark, tmp_path, database, made, schema, message
):
    execute(spark, database, *([f"CREATE TABLE orders ({made})"] if made else ["CREATE TABLE other (x INT)"]))
    before = tables(spark, database)
    batch = make_batch(tmp_path / "b", lines({"id": 1}), [b"x"])
    outputs = [Output(str(tmp_path / "out")), orders(database)]
    with pytest.raises(BadArgument) as caught:
        run(spark, str(batch), outputs, schema=schema)
    assert message in str(caught.value)
    assert tables(spark, database) == before
    assert not (tmp_path / "out").exists()


def test_a_database_that_is_not_there_is_found_before_anything_is_written(spark, tmp_path):
    batch = make_batch(tmp_path / "b", lines({"id": 1}))
    missing = "cannot connect to the database: .*none.* not found"
    for url, message in (
        (f"jdbc:derby:{tmp_path}/none", missing),
        ("jdbc:nothing:x", "No suitable driver; is the database's driver"),
    ):
        with pytest.raises(BadArgument, match=f"table orders: .*{message}"):
            run(spark, str(batch), [Output(str(tmp_path / "out")), orders(url)])
    assert os.listdir(tmp_path) == ["b"]


def test_options_come_from_a_file_or_the_environment(spark, tmp_path, database, monkeypatch):
    batch = make_batch(tmp_path / "b", lines({"id": 1}))
    (tmp_path / "table").write_text("orders\n")
    monkeypatch.setenv("DB_URL", database)
    output = Output(format="jdbc", options={"url": {"env": "DB_URL"}, "dbtable": {"file": str(tmp_path / "table")}})
    result = run(spark, str(batch), [output], schema="id INT", quarantine=str(tmp_path / "aside"))
    assert rows(spark, database) == [(1, "orders-1a2b")]
    assert database not in json.dumps(result)
    monkeypatch.delenv("DB_URL")
    with pytest.raises(BadArgument, match="the option 'url' refers to the environment variable 'DB_URL', which is not set"):
        run(spark, str(batch), [output], schema="id INT", quarantine=str(tmp_path / "aside"))


# Names of fields come from records


HOSTILE_NAMES = [
    *("first-name", "a.b", "a b", "1e5", "select", "a`b", "a``", '"', 'a"b', "a'b", "a]b", "a\\", "ä"),
    "a:INT>, planted STRING COMMENT 'by a record', t STRUCT<b",
    "a` INT, `planted` STRING, `t",
    'a" INT, "planted" INT, "t',
    'a" INT); DROP TABLE orders; --',
]


def with_names(number: int, *names: str) -> dict[str, object]:
    return {"id": number, **{name: {name: [{name: number}]} for name in names}}


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_what_records_call_their_fields_is_a_name_and_no_sql(spark, tmp_path, shop, database, name):
    """In a table that is made, and in one that gets the column."""
    where = {"quarantine": str(tmp_path / "aside")}
    first, second = (
        make_batch(tmp_path / "b1", lines({"id": 1})),
        make_batch(tmp_path / "b2", lines(with_names(2, name)), batch_id="b2"),
    )
    for batches in (first, second), (second, first):
        for batch in batches:
            run(spark, str(batch), [Output(table=shop)], **where)
        found = spark.table(shop).where("id = 2").drop("batch")
        assert (set(found.columns), found.first().asDict(recursive=True)) == ({"id", name}, with_names(2, name))
        spark.sql(f"DROP TABLE {shop}")
        in_text = orders(database, dbtable=f"t{len(tables(spark, database))}")
        for batch in batches:
            flat = Output(
                format="jdbc",
                options=in_text.options,
                sql=f"SELECT id, to_json(struct(*)) AS {quoted(name)} FROM batch" if batch == second else None,  # noqa: S608
            )
            run(spark, str(batch), [flat], **where)
        found = spark.read.format("jdbc").options(**in_text.options).load()
        assert sorted(found.columns) == sorted(["id", name, "batch"])
        assert json.loads(found.where("id = 2").first()[name]) == with_names(2, name)


def test_a_name_that_this_spark_cannot_quote_for_a_database_is_refused_before_anything_is_written(
    spark, tmp_path, database, monkeypatch
):
    """Spark 4.0.0 puts quotes around a name, and leaves those that are in it (SPARK-52832)."""

    class Dialect:
        def __init__(self, dialect):
            self._dialect = dialect

        def __getattr__(self, name):
            return getattr(self._dialect, name)

        def quoteIdentifier(self, name: str) -> str:
            return f'"{name}"'

    made = jdbc.Jdbc.__init__

    def make(self, *arguments):
        made(self, *arguments)
        self._dialect = Dialect(self._dialect)

    monkeypatch.setattr(jdbc.Jdbc, "__init__", make)
    outputs = [Output(str(tmp_path / "out")), orders(database)]
    for name in HOSTILE_NAMES:
        batch = make_batch(tmp_path / "b", lines({"id": 1, name: 1}))
        if '"' in name:
            with pytest.raises(BadArgument, match=r"Spark .* cannot quote the column .* for this database; rename"):
                run(spark, str(batch), outputs)
            assert (tables(spark, database), os.path.exists(tmp_path / "out")) == (set(), False)
    assert run(spark, str(make_batch(tmp_path / "b", lines({"id": 1, "first-name": 1}))), outputs)["good"] == 1


# A table of Spark's own catalog


@pytest.fixture
def shop(spark) -> Iterator[str]:
    spark.sql("CREATE DATABASE shop")
    yield "shop.orders"
    spark.sql("DROP DATABASE shop CASCADE")


@pytest.mark.parametrize("format", ["parquet", "orc", "json", "csv"])
def test_a_table_of_the_catalog_has_each_batch_once(spark, tmp_path, shop, format):
    many = make_batch(tmp_path / "b1", lines(*({"id": n, "month": n % 3, "name": "x"} for n in range(6))))
    few = make_batch(tmp_path / "b2", lines({"id": 1, "month": 1}))  # the same batch, with less in it
    other = make_batch(tmp_path / "b3", lines({"id": 9, "month": 9}), batch_id="orders-ffff")
    outputs = [Output(table=shop, format=format, partition_by=["month"])]
    schema, aside = "id BIGINT, name STRING, month INT", str(tmp_path / "aside")
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    try:
        for batch in many, other, few:
            result = run(spark, str(batch), outputs, schema=schema, quarantine=aside)
        assert spark.conf.get("spark.sql.sources.partitionOverwriteMode") == "dynamic"
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    assert result["outputs"] == [{"path": None, "table": shop, "format": format, "written": 1, "left_out": []}]
    found = spark.table(shop)
    assert sorted(map(tuple, found.select("id", "name", "month", "batch").collect())) == [
        (1, None, 1, "orders-1a2b"),
        (9, None, 9, "orders-ffff"),
    ]
    # Also where the repeated run has no rows at all.
    outputs = [Output(table=shop, format=format, partition_by=["month"], sql="SELECT * FROM batch WHERE id < 0")]
    run(spark, str(many), outputs, schema=schema, quarantine=aside)
    assert [row.id for row in spark.table(shop).collect()] == [9]


def test_a_table_that_is_not_partitioned_by_batch_is_refused(spark, tmp_path, shop):
    spark.sql(f"CREATE TABLE {shop} (id INT) USING parquet")
    batch = make_batch(tmp_path / "b", lines({"id": 1}))
    with pytest.raises(BadArgument, match=r"table shop\.orders must be partitioned by a column 'batch'"):
        run(spark, str(batch), [Output(table=shop)], schema="id INT", quarantine=str(tmp_path / "aside"))
    spark.sql(f"DROP TABLE {shop}")
    spark.sql(f"CREATE TABLE {shop} (id INT, batch STRING) USING parquet")
    with pytest.raises(BadArgument, match=r"table shop\.orders must be partitioned by a column 'batch'"):
        run(spark, str(batch), [Output(table=shop)], schema="id INT", quarantine=str(tmp_path / "aside"))
    assert spark.table(shop).count() == 0


def test_options_that_a_table_does_not_take_are_a_bad_argument(spark, tmp_path, shop):
    batch = make_batch(tmp_path / "b", [b'{"id": 1}'])
    outputs = [
        Output(table="shop.wrong", options={"compression": "nonsense"}),
        Output(str(tmp_path / "out"), options={"parquet.block.size": "x"}),
    ]
    for output, told in zip(outputs, ["table shop.wrong: [CODEC_NOT_AVAILABLE", f"{tmp_path}/out: For input"], strict=True):
        with pytest.raises(BadArgument) as caught:
            run(spark, str(batch), [output], schema="id INT", quarantine=str(tmp_path / "q"))
        assert str(caught.value).startswith(f"output: {told}")
    with pytest.raises(BadArgument, match="For input"):  # whatever their order, files are written first
        run(spark, str(batch), [Output(table="shop.fine"), outputs[1]], schema="id INT", quarantine=str(tmp_path / "q"))
    assert not [name for name in ("wrong", "fine") if spark.catalog.tableExists(f"shop.{name}")]


def test_a_batch_without_fields_leaves_nothing_of_an_earlier_run_in_a_table(spark, tmp_path, shop, database):
    outputs = [Output(table=shop), orders(database)]
    batch = make_batch(tmp_path / "b", lines({}))
    where = {"quarantine": str(tmp_path / "aside")}
    run(spark, str(batch), outputs, schema="id INT", **where)
    assert (spark.table(shop).count(), len(rows(spark, database))) == (1, 1)
    assert run(spark, str(batch), outputs, **where)["note"]
    assert (spark.table(shop).count(), len(rows(spark, database))) == (0, 0)


# Columns that are not those of the batches before


@pytest.mark.parametrize("kind", ["parquet", "orc", "table", "jdbc"])
def test_new_and_missing_columns_are_as_the_policy_says(spark, tmp_path, shop, database, kind):
    output = {
        "table": Output(table=shop),
        "jdbc": orders(database),
    }.get(kind) or Output(str(tmp_path / "out"), format=kind)

    def write(number: int, schema: str, policy: str, record: dict[str, object]) -> list[str]:
        batch = make_batch(tmp_path / f"b{number}", lines(record), batch_id=f"orders-{number}")
        aside = str(tmp_path / "aside")
        done = run(spark, str(batch), [output], schema=schema, schema_evolution=policy, quarantine=aside)
        return done["outputs"][0]["left_out"]

    def read() -> dict[str, dict[str, object]]:
        if kind == "jdbc":
            frame = spark.read.format("jdbc").options(url=database, dbtable="orders").load()
        else:
            frame = spark.table(shop) if kind == "table" else spark.read.format(kind).load(output.path, mergeSchema=True)
        return {row.batch: {name: value for name, value in row.asDict().items() if name != "batch"} for row in frame.collect()}

    assert write(1, "id INT, name STRING", "fail", {"id": 1, "name": "a"}) == []
    with pytest.raises(BadArgument, match=r"schema_evolution is 'fail': 'name' is missing, 'more' is new"):
        write(2, "id INT, more DATE", "fail", {"id": 2, "more": "2026-01-02"})
    for policy in "fail", "merge":
        with pytest.raises(BadArgument, match="the column 'name' is string there and int in this batch"):
            write(2, "id INT, name INT", policy, {"id": 2, "name": 5})
    assert list(read()) == ["orders-1"]

    assert write(2, "id INT, more BOOLEAN", "merge", {"id": 2, "more": True}) == []
    everything = {"id": 2, "name": None, "more": True}
    assert read() == {"orders-1": {"id": 1, "name": "a", "more": None}, "orders-2": everything}
    if kind in ("table", "jdbc"):
        assert write(3, "other INT, id INT", "ignore", {"id": 3, "other": 5}) == ["other"]
        assert read()["orders-3"] == {"id": 3, "name": None, "more": None}
    else:  # files of a batch have columns of their own, and with "ignore" are not looked at
        assert write(3, "id INT, other INT, name INT", "ignore", {"id": 3, "other": 5}) == []
        assert spark.read.format(kind).load(f"{output.path}/batch=orders-3").columns == ["id", "other", "name"]


def test_fields_of_structs_may_be_new_in_files_but_not_in_tables(spark, tmp_path, shop):
    one = make_batch(tmp_path / "b1", lines({"s": {"a": 1}, "l": [{"x": 1}]}))
    two = make_batch(tmp_path / "b2", lines({"s": {"b": 1}, "l": [{"x": 1, "y": 2}]}), batch_id="orders-ffff")
    for output in Output(str(tmp_path / "out")), Output(table=shop):
        run(spark, str(one), [output], quarantine=str(tmp_path / "aside"))
    run(spark, str(two), [Output(str(tmp_path / "out"))])
    with pytest.raises(
        BadArgument, match=r"the column 'l.element' is struct<x:bigint> there and struct<x:bigint,y:bigint> in this"
    ):
        run(spark, str(two), [Output(table=shop)], quarantine=str(tmp_path / "aside"))
    bad = make_batch(tmp_path / "b3", lines({"s": {"a": 1}, "l": [{"x": "text"}]}), batch_id="orders-0000")
    # An inferred schema has the type that is there.
    result = run(spark, str(bad), [Output(str(tmp_path / "out"))], max_bad_records=1)
    assert (result["good"], result["reasons"]) == (0, {"a value does not fit the schema": 1})
    with pytest.raises(BadArgument, match=r"the column 'l.element.x' is bigint there and string in this batch"):
        run(spark, str(bad), [Output(str(tmp_path / "out"))], schema="s STRUCT<a: BIGINT>, l ARRAY<STRUCT<x: STRING>>")


def test_columns_of_partitions_have_no_type_to_compare_with(spark, tmp_path):
    # Spark would guess an INT from the names of the directories.
    for number in "12":
        batch = make_batch(tmp_path / f"b{number}", lines({"id": 1, "month": number}), batch_id=f"orders-{number}")
        run(spark, str(batch), [Output(str(tmp_path / "out"), partition_by=["month"])], schema_evolution="fail")
    assert spark.read.parquet(str(tmp_path / "out")).count() == 2


def test_what_a_killed_job_left_of_another_batch_is_no_table(spark, tmp_path):
    (tmp_path / "out" / "batch=orders-0" / "_temporary").mkdir(parents=True)
    batch = make_batch(tmp_path / "b", lines({"id": 1}))
    assert run(spark, str(batch), [Output(str(tmp_path / "out"))], schema_evolution="fail")["good"] == 1
