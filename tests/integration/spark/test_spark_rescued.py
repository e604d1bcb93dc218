"""What the schema does not name in the records of a batch: counted in the result, and kept in a column if asked."""

from __future__ import annotations

import json
import os

import pyarrow.parquet as pq
import pytest
from spark_batches import make_batch

from qewqew_core.errors import BadArgument
from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.output import Output

RECORDS = [
    b'{"id":1,"name":"a"}',
    b'{"id":2,"name":"b","colour":"red","who":{"phone":"1"}}',
    b'{"id":3,"who":{"mail":"m","phone":2.50}}',
    b'{"id":"x","colour":"blue"}',
    b'{"id":4,"colour":null}',
]
SCHEMA = "id BIGINT, name STRING, who STRUCT<mail: STRING>"


@pytest.mark.parametrize("bad", [True, False])
def test_it_is_counted_and_kept_as_json_beside_the_fields(spark, tmp_path, bad):
    batch = make_batch(tmp_path / "b", RECORDS if bad else [*RECORDS[:3], *RECORDS[4:]])
    counted = run(spark, str(batch), [Output(str(tmp_path / "plain"))], schema=SCHEMA)
    kept = run(spark, str(batch), [Output(str(tmp_path / "out"))], schema=SCHEMA, rescued="_rescued")
    assert counted["unnamed"] == kept["unnamed"] == {"records": 2, "fields": {"who.phone": 2, "colour": 1}}
    assert (kept["good"], kept["bad"]) == (4, int(bad))
    rows = {row["id"]: row for row in pq.read_table(tmp_path / "out").to_pylist()}
    texts = {id: row["_rescued"] and json.loads(row["_rescued"]) for id, row in rows.items()}
    assert texts == {1: None, 2: {"colour": "red", "who.phone": "1"}, 3: {"who.phone": 2.5}, 4: None}
    assert '{"who.phone": 2.50}' in {row["_rescued"] for row in rows.values()}  # as it was written
    assert "_rescued" not in pq.read_table(tmp_path / "plain").column_names


def test_a_query_that_does_not_read_all_records_does_not_change_the_count(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b'{"id":1,"more":1}'] * 50)
    outputs = [Output(str(tmp_path / "out"), sql="SELECT id FROM batch LIMIT 1")]
    assert run(spark, str(batch), outputs, schema="id INT")["unnamed"] == {"records": 50, "fields": {"more": 20}}
    outputs = [Output(str(tmp_path / "two"), sql="SELECT a.id, a.r FROM batch a JOIN batch b ON a.id = b.id")]
    done = run(spark, str(batch), outputs, schema="id INT", rescued="r")
    assert done["unnamed"] == {"records": 50, "fields": {"more": 50}}


def test_sparks_own_parser_of_json_keeps_it_too(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [b'{"day":"20.11.2026","more":{"a":1.0}}', b'{"day":"21.11.2026"}', b"{"])
    options = {"dateFormat": "dd.MM.yyyy"}
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="day DATE", read_options=options, rescued="_rescued")
    assert (result["good"], result["bad"], result["unnamed"]) == (2, 1, None)
    texts = sorted(pq.read_table(tmp_path / "out")["_rescued"].to_pylist(), key=lambda text: text or "")
    assert texts == [None, '{"more": {"a":1.0}}']


def test_all_names_are_told_when_there_is_a_bad_record_too(spark, tmp_path):
    batch = make_batch(tmp_path / "b", [*(b'{"id":1,"x%d":1}' % number for number in range(40)), b'{"id":"x","y":1}'])
    result = run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="id INT", rescued="_corrupt_record")
    assert (result["bad"], result["unnamed"]) == (1, {"records": 40, "fields": {f"x{number}": 1 for number in range(40)}})
    texts = pq.read_table(tmp_path / "out")["_corrupt_record"].to_pylist()  # a name like any other
    assert sorted(texts) == sorted(f'{{"x{number}": 1}}' for number in range(40))


@pytest.mark.parametrize("name", ["ID", "_metadata", "_corrupt_reason"])
def test_the_column_must_have_a_name_of_its_own(spark, tmp_path, name):
    batch = make_batch(tmp_path / "b", [b'{"id":1}'])
    with pytest.raises(BadArgument, match="with 'rescued' there are columns that Spark takes for one"):
        run(spark, str(batch), [Output(str(tmp_path / "out"))], schema="id INT", rescued=name)
    assert not (tmp_path / "out").exists()


FIRST, SECOND = [b'{"id":1,"a":1.5,"o":{"b":1}}'], [b'{"id":"x","a":2}', b'{"id":2,"a":3,"o":{"b":2},"new":{"c":1.0}}']


@pytest.mark.parametrize("kind", ["parquet", "delta", "iceberg"])
@pytest.mark.parametrize("policy", ["merge", "rescue"])
def test_types_that_were_inferred_once_stay_and_what_is_new_is_added_or_rescued(lake, kind, policy):
    where = {"table": lake.name(kind)} if kind == "iceberg" else {"path": lake.name(kind)}
    more = {"rescued": "_rescued", "schema_evolution": policy, "quarantine": str(lake.place / "aside")}
    done = []
    for number, records in enumerate([FIRST, SECOND]):
        batch = make_batch(lake.place / f"b{number}", records, batch_id=f"b{number}")
        done.append(run(lake.session, str(batch), [Output(**where, format=kind)], **more))
    assert [each["good"] for each in done] == [1, 1]
    assert done[1]["reasons"] == {"a value does not fit the schema": 1}
    rescued = '{"new": {"c":1.0}}' if policy == "rescue" else None
    if kind == "parquet":
        table = lake.session.read.option("mergeSchema", True).parquet(where["path"])
        found = [tuple(row) for row in table.select("id", "a", "o.b", "_rescued").orderBy("id").collect()]
        columns = dict(table.dtypes)
        assert (columns["id"], columns["a"], "new" in columns) == ("bigint", "double", policy == "merge")
    else:
        found = sorted(lake.rows(kind, "id, a, o.b, _rescued"))
    assert found == [(1, 1.5, 1, None), (2, 3.0, 2, rescued)]
    if policy == "rescue":
        query = Output(**where, format=kind, sql="SELECT id, named_struct('b', 1L, 'c', 1) AS o FROM batch")
        third = make_batch(lake.place / "b3", FIRST, batch_id="b3")
        with pytest.raises(BadArgument, match=r"'o\.c' is new, and schema_evolution is 'rescue'"):
            run(lake.session, str(third), [query], **more)


def test_under_rescue_a_given_schema_adds_nothing_and_a_query_may_not(spark, tmp_path):
    one, two = (make_batch(tmp_path / name, [b'{"id":1,"more":2,"p":"x"}'], batch_id=name) for name in ("b1", "b2"))
    output, arguments = Output(str(tmp_path / "out"), partition_by=["p"]), {"rescued": "r", "schema_evolution": "rescue"}
    run(spark, str(one), [output], schema="id INT, p STRING", **arguments)
    result = run(spark, str(two), [output], schema="id INT, more INT, p STRING", **arguments)
    assert result["unnamed"] == {"records": 1, "fields": {"more": 1}}
    rows = spark.read.parquet(output.path).orderBy("batch").collect()
    assert [(row["id"], row["r"], row["p"]) for row in rows] == [(1, '{"more": 2}', "x")] * 2
    query = Output(str(tmp_path / "out"), sql="SELECT id, r, 1 AS one FROM batch")
    with pytest.raises(BadArgument, match="'one' is new, and schema_evolution is 'rescue'"):
        run(spark, str(two), [query], schema="id INT", **arguments)


def test_what_a_killed_job_leaves_of_the_kept_columns_is_removed_when_nobody_can_be_writing_it(spark, tmp_path):
    output, own = Output(str(tmp_path / "out")), tmp_path / "out" / ".qewqew"
    run(spark, str(make_batch(tmp_path / "b1", [b'{"id":1}'], batch_id="b1")), [output])
    old, new = (own / f"columns-{digit * 16}.json.{digit * 12}" for digit in "ab")
    for path in old, new:
        path.write_text('{"type":"str')
    os.utime(old, (0, 0))
    run(spark, str(make_batch(tmp_path / "b2", [b'{"id":2,"a":1}'], batch_id="b2")), [output])
    assert (old.exists(), new.exists()) == (False, True)
    assert sorted(pq.read_table(tmp_path / "out")["id"].to_pylist()) == [1, 2]
