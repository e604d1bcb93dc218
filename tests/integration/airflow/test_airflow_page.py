"""The routes of the page in Airflow's own API server application: rights, requests of other sites, actions, and what is shown."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from airflow_version import needs_teams
from asking import FROM_THE_PAGE, KEY, PAGE, RECORDS, Login, act, dead_batch, only_connection

from qewqew_core import Message, Queue, Topic
from qewqew_core.limits import now_ms
from qewqew_core.tools import marker

pytestmark = pytest.mark.filterwarnings("ignore:The HMAC key")  # of an Airflow that was just made

# Rights

SCRIPTS = ["page.js", "server.js", "elements.js", "list.js", "queue.js", "batches.js", "plot.js", "dialogs.js"]
LOOKS = ["page", "page.css", *SCRIPTS, "data/state", "data/history"]
OF_A_QUEUE = [f"connections/qewqew_default/{what}?queue=orders" for what in ("batches", "samples")]
ALL = {"viewer", "user", "op", "admin"}
OPERATORS = {"op", "admin"}
ACTIONS, BULK = ("return", "put-back", "drop", "retry"), ("all/return", "all/drop")
ROUTES = [
    *((("GET", path), ALL) for path in [*LOOKS, *OF_A_QUEUE]),
    (("GET", "connections/qewqew_default/records?queue=orders"), OPERATORS),
    *((("POST", f"connections/qewqew_default/{action}"), OPERATORS) for action in (*ACTIONS, *BULK)),
]


@pytest.mark.quick("every route of the page is for those alone who have the right")
@pytest.mark.parametrize(("route", "roles"), ROUTES, ids=lambda one: " ".join(one) if isinstance(one, tuple) else "")
def test_every_route_is_for_those_who_have_the_right(
    route: tuple[str, str], roles: set[str], directory: Path, client: Login
) -> None:
    body = dead_batch(directory, [b"x"])
    for role in (None, "viewer", "user", "op", "admin"):
        method, path = route
        # Nobody without the right gets as far as what is wrong with the request.
        found = client(role).request(method, f"{PAGE}/{path}", content=None if method == "GET" else b"{", headers=FROM_THE_PAGE)
        wanted = 401 if role is None else 403 if role not in roles else 200 if method == "GET" else 415
        assert found.status_code == wanted, (role, found.text)
    assert body["batch"] in {one.id for one in Queue(directory / "orders").dead()}


def test_no_route_of_the_page_is_missing_from_the_test_above(application: Any) -> None:
    from qewqew_airflow.page.app import STATIC, app

    assert {(method, route.path) for route in app.routes for method in route.methods} == {
        ("GET", "/{name}"),
        ("GET", "/data/state"),
        ("GET", "/data/history"),
        ("GET", "/connections/{connection_id}/batches"),
        ("GET", "/connections/{connection_id}/samples"),
        ("GET", "/connections/{connection_id}/records"),
        ("POST", "/connections/{connection_id}/{action}"),
        ("POST", "/connections/{connection_id}/all/{action}"),
    }
    assert set(STATIC) == set(LOOKS[:-2])


@pytest.mark.parametrize("path", ["openapi.json", "docs", "redoc", "../qewqew/docs", "page.py", "%2e%2e%2fapp.py", "..%2fapp.py"])
def test_nothing_else_is_served(path: str, client: Login) -> None:
    assert client("admin").get(f"{PAGE}/{path}").status_code in (404, 405)
    assert "openapi" not in client(None).get(f"{PAGE}/{path}").text


def test_whoever_may_not_read_the_connection_sees_numbers_and_no_paths_keys_or_reasons(
    directory: Path, client: Login, fresh: None
) -> None:
    dead_batch(directory, [b"x"] * 3)
    (directory / "broken").write_bytes(b"\x00\x01")
    (directory / "broken.wal").write_bytes(b"no log at all")
    seen = only_connection(client("viewer"))
    text = json.dumps(seen)
    assert str(directory) not in text
    assert KEY not in text
    assert "the cluster was gone" not in text
    assert [(row["name"], row.get("dead"), "error" in row) for row in seen["queues"]] == [
        ("broken", None, True),
        ("orders", 1, False),
    ]
    assert (seen["peek"], seen["act"]) == (False, False)

    seen = only_connection(client("op"))
    assert seen["directory"] == str(directory)
    assert (seen["peek"], seen["act"]) == (True, True)
    (batch,) = seen["queues"][1]["batches"]
    assert (batch["key"], batch["reason"]) == (KEY, "attempt 1 of 1: the cluster was gone")


def test_a_viewer_sees_the_owner_if_airflow_shows_him_the_dag(directory: Path, client: Login, fresh: None, run: Any) -> None:
    from airflow.sdk import DAG, task

    with DAG("page_seen", schedule=None) as dag:

        @task
        def nothing() -> None: ...

        nothing()
    run(dag)
    dead_batch(directory, [b"x"], "page_seen|manual|nothing|-1")
    (batch,) = only_connection(client("viewer"))["queues"][0]["batches"]
    assert batch["task"] == {"dag": "page_seen", "run": "manual", "task": "nothing", "index": -1}


def test_connections_of_other_types_are_not_reached_and_secrets_are_not_shown(
    directory: Path, client: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = {"conn_type": "qewqew", "host": str(directory), "password": "geheim1", "extra": {"password": "geheim2"}}
    monkeypatch.setenv("AIRFLOW_CONN_QEWQEW_DEFAULT", json.dumps(secret))
    monkeypatch.setenv(
        "AIRFLOW_CONN_WAREHOUSE", json.dumps({"conn_type": "postgres", "host": str(directory), "password": "geheim3"})
    )
    monkeypatch.setenv("AIRFLOW_CONN_UNREADABLE", "{")
    body = dead_batch(directory, [b"x"])
    admin = client("admin")
    assert only_connection(admin)["id"] == "qewqew_default"
    answers = [
        admin.get(f"{PAGE}/data/state"),
        admin.get(f"{PAGE}/connections/warehouse/records", params={"queue": "orders"}),
        act(admin, "drop", body),  # the extra is wrong
    ]
    assert [answer.status_code for answer in answers] == [200, 404, 400]
    assert not any("geheim" in answer.text for answer in answers)
    assert "extra has 'password'" in answers[2].text


def test_a_connection_in_the_database_is_listed_and_one_of_the_environment_with_its_id_wins(
    tmp_path: Path, client: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.models.connection import Connection
    from airflow.utils.session import create_session

    with create_session() as session:
        session.add_all(
            Connection(conn_id=one, conn_type="qewqew", host=str(tmp_path / one)) for one in ("stored", "qewqew_default")
        )
        session.add(Connection(conn_id="other", conn_type="http"))
    try:
        found = client("admin").get(f"{PAGE}/data/state").json()["connections"]
        assert [(one["id"], bool(one["error"])) for one in found] == [("qewqew_default", False), ("stored", True)]
        assert "does not exist" in found[1]["error"]
    finally:
        with create_session() as session:
            for one in session.query(Connection).filter(Connection.conn_id.in_(["stored", "qewqew_default", "other"])):
                session.delete(one)


@needs_teams
def test_a_connection_of_a_team_is_for_the_team(directory: Path, client: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.models.connection import Connection
    from airflow.models.team import Team
    from airflow.utils.session import create_session
    from sqlalchemy import delete

    Queue(directory / "orders").close()
    with create_session() as session:
        session.add(Team(name="red"))
        session.flush()
        session.add(Connection(conn_id="of_red", conn_type="qewqew", host=str(directory), team_name="red"))

    def seen(role: str, *teams: str) -> tuple[set[str], int]:
        asking = client(role, *teams)
        listed, history = (asking.get(f"{PAGE}/data/{path}") for path in ("state", "history"))
        connections = {one["id"] for one in listed.json()["connections"]}
        assert connections == set(history.json())
        return connections - {"qewqew_default"}, asking.get(f"{PAGE}/connections/of_red/records?queue=orders").status_code

    try:
        assert seen("viewer") == ({"of_red"}, 403)  # of a time when Airflow had teams
        monkeypatch.setenv("AIRFLOW__CORE__MULTI_TEAM", "True")
        assert [seen("viewer", "red"), seen("viewer", "blue")] == [({"of_red"}, 403), (set(), 403)]
        assert [seen("op", "red"), seen("op", "blue"), seen("admin")] == [({"of_red"}, 200), (set(), 403), ({"of_red"}, 200)]
    finally:
        with create_session() as session:
            session.execute(delete(Connection).where(Connection.conn_id == "of_red"))
            session.execute(delete(Team).where(Team.name == "red"))


# Requests of other sites


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X-QewQew": None}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_what_another_site_can_make_a_browser_send_changes_nothing(
    headers: dict[str, str | None], status: int, directory: Path, client: Login
) -> None:
    body = dead_batch(directory, [b"x"])
    sent = {name: value for name, value in {"Content-Type": "application/json", **FROM_THE_PAGE, **headers}.items() if value}
    answer = client("admin").post(f"{PAGE}/connections/qewqew_default/drop", content=json.dumps(body), headers=sent)
    assert answer.status_code == status, answer.text
    with Queue(directory / "orders") as queue:
        assert len(queue.dead()) == 1


def test_behind_a_proxy_the_origin_may_be_that_of_base_url(
    directory: Path, client: Login, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example/blue/")
    body = dead_batch(directory, [b"x"])
    assert act(client("op"), "drop", body, Origin="https://airflow.example").status_code == 200


def test_state_changes_by_post_alone_and_every_answer_has_the_headers(directory: Path, client: Login) -> None:
    admin = client("admin")
    assert admin.get(f"{PAGE}/connections/qewqew_default/drop").status_code == 405
    for answer in (
        admin.get(f"{PAGE}/page"),
        admin.get(f"{PAGE}/data/state"),
        client(None).get(f"{PAGE}/page"),
        act(admin, "drop", {"queue": "orders", "batch": "b", "attempt": 1, "made": 1}),
    ):
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        assert "frame-ancestors 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"


def test_the_page_has_relative_links_alone_and_nothing_from_the_network() -> None:
    import qewqew_airflow.page

    for file in (Path(qewqew_airflow.page.__path__[0]) / "static").iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
        assert 'href="/' not in text
        assert "innerHTML" not in text
        assert "eval(" not in text


# Looking


@pytest.mark.quick("the page says what queues and topics hold")
def test_the_state_says_what_the_queues_and_topics_hold(directory: Path, client: Login, fresh: None) -> None:
    (directory / "shop").mkdir()
    with Queue(directory / "shop" / "orders") as queue:
        queue.put_many([b"12345"] * 7)
        leased = queue.lease(KEY, max_records=2, lease_timeout=1000)
    assert leased is not None
    with Topic(directory / "events") as topic, topic.reader("lake", "a.*"):
        topic.append_many([Message(b"x", tag="a.b"), Message(b"y", tag="c")])
    found = only_connection(client("op"))
    (queue_row,), (topic_row,) = found["queues"], found["topics"]
    assert (queue_row["name"], queue_row["waiting"], queue_row["bytes"]) == ("shop/orders", 5, 25)
    assert (queue_row["leased"], queue_row["returned"], queue_row["dead"]) == (1, 0, 0)
    (batch,) = queue_row["batches"]
    assert batch["task"] == {"dag": "flights", "run": "manual__2026-01-01T00:00:00+00:00", "task": "load", "index": 3}
    assert (batch["state"], batch["records"], batch["attempt"]) == ("leased", 2, 1)
    assert batch["expires"] is not None
    assert (topic_row["name"], topic_row["messages"], topic_row["waiting"]) == ("events", 2, 2)
    (reader,) = topic_row["readers"]
    assert (reader["name"], reader["filter"], reader["lag"]) == ("lake", "a.*", 2)


def test_looking_waits_for_no_owner_and_acting_says_that_it_is_locked(
    directory: Path, client: Login, fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qewqew_airflow.page import actions

    monkeypatch.setattr(actions, "LOCK_TIMEOUT", 0.05)
    body = dead_batch(directory, [b"dead"])
    with Queue(directory / "orders") as queue:
        queue.put_many([b"only in the log as yet"])
        op = client("op")
        assert only_connection(op)["queues"][0]["waiting"] == 1
        records = op.get(RECORDS, params={"queue": "orders"}).json()["records"]
        assert [one["text"] for one in records] == ["only in the log as yet"]
        assert op.get(RECORDS, params={"queue": "orders", "batch": body["batch"]}).json()["records"][0]["text"] == "dead"
        answer = act(op, "return", body)
        assert (answer.status_code, "Locked" in answer.json()["detail"]) == (409, True)
        assert len(queue.dead()) == 1
    assert act(op, "return", body).status_code == 200


HOSTILE = ["<img src=x onerror=alert(1)>", "a'\"&b", "ünï", "%2e", "a?b#c", "-x"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_queue_with_any_printable_name_can_be_looked_into(name: str, directory: Path, client: Login, fresh: None) -> None:
    with Queue(directory / name) as queue:
        queue.put(b"</script><b>")
    op = client("op")
    assert only_connection(op)["queues"][0]["name"] == name
    answer = op.get(RECORDS, params={"queue": name})
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json()["records"][0] == {"number": 0, "bytes": 12, "kind": "text", "text": "</script><b>", "cut": False}


def test_names_that_cannot_be_shown_are_listed_escaped_and_with_the_reason(directory: Path, client: Login, fresh: None) -> None:
    for name in (b"new\nline", b"\xff\xfe", "right\u202eleft".encode()):
        with Queue(os.path.join(os.fsencode(directory), name).decode("utf-8", "surrogateescape")) as queue:
            queue.put(b"x")
    rows = only_connection(client("op"))["queues"]
    assert sorted(row["name"] for row in rows) == ["\\udcff\\udcfe", "new\\nline", "right\\u202eleft"]
    assert all("BadPath" in row["error"] for row in rows)


@pytest.mark.parametrize("name", ["../orders", "/etc/passwd", "", ".", "a//b", "a\0b", "link/orders", "x" * 300])
def test_names_cannot_leave_the_directory(name: str, directory: Path, client: Login) -> None:
    outside = directory.parent / "outside"
    outside.mkdir()
    body = dead_batch(outside, [b"secret"])
    dead_batch(directory.parent, [b"secret"])
    (directory / "link").symlink_to(outside)
    op = client("op")
    answers = [
        op.get(RECORDS, params={"queue": name}),
        op.get(RECORDS, params={"topic": name}),
        act(op, "drop", {**body, "queue": name}),
    ]
    assert [answer.status_code for answer in answers] == [400, 400, 400], [answer.text for answer in answers]
    assert "secret" not in "".join(answer.text for answer in answers)
    with Queue(outside / "orders") as queue:
        assert len(queue.dead()) == 1


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"queue": "q", "topic": "t"},
        {"queue": "q", "reader": "r"},
        {"topic": "t", "reader": "../r", "batch": "b"},
    ],
)
def test_a_place_that_cannot_be_meant_is_a_bad_request(asked: dict[str, str], client: Login) -> None:
    assert client("op").get(RECORDS, params=asked).status_code == 400


@pytest.mark.parametrize("asked", [{"number": 0}, {"number": 1000}, {"number": "x"}, {"start": -1}, {"other": 1}])
def test_limits_of_a_peek_are_checked(asked: dict[str, Any], client: Login) -> None:
    assert client("op").get(RECORDS, params={"queue": "q", **asked}).status_code == 422


def test_messages_are_read_from_the_oldest_a_number_or_the_place_of_a_reader(directory: Path, client: Login) -> None:
    with Topic(directory / "events") as topic, topic.reader("odd", "odd") as reader:
        topic.append_many([Message(b"%d" % number, tag="odd" if number % 2 else "even") for number in range(50)])
        reader.read_many(5)
        reader.commit()
    op = client("op")

    def numbers(**asked: Any) -> list[int]:
        answer = op.get(RECORDS, params={"topic": "events", "number": 3, **asked}).json()
        assert answer["more"] == (answer["records"][-1]["number"] < 49)
        return [one["number"] for one in answer["records"]]

    assert numbers() == [0, 1, 2]
    assert numbers(start=47) == [47, 48, 49]
    assert numbers(reader="odd") == [11, 13, 15]
    assert op.get(RECORDS, params={"topic": "events", "reader": "nobody"}).status_code == 400
    assert op.get(RECORDS, params={"topic": "missing"}).status_code == 400


def test_looking_at_what_is_not_there_makes_nothing(directory: Path, client: Login) -> None:
    op = client("op")
    op.get(RECORDS, params={"queue": "orders"})
    op.get(RECORDS, params={"topic": "events"})
    act(op, "drop", {"queue": "orders", "batch": "b", "attempt": 1, "made": 1})
    act(op, "drop", {"topic": "events", "reader": "r", "batch": "b", "attempt": 1, "made": 1})
    assert [path.name for path in directory.iterdir()] == [marker.NAME]


def test_an_unexpected_error_has_no_traceback(directory: Path, client: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    from qewqew_airflow.page import preview

    def fail(*_: Any) -> None:
        raise RuntimeError("a secret of the code")

    monkeypatch.setattr(preview, "queue_records", fail)
    answer = client("op").get(RECORDS, params={"queue": "q"})
    assert answer.status_code == 500
    assert "RuntimeError" in answer.json()["detail"]
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text


def test_a_store_with_an_unexpected_error_is_one_row(
    directory: Path, client: Login, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    from qewqew_airflow.page import contents

    def fail(path: str) -> dict[str, Any]:
        raise RuntimeError("a secret of the code")

    dead_batch(directory, [b"x"])
    Topic(directory / "clicks").close()
    monkeypatch.setattr(contents, "topic_row", fail)
    found = only_connection(client("op"))
    assert [row["waiting"] for row in found["queues"]] == [0]
    (row,) = found["topics"]
    assert row["name"] == "clicks"
    assert row["error"].startswith("RuntimeError: ")
    assert "secret" not in row["error"]


# Acting


@pytest.mark.quick("a dead batch is returned, put back or dropped from the page")
def test_a_dead_batch_of_a_queue_is_returned_put_back_or_dropped(directory: Path, client: Login, fresh: None) -> None:
    op = client("op")
    for action, wanted in (("return", (0, "returned")), ("put-back", (2, None)), ("drop", (0, None))):
        body = dead_batch(directory, [b"1", b"2"], f"key {action}", action)
        answer = act(op, action, body)
        assert (answer.status_code, answer.json()) == (200, {"batch": body["batch"], "records": 2})
        with Queue(directory / action) as queue:
            assert (len(queue), *(one.state for one in queue.batches())) == tuple(one for one in wanted if one is not None)
            assert queue.dead() == []


def test_a_dead_batch_of_a_reader_is_returned_put_back_or_dropped(directory: Path, client: Login, fresh: None) -> None:
    op = client("op")
    for action, states in (("return", ["returned"]), ("put-back", []), ("drop", [])):
        with Topic(directory / action, max_attempts=1) as topic, topic.reader("lake") as reader:
            topic.append_many([b"1", b"2"])
            batch = reader.lease("key")
            assert batch is not None
            batch.nack()
        place = {"topic": action, "reader": "lake"}
        peeked = op.get(RECORDS, params={**place, "batch": batch.id}).json()["records"]
        assert [one["text"] for one in peeked] == ["1", "2"]
        assert act(op, action, {**place, "batch": batch.id, "attempt": 1, "made": batch.made}).status_code == 200
        with Topic(directory / action) as topic, topic.reader("lake") as reader:
            assert [one.state for one in reader.batches()] == states
            assert reader.dead() == []
            assert len(reader.read_many(10, timeout=0)) == (2 if action == "put-back" else 0)


def test_a_batch_that_is_not_due_says_when_and_is_due_at_once_for_who_says_so(
    directory: Path, client: Login, fresh: None
) -> None:
    with Queue(directory / "orders", retry_delay=3600) as queue:
        queue.put_many([b"1", b"2"])
        for key, timeout in (("returned", None), ("expired", 0.001)):
            batch = queue.lease(key, max_records=1, lease_timeout=timeout)
            assert batch is not None
            if timeout is None:
                batch.nack("no luck")
    op = client("op")
    rows = op.get(f"{PAGE}/connections/qewqew_default/batches", params={"queue": "orders"}).json()["batches"]
    assert [row["state"] for row in rows] == ["returned", "returned"]
    for row in rows:
        assert 3500 < (datetime.fromisoformat(row["due"]) - datetime.now(UTC)).total_seconds() < 3600
        body = {"queue": "orders", "batch": row["id"], "state": "returned", "attempt": 1, "made": row["made"]}
        assert [act(op, action, body).status_code for action in ("return", "put-back", "drop")] == [400] * 3
        assert act(op, "retry", body).status_code == 200
        assert act(op, "retry", {**body, "state": "dead"}).status_code == 400
    found = op.get(f"{PAGE}/connections/qewqew_default/batches", params={"queue": "orders"}).json()["batches"]
    assert [row["due"] for row in found] == [None, None]
    with Queue(directory / "orders") as queue:
        assert {queue.lease(key).id for key in "ab"} == {row["id"] for row in rows}  # type: ignore[union-attr]


def test_batches_are_told_with_the_results_of_their_tasks_and_after_their_records_are_gone(
    directory: Path, client: Login, run: Any
) -> None:
    from datetime import timedelta

    from airflow.sdk import DAG, task

    from qewqew_airflow.operators.stage import QewQewStageOperator

    reported = {"good": 2, "bad": 1, "reasons": {"malformed": 1}, "outputs": [{"table": "db.t", "snapshot": "7"}], "secret": 1}
    reported |= {"unnamed": {"records": 1, "fields": {"who.phone": 1}}}
    with DAG("page_results", schedule=None) as dag:

        @task
        def load(ti: Any = None) -> dict[str, Any]:
            with Queue(directory / "orders", retention=timedelta(0)) as queue:
                queue.put(b"x")
                batch = queue.lease(f"page_results|{ti.run_id}|load|-1")
                assert batch is not None
                batch.ack()
            return {"batch_id": batch.id, "oldest": "2026-01-01T00:00:00Z", **reported}  # so long ago that all may be in it

        stage = [QewQewStageOperator(task_id=name, queue_name="orders", records=[b"1"]) for name in ("one", "other")]
        stage >> load()
    run(dag)

    def batches(role: str) -> list[dict[str, Any]]:
        answer = client(role).get(f"{PAGE}/connections/qewqew_default/batches", params={"queue": "orders"})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["batches"])

    (batch,) = batches("op")
    assert (batch["state"], batch["records"], batch["task"]["dag"]) in {("gone", 3, "page_results"), ("acked", 3, "page_results")}
    named = {(by["dag"], by["task"], by["index"], by["records"]) for by in batch["staged_by"]["tasks"]}
    assert named == {("page_results", "one", -1, 1), ("page_results", "other", -1, 1)}
    assert batch["staged_by"]["count"] == 2
    assert batch["result"] == {
        **{name: reported[name] for name in reported if name != "secret"},
        "oldest": "2026-01-01T00:00:00Z",
    }
    with Queue(directory / "orders") as queue:
        queue.put(b"x")
        queue.lease("somebody else")
    (other, _) = batches("viewer")
    assert (other["state"], other["key"], other["task"]) == ("leased", None, None)


def test_what_was_done_is_seen_at_once(directory: Path, client: Login) -> None:
    op = client("op")
    body = dead_batch(directory, [b"x"])
    assert only_connection(op)["queues"][0]["dead"] == 1
    assert act(op, "return", body).status_code == 200
    assert only_connection(op)["queues"][0]["dead"] == 0


def test_nothing_is_done_to_a_batch_that_has_changed_since_it_was_shown(directory: Path, client: Login) -> None:
    op = client("op")
    body = dead_batch(directory, [b"x"])
    for wrong in ({"attempt": 2}, {"made": body["made"] + 1}):
        assert act(op, "drop", {**body, **wrong}).status_code == 409
    assert act(op, "drop", {**body, "batch": "another"}).status_code == 404
    with Queue(directory / "orders") as queue:
        queue.dead()[0].return_to_queue()
    assert [act(op, action, body).status_code for action in ("return", "put-back", "drop")] == [409, 409, 409]
    with Queue(directory / "orders") as queue:
        assert [one.state for one in queue.batches()] == ["returned"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        [],
        "x",
        {"queue": "orders"},
        {"batch": 1},
        {"queue": "q", "batch": "b", "attempt": "1", "made": 1},
    ],
    ids=str,
)
def test_a_request_that_cannot_be_meant_is_refused(body: Any, client: Login) -> None:
    assert act(client("op"), "drop", body).status_code == 422


def test_an_action_is_not_made_up_from_its_name(directory: Path, client: Login) -> None:
    body = dead_batch(directory, [b"x"])
    assert act(client("admin"), "ack", body).status_code == 422


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_files_of_another_user_are_looked_at_and_left_alone(directory: Path, client: Login, fresh: None) -> None:
    body = dead_batch(directory, [b"x"])
    for parent, names, files in os.walk(directory):
        for one in [*names, *files]:
            os.chown(os.path.join(parent, one), 12345, -1)
    op = client("op")
    assert only_connection(op)["queues"][0]["dead"] == 1
    answer = act(op, "drop", body)
    assert (answer.status_code, "belongs to user 12345" in answer.json()["detail"]) == (400, True)


# History


MINUTE_MS = 60_000
NOON = 29_000_000  # a minute


@pytest.fixture
def samples(tmp_path: Path) -> Any:
    from qewqew_airflow.page.samples import Samples

    return Samples(str(tmp_path / "state" / "page.sqlite3"))


def seen(depth: int, **more: Any) -> Any:
    from qewqew_airflow.page.samples import Seen

    return Seen("queue orders", depth, **more)


def test_what_was_put_and_drained_is_told_by_keys_leases_and_the_depth(samples: Any) -> None:
    looks = [
        (0, seen(10), (10, None, None, 0)),  # nothing is known of the time before
        (1, seen(25), (25, 15, 0, 1)),  # without a key
        (2, seen(5, staged=((0, 30),)), (5, 30, 50, 1)),  # 30 under a key, so 50 were taken
        (3, seen(0, leased=((0, 25),)), (0, 20, 25, 1)),  # a batch of 25 was leased, so 20 came
        (6, seen(9), (9, 9, 0, 3)),  # two minutes were missed
        (30, seen(90), (90, None, None, 0)),  # too many
    ]
    for minute, look, _ in looks:
        now = (NOON + minute) * MINUTE_MS
        times = {name: tuple((now - 1, records) for _, records in getattr(look, name)) for name in ("leased", "staged")}
        samples.add("/d", NOON + minute, now, [seen(look.depth, **times)])
        samples.add("/d", NOON + minute, now, [seen(777)])  # another process of the API server, too late
    found = samples.of("/d", "queue orders", 0)
    assert [row[1:] for row in found] == [wanted for *_, wanted in looks]
    assert [row[0] for row in found] == [(NOON + minute) * MINUTE_MS for minute, *_ in looks]
    assert samples.of("/other", "queue orders", 0) == []
    assert os.stat(samples.path).st_mode & 0o777 == 0o600


def test_of_a_topic_what_was_put_is_counted(samples: Any) -> None:
    from qewqew_airflow.page.samples import Seen

    for minute, (lag, total) in enumerate([(5, 100), (0, 130)]):
        samples.add("/d", NOON + minute, (NOON + minute) * MINUTE_MS, [Seen("topic events", lag, total)])
    assert samples.of("/d", "topic events", 0)[1][1:] == (0, 30, 35, 1)


def test_old_samples_are_joined_then_removed_and_never_too_many(samples: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from qewqew_airflow.page import samples as module

    start = NOON // module.COARSE * module.COARSE
    for minute in range(start, start + 45):
        samples.add("/d", minute, minute * MINUTE_MS, [seen(minute - start)])
    for _ in range(2):  # once more changes nothing
        samples.thin(start + module.FINE_MINUTES + 31)
        found = samples.of("/d", "queue orders", 0)
        assert [row[1:] for row in found[:3]] == [(14, 14, 0, 14), (29, 15, 0, 15), (30, 1, 0, 1)]
        assert len(found) == 2 + 15
    monkeypatch.setattr(module, "MOST_SAMPLES", 10)
    samples.thin(start + module.FINE_MINUTES + 31)
    assert [row[1] for row in samples.of("/d", "queue orders", 0)] == list(range(35, 45))
    samples.thin(start + 44 + module.COARSE_MINUTES + 1)
    assert samples.of("/d", "queue orders", 0) == []


@pytest.mark.parametrize("damage", [b"", b"no database at all" * 1000, None])
def test_a_damaged_file_of_samples_is_replaced(damage: bytes | None, samples: Any) -> None:
    samples.add("/d", NOON, NOON * MINUTE_MS, [seen(1)])
    data = Path(samples.path).read_bytes()
    Path(samples.path).write_bytes(data[:5000] + b"\xff" * (len(data) - 5000) if damage is None else damage)
    with suppress(sqlite3.DatabaseError):  # found out in the middle: the next one is right
        samples.add("/d", NOON, NOON * MINUTE_MS, [seen(2)])
    samples.add("/d", NOON + 1, (NOON + 1) * MINUTE_MS, [seen(3)])
    assert samples.of("/d", "queue orders", 0)[-1][1] == 3


def test_queues_and_topics_are_sampled_once_a_minute_whoever_looks(directory: Path, samples: Any, monkeypatch: Any) -> None:
    from qewqew_airflow.page import samples as module
    from qewqew_airflow.page.budget import Budget
    from qewqew_airflow.page.contents import each_directory

    monkeypatch.setenv("AIRFLOW_CONN_TWIN", json.dumps({"conn_type": "qewqew", "host": f"{directory}/../{directory.name}"}))
    now = [float(NOON * 60)]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    samplers = [module.Sampler(samples, partial(each_directory, Budget())) for _ in range(3)]
    with Queue(directory / "orders") as queue, Topic(directory / "events") as topic, topic.reader("lake"):
        for _ in range(2):
            queue.put_many([b"x"] * 3)
            topic.append_many([b"x"] * 5)
            for sampler in samplers:
                sampler.sample()
            now[0] += 60
    assert {name: [depth for _, depth in rows] for name, rows in samples.depths(str(directory), 0).items()} == {
        "queue orders": [3, 6],
        "topic events": [5, 10],
    }


def test_airflow_runs_the_sampler_as_long_as_its_api_server_and_the_samples_outlive_it(
    directory: Path, client: Login, monkeypatch: pytest.MonkeyPatch, samples: Any
) -> None:
    import threading
    import time

    from qewqew_airflow.page import app

    with Queue(directory / "orders") as queue:
        queue.put_many([b"x"] * 3)
    monkeypatch.setattr(app, "_samples", samples)
    monkeypatch.setattr(app, "_sampler", app.Sampler(samples, partial(app.each_directory, app._budget)))

    def running() -> bool:
        return any(thread.name == "qewqew samples" for thread in threading.enumerate())

    viewer = client("viewer")
    assert not running()
    with viewer:
        assert running()
        deadline = time.monotonic() + 300
        while not (found := viewer.get(f"{PAGE}/data/history").json()["qewqew_default"]):
            assert time.monotonic() < deadline
        assert found["queue orders"][0][1] == 3
    assert not running()
    answer = viewer.get(f"{PAGE}/connections/qewqew_default/samples", params={"queue": "orders", "hours": 1})
    assert answer.json()["samples"][0][1:] == [3, None, None, 0]


def test_samples_that_cannot_be_read_are_said_to_be_away(directory: Path, client: Login, monkeypatch: Any) -> None:
    from qewqew_airflow.page import app

    monkeypatch.setattr(app, "_samples", app.Samples(str(directory)))  # a directory is no file
    for path in ("data/history", "connections/qewqew_default/samples?queue=orders"):
        assert client("viewer").get(f"{PAGE}/{path}").status_code == 503
    assert only_connection(client("viewer"))["error"] is None


def test_the_task_of_a_key_is_what_the_operators_wrote() -> None:
    from types import SimpleNamespace

    from qewqew_airflow.keys import task_key, task_of

    ti = SimpleNamespace(dag_id="a.b", run_id="manual__x|y/ü +00:00", task_id="group.load", map_index=-1)
    assert task_of(task_key({"ti": ti})) == {"dag": "a.b", "run": ti.run_id, "task": "group.load", "index": -1}  # type: ignore[typeddict-item]
    ti.run_id = "r" * 600
    for key in (task_key({"ti": ti}), "mine", "a|b|c", "a|b|c|d", "a|..|c|1", "|b|c|1", "a|b|c|²", "a|b|c|1|2|3"):  # type: ignore[typeddict-item]
        assert task_of(key) is None


def test_every_process_loads_the_plugin_without_the_web_framework(tmp_path: Path) -> None:
    import subprocess

    program = """
import sys, airflow.plugins_manager
before = set(sys.modules)
import qewqew_airflow.plugin
heavy = ("fastapi", "starlette", "pyspark", "qewqew_core")
print([name for name in set(sys.modules) - before if name.split(".")[0] in heavy])
"""
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True).stdout == "[]\n"


def test_the_clock_of_the_page_is_the_servers(client: Login) -> None:
    before = now_ms()
    assert before <= client("viewer").get(f"{PAGE}/data/state").json()["now"] <= now_ms()
