"""Requests to the page that schemathesis makes of what its OpenAPI says, and of what it does not say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
from asking import FROM_THE_PAGE, PAGE, Login, dead_batch
from hypothesis import strategies

from qewqew_core import Queue

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore:The HMAC key")]

LIKELY = {"connection_id": "qewqew_default", "queue": "orders", "name": "page"}
HASTE = hypothesis.settings(max_examples=200, deadline=None, suppress_health_check=list(hypothesis.HealthCheck))


@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize("role", ["viewer", "admin"])
def test_no_request_that_schemathesis_makes_is_answered_with_an_error_of_the_server(
    directory: Path,
    client: Login,
    role: str,
    mode: str,
) -> None:
    import schemathesis  # here: it takes seconds

    from qewqew_airflow.page.app import app

    dead_batch(directory, [b'{"n": 1}'])
    asks = client(role)
    answers = list[int]()
    for made in schemathesis.openapi.from_dict(app.openapi()).get_all_operations():
        operation = made.ok()

        @HASTE
        @hypothesis.given(
            case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)), likely=strategies.booleans()
        )
        def check(case: Any, likely: bool) -> None:
            for given in (case.path_parameters, case.query):
                given.update({name: value for name, value in LIKELY.items() if likely and name in given})
            sent = case.as_transport_kwargs(base_url=PAGE)
            del sent["cookies"]
            sent["headers"] = {**sent["headers"], **FROM_THE_PAGE}
            answer = asks.request(**sent)
            answers.append(answer.status_code)
            assert answer.status_code < 500, (sent, answer.text)

        check()
    assert 200 in answers
    with Queue(directory / "orders") as queue:
        assert len(queue) + sum(batch.records for batch in queue.dead()) == 1
