"""What an older Airflow does not have, and where it has what tests import. docs/versions.md tells users the former."""

from __future__ import annotations

import airflow
import pytest

VERSION = tuple(int(part) for part in airflow.__version__.split(".")[:2])

if VERSION >= (3, 2):
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime
    from airflow.serialization.encoders import encode_trigger
else:
    from airflow.models.dagbag import DagBag, sync_bag_to_db
    from airflow.providers_manager import ProvidersManager as ProvidersManagerTaskRuntime
    from airflow.serialization.serialized_objects import _encode_trigger as encode_trigger

__all__ = ["VERSION", "DagBag", "ProvidersManagerTaskRuntime", "encode_trigger", "sync_bag_to_db"]

# Whether callbacks get the exception from dag.test() too, not only from the task runner of a real run.
DAG_TEST_TELLS_EXCEPTIONS = VERSION >= (3, 3)

SHARES_STREAMS = HAS_RETRY_POLICIES = VERSION >= (3, 3)
needs_shared_streams = pytest.mark.skipif(not SHARES_STREAMS, reason="the triggers of Airflow 3.1 and 3.2 share no streams")
needs_retry_policies = pytest.mark.skipif(not HAS_RETRY_POLICIES, reason="Airflow 3.1 and 3.2 have no retry policies")
needs_state_store = pytest.mark.skipif(VERSION < (3, 3), reason="the tasks of Airflow 3.1 and 3.2 have no state store")
needs_teams = pytest.mark.skipif(VERSION < (3, 2), reason="Airflow 3.1 has no teams")
needs_rules_by_index = pytest.mark.skipif(
    VERSION < (3, 3),
    reason="in a mapped group, Airflow 3.1 and 3.2 take one failure for one of every index (apache/airflow#50210)",
)
needs_connection_fields = pytest.mark.skipif(
    VERSION < (3, 2), reason="Airflow 3.1 does not take the fields of a connection's form from a provider's description"
)
