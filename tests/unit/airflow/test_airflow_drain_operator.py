"""What `QewQewDrainOperator` takes and refuses when a DAG is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import ObjectStoragePath

from qewqew_airflow.operators.drain import QewQewDrainOperator
from qewqew_airflow.operators.spark_submit import QewQewSparkSubmitOperator
from qewqew_core import BadArgument

OUTPUT = {"path": "/lake/orders", "format": "delta"}


def operator(**more: Any) -> QewQewDrainOperator:
    return QewQewDrainOperator(**{"task_id": "drain", "prefix": "s3://lake/orders", "outputs": [OUTPUT], **more})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"outputs": []}, "no output; give at least one"),
        ({"outputs": None}, "outputs must be a list of at least one output"),
        ({"outputs": [{"path": "/lake/orders"}]}, "a drain writes one output, a table of Iceberg or Delta"),
        ({"outputs": [OUTPUT, {**OUTPUT, "path": "/lake/b"}]}, "a drain writes one output, a table of Iceberg or Delta"),
        ({"outputs": [{"table": "lake.shop.orders", "format": "iceberg"}]}, "so set quarantine to where records go"),
        ({"prefix": ""}, "prefix must be a directory or a URL, not ''"),
        ({"prefix": 7}, "prefix must be a directory or a URL, not 7"),
        ({"prefix": "s3://user:hushhush@lake/orders"}, "the s3 URL contains a password"),
        ({"prefix": ObjectStoragePath("s3://conn@lake/orders")}, "needs a connection of Airflow's, which is not used here"),
        ({"application": "mine.py"}, "the application of a drain is drain.py"),
        ({"application_args": ["x"]}, "the application of a drain is drain.py"),
        ({"max_bad_records": -1}, "max_bad_records is -1"),
        ({"codec": "csv"}, "the codec 'csv' needs a schema"),
        ({"read_options": {"fs.secret": "hushhush"}}, "fs.secret"),
    ],
)
def test_what_is_wrong_is_refused_when_the_dag_is_read(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message.replace("(", r"\(")) as raised:
        operator(**arguments)
    assert "hushhush" not in str(raised.value)


def test_templates_are_rendered_and_then_checked() -> None:
    found = operator(prefix="{{ params.prefix }}", schema="{{ params.schema }}", outputs=None, name="drain")
    found.render_template_fields({"params": {"prefix": "s3://lake/orders", "schema": "id BIGINT"}})
    assert (found.prefix, found.schema) == ("s3://lake/orders", "id BIGINT")
    with pytest.raises(BadArgument, match="outputs must be a list"):
        found._check_job()
    assert {"prefix", "outputs", "schema", "quarantine", "conf", "env_vars"} <= {*found.template_fields}


def test_the_command_line_is_that_of_the_drain(tmp_path: Path) -> None:
    found = operator(prefix=tmp_path / "orders", schema="id BIGINT", read_options={"fs.endpoint_url": "http://store"})
    assert found._arguments(found.prefix, "/result") == [
        str(tmp_path / "orders"),
        *("--output", '{"path": "/lake/orders", "format": "delta"}'),
        *("--schema", "id BIGINT", "--read-option", "fs.endpoint_url=http://store", "--result", "/result"),
    ]
    assert (found.job, QewQewSparkSubmitOperator.job) == ("drain.py", "batch.py")
