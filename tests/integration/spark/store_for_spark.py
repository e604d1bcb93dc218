"""Lets the tests' Spark write to an object store, although Hadoop's client of S3 is not among their packages.

Spark has Hadoop's client of WebHDFS. Here is a server of that protocol, as far as writing files needs it, which keeps them in the
store. Like S3A it has no directories, and renames by copying.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

TOP = "tables"  # what is not below it, Spark does not see
HADOOP = {
    "fs.s3.impl": "org.apache.hadoop.fs.viewfs.ViewFileSystemOverloadScheme",
    "fs.s3.impl.disable.cache": "true",
    "fs.webhdfs.impl.disable.cache": "true",
}


class Bridge(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, bucket: str, client: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bucket, self.client = bucket, client
        self.made: set[str] = set()  # directories

    def keys(self, key: str) -> dict[str, int]:
        """The sizes of the object, and of those below it."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=key)
        found = {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", [])}
        return {name: size for name, size in found.items() if name == key or name.startswith(f"{key}/".lstrip("/"))}

    def answer(self, op: str, key: str, query: dict[str, list[str]]) -> dict[str, Any]:
        found = self.keys(key) if op != "MKDIRS" else {}
        match op:
            case "MKDIRS":
                parts = key.split("/")
                self.made |= {"/".join(parts[: number + 1]) for number in range(len(parts))}
            case "RENAME":
                new = query["destination"][0].strip("/")
                if self.keys(new) or new in self.made:  # into the directory
                    new = f"{new}/{key.rsplit('/', 1)[-1]}"
                for name in found:
                    source = {"Bucket": self.bucket, "Key": name}
                    self.client.copy_object(Bucket=self.bucket, Key=new + name.removeprefix(key), CopySource=source)
                    self.client.delete_object(**source)
                self.made |= {new} if key in self.made else set()
                self.made -= {name for name in self.made if name == key or name.startswith(f"{key}/")}
            case "DELETE":
                for name in found:
                    self.client.delete_object(Bucket=self.bucket, Key=name)
                self.made -= {name for name in self.made if name == key or name.startswith(f"{key}/")}
            case "GETFILESTATUS" if key in found:
                return {"FileStatus": status("", found[key])}
            case "GETFILESTATUS" if found or key in self.made or not key:
                return {"FileStatus": status("")}
            case "LISTSTATUS" if found or key in self.made:
                below = {name.removeprefix(f"{key}/"): size for name, size in found.items()}
                below |= {name.removeprefix(f"{key}/"): -1 for name in self.made if name.startswith(f"{key}/")}
                listed = {name: size for name, size in below.items() if "/" not in name}
                listed |= {name.split("/")[0]: -1 for name in below if "/" in name}
                return {"FileStatuses": {"FileStatus": [status(name, size) for name, size in sorted(listed.items())]}}
            case "GETHOMEDIRECTORY":
                return {"Path": "/"}
            case "GETFILESTATUS" | "LISTSTATUS":
                raise FileNotFoundError(key)
            case "GETFILEBLOCKLOCATIONS" | "GET_BLOCK_LOCATIONS":
                return {"BlockLocations": {"BlockLocation": []}}
            case _:
                raise NotImplementedError(op)
        return {"boolean": True}


def status(name: str, size: int = -1) -> dict[str, Any]:
    kind = {"type": "DIRECTORY", "length": 0} if size < 0 else {"type": "FILE", "length": size}
    more = {"accessTime": 0, "modificationTime": 0, "blockSize": 1 << 27, "replication": 1}
    return {"pathSuffix": name, "owner": "x", "group": "x", "permission": "755", **kind, **more}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bridge

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        query = parse_qs(place.query)
        op = query["op"][0].upper()
        key = unquote(place.path).removeprefix("/webhdfs/v1").strip("/")
        if op == "CREATE" and "here" not in query:
            self.say(307, location=f"http://{self.headers['Host']}{self.path}&here=1")
        elif op == "CREATE":
            self.server.client.put_object(Bucket=self.server.bucket, Key=key, Body=self.body())
            self.say(201)
        else:
            try:
                self.say(200, self.server.answer(op, key, query))
            except Exception as error:
                missing = isinstance(error, FileNotFoundError)
                java = "java.io.FileNotFoundException" if missing else "java.io.IOException"
                said = {"exception": java.rsplit(".", 1)[-1], "javaClassName": java, "message": f"{op} {key}: {error!r}"}
                self.say(404 if missing else 500, {"RemoteException": said})

    do_PUT = do_DELETE = do_GET

    def body(self) -> bytes:
        """In chunks, whose length is not told before."""
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def say(self, code: int, said: Any = None, location: str = "") -> None:
        text = b"" if said is None else json.dumps(said).encode()
        self.send_response(code)
        # No Content-Type: to parse it, the client would want a class that Spark does not have.
        self.send_header("Content-Length", str(len(text)))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Not into the output of the tests."""


@contextmanager
def writes_to(spark: Any, bucket: str, client: Any) -> Iterator[None]:
    """Inside the block, this Spark writes to ``s3://bucket/tables/``; ``client`` is boto3's."""
    settings = spark.sparkContext._jsc.hadoopConfiguration()
    with Bridge(bucket, client) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        target = {f"fs.viewfs.mounttable.{bucket}.link./{TOP}": f"webhdfs://127.0.0.1:{server.server_port}/{TOP}"}
        for name, value in (HADOOP | target).items():
            settings.set(name, value)
        try:
            yield
        finally:
            for name in HADOOP | target:
                settings.unset(name)
            server.shutdown()
            thread.join()
