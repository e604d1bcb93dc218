"""The routes of the page, with Airflow's own permissions, see docs/airflow/page.md.

===================== =================== ==============================================================
to                    permission          routes
===================== =================== ==============================================================
look                  GET on assets       all; a user without it sees nothing of the page
look into records     GET on connection   records; without it directories, errors and foreign keys are hidden
see results of tasks  GET on DAG's XComs  batches; without it they are left out
act on batches        PUT on connection   return, put-back, drop, retry; all/return, all/drop
===================== =================== ==============================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Annotated, Any, Literal

from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_asset, requires_access_connection
from airflow.configuration import AIRFLOW_HOME, conf
from airflow.models.connection import Connection
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qewqew_airflow.page import preview
from qewqew_airflow.page.actions import act_on, act_on_all
from qewqew_airflow.page.asked import LARGEST_REQUEST, Act, ActOnAll, Asked, Peek, Place, act_of, act_on_all_of
from qewqew_airflow.page.batches import add_stagers, batches_of, results_of
from qewqew_airflow.page.budget import Budget, Slow
from qewqew_airflow.page.contents import (
    Contents,
    RecentContents,
    connections,
    each_directory,
    explained,
    find_batch,
    hook_of,
)
from qewqew_airflow.page.owners import add_owners
from qewqew_airflow.page.permissions import may, may_see, may_see_xcoms, owner_hider, shown, told
from qewqew_airflow.page.samples import Sampler, Samples
from qewqew_core import BadArgument, BadPath, BatchConflict, BatchExpired, BatchNotFound, Locked, QewQewError
from qewqew_core.batch.places import directory_of
from qewqew_core.limits import now_ms

SCRIPTS = ("page", "server", "elements", "list", "queue", "batches", "plot", "dialogs")
STATIC = {"page": "text/html", "page.css": "text/css", **{f"{script}.js": "text/javascript" for script in SCRIPTS}}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATUS: list[tuple[type[QewQewError], int]] = [
    (Locked, 409),
    (BatchConflict, 409),
    (BatchNotFound, 404),
    (BatchExpired, 404),
    (BadArgument, 400),
    (BadPath, 400),
    (Slow, 503),
]

_logger = logging.getLogger(__name__)
_budget = Budget()
_recent = RecentContents(_budget)
_samples = Samples(os.path.join(AIRFLOW_HOME, "qewqew", "page.sqlite3"))
_sampler = Sampler(_samples, functools.partial(each_directory, _budget))


@contextlib.asynccontextmanager
async def _lifespan(_: FastAPI) -> AsyncIterator[None]:
    with _sampler.sampling():
        yield


app = FastAPI(
    title="QewQew",
    openapi_url=None,  # the dependencies below would not protect it
    lifespan=_lifespan,
    dependencies=[Depends(requires_access_asset("GET"))],
)


class _SmallBodies:
    """Refuses a body that is too large where it is read. With teams, Airflow itself reads it, before it asks for permissions."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = Headers(scope=scope).get("Content-Length", "") if scope["type"] == "http" else ""
        announced, read = int(length) if length.isdecimal() else 0, 0

        async def limited() -> Message:
            nonlocal read
            if announced <= LARGEST_REQUEST:
                message = await receive()
                read += len(message.get("body", b""))
                if read <= LARGEST_REQUEST:
                    return message
            raise HTTPException(413, f"a request must not have more than {LARGEST_REQUEST:,} bytes", {"Connection": "close"})

        await self._app(scope, limited, send)


app.add_middleware(_SmallBodies)


@app.middleware("http")
async def _headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
    response = await call_next(request)
    response.headers.update(HEADERS)
    return response


@app.exception_handler(QewQewError)
async def _failed(request: Request, error: QewQewError) -> JSONResponse:
    """The only place from which an error of a store gets into an answer, besides `shown`."""
    status = next((code for kind, code in STATUS if isinstance(error, kind)), 500)
    asked = request.query_params
    store = asked.get("queue") or asked.get("topic") or f"connection {request.path_params.get('connection_id')}"
    return JSONResponse({"detail": told(explained(error), store, getattr(request.state, "may_read", False))}, status)


@app.exception_handler(sqlite3.Error)
def _without_samples(_: Request, error: sqlite3.Error) -> JSONResponse:
    _logger.warning("%s cannot be read: %s", _samples.path, error)
    return JSONResponse({"detail": "the data of the plots cannot be read now; see the log of the API server"}, 503)


@app.exception_handler(ClientDisconnect)
async def _gone(request: Request, _: ClientDisconnect) -> Response:
    """The browser has gone in the middle of its request: nothing was done, and nobody gets this answer."""
    _logger.debug("%s %s was broken off by the client", request.method, request.url.path)
    return Response(status_code=499)


@app.exception_handler(Exception)
def _broken(_: Request, error: Exception) -> JSONResponse:
    """An unexpected error. Its traceback is in the server's log."""
    return JSONResponse({"detail": f"{type(error).__name__}; see the log of the API server"}, 500, HEADERS)


# Looking


@app.get("/{name}")
def static(name: str) -> Response:
    if name not in STATIC:
        raise HTTPException(404, "this page does not exist")
    file = name if "." in name else f"{name}.html"
    return Response((files("qewqew_airflow.page") / "static" / file).read_bytes(), media_type=STATIC[name])


def _all(user: GetUserDep) -> list[Connection]:
    """The connections that the user may see."""
    return [connection for connection in connections().values() if may_see(connection, user)]


AllDep = Annotated[list[Connection], Depends(_all)]


@app.get("/data/state")
async def state(visible: AllDep, user: GetUserDep) -> dict[str, Any]:
    """Everything that the page lists, for the connections that the user may see."""
    found = await asyncio.gather(*map(_recent, visible))

    def shown_all() -> list[dict[str, Any]]:
        return [shown(*several, user) for several in _grouped(visible, found, user)]

    late_after = conf.getfloat("qewqew", "late_after", fallback=7200.0)
    return {"now": now_ms(), "late_after": late_after, "connections": await run_in_threadpool(shown_all)}


@app.get("/data/history")
async def history(visible: AllDep, user: GetUserDep) -> dict[str, Any]:
    """For the sparklines: by connection and queue or topic, how much waited how many seconds ago."""
    found = await asyncio.gather(*map(_recent, visible))

    def depths() -> dict[str, Any]:
        now = now_ms()
        return {
            connection.conn_id: {
                name: [(round((now - at) / 1000), depth) for at, depth in series]
                for name, series in _samples.depths(contents.directory, now // 60_000 - 61).items()
            }
            for connection, contents, _ in _grouped(visible, found, user)
        }

    return await run_in_threadpool(depths)


def _grouped(visible: list[Connection], found: list[Contents], user: Any) -> list[tuple[Connection, Contents, list[str]]]:
    """A connection, the contents of its directory, and the names of others with this directory.

    Of several connections, this is the one with which the user may do most.
    """
    groups: dict[str, list[tuple[Connection, Contents]]] = {}
    for connection, contents in zip(visible, found, strict=True):
        directory = contents.directory if contents.error is None else f"not of {connection.conn_id}"
        groups.setdefault(directory, []).append((connection, contents))
    rows = []
    for group in groups.values():
        if len(group) > 1:
            group.sort(key=lambda member: not may("PUT", member[0], user))
        (connection, contents), *others = group
        rows.append((connection, contents, [other.conn_id for other, _ in others]))
    return rows


# One queue, or reader of a topic


def _connection(connection_id: str, request: Request, user: GetUserDep) -> Connection:
    connection = connections().get(connection_id)
    if connection is None or not may_see(connection, user):
        raise HTTPException(404, "Airflow's database and environment have no such connection of type qewqew")
    request.state.may_read = may("GET", connection, user)
    return connection


ConnectionDep = Annotated[Connection, Depends(_connection)]


@app.get("/connections/{connection_id}/batches")
async def batches(
    connection: ConnectionDep, asked: Annotated[Place, Query()], request: Request, user: GetUserDep
) -> dict[str, Any]:
    """The batches that are remembered, with what Airflow keeps of the work on them."""

    def look() -> dict[str, Any]:
        path = asked.path(hook_of(connection))
        rows, more = batches_of(path, asked.stem(path), asked.reader)
        add_owners(rows)
        sees_results = functools.cache(functools.partial(may_see_xcoms, user))
        for row, result in results_of([row for row in rows if row["task"] is not None and sees_results(row["task"]["dag"])]):
            row["result"] = result
        if asked.queue is not None:
            add_stagers(rows, path, sees_results)
        if not request.state.may_read:
            rows = list(map(owner_hider(user), rows))
        return {"batches": rows, "more": more}

    return await _budget.do(connection, look)


@app.get("/connections/{connection_id}/samples")
async def samples(connection: ConnectionDep, asked: Annotated[Asked, Query()]) -> dict[str, Any]:
    """For the plot: (time, depth, put, drained, minutes) of a queue or topic, the oldest first."""

    def look() -> dict[str, Any]:
        hook = hook_of(connection)
        asked.path(hook)
        name = f"queue {asked.queue}" if asked.queue is not None else f"topic {asked.topic}"
        return {"samples": _samples.of(hook.directory(), name, now_ms() // 60_000 - asked.hours * 60)}

    return await _budget.do(connection, look)


@app.get("/connections/{connection_id}/records", dependencies=[Depends(requires_access_connection("GET"))])
async def records(connection: ConnectionDep, asked: Annotated[Peek, Query()]) -> dict[str, Any]:
    """The first records of a queue, topic or batch. Reads one more than asked for, to know whether there are more."""

    def look() -> dict[str, Any]:
        path = asked.path(hook_of(connection))
        number = asked.number + 1
        if asked.batch is not None:
            batch, _ = find_batch(path, asked.reader, asked.batch)
            found = preview.batch_records(directory_of(asked.stem(path), batch), number)
        elif asked.queue is not None:
            found = preview.queue_records(path, number)
        else:
            found = preview.topic_messages(path, number, asked.start, asked.reader)
        return {"records": found[: asked.number], "more": len(found) > asked.number}

    return await _budget.do(connection, look)


# Acting


@app.post("/connections/{connection_id}/{action}", dependencies=[Depends(requires_access_connection("PUT"))])
async def act(
    connection: ConnectionDep,
    action: Literal["return", "put-back", "drop", "retry"],
    asked: Annotated[Act, Depends(act_of)],
    user: GetUserDep,
) -> dict[str, Any]:
    """Return, put back or drop a dead batch, as `Batch` does; retry a returned one; or return a leased one whose owner is gone.

    Waits `LOCK_TIMEOUT` seconds for the queue's lock.
    """
    return await _do(connection, action, functools.partial(act_on, connection, action, asked, user))


@app.post("/connections/{connection_id}/all/{action}", dependencies=[Depends(requires_access_connection("PUT"))])
async def act_all(
    connection: ConnectionDep,
    action: Literal["return", "drop"],
    asked: Annotated[ActOnAll, Depends(act_on_all_of)],
    request: Request,
    user: GetUserDep,
) -> dict[str, Any]:
    """Return or drop dead batches of one queue or reader. It is done to those that have not changed since they were shown."""
    answer = await _do(connection, action, functools.partial(act_on_all, connection, action, asked, user))
    store = str(asked.queue or asked.topic)
    return {**answer, "failed": [told(why, store, request.state.may_read) for why in answer["failed"]]}


async def _do(connection: Connection, action: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    def do() -> dict[str, Any]:
        try:
            return work()
        finally:
            _recent.forget()  # other connections may have the same directory

    try:
        return await _budget.do(connection, do)
    except Slow as late:
        became = "this may still be done: look at the batch before you ask again" if late.begun else "nothing was done"
        raise Slow(f"{late}. {action}: {became}") from None
