"""The page's routes with the FAB auth manager: every default role, anonymous users, a role of one's own, and the login form.

Its provider brings eighteen packages, which .venv does not have: before ``./run test --soak`` with this file,
``.venv/bin/pip install -c constraints.txt apache-airflow-providers-fab``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from demo.local_airflow import LocalAirflow
from qewqew_core import Queue
from qewqew_core.tools import marker

pytest.importorskip("airflow.providers.fab", reason="the FAB provider is not installed")
import requests  # what the provider needs

pytestmark = pytest.mark.soak

PASSWORD = "of-a-test"  # noqa: S105
READS_CONNECTIONS = "Support"  # a role that looks into records and does not act
ROLES = ["Public", "Viewer", "User", READS_CONNECTIONS, "Op", "Admin"]
LOOKS, PEEKS, ACTS = ROLES[1:], ROLES[3:], ROLES[4:]
KEY = "flights|manual__2026-01-01T00:00:00+00:00|load|-1"
FROM_THE_PAGE = {"X-QewQew": "1", "Content-Type": "text/plain"}  # so that who has the right is told 415, and nothing is done
ROUTES = [
    *((("GET", path), LOOKS) for path in ("page", "page.js", "page.css", "data/state", "data/history")),
    *((("GET", f"connections/qewqew_default/{what}?queue=orders"), LOOKS) for what in ("batches", "samples")),
    (("GET", "connections/qewqew_default/records?queue=orders"), PEEKS),
    *((("POST", f"connections/qewqew_default/{action}"), ACTS) for action in ("return", "put-back", "drop")),
]


class FabApiServer(LocalAirflow):
    components = {"api-server": ["api-server"]}  # noqa: RUF012

    def _environment(self) -> dict[str, str]:
        manager = "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"
        self._settings = {**super()._environment(), "AIRFLOW__CORE__AUTH_MANAGER": manager}
        return self._settings

    def create_admin(self) -> None:
        names = "--username admin --email admin@example.com --firstname A --lastname A --role Admin"
        command = ["users", "create", *names.split(), "--password", PASSWORD]
        assert self._popen("users", command, self._settings).wait() == 0, self._tail("users")

    def password(self) -> str:
        return PASSWORD


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("queues")


@pytest.fixture(scope="module")
def dead(directory: Path) -> dict[str, Any]:
    """What an action on the dead batch of the queue must send."""
    with Queue(directory / "orders", max_attempts=1) as queue:
        queue.put_many([b"x"] * 3)
        batch = queue.lease(KEY)
        assert batch is not None
        batch.nack("the cluster was gone")
        return {"queue": "orders", "batch": batch.id, "attempt": 1, "made": batch.made}


@pytest.fixture(scope="module")
def server(directory: Path, dead: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[FabApiServer]:
    marker.init(str(directory))
    env = {"AIRFLOW_CONN_QEWQEW_DEFAULT": json.dumps({"conn_type": "qewqew", "host": str(directory)})}
    with FabApiServer(tmp_path_factory.mktemp("airflow"), tmp_path_factory.mktemp("dags"), env) as running:
        running.create_admin()
        reads = [{"action": {"name": "can_read"}, "resource": {"name": name}} for name in ("Assets", "Connections")]
        running._call("POST", "/auth/fab/v1/roles", {"name": READS_CONNECTIONS, "actions": reads})
        for role in ROLES[:-1]:  # names of users are of any case: "Admin" is there
            name = {"username": role, "first_name": role, "last_name": role, "email": f"{role}@example.com"}
            running._call("POST", "/auth/fab/v1/users", {**name, "password": PASSWORD, "roles": [{"name": role}]})
        yield running


@pytest.fixture(scope="module")
def ask(server: FabApiServer) -> Callable[..., requests.Response]:
    """``ask(role, method, path, **more)`` with the cookie that the user's browser has; role None: nobody has logged in."""
    cookies: dict[str | None, dict[str, str]] = {None: {}}

    def send(role: str | None, method: str, path: str, **more: Any) -> requests.Response:
        if role not in cookies:
            answer = server._call("POST", "/auth/token", {"username": role, "password": PASSWORD}, login=False)
            cookies[role] = {"_token": answer["access_token"]}
        return requests.request(method, f"{server.url}{path}", cookies=cookies[role], timeout=300, **more)

    return send


@pytest.mark.parametrize(("route", "roles"), ROUTES, ids=lambda one: " ".join(one) if isinstance(one, tuple) else "")
def test_every_route_is_for_the_roles_that_have_the_right(
    route: tuple[str, str], roles: list[str], ask: Callable[..., requests.Response]
) -> None:
    method, path = route
    for role in (None, *ROLES):
        found = ask(role, method, f"/qewqew/{path}", headers=FROM_THE_PAGE)
        wanted = 401 if role is None else 403 if role not in roles else 200 if method == "GET" else 415
        assert found.status_code == wanted, (role, found.text)


def test_each_role_is_shown_what_it_may_see(ask: Callable[..., requests.Response], directory: Path) -> None:
    for role in LOOKS:
        answer = ask(role, "GET", "/qewqew/data/state")
        (seen,) = answer.json()["connections"]
        assert (seen["peek"], seen["act"]) == (role in PEEKS, role in ACTS)
        assert [row["dead"] for row in seen["queues"]] == [1]
        for secret in (str(directory), KEY, "the cluster was gone"):
            assert (secret in answer.text) == (role in PEEKS)


def test_airflow_tells_of_the_page_whoever_may_read_plugins(ask: Callable[..., requests.Response]) -> None:
    told = {role for role in ROLES if "qewqew/page" in ask(role, "GET", "/api/v2/plugins").text}
    assert told == {"Op", "Admin"}


def test_whoever_logs_in_by_the_form_acts_on_a_dead_batch(server: FabApiServer, dead: dict[str, Any], directory: Path) -> None:
    with requests.Session() as browser:
        form = browser.get(f"{server.url}/auth/login/", timeout=300).text
        token = re.search(r'name="csrf_token"[^>]*value="([^"]+)"', form)
        assert token is not None, form
        answers = {"username": "Op", "password": PASSWORD, "csrf_token": token[1]}
        browser.post(f"{server.url}/auth/login/", data=answers, timeout=300).raise_for_status()
        route = f"{server.url}/qewqew/connections/qewqew_default/drop"
        assert browser.post(route, json=dead, timeout=300).status_code == 403  # as another site could send it
        dropped = browser.post(route, json=dead, headers={"X-QewQew": "1", "Origin": server.url}, timeout=300)
        assert (dropped.status_code, dropped.json()["records"]) == (200, 3)
        browser.get(f"{server.url}/auth/logout", timeout=300)
        assert browser.get(f"{server.url}/qewqew/page", timeout=300).status_code == 401
    with Queue(directory / "orders") as queue:
        assert queue.dead() == []
