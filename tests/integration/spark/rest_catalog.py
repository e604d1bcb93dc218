"""An Iceberg REST catalog for tests: the part of the protocol that PyIceberg uses for tables, in front of a catalog in a file.

As a real server does, it checks a commit's requirements against the table as it is now, and then takes the commit or answers 409.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from pyiceberg.catalog.rest import CreateTableRequest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.table import CommitTableRequest, Table
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER

MISSING = NoSuchTableError, NoSuchNamespaceError
OPTIONAL = "location", "partition-spec", "write-order"
CONFLICTS = CommitFailedException, TableAlreadyExistsError, NamespaceAlreadyExistsError


class RestCatalog(ThreadingHTTPServer):
    """``before_commit`` and ``after_commit`` are called when a table is committed; what they raise is an answer of 500."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, catalog: SqlCatalog) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.catalog = catalog
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.before_commit: Callable[[], object] = lambda: None
        self.after_commit: Callable[[], object] = lambda: None
        self.refused = 0  # commits
        self.one_at_a_time = threading.Lock()

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> dict[str, Any]:
        match method, [unquote(part) for part in path.strip("/").split("/")[1:]]:
            case "GET", ["config"]:
                return {"defaults": {}, "overrides": {}}
            case "GET", ["namespaces"]:
                return {"namespaces": self.catalog.list_namespaces()}
            case "POST", ["namespaces"]:
                self.catalog.create_namespace(tuple(body["namespace"]))
                return {"namespace": body["namespace"], "properties": {}}
            case "GET", ["namespaces", namespace]:
                return {"namespace": [namespace], "properties": self.catalog.load_namespace_properties(namespace)}
            case "POST", ["namespaces", namespace, "tables"]:
                return self.create(namespace, CreateTableRequest.model_validate({**dict.fromkeys(OPTIONAL), **body}))
            case "GET", ["namespaces", namespace, "tables", name]:
                return told(self.catalog.load_table((namespace, name)), *query.get("snapshots", []))
            case "POST", ["namespaces", namespace, "tables", name]:
                return self.commit((namespace, name), CommitTableRequest.model_validate(body))
        raise NotImplementedError(f"{method} {path}")

    def create(self, namespace: str, wanted: CreateTableRequest) -> dict[str, Any]:
        identifier = namespace, wanted.name
        if self.catalog.table_exists(identifier):
            raise TableAlreadyExistsError(wanted.name)
        create = self.catalog._create_staged_table if wanted.stage_create else self.catalog.create_table
        spec, order = wanted.partition_spec or UNPARTITIONED_PARTITION_SPEC, wanted.write_order or UNSORTED_SORT_ORDER
        return told(create(identifier, wanted.table_schema, wanted.location, spec, order, wanted.properties))

    def commit(self, identifier: tuple[str, str], wanted: CommitTableRequest) -> dict[str, Any]:
        self.before_commit()
        table: Any = SimpleNamespace(name=lambda: identifier)  # it loads the table itself
        with self.one_at_a_time:
            done = self.catalog.commit_table(table, wanted.requirements, wanted.updates)
        self.after_commit()
        return json.loads(done.model_dump_json())


def told(table: Table, snapshots: str = "all") -> dict[str, Any]:
    metadata = json.loads(table.metadata.model_dump_json())
    if snapshots == "refs":
        named = {ref["snapshot-id"] for ref in metadata.get("refs", {}).values()}
        metadata["snapshots"] = [each for each in metadata["snapshots"] if each["snapshot-id"] in named]
    return {"metadata-location": table.metadata_location, "metadata": metadata, "config": {}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RestCatalog

    def do_GET(self) -> None:
        self.handle_with(None)

    def do_POST(self) -> None:
        self.handle_with(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def handle_with(self, body: Any) -> None:
        place = urlsplit(self.path)
        try:
            status, said = 200, self.server.answer(self.command, place.path, parse_qs(place.query), body)
        except Exception as error:
            status = 404 if isinstance(error, MISSING) else 409 if isinstance(error, CONFLICTS) else 500
            said = {"error": {"message": str(error), "type": type(error).__name__, "code": status}}
            self.server.refused += status == 409 and isinstance(error, CommitFailedException)
        text = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Not into the output of the tests."""


@contextmanager
def rest_catalog(settings: dict[str, str]) -> Iterator[RestCatalog]:
    """A server whose own catalog has these settings."""
    with RestCatalog(SqlCatalog("of the server", **settings)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
