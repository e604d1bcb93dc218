"""What a user may see and do, by Airflow's own permissions, and what is hidden from others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.base_auth_manager import ResourceMethod
from airflow.api_fastapi.auth.managers.models.resource_details import ConnectionDetails, DagAccessEntity, DagDetails
from airflow.configuration import conf
from airflow.models.connection import Connection

from qewqew_airflow.page.budget import Slow
from qewqew_airflow.page.contents import Contents
from qewqew_core.tools.printing import visible


def may_see(connection: Connection, user: Any) -> bool:
    """A connection of a team is for its members, any other for everybody who may look."""
    team = getattr(connection, "team_name", None)  # since Airflow 3.2
    if team is None or not conf.getboolean("core", "multi_team", fallback=False):  # a name may be left from when teams were on
        return True
    from airflow.api_fastapi.auth.managers.models.resource_details import TeamDetails

    return get_auth_manager().is_authorized_team(method="GET", details=TeamDetails(name=team), user=user)


def may(method: ResourceMethod, connection: Connection, user: Any) -> bool:
    details = ConnectionDetails(conn_id=connection.conn_id, team_name=getattr(connection, "team_name", None))
    return get_auth_manager().is_authorized_connection(method=method, details=details, user=user)


def may_see_xcoms(user: Any, dag_id: str) -> bool:
    return get_auth_manager().is_authorized_dag(
        method="GET", access_entity=DagAccessEntity.XCOM, details=DagDetails(id=dag_id), user=user
    )


# What is hidden


def shown(connection: Connection, contents: Contents, also: list[str], user: Any) -> dict[str, Any]:
    """A connection and its contents, for the page. ``also``: other connections with this directory."""
    may_peek, may_act = may("GET", connection, user), may("PUT", connection, user)
    hide_owner = owner_hider(user)
    # Keys and reasons only of DAGs that the user may see.
    hidden = {} if may_peek else {"batches": lambda batches: list(map(hide_owner, batches))}

    def show(row: dict[str, Any]) -> dict[str, Any]:
        changes: dict[str, Callable[[Any], Any]] = {
            "error": lambda error: told(error, row["name"], may_peek),
            "readers": lambda readers: list(map(show, readers)),
            **hidden,
        }
        return {name: changes[name](value) if name in changes else value for name, value in row.items()}

    return {
        "id": connection.conn_id,
        "also": also,
        "peek": may_peek,
        "act": may_act,
        "complete": contents.complete,
        "error": None if contents.error is None else told(contents.error, connection.conn_id, may_peek),
        "queues": list(map(show, contents.queues)),
        "topics": list(map(show, contents.topics)),
        **({"directory": contents.directory} if may_peek else {}),
    }


def told(explained: str, store: str, may_read: bool) -> str:
    """An explained error for a user. Texts have paths, hosts and the targets of links in them, so users who may not read the
    connection are told nothing but the kind. (That it is `Slow` says no more than the connection.)
    """
    kind = explained.partition(":")[0]
    if may_read or kind == Slow.__name__:
        return explained
    return f"{kind}: only users who may read the connection see what is wrong with {visible(store):.300}"


def owner_hider(user: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function that hides what only users who may see the DAG of a batch may see."""
    allowed = functools.cache(lambda: get_auth_manager().get_authorized_dag_ids(user=user))  # only asked if there is a batch

    def hide(batch: dict[str, Any]) -> dict[str, Any]:
        if batch["task"] is not None and batch["task"]["dag"] in allowed():
            return batch
        return {**batch, "key": None, "task": None, "reason": "", "cause": "", "owner": None}

    return hide
