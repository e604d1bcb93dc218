"""Requests to the page that schemathesis makes of what its OpenAPI says, and of what it does not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from test_airflow_page import FROM_THE_PAGE, PAGE, Login, application, client, dead_batch  # noqa: F401

from qewqew_airflow.page.app import app
from qewqew_core import Queue

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore:The HMAC key")]

OPERATIONS = {
    f"{one.ok().method.upper()} {one.ok().path}": one.ok()
    for one in schemathesis.openapi.from_dict(app.openapi()).get_all_operations()
}
LIKELY = {"connection_id": "qewqew_default", "queue": "orders", "name": "page"}


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("role", ["viewer", "admin"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_request_that_schemathesis_makes_is_answered_with_an_error_of_the_server(
    directory: Path,
    client: Login,
    operation: str,
    role: str,
    mode: GenerationMode,  # noqa: F811
) -> None:
    dead_batch(directory, [b'{"n": 1}'])
    asks = client(role)

    @hypothesis.given(case=OPERATIONS[operation].as_strategy(generation_mode=mode), likely=hypothesis.strategies.booleans())
    @hypothesis.settings(max_examples=200, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))
    def check(case: Any, likely: bool) -> None:
        for given in (case.path_parameters, case.query):
            given.update({name: value for name, value in LIKELY.items() if likely and name in given})
        sent = case.as_transport_kwargs(base_url=PAGE)
        del sent["cookies"]
        sent["headers"] = {**sent["headers"], **FROM_THE_PAGE}
        answer = asks.request(**sent)
        assert answer.status_code < 500, answer.text
        case.validate_response(answer, checks=[schemathesis.checks.not_a_server_error])

    check()
    with Queue(directory / "orders") as queue:
        assert len(queue) + sum(batch.records for batch in queue.dead()) == 1
