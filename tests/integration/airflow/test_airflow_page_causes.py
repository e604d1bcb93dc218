"""Dead batches of one cause: how the page shows them, and what it does to all of them."""

from __future__ import annotations

import json
import secrets
import shutil
from pathlib import Path
from typing import Any

import pytest
from asking import FROM_THE_PAGE, KEY, PAGE, Login, act, only_connection

from qewqew_core import Message, Queue, Topic

pytestmark = pytest.mark.filterwarnings("ignore:The HMAC key")  # of an Airflow that was just made


def fail(directory: Path, *reasons: str, keys: str | None = None) -> None:
    """A dead batch of two records for each reason, in the queue orders."""
    keys = keys or secrets.token_hex(4)  # no batch of another test has its id
    with Queue(directory / "orders", max_attempts=1) as queue:
        for number, reason in enumerate(reasons):
            queue.put_many([b"1", b"2"])
            batch = queue.lease(f"{keys} {number}")
            assert batch is not None
            batch.nack(reason)


def rows(client: Any, **place: str) -> list[dict[str, Any]]:
    answer = client.get(f"{PAGE}/connections/qewqew_default/batches", params=place or {"queue": "orders"})
    assert answer.status_code == 200, answer.text
    return [row for row in answer.json()["batches"] if row["state"] == "dead"]


def all_of(found: list[dict[str, Any]], **place: str) -> dict[str, Any]:
    """The body of a request to act on all of these batches."""
    shown = [{"batch": row["id"], "attempt": row["attempt"], "made": row["made"]} for row in found]
    return {**(place or {"queue": "orders"}), "batches": shown}


def empty(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()


def audited(event: str, batches: set[str]) -> list[tuple[str, Any]]:
    """The entries of these batches in the audit log: the user, and what is told."""
    from airflow.models.log import Log
    from airflow.utils.session import create_session

    with create_session() as session:
        entries = [(one.owner, json.loads(one.extra)) for one in session.query(Log).filter_by(event=event)]
    return [(owner, told) for owner, told in entries if told["batch"] in batches]


@pytest.mark.quick("all dead batches of one cause are returned or dropped from the page")
@pytest.mark.parametrize(("action", "states"), [("return", ["returned"] * 3), ("drop", [])])
def test_all_batches_of_a_cause_are_returned_or_dropped_and_each_is_in_the_audit_log(
    action: str, states: list[str], directory: Path, client: Login, fresh: None
) -> None:
    fail(directory, *(f"Path /lake/{number}/x already exists" for number in range(3)), "no table")
    op = client("op")
    same = [row for row in rows(op) if row["cause"] == "Path … already exists"]
    assert len(same) == 3
    answer = act(op, f"all/{action}", all_of(same))
    assert (answer.status_code, answer.json()) == (200, {"done": 3, "records": 6, "changed": 0, "failed": []})
    with Queue(directory / "orders") as queue:
        assert [batch.state for batch in queue.batches()] == states
        assert [batch.reason for batch in queue.dead()] == ["attempt 1 of 1: no table"]
    wanted = {"connection_id": "qewqew_default", "queue": "orders", "was": "dead", "records": 2}
    told = audited(f"qewqew_{action}", {row["id"] for row in same})
    assert sorted(told, key=str) == sorted([("op", {**wanted, "batch": row["id"]}) for row in same], key=str)
    assert only_connection(op)["queues"][0]["dead"] == 1


def test_all_dead_batches_of_a_reader_are_returned(directory: Path, client: Login, fresh: None) -> None:
    with Topic(directory / "events", max_attempts=1) as topic, topic.reader("lake") as reader:
        for number in range(3):
            topic.append_many([Message(b"1"), Message(b"2")])
            batch = reader.lease(f"key {number}")
            assert batch is not None
            batch.nack(f"no partition {number}")
    op, place = client("op"), {"topic": "events", "reader": "lake"}
    found = rows(op, **place)
    assert {row["cause"] for row in found} == {"no partition …"}
    assert act(op, "all/return", all_of(found, **place)).json() == {"done": 3, "records": 6, "changed": 0, "failed": []}
    with Topic(directory / "events") as topic, topic.reader("lake") as reader:
        assert [batch.state for batch in reader.batches()] == ["returned"] * 3


def test_nothing_is_done_to_those_that_have_changed_since_they_were_shown(directory: Path, client: Login, fresh: None) -> None:
    fail(directory, *["the cluster was gone"] * 5)
    op = client("op")
    body = all_of(rows(op))
    returned, older, later, other, same = (one["batch"] for one in body["batches"])
    with Queue(directory / "orders") as queue:
        queue.batch(returned).return_to_queue()
    body["batches"][1]["made"] -= 1
    body["batches"][2]["attempt"] += 1
    body["batches"][3]["batch"] = "another"
    answer = act(op, "all/drop", body)
    assert (answer.status_code, answer.json()) == (200, {"done": 1, "records": 2, "changed": 4, "failed": []})
    with Queue(directory / "orders") as queue:
        assert {batch.id: batch.state for batch in [*queue.batches(), *queue.dead()]} == {
            **dict.fromkeys((older, later, other), "dead"),
            returned: "returned",
        }
    assert [told["batch"] for _, told in audited("qewqew_drop", {returned, older, later, other, same})] == [same]
    assert act(op, "all/drop", body).json()["done"] == 0


def test_one_whose_files_are_missing_keeps_no_other_from_being_returned(directory: Path, client: Login, fresh: None) -> None:
    fail(directory, *["the cluster was gone"] * 4)
    op = client("op")
    found = rows(op)
    shutil.rmtree(next(directory.glob(f"orders.*/{found[0]['id']}")))
    empty(next(directory.glob(f"orders.*/{found[1]['id']}")))
    answer = act(op, "all/return", all_of(found)).json()
    assert (answer["done"], answer["changed"], len(answer["failed"])) == (2, 0, 2), answer


def test_all_or_none_are_refused_while_the_queue_is_locked_and_where_there_is_none(
    directory: Path, client: Login, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qewqew_airflow.page import actions

    monkeypatch.setattr(actions, "LOCK_TIMEOUT", 0.05)
    fail(directory, "the cluster was gone", "the cluster was gone")
    op = client("op")
    body = all_of(rows(op))
    with Queue(directory / "orders") as queue:
        answer = act(op, "all/drop", body)
        assert (answer.status_code, "Locked" in answer.json()["detail"]) == (409, True)
        assert len(queue.dead()) == 2
    before = sorted(directory.iterdir())
    assert act(op, "all/drop", {**body, "queue": "nothing"}).json()["done"] == 0
    assert sorted(directory.iterdir()) == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"batches": []},
        {"batches": "all"},
        {"batches": [{"batch": "b", "attempt": 1}]},
        {"batches": [{"batch": "b", "attempt": "1", "made": 1}]},
        {"batches": [{"batch": "b", "attempt": 1, "made": 1}] * 51},
        {"state": "leased"},
    ],
    ids=str,
)
def test_a_request_for_all_that_cannot_be_meant_is_refused(wrong: dict[str, Any], directory: Path, client: Login) -> None:
    fail(directory, "the cluster was gone")
    op = client("op")
    body = all_of(rows(op))
    answer = act(op, "all/drop", {**body, **wrong})
    assert (answer.status_code, "1 to 50 batches" in answer.json()["detail"]) == (422, True)
    assert [act(op, f"all/{action}", body).status_code for action in ("put-back", "retry")] == [422, 422]
    assert len(rows(op)) == 1


def test_as_many_as_the_page_asks_for_at_once_are_no_too_large_request(directory: Path, client: Login) -> None:
    name = "n" * 100
    shown = {"batch": f"{name}-0123456789abcdef", "attempt": 12, "made": 1_800_000_000_000}
    answer = act(client("op"), "all/return", {"queue": name, "batches": [shown] * 50})
    assert (answer.status_code, answer.json()["done"]) == (200, 0)


def test_another_site_cannot_make_a_browser_act_on_all(directory: Path, client: Login) -> None:
    fail(directory, "the cluster was gone")
    body = all_of(rows(client("op")))
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert act(client("admin"), "all/drop", body, **headers).status_code == 403
    without = {name: value for name, value in FROM_THE_PAGE.items() if name != "X-QewQew"}
    answer = client("admin").post(f"{PAGE}/connections/qewqew_default/all/drop", json=body, headers=without)
    assert answer.status_code == 403
    assert len(rows(client("op"))) == 1


def test_a_viewer_sees_no_cause_and_those_who_may_act_but_not_read_no_reason_of_a_failure(
    directory: Path, client: Login, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qewqew_airflow.page import app

    fail(directory, "the cluster was gone", keys=KEY)
    viewer, op = client("viewer"), client("op")
    assert [(row["cause"], row["reason"], row["key"]) for row in rows(viewer)] == [("", "", None)]
    assert "cluster" not in json.dumps(only_connection(viewer))
    body = all_of(rows(op))
    empty(next(directory.glob(f"orders.*/{body['batches'][0]['batch']}")))
    monkeypatch.setattr(app, "may", lambda method, *_: method == "PUT")
    answer = act(op, "all/return", body)
    (why,) = answer.json()["failed"]
    assert "only users who may read the connection see what is wrong with orders" in why
    assert str(directory) not in answer.text


def test_all_dead_batches_are_shown_and_others_beside_them(
    directory: Path, client: Login, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qewqew_airflow.page import batches

    monkeypatch.setattr(batches, "SHOWN", 2)
    fail(directory, *["the cluster was gone"] * 5)
    with Queue(directory / "orders") as queue:
        for number in range(3):
            queue.put(b"x")
            queue.lease(f"other {number}")

    def seen() -> tuple[list[str], bool]:
        answer = client("op").get(f"{PAGE}/connections/qewqew_default/batches", params={"queue": "orders"}).json()
        return [row["state"] for row in answer["batches"]], answer["more"]

    assert seen() == (["dead"] * 5 + ["leased"] * 2, True)
    monkeypatch.setattr(batches, "SHOWN", 3)
    assert seen() == (["dead"] * 5 + ["leased"] * 3, False)
    monkeypatch.setattr(batches, "MOST_DEAD", 4)
    assert seen() == (["dead"] * 4 + ["leased"] * 3, True)
