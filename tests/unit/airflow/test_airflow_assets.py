"""The URIs of assets, the datasets of OpenLineage, and what a query's values become."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from airflow.sdk import Asset

from qewqew_airflow.assets.qewqew import convert_asset_to_openlineage, create_asset
from qewqew_airflow.links.qewqew import QewQewLink
from qewqew_airflow.operators.leases import QewQewAckOperator
from qewqew_airflow.operators.publish import QewQewPublishOperator
from qewqew_airflow.operators.stage import QewQewStageOperator
from qewqew_airflow.shared.lineage import written_output
from qewqew_core import BadArgument
from qewqew_core.tools.rows import encode, plain


@pytest.mark.parametrize(
    ("given", "uri"),
    [
        ("qewqew://shop/orders", "qewqew://shop/orders"),
        ("QewQew://shop/orders/", "qewqew://shop/orders"),
        ("qewqew://shop/sub/orders#part", "qewqew://shop/sub/orders"),
        ("qewqew://shop/gr%C3%B6%C3%9Fe", "qewqew://shop/gr%C3%B6%C3%9Fe"),
        ("qewqew://shop/größe", "qewqew://shop/gr%C3%B6%C3%9Fe"),
    ],
)
def test_one_queue_has_one_uri(given: str, uri: str) -> None:
    assert Asset(given).uri == uri


@pytest.mark.parametrize(
    "uri", ["qewqew:///var/lib/orders", "qewqew://shop", "qewqew://shop/", "qewqew://shop/a/../b", "qewqew://shop/a?b=c"]
)
def test_what_names_no_queue_of_a_connection_is_no_asset(uri: str) -> None:
    with pytest.raises(BadArgument):
        Asset(uri)


def test_an_asset_is_made_of_connection_and_name_and_names_the_dataset_that_the_operators_name() -> None:
    asset = create_asset(name="sub/größe", qewqew_conn_id="shop", extra={"team": "a"}, group="queues")
    assert (asset.uri, asset.extra, asset.group) == ("qewqew://shop/sub/gr%C3%B6%C3%9Fe", {"team": "a"}, "queues")
    dataset = convert_asset_to_openlineage(asset, None)
    stage = QewQewStageOperator(task_id="t", queue_name="sub/größe", qewqew_conn_id="shop", records=[])
    [output] = stage.get_openlineage_facets_on_complete(None).outputs
    assert (dataset.namespace, dataset.name) == (output.namespace, output.name) == ("qewqew://shop", "sub/größe")


@pytest.mark.parametrize(
    ("output", "namespace", "name"),
    [
        ({"path": "/data/orders/"}, "file", "/data/orders"),
        ({"path": "file:///data/orders"}, "file", "/data/orders"),
        ({"path": "s3://lake/tables/orders"}, "s3://lake", "tables/orders"),
        ({"path": "hdfs://somebody:hushhush@name:8020/orders"}, "hdfs://name:8020", "orders"),
        ({"table": "db.orders"}, "spark://spark_default", "db.orders"),
        ({"table": "lake.shop.orders", "format": "iceberg"}, "iceberg://lake", "shop.orders"),
    ],
)
def test_outputs_are_named_by_the_rules_of_openlineage(output: dict[str, Any], namespace: str, name: str) -> None:
    dataset = written_output({**output, "written": 7}, "spark_default")
    assert (dataset.namespace, dataset.name) == (namespace, name)
    assert dataset.outputFacets["outputStatistics"].rowCount == 7
    assert written_output(output, "spark_default").outputFacets == {}


def test_what_is_published_comes_from_the_queue_and_goes_to_the_prefix() -> None:
    publish = QewQewPublishOperator(task_id="t", queue_name="orders", qewqew_conn_id="shop", prefix="s3://lake/batches")
    found = publish.get_openlineage_facets_on_complete(None)
    assert [(each.namespace, each.name) for each in (*found.inputs, *found.outputs)] == [
        ("qewqew://shop", "orders"),
        ("s3://lake", "batches"),
    ]


def test_the_link_of_a_task_leads_to_its_batch_and_holds_behind_a_prefix() -> None:
    ti_key = SimpleNamespace(dag_id="d", run_id="manual__1", task_id="t", map_index=-1)
    stage = QewQewStageOperator(task_id="t", queue_name="a&b", records=[])
    link = "plugin/qewqew?connection=qewqew_default&queue=a%26b&key=d%7Cmanual__1%7Ct%7C-1"
    assert QewQewLink().get_link(stage, ti_key=ti_key) == link
    batch = {"connection": "shop", "topic": "news", "reader": "load", "batch_id": "news-1", "key": "k", "attempt": 1}
    ack = QewQewAckOperator(task_id="t", batch=batch)
    ack._take_output()
    assert QewQewLink().get_link(ack, ti_key=ti_key) == "plugin/qewqew?connection=shop&topic=news&batch=news-1"


@pytest.mark.parametrize(
    ("value", "record"),
    [
        (Decimal("12345678901234567890.10"), '"12345678901234567890.10"'),
        (datetime(2026, 11, 20, 15, tzinfo=UTC), '"2026-11-20T15:00:00+00:00"'),
        (date(2026, 11, 20), '"2026-11-20"'),
        (time(15, 30), '"15:30:00"'),
        (UUID(int=7), '"00000000-0000-0000-0000-000000000007"'),
        (b"\xff\x00", '"/wA="'),
        ([Decimal(1), {"at": date(2026, 1, 1)}], '["1",{"at":"2026-01-01"}]'),
        (None, "null"),
        (1.5, "1.5"),
    ],
)
def test_what_a_database_gives_becomes_json(value: Any, record: str) -> None:
    assert encode([plain(value)], 0).decode() == f"[{record}]"
