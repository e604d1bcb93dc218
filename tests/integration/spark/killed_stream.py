"""What test_spark_stream_kills.py starts, and kills: a writer of a topic, and an application with two streams that read it.

    killed_stream.py write DIRECTORY
    killed_stream.py stream DIRECTORY
    killed_stream.py finish DIRECTORY

DIRECTORY has the topic ``orders`` and all that the streams leave. Files in it are signals: ``retention`` lets the writer remove
what the readers have committed, ``enough`` ends it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from qewqew_core import Message, Topic


def write(home: Path) -> None:
    """Append messages whose bodies begin with their number; print how many there are, at the end."""
    number = 0
    with Topic(home / "orders", block_size=50_000) as topic:
        while not (home / "enough").exists():
            topic.delete_committed = (home / "retention").exists()
            numbers = range(number, number + random.randint(1, 40))
            topic.append_many([Message(b"%d " % one + b"x" * random.randint(0, 300), "ab"[one % 2]) for one in numbers])
            number = numbers.stop
            time.sleep(random.uniform(0, 0.1))
        print(json.dumps({"messages": number}))


def stream(home: Path, finish: bool) -> None:
    from pyspark.sql import DataFrame, SparkSession
    from spark_version import PLANS_BATCHES

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        .config("spark.python.authenticate.socketTimeout", "2m")  # a busy machine must not look like a failure
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")

    def source(**options: Any) -> DataFrame:
        limits = {} if finish or not PLANS_BATCHES else {"maxOffsetsPerTrigger": 150}
        frame = spark.readStream.format("qewqew").options(startingOffsets="earliest", **limits, **options)
        return frame.load(str(home / "orders")).selectExpr("number", "CAST(split(value, ' ')[0] AS BIGINT) AS body")

    def overwrite(frame: DataFrame, batch: int) -> None:
        frame.write.mode("overwrite").parquet(str(home / "batches" / str(batch)))

    writers = [
        source(reader="batches").writeStream.foreachBatch(overwrite).option("checkpointLocation", str(home / "of-batches")),
        source(**{} if PLANS_BATCHES else {"reader": "files"})
        .writeStream.format("parquet")
        .option("path", str(home / "files"))
        .option("checkpointLocation", str(home / "of-files")),
    ]
    queries = [(one.trigger(availableNow=True) if finish else one).start() for one in writers]
    if not finish:
        spark.streams.awaitAnyTermination()  # raises what has failed
    for query in queries:
        query.awaitTermination()
    if not PLANS_BATCHES:  # then the interrupted batch was all that these have done
        for query in [one.start() for one in writers]:
            query.awaitTermination()
    batches = spark.read.parquet(*(str(one) for one in (home / "batches").iterdir()))
    found = {}
    for name, frame in {"batches": batches, "files": spark.read.parquet(str(home / "files"))}.items():
        row = frame.selectExpr("count(*)", "count(DISTINCT number)", "min(number)", "max(number)", "count_if(number <> body)")
        found[name] = list(row.first() or ())
    print(json.dumps(found))


if __name__ == "__main__":
    what, place = sys.argv[1], Path(sys.argv[2])
    if what == "write":
        write(place)
    else:
        stream(place, what == "finish")
