"""Assets: ``qewqew://CONNECTION/NAME`` is the queue or topic NAME of an Airflow connection.

It names the connection and not a host, because DAGs, triggers and the page do so too, and because it is known when a DAG
file is parsed. Workers with queues of their own have connections of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from airflow.sdk import Asset

from qewqew_airflow.hooks.qewqew import QewQewHook
from qewqew_airflow.shared.masking import masked
from qewqew_core import BadArgument
from qewqew_core.secrecy import excerpt

if TYPE_CHECKING:
    from airflow.providers.common.compat.openlineage.facet import Dataset
    from airflow.sdk import Context


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """The URI of an asset in its normal form. Raises `BadArgument` unless it names a connection and a queue or topic."""
    name = unquote(uri.path.strip("/"))
    if not uri.netloc or not name or uri.query:
        raise BadArgument(f"the URI of a queue or topic is qewqew://CONNECTION/NAME, not {excerpt(uri.geturl(), 200)}")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise BadArgument(f"{excerpt(name, 200)} is not the name of a queue or topic: a part must not be empty, '.' or '..'")
    return uri._replace(path="/" + quote(name))


def create_asset(
    *, name: str, qewqew_conn_id: str = QewQewHook.default_conn_name, extra: Mapping[str, Any] | None = None, **asset: Any
) -> Asset:
    """The asset of a queue or topic. ``asset`` are further arguments of Asset, such as ``group`` or ``watchers``."""
    return Asset(uri=f"qewqew://{qewqew_conn_id}/{quote(name)}", extra=dict(extra or {}), **asset)


def convert_asset_to_openlineage(asset: Asset, lineage_context: Any) -> Dataset:
    """The same dataset as the operators name; see `lineage.of_queue`."""
    from qewqew_airflow.shared.lineage import of_queue

    uri = urlsplit(asset.uri)
    return of_queue(uri.netloc, unquote(uri.path.strip("/")))


def write_counts(context: Context, outlets: list[Any], counts: Mapping[str, Any]) -> None:
    """Write ``counts`` into the ``extra`` of the events of the assets among the outlets of a task."""
    for outlet in outlets:
        if isinstance(outlet, Asset):
            context["outlet_events"][outlet].extra = {**context["outlet_events"][outlet].extra, **masked(counts)}
