"""What a command works on: a path, what is there (a queue, a topic, neither), and the options that many commands share."""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from qewqew_core import arguments
from qewqew_core.batch.leases import HasBatches
from qewqew_core.disk.opening import opening
from qewqew_core.errors import BadArgument, BadPath, Empty
from qewqew_core.queue import paths
from qewqew_core.queue.queue import Queue
from qewqew_core.references import refuse_in_clear
from qewqew_core.tools.listing import Kind, kind_of, queues_in
from qewqew_core.topic import topic_paths
from qewqew_core.topic.reader import Reader
from qewqew_core.topic.topic import Topic

MOST = 1_000_000_000  # that can be asked for
NO_READERS = "a queue has no readers, and does not keep what was taken"


class Dialect(enum.StrEnum):
    A = "A"
    B = "B"
    C = "C"


def _seconds(value: float) -> float:
    return arguments.check_timeout("a time to wait", value)


Path = Annotated[str, typer.Argument(metavar="PATH", help="The path of the queue or topic.", show_default=False)]
QueuePath = Annotated[str, typer.Argument(metavar="QUEUE", help="The path of the queue.", show_default=False)]
TopicPath = Annotated[str, typer.Argument(metavar="TOPIC", help="The path of the topic, a directory.", show_default=False)]
BatchId = Annotated[str, typer.Argument(metavar="ID", help="The id of the batch.", show_default=False)]
BatchIds = Annotated[list[str], typer.Argument(metavar="ID", help="The ids of the batches.", show_default=False)]
ReaderName = Annotated[
    str | None, typer.Option("--reader", metavar="READER", help="The reader whose batches to use; required if PATH is a topic.")
]
AsTopic = Annotated[bool, typer.Option("--topic", help="If nothing is at PATH, create a topic, not a queue.")]
WhichDialect = Annotated[
    Dialect | None, typer.Option(help="For a topic; needed the first time you open one that a zbus server created in dialect C.")
]
FilterText = Annotated[str | None, typer.Option("--filter", metavar="FILTER", help="For a topic: tags like 'order.*;invoice.#'.")]
LockTimeout = Annotated[
    float,
    typer.Option(min=0, metavar="SECONDS", help="How long to wait for another process that has the lock.", callback=_seconds),
]
Timeout = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for a record to arrive.", callback=_seconds)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonLines = Annotated[
    bool,
    typer.Option(
        "--json",
        help='Print one JSON object for each record: {"record": …} or {"base64": …}; for a topic also number, tag, id and time.',
    ),
]
Null = Annotated[bool, typer.Option("--null", "-0", help="End each record with a NUL byte instead of a newline.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


StoreOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help='An option for the store. Others can see it: give a secret as {"env": "NAME"} or {"file": "PATH"}.',
    ),
]


def store_options(given: list[str] | None) -> dict[str, str]:
    """Raises `BadArgument` for a secret."""
    options = pairs("--option", given)
    refuse_in_clear("--option", options)
    return options


def pairs(option: str, given: list[str] | None) -> dict[str, str]:
    """What was given as NAME=VALUE. The error does not repeat it: it may be a secret."""
    found = [text.partition("=") for text in given or ()]
    if not all(name and equals for name, equals, _ in found):
        raise typer.BadParameter(f"{option} must be NAME=VALUE")
    return {name: value for name, _, value in found}


# What is there


def nothing(path: str, kind: Kind | None = None) -> Empty:
    hint = "" if kind is Kind.TOPIC else " (an empty closed queue leaves no files)"
    return Empty(f"there is no {kind or 'queue or topic'} here{hint}", path=path)


def existing(path: str, wanted: Kind | None = None, instead: str = "") -> Kind:
    """What is at a path. Raises `Empty` if nothing is, and `BadPath` for anything else or, with ``instead``, an unwanted
    kind.
    """
    found = kind_of(path)
    if found is None and os.path.isdir(path):
        with opening(path, "directory"):  # without the right to look, that is the error
            os.listdir(path)
        name = os.path.basename(os.path.abspath(path))
        example = os.path.join(path, "orders.qew")
        what = f"this is a directory but not a topic: it has no {name}.idx. A queue is a file in a directory, such as {example}"
        raise BadPath(what, path=path)
    if found is None:
        paths.check_path(path)
        raise nothing(path, wanted)
    if wanted not in (None, found):
        raise BadPath(f"this is {_called(found, path)}, but the command needs a {wanted}: {instead}", path=path)
    return found


def _called(found: Kind | None, path: str) -> str:
    directory, name = os.path.split(os.path.abspath(path))
    return "another kind of file" if found is Kind.QUEUE and name not in queues_in(directory) else f"a {found}"


def to_fill(path: str, as_topic: bool) -> Kind:
    """What is at a path or, if nothing is, what to create there. Raises `BadPath` if that is impossible."""
    found = kind_of(path)
    if found is Kind.QUEUE and as_topic:
        raise BadPath(f"this is {_called(found, path)}, so no topic can be created here: give another path", path=path)
    if found is None and not as_topic and os.path.isdir(path):
        raise BadPath(
            "this is a directory but not a topic: give the path of a queue in it, or add --topic to create one", path=path
        )
    kind = found or (Kind.TOPIC if as_topic else Kind.QUEUE)
    (paths.check_path if kind is Kind.QUEUE else topic_paths.check_topic_path)(path)
    return kind


def only_for(kind: Kind, found: Kind, path: str, **options: object) -> None:
    """Raise `BadArgument` for options that only the other kind has."""
    if found is not kind and (given := [name for name, value in options.items() if value is not None]):
        raise BadArgument(f"this is a {found}, and --{given[0].replace('_', '-')} is only for a {kind}", path=path)


# Opening it: what is not there is not created


_shared: dict[str, str | None] = {"group": None}


def group() -> str | None:
    """The group that shares what is opened."""
    return _shared["group"]


def share_with(group: str | None) -> str | None:
    """Take the option of ``qewqew`` itself: so each command has it."""
    _shared["group"] = group
    return group


def existing_queue(path: str, instead: str, lock_timeout: float, **settings: Any) -> Queue:
    existing(path, Kind.QUEUE, instead)
    return Queue(path, lock_timeout=lock_timeout, group=group(), **settings)


def existing_topic(path: str, **settings: Any) -> Topic:
    existing(path, Kind.TOPIC, NO_READERS)
    return Topic(path, group=group(), **settings)


def existing_reader(topic: Topic, name: str, **settings: Any) -> Reader:
    topic_paths.check_reader_name(name)
    if name not in (names := topic.readers()):
        raise Empty(f"the topic has no reader {name!r}; it has {', '.join(names) or 'no readers'}", path=topic.path)
    return topic.reader(name, **settings)


@contextlib.contextmanager
def leasing(path: str, reader: str | None, lock_timeout: float, **settings: Any) -> Iterator[HasBatches]:
    """The owner of batches: a queue, or a reader of a topic."""
    kind = existing(path)
    only_for(Kind.TOPIC, kind, path, reader=reader)
    if kind is Kind.QUEUE:
        with Queue(path, lock_timeout=lock_timeout, group=group(), **settings) as queue:
            yield queue
        return
    with Topic(path, lock_timeout=lock_timeout, group=group(), **settings) as topic:
        if reader is None:
            names = ", ".join(topic.readers()) or "no readers yet"
            raise BadArgument(f"this is a topic: choose one of its readers with --reader. It has {names}", path=path)
        with existing_reader(topic, reader) as opened:
            yield opened
