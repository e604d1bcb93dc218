"""The queues that are compared, each behind the same few calls.

A peer is opened in a directory of its own, with ``sync="never"`` (what was put survives the death of the process, if the peer
can do that; see `Peer.killed`) or ``"commit"`` (it survives a power cut too). Its package is imported when it is opened.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pickle
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

BATCH = 1_000
Commit = Callable[[list[list[bytes]]], object]  # all of these batches, as one durable commit


class Peer:
    """``put``, ``get``, ``put_many`` and ``get_many`` are the peer's own methods where it has them: nothing comes between."""

    name: ClassVar[str]
    package: ClassVar[str | None] = None  # what is imported; None: part of Python
    package_name: ClassVar[str | None] = None  # as it is installed, if not by that name
    never: ClassVar[str]  # how what is not durable is set …
    commit: ClassVar[str | None]  # … and what is; None: it cannot be durable
    always: ClassVar[bool] = False  # it is durable in either case: it cannot do without
    killed: ClassVar[bool] = True  # what was put survives a killed process
    batch_put: ClassVar[bool] = True
    batch_get: ClassVar[bool] = True
    shared: ClassVar[bool] = True  # threads may share one object; else each has its own
    races: ClassVar[bool] = False  # many processes may stage into it at once: it has `staging` and `count`
    remembers: ClassVar[bool] = True  # what was taken is gone for the next process

    put: Callable[[bytes], object]
    get: Callable[[], bytes]
    put_many: Callable[[list[bytes]], object]
    get_many: Callable[[int], list[bytes]]  # up to so many; fewer, or none, at the end

    def __init__(self, directory: str, sync: str) -> None:
        raise NotImplementedError

    @classmethod
    def missing(cls) -> str | None:
        """Why it cannot run here."""
        if cls.package and importlib.util.find_spec(cls.package) is None:
            return f"{cls.package_name or cls.package} is not installed"
        return None

    def put_each(self, records: list[bytes]) -> None:
        put = self.put
        for record in records:
            put(record)

    def get_each(self, count: int) -> list[bytes]:
        get = self.get
        return [get() for _ in range(count)]

    def fill(self, records: list[bytes]) -> None:
        """Put them in whatever way is quickest; nobody measures it."""
        self.put_each(records)

    @classmethod
    @contextlib.contextmanager
    def staging(cls, directory: str) -> Iterator[Commit]:
        """What one of many processes commits with, until the block ends."""
        peer = cls(directory, "commit")
        yield lambda batches: peer.put_many(list(chain.from_iterable(batches)))
        peer.close()

    def count(self, size: int) -> int:
        """How many records there are, each of ``size`` bytes."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        """After `close`: end what is not part of the work."""

    def memory(self) -> int:
        """Resident bytes of this process, and of a server."""
        return resident("self")


def resident(process: str) -> int:
    return int(Path(f"/proc/{process}/status").read_text().partition("VmRSS:")[2].split()[0]) * 1024


class PlainFile(Peer):
    """What everything is a ratio to: length and record, through Python's buffer."""

    name = "plain file"
    never = "written through Python's buffer"
    commit = "`flush` and `fdatasync`"
    killed = False
    remembers = False
    races = True

    def __init__(self, directory: str, sync: str) -> None:
        self.directory = directory
        self.file = open(os.path.join(directory, "frames"), "a+b")  # noqa: SIM115 - until close
        self.file.seek(0)
        self.sync = sync
        self.put_many = self.put_each if sync == "never" else self.put_synced
        self.get_many = self.get_each

    def put_each(self, records: list[bytes]) -> None:
        write, each = self.file.write, self.sync == "commit"
        for record in records:
            write(len(record).to_bytes(4))
            write(record)
            if each:
                self.file.flush()
                os.fdatasync(self.file.fileno())

    def put_synced(self, records: list[bytes]) -> None:
        write = self.file.write
        for record in records:
            write(len(record).to_bytes(4))
            write(record)
        self.file.flush()
        os.fdatasync(self.file.fileno())

    def get_each(self, count: int) -> list[bytes]:
        read, records = self.file.read, []
        for _ in range(count):
            if not (head := read(4)):
                break
            records.append(read(int.from_bytes(head)))
        return records

    @classmethod
    @contextlib.contextmanager
    def staging(cls, directory: str) -> Iterator[Commit]:
        """Each process has a file of its own."""
        own = os.path.join(directory, str(os.getpid()))
        os.mkdir(own)
        with super().staging(own) as commit:
            yield commit

    def count(self, size: int) -> int:
        return sum(path.stat().st_size for path in Path(self.directory).rglob("frames")) // (4 + size)

    def close(self) -> None:
        self.file.close()


class QewQew(Peer):
    name = "QewQew"
    package = "qewqew_core"
    package_name = "qewqew"
    never = '`sync="never"`'
    commit = '`sync="commit"`, the default'
    races = True

    def __init__(self, directory: str, sync: str) -> None:
        from qewqew_core import Queue

        self.queue = Queue(os.path.join(directory, "queue"), sync=sync)  # type: ignore[arg-type]
        self.put, self.get = self.queue.put, self.queue.get
        self.put_many, self.get_many = self.queue.put_many, self.queue.get_many

    @classmethod
    @contextlib.contextmanager
    def staging(cls, directory: str) -> Iterator[Commit]:
        """With the settings that one gets without asking."""
        from qewqew_core import Stage

        with Stage(os.path.join(directory, "queue")) as stage:

            def commit(batches: list[list[bytes]]) -> None:
                for batch in batches:
                    stage.put_many(batch)
                stage.commit()

            yield commit

    def count(self, size: int) -> int:
        return len(self.queue)

    def close(self) -> None:
        self.queue.close()


class QewQewTopic(Peer):
    """A topic: reading is a reader's `read` and `commit`."""

    name = "QewQew topic"
    package = "qewqew_core"
    package_name = "qewqew"
    never = '`sync="never"`'
    commit = '`sync="commit"`, the default'
    races = True
    tag = "order.new.eu"

    def __init__(self, directory: str, sync: str) -> None:
        from qewqew_core import Message, Topic

        self.topic = Topic(os.path.join(directory, "topic"), sync=sync, lock_timeout=60)  # type: ignore[arg-type]
        self.reader: Any = None
        self.message = Message
        self.put, self.get = self.append, self.read
        self.put_many, self.get_many = self.append_many, self.read_many

    def append(self, record: bytes) -> None:
        self.topic.append(record, tag=self.tag)

    def append_many(self, records: list[bytes]) -> None:
        self.topic.append_many([self.message(record, self.tag) for record in records])

    def read_with(self, name: str, filter: str | None = None) -> None:
        self.reader = self.topic.reader(name, filter)

    def read(self) -> bytes:
        if self.reader is None:
            self.read_with("benchmark")
        body: bytes = self.reader.read().body
        self.reader.commit()
        return body

    def read_many(self, count: int) -> list[bytes]:
        if self.reader is None:
            self.read_with("benchmark")
        messages = self.reader.read_many(count)
        self.reader.commit()
        return [message.body for message in messages]

    @classmethod
    @contextlib.contextmanager
    def staging(cls, directory: str) -> Iterator[Commit]:
        """Opened for each commit: a topic has one writer at a time."""

        def commit(batches: list[list[bytes]]) -> None:
            with contextlib.closing(cls(directory, "commit")) as topic:
                topic.append_many(list(chain.from_iterable(batches)))

        yield commit

    def count(self, size: int) -> int:
        return len(self.topic)

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
        self.topic.close()


class PersistSqlite(Peer):
    name = "persist-queue sqlite"
    package = "persistqueue"
    package_name = "persist-queue"
    never = "there is none: `synchronous=FULL`, and a commit for each record"
    commit = "the only way"
    always = True
    batch_put = False

    def __init__(self, directory: str, sync: str) -> None:
        from persistqueue import SQLiteQueue

        path = os.path.join(directory, "queue")
        self.queue = SQLiteQueue(path, multithreading=True, auto_commit=False)  # taking is made durable by task_done
        self.put = self.queue.put
        self.database = os.path.join(path, "data.db")

    def get(self) -> bytes:
        record: bytes = self.queue.get_nowait()
        self.queue.task_done()
        return record

    def get_many(self, count: int) -> list[bytes]:
        records = [self.queue.get_nowait() for _ in range(min(count, self.queue.size))]
        self.queue.task_done()
        return records

    def fill(self, records: list[bytes]) -> None:
        """Beside its API, which would take a minute for 100,000 records: opening it again finds them."""
        with contextlib.closing(sqlite3.connect(self.database)) as database, database:
            database.execute("PRAGMA synchronous = OFF")
            rows = ((pickle.dumps(record, 4), 0.0) for record in records)
            database.executemany("INSERT INTO queue_default (data, timestamp) VALUES (?, ?)", rows)

    def close(self) -> None:
        self.queue.close()


class Queuelib(Peer):
    name = "queuelib"
    package = "queuelib"
    never = "the only way: no `fsync`; which records there are is written by `close()` alone"
    commit = None
    killed = batch_put = batch_get = False

    def __init__(self, directory: str, sync: str) -> None:
        from queuelib import FifoDiskQueue

        self.queue = FifoDiskQueue(os.path.join(directory, "queue"))
        self.put, self.get = self.queue.push, self.queue.pop

    def close(self) -> None:
        self.queue.close()


class Litequeue(Peer):
    name = "litequeue"
    package = "litequeue"
    never = "WAL, `synchronous=NORMAL`, its default"
    commit = "`synchronous=FULL`"
    batch_get = shared = False

    def __init__(self, directory: str, sync: str) -> None:
        from litequeue import LiteQueue

        self.queue = LiteQueue(os.path.join(directory, "queue.db"), timeout=60)
        self.connection = self.queue.conn
        if sync == "commit":
            self.connection.execute("PRAGMA synchronous = FULL")

    def put(self, record: bytes) -> None:  # it stores text only
        self.queue.put(record.decode("latin-1"))

    def put_many(self, records: list[bytes]) -> None:
        with self.queue.transaction(mode="IMMEDIATE"):
            self.put_each(records)

    def get(self) -> bytes:
        message = self.queue.pop()
        self.queue.done(message.message_id)
        data: str = message.data
        return data.encode("latin-1")

    def close(self) -> None:
        self.queue.close()


class SqliteWal(Peer):
    """What one writes oneself: a table, one statement for each call."""

    name = "own sqlite3 WAL"
    never = "WAL, `synchronous=NORMAL`"
    commit = "WAL, `synchronous=FULL`"
    shared = False
    races = True

    def __init__(self, directory: str, sync: str) -> None:
        path = os.path.join(directory, "queue.db")
        self.database = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        self.database.execute("PRAGMA journal_mode = WAL")
        self.database.execute(f"PRAGMA synchronous = {'FULL' if sync == 'commit' else 'NORMAL'}")
        self.database.execute("CREATE TABLE IF NOT EXISTS queue (id INTEGER PRIMARY KEY, record BLOB NOT NULL)")

    def put(self, record: bytes) -> None:
        self.database.execute("INSERT INTO queue (record) VALUES (?)", (record,))

    def put_many(self, records: list[bytes]) -> None:
        with self.database:
            self.database.execute("BEGIN IMMEDIATE")
            self.database.executemany("INSERT INTO queue (record) VALUES (?)", ((record,) for record in records))

    def get(self) -> bytes:
        first = "DELETE FROM queue WHERE id = (SELECT min(id) FROM queue) RETURNING record"
        record: bytes = self.database.execute(first).fetchall()[0][0]
        return record

    def get_many(self, count: int) -> list[bytes]:
        with self.database:
            self.database.execute("BEGIN IMMEDIATE")
            rows = self.database.execute("SELECT id, record FROM queue ORDER BY id LIMIT ?", (count,)).fetchall()
            if rows:
                self.database.execute("DELETE FROM queue WHERE id <= ?", (rows[-1][0],))
        return [record for _, record in rows]

    def count(self, size: int) -> int:
        count: int = self.database.execute("SELECT count(*) FROM queue").fetchone()[0]
        return count

    def close(self) -> None:
        self.database.close()


class Lmdb(Peer):
    name = "lmdb"
    package = "lmdb"
    never = "`sync=False`"
    commit = "`sync=True`, its default"
    races = True

    def __init__(self, directory: str, sync: str) -> None:
        import lmdb

        self.environment = lmdb.open(os.path.join(directory, "queue"), map_size=64 << 30, sync=sync == "commit")

    def put(self, record: bytes) -> None:
        self.put_many([record])

    def put_many(self, records: Iterable[bytes]) -> None:
        with self.environment.begin(write=True) as transaction:
            cursor = transaction.cursor()
            number = int.from_bytes(cursor.key()) + 1 if cursor.last() else 0
            for record in records:
                transaction.put(number.to_bytes(8), record, append=True)
                number += 1

    def get(self) -> bytes:
        (record,) = self.get_many(1)
        return record

    def get_many(self, count: int) -> list[bytes]:
        with self.environment.begin(write=True) as transaction, transaction.cursor() as cursor:
            records: list[bytes] = []
            more = cursor.first()
            while more and len(records) < count:
                records.append(cursor.value())
                more = cursor.delete()
            return records

    def count(self, size: int) -> int:
        count: int = self.environment.stat()["entries"]
        return count

    def close(self) -> None:
        self.environment.close()


class Rocksdict(Peer):
    name = "rocksdict"
    package = "rocksdict"
    never = "its default: the log is not synced"
    commit = "`WriteOptions.sync`"

    def __init__(self, directory: str, sync: str) -> None:
        from rocksdict import Options, Rdict, WriteBatch, WriteOptions

        self.batch = lambda: WriteBatch(raw_mode=True)
        self.database = Rdict(os.path.join(directory, "queue"), Options(raw_mode=True))
        options = WriteOptions()
        options.sync = sync == "commit"
        self.database.set_write_options(options)
        ends = self.database.iter()
        ends.seek_to_first()
        self.head = int.from_bytes(ends.key()) if ends.valid() else 0
        ends.seek_to_last()
        self.numbers = itertools.count(int.from_bytes(ends.key()) + 1 if ends.valid() else 0)

    def put(self, record: bytes) -> None:
        self.database[next(self.numbers).to_bytes(8)] = record

    def put_many(self, records: list[bytes]) -> None:
        batch = self.batch()
        for record in records:
            batch.put(next(self.numbers).to_bytes(8), record)
        self.database.write(batch)

    def get(self) -> bytes:
        (record,) = self.get_many(1)
        return record

    def get_many(self, count: int) -> list[bytes]:
        records: list[bytes] = []
        batch, cursor = self.batch(), self.database.iter()
        cursor.seek(self.head.to_bytes(8))  # past the tombstones of what was taken
        while cursor.valid() and len(records) < count:
            records.append(cursor.value())
            batch.delete(cursor.key())
            cursor.next()
        self.head += len(records)
        self.database.write(batch)
        return records

    def close(self) -> None:
        self.database.close()


class RedisList(Peer):
    """With a server of its own, that listens in the directory only."""

    name = "Redis list"
    package = "redis"
    never = "`appendfsync everysec`"
    commit = "`appendfsync always`"
    races = True

    @classmethod
    def missing(cls) -> str | None:
        return super().missing() or (None if shutil.which("redis-server") else "redis-server is not installed")

    def __init__(self, directory: str, sync: str) -> None:
        import redis

        # The path of a socket may have no more than 107 characters, but it may lead through an open directory.
        self.directory = os.open(directory, os.O_DIRECTORY)
        socket = f"/proc/self/fd/{self.directory}/socket"
        self.server: subprocess.Popen[bytes] | None = None
        # Not its 5 s, after which the client sends a commit that the server is still making again, and it is there twice.
        self.redis: Any = redis.Redis(unix_socket_path=socket, socket_timeout=60)
        if not os.path.exists(socket):
            sync = "always" if sync == "commit" else "everysec"
            options = {"port": 0, "dir": ".", "unixsocket": "socket", "save": "", "appendonly": "yes", "appendfsync": sync}
            command = ["redis-server", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
            self.server = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)  # noqa: S603
            self.wait(redis.ConnectionError)
        self.connected()

    def wait(self, refused: type[Exception]) -> None:
        """Until it has loaded what it holds."""
        deadline = time.monotonic() + 60
        while self.server and self.server.poll() is None:
            try:
                self.redis.ping()
                return
            except refused:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.001)
        raise RuntimeError("redis-server has ended")

    def connected(self) -> None:
        pass

    def put(self, record: bytes) -> None:
        self.redis.rpush("queue", record)

    def put_many(self, records: list[bytes]) -> None:
        self.redis.rpush("queue", *records)

    @classmethod
    @contextlib.contextmanager
    def staging(cls, directory: str) -> Iterator[Commit]:
        with contextlib.closing(cls(directory, "commit")) as peer:

            def commit(batches: list[list[bytes]]) -> None:
                pipeline = peer.redis.pipeline(transaction=True)
                for batch in batches:
                    pipeline.rpush("queue", *batch)
                pipeline.execute()

            yield commit

    def count(self, size: int) -> int:
        count: int = self.redis.llen("queue")
        return count

    def get(self) -> bytes:
        record: bytes = self.redis.lpop("queue")
        return record

    def get_many(self, count: int) -> list[bytes]:
        records: list[bytes] | None = self.redis.lpop("queue", count)
        return records or []

    def close(self) -> None:
        self.redis.close()
        os.close(self.directory)

    def stop(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait()

    def memory(self) -> int:
        return super().memory() + (resident(str(self.server.pid)) if self.server else 0)


class RedisStream(RedisList):
    """With a group of consumers; what was read is acknowledged and deleted."""

    name = "Redis stream"
    races = False

    def connected(self) -> None:
        from redis import ResponseError

        with contextlib.suppress(ResponseError):  # the group is there
            self.redis.xgroup_create("queue", "benchmark", "0", mkstream=True)

    def put(self, record: bytes) -> None:
        self.redis.xadd("queue", {"r": record})

    def put_many(self, records: list[bytes]) -> None:
        pipeline = self.redis.pipeline(transaction=True)
        for record in records:
            pipeline.xadd("queue", {"r": record})
        pipeline.execute()

    def get(self) -> bytes:
        (record,) = self.get_many(1)
        return record

    def get_many(self, count: int) -> list[bytes]:
        streams = self.redis.xreadgroup("benchmark", "benchmark", {"queue": ">"}, count=count)
        if not streams:
            return []
        entries = streams[0][1] if isinstance(streams, list) else next(iter(streams.values()))[0]
        ids = [number for number, _ in entries]
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.xack("queue", "benchmark", *ids)
        pipeline.xdel("queue", *ids)
        pipeline.execute()
        return [fields[b"r"] for _, fields in entries]


class ZbusJava(Peer):
    """The Java library whose files topics have; `ZbusWork.java` does the works, and only those of topics."""

    name = "zbus (Java)"
    never = "memory-mapped files, its only way"
    commit = None
    jar = os.environ.get("ZBUS_JAR", "")

    @classmethod
    def missing(cls) -> str | None:
        return None if shutil.which("java") and os.path.isfile(cls.jar) else "there is no Java, or ZBUS_JAR names no jar"


PEERS: dict[str, type[Peer]] = {
    one.name: one
    for one in (
        PlainFile,
        QewQew,
        QewQewTopic,
        PersistSqlite,
        Queuelib,
        Litequeue,
        SqliteWal,
        Lmdb,
        Rocksdict,
        RedisList,
        RedisStream,
        ZbusJava,
    )
}
OURS = (QewQew.name, QewQewTopic.name)
