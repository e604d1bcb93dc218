"""Threads of one session that run jobs: what a job needs of a session is its own, and the session stays as it was."""

from __future__ import annotations

import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

from spark_batches import make_batch
from test_spark_batch_job import lines, quarantine, table

from qewqew_spark.jobs.batch import run
from qewqew_spark.jobs.output import Output

THREADS = 4


def in_threads(spark: Any, tmp_path: Path, outputs: list[Output], **options: Any) -> list[dict[str, Any]]:
    """Of each thread's batch, with the field `owner`, the result. Each has a bad record too."""
    barrier = Barrier(THREADS)

    def job(owner: int) -> dict[str, Any]:
        records = [*lines(*({"owner": owner, "i": i} for i in range(3))), b"bad %d" % owner]
        batch = make_batch(tmp_path / f"b{owner}", records, batch_id=f"id-{owner}")
        barrier.wait()
        return run(spark, str(batch), outputs, quarantine=str(tmp_path / "aside"), **options)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(job, range(THREADS)))


def test_each_thread_of_a_session_writes_its_own_batch(spark, tmp_path, monkeypatch):
    (tmp_path / "made.py").write_text(
        "def of_view(batch):\n"
        "    batch.sparkSession.conf.set('spark.sql.caseSensitive', 'true')\n"
        "    batch.createOrReplaceTempView('again')\n"
        "    return batch.sparkSession.sql('SELECT again.owner, i FROM batch JOIN again USING (i)')\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    outputs = [
        Output(str(tmp_path / "all")),
        Output(str(tmp_path / "query"), sql="SELECT owner, i FROM batch"),
        Output(str(tmp_path / "function"), transform="made:of_view"),
    ]
    session = spark.newSession()
    for schema in "owner BIGINT, i BIGINT", None:  # the second time each replaces what it wrote
        results = in_threads(session, tmp_path, outputs, schema=schema)
        assert [(result["batch"], result["good"], result["bad"]) for result in results] == [
            (f"id-{owner}", 3, 1) for owner in range(THREADS)
        ]
    for place in "all", "query", "function":
        assert table(session, tmp_path / place, "owner", "i", "batch") == [
            (owner, i, f"id-{owner}") for owner in range(THREADS) for i in range(3)
        ]
    for owner in range(THREADS):
        assert list(quarantine(session, tmp_path / "aside" / f"batch=id-{owner}")) == [b"bad %d" % owner]
    assert stat.S_IMODE((tmp_path / "aside").stat().st_mode) == 0o700
    assert session.conf.get("spark.sql.caseSensitive") == "false"
    assert not session.catalog.tableExists("again")


def test_a_job_sees_what_its_session_has_and_leaves_it_there(spark, tmp_path, monkeypatch):
    session = spark.newSession()
    session.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    session.conf.set("spark.sql.catalog.other", "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog")
    session.conf.set("spark.sql.catalog.other.url", f"jdbc:derby:{tmp_path}/other;create=true")
    session.conf.set("spark.sql.catalog.other.driver", "org.apache.derby.iapi.jdbc.AutoloadedDriver")
    session.udf.register("plus_one", lambda number: number + 1, "INT")
    session.range(7).createOrReplaceTempView("seven")
    session.range(2).createOrReplaceTempView("batch")  # of the user, by whatever name
    session.sql("USE other.SYS")
    query = "SELECT plus_one(id) AS next, (SELECT count(*) FROM seven) AS n, current_timezone() AS zone, "
    query += "current_catalog() AS catalog, current_schema() AS namespace FROM batch"
    batch = make_batch(tmp_path / "b", lines({"id": 1}))
    run(session, str(batch), [Output(str(tmp_path / "out"), sql=query)], schema="id INT")
    assert table(spark, tmp_path / "out", "next", "n", "zone", "catalog", "namespace") == [(2, 7, "Asia/Tokyo", "other", "SYS")]
    assert session.table("batch").count() == 2
    assert session.catalog.currentCatalog() == "other"
