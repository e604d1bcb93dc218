"""The codecs avro and msgpack through the data source."""

from __future__ import annotations

import io
import json

import fastavro
import msgpack
from spark_batches import make_batch


def read(spark, tmp_path, records, schema, **options):
    batch = make_batch(tmp_path / "b", records)
    frame = spark.read.format("qewqew").schema(f"{schema}, _corrupt_reason STRING").options(**options).load(str(batch))
    return sorted(map(tuple, frame.collect()), key=repr)


def test_avro_and_msgpack_through_the_source(spark, tmp_path):
    written = {
        "type": "record",
        "name": "R",
        "fields": [{"name": "id", "type": "long"}, {"name": "l", "type": {"type": "map", "values": "int"}}],
    }
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(written), {"id": 1, "l": {"x": 2}})
    expected = [(1, {"x": 2}, None), (None, None, "malformed {}")]
    for codec, record, options in [
        ("avro", stream.getvalue(), {"avroSchema": json.dumps(written)}),
        ("msgpack", msgpack.packb({"id": 1, "l": {"x": 2}}), {}),
    ]:
        rows = read(spark, tmp_path / codec, [record, b"\xc1"], "id BIGINT, l MAP<STRING, INT>", codec=codec, **options)
        assert rows == [expected[0], (None, None, f"malformed {codec.replace('avro', 'Avro')}")]
