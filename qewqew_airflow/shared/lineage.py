"""OpenLineage: the names of datasets, and what a task reports about them. Imported only if the OpenLineage provider asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from airflow.providers.common.compat.openlineage.facet import Dataset, OutputDataset, OutputStatisticsOutputDatasetFacet
from airflow.providers.openlineage.extractors import OperatorLineage

from qewqew_airflow.shared.masking import masked


def of_queue(conn_id: str, name: str) -> Dataset:
    """A queue or topic: namespace ``qewqew://CONNECTION``."""
    return Dataset(namespace=f"qewqew://{conn_id}", name=masked(name))


def written_queue(conn_id: str, name: str, records: int, size: int | None = None) -> OutputDataset:
    return OutputDataset(f"qewqew://{conn_id}", masked(name), outputFacets=_statistics(records, size))


def written_output(output: Mapping[str, Any], spark_conn_id: str) -> OutputDataset:
    """An output of the ready-made job. A path is named by OpenLineage's rules. The namespace of an Iceberg table is
    ``iceberg://CATALOG``, that of other tables ``spark://CONNECTION``.
    """
    path, table = output.get("path"), str(output.get("table"))
    if path is None and str(output.get("format")).lower() == "iceberg":
        catalog, _, name = table.partition(".")
        namespace = f"iceberg://{catalog}"
    elif path is None:
        namespace, name = f"spark://{spark_conn_id}", str(output.get("table") or output.get("format"))
    else:
        url = urlsplit(path)
        here = url.scheme in ("", "file")
        namespace = "file" if here else f"{url.scheme}://{url.hostname or ''}" + (f":{url.port}" if url.port else "")
        name = url.path.rstrip("/") if here else url.path.strip("/") or "/"
    written = output.get("written")
    return OutputDataset(masked(namespace), masked(name), outputFacets={} if written is None else _statistics(written, None))


def lineage(inputs: Iterable[Dataset] = (), outputs: Iterable[Dataset] = ()) -> OperatorLineage[Any, Any]:
    return OperatorLineage(inputs=list(inputs), outputs=list(outputs))


def _statistics(records: int, size: int | None) -> dict[str, Any]:
    return {"outputStatistics": OutputStatisticsOutputDatasetFacet(rowCount=records, size=size)}
