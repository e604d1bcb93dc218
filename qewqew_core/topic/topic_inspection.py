"""What a topic and its readers hold, without a lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from qewqew_core import arguments
from qewqew_core.batch import damage_met, places
from qewqew_core.batch.stats import QueueStats
from qewqew_core.disk.files import Files, list_if_there, look_into
from qewqew_core.disk.looking import look_again
from qewqew_core.disk.opening import opening, strange, unwritable
from qewqew_core.errors import BadPath, Corrupt, QewQewError
from qewqew_core.formats.zbus import HEAD
from qewqew_core.topic import block_sums, reader_files, reader_inspection, topic_paths
from qewqew_core.topic.block_sums import waits_since
from qewqew_core.topic.reader_state import Range, ReaderState
from qewqew_core.topic.view import View

if TYPE_CHECKING:
    import pendulum


@dataclass(frozen=True)
class TopicStats:
    """What a topic holds: messages, bytes of their bodies, block files; numbers and times of the first and last message."""

    messages: int
    bytes: int
    blocks: int
    first: int  # number of the oldest message
    next: int  # number of the next message
    oldest: pendulum.DateTime | None  # timestamp of the oldest message; if that is in the future, about when it was appended
    newest: pendulum.DateTime | None  # when the last message was appended
    readers: dict[str, int]  # how many messages lie behind what each has committed
    on_disk: int  # bytes of the files of blocks and index
    strange: dict[str, QewQewError]  # readers that cannot be read: something else is in the place of one of their files


def inspect_topic(path: str | os.PathLike[str], *, closely: bool = False) -> tuple[TopicStats, dict[str, ReaderState]]:
    """What a topic holds, and its readers by name, as of their last commits. Takes no lock, waits for nobody, changes nothing.
    ``closely``: see `reader_files.strangers`.

    Raises `BadPath` if there is no topic, and `Corrupt`.
    """
    directory = topic_paths.check_topic_path(path)

    def look() -> tuple[TopicStats, dict[str, ReaderState]]:
        files = look_into(directory, directory)
        for error in strangers(files, directory):
            raise error
        with closing(View.of(files, directory)) as view:
            return stats_of(files, view, closely)

    with opening(directory, "topic"):
        return look_again(look)


def strangers(files: Files, directory: str) -> Iterator[BadPath]:
    """What is in the place of a file or directory that a topic itself has or may have, and is not the topic's; see
    `reader_files.strangers`.
    """
    own = topic_paths.names_of(directory, list_if_there(files, os.path.join(directory, "state")))
    blocks = places.names_in(files, topic_paths.data_of(directory), are_batches=False)
    yield from unwritable(files, directory, "topic")
    yield from strange(files, chain(own, damage_met.names_of(os.path.join(directory, "state", "topic")), blocks), "topic")


def stats_of(files: Files, view: View, closely: bool = False) -> tuple[TopicStats, dict[str, ReaderState]]:
    """Counts and sizes, and the readers by name, and what is wrong with those that others have replaced. ``closely``: see
    `reader_files.strangers`.
    """
    for _ in range(20):  # until the writer does not change it in between
        index = view.index()
        entries = view.entries(index)
        oldest = view.oldest()
        first = None
        with suppress(Corrupt):  # it is damaged, which its reader is told
            first = view.message(oldest, cut=0)
        if view.index() == index:
            break
    count = index.number - oldest.number
    readers: dict[str, ReaderState] = {}
    odd: dict[str, QewQewError] = {}
    for name in sorted(names_in_use(files, view.directory)):
        if (error := next(reader_files.strangers(files, view.directory, name, closely), None)) is not None:
            odd[name] = error
            reader_files.name_once(str(error))
        elif (state := reader_inspection.effective_state(files, view, name)) is not None:  # else it was deleted since
            readers[name] = state
    committed = {name: state.committed_position() for name, state in readers.items()}
    on_disk = files.status(view.path).st_blocks * 512
    for entry in entries:
        files.check_kind(block_sums.path_of(view.directory, entry.base))
        block = files.check_kind(view.block_path(entry.base))
        on_disk += 0 if block is None else block.st_blocks * 512
    stats = TopicStats(
        messages=count,
        bytes=sum(entry.end for entry in entries) - HEAD * count,
        blocks=len(entries),
        first=oldest.number,
        next=index.number,
        oldest=arguments.moment(waits_since(view, files, oldest.block, oldest.offset, first.timestamp or 0)) if first else None,
        newest=arguments.moment(max(entry.updated for entry in entries if entry.end)) if count else None,
        readers={
            name: max(0, index.number - position.number) if position.block >= index.start else count
            for name, position in committed.items()
        },
        on_disk=on_disk,
        strange=odd,
    )
    return stats, readers


def readers_of(path: str | os.PathLike[str]) -> list[str]:
    """The names of a topic's readers, also of those that cannot be read, as `inspect_reader` says. Raises as `inspect_topic`."""
    odd = inspect_topic(path)[0].strange
    directory = topic_paths.check_topic_path(path)
    with opening(directory, "topic"):
        return sorted({*all_readers(look_into(directory, directory), directory), *odd})


def names_of_readers(files: Files, directory: str) -> list[str]:
    """The readers that have an .rdx."""
    names = list_if_there(files, os.path.join(directory, "reader"))
    return sorted(name.removesuffix(".rdx") for name in names if name.endswith(".rdx"))


def names_in_use(files: Files, directory: str) -> set[str]:
    """All names that files and directories in reader/ and state/ give to readers, whether or not there is such a reader."""
    return {
        name.removesuffix(suffix)
        for home, suffixes in topic_paths.OF_READER.items()
        for name in list_if_there(files, os.path.join(directory, home))
        for suffix in suffixes
        if name.endswith(suffix)
    }


def all_readers(files: Files, directory: str) -> list[str]:
    """Also those whose .rdx is missing: opening one says so."""
    return sorted({*names_of_readers(files, directory), *reader_inspection.without_rdx(files, directory)})


def inspect_reader(path: str | os.PathLike[str], name: str, *, closely: bool = False) -> QueueStats:
    """What waits for a reader of a topic, as of its last commit. Takes no lock, waits for nobody, changes nothing.

    Zeros for a topic that does not exist, if its parent directory does; everything in the topic for a reader that does not
    exist yet. With a filter, it must read the messages to count them. ``closely``: as of `reader_files.strangers`. Raises
    `BadPath`, `Corrupt`.
    """
    directory = topic_paths.check_topic_path(path)
    topic_paths.check_reader_name(name)
    with opening(topic_paths.rdx_of(directory, name), "reader"):
        return look_again(lambda: _inspect_reader(directory, name, closely))


def _inspect_reader(directory: str, name: str, closely: bool) -> QueueStats:
    files = look_into(directory, directory)
    if not files.exists(topic_paths.index_of(directory)):
        return QueueStats(0, 0, 0, None, 0, 0, 0, 0)
    for error in reader_files.strangers(files, directory, name, closely):
        raise error
    with closing(View.of(files, directory)) as view:
        state = reader_inspection.effective_state(files, view, name)
        if state is None:
            if name in reader_inspection.without_rdx(files, directory):
                raise reader_inspection.missing_rdx(topic_paths.rdx_of(directory, name))
            state = ReaderState(pending=[Range(view.oldest(), None)])
        stem = topic_paths.stem_of(directory, name)
        stats = reader_inspection.stats_of(files, state, view, stem)
        if stats.missing:  # or the batch was just ended
            now = reader_inspection.effective_state(files, view, name) or ReaderState()
            gone = reader_files.without_files(files, stem, state) & reader_files.without_files(files, stem, now)
            stats = replace(stats, missing=len(gone))
        return stats
