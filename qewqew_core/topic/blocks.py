"""`Blocks`: the block files and the index of a topic, opened by its one writer. Both follow the topic's log."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator

from qewqew_core.crc import crc32
from qewqew_core.disk.descriptors import Descriptors, NotCopied, close_each
from qewqew_core.disk.files import Files, check_regular, write_new
from qewqew_core.errors import Corrupt
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import Entry, Index
from qewqew_core.topic import topic_log
from qewqew_core.topic.outgoing import joined
from qewqew_core.topic.topic_paths import block_of, data_of, index_of, log_of
from qewqew_core.topic.topic_state import Block, TopicState


class Blocks(NotCopied):
    """The blocks of the topic in ``directory``. Call it with the writer's lock."""

    def __init__(self, files: Files, directory: str) -> None:
        self.files = files
        self.directory = directory
        self.index_path = index_of(directory)
        self.log_path = log_of(directory)
        self.data = data_of(directory)
        self.unsynced: set[int] = set()  # blocks, by their base, with messages that may not be on disk, but in the log
        self._descriptors: dict[int, int] = {}  # base offset: descriptor; of the last block
        self._index = Descriptors()  # at most one

    # Blocks

    def path_of(self, base: int) -> str:
        return block_of(self.directory, base)

    def exists(self, base: int) -> bool:
        return self.files.exists(self.path_of(base))

    def make(self, base: int) -> None:
        """Make an empty block."""
        path = self.path_of(base)
        if base in self._descriptors:  # an append that was interrupted had it open
            close_each(self._descriptors, base)
        if self.files.exists(path):  # left by a crash: nothing in it is committed
            self.files.unlink(path)
        Descriptors([self.files.open(path, new=True)]).close()

    def unmake(self, made: list[int], last: Block) -> None:
        """Remove blocks whose commit has not happened, and anything after the end of the ``last`` block."""
        for base in made:
            if base in self._descriptors:
                close_each(self._descriptors, base)
            with contextlib.suppress(FileNotFoundError):
                self.files.unlink(self.path_of(base))
            self.unsynced.discard(base)
        self.files.truncate(self.descriptor(last.base), last.end)

    def remove(self, entries: list[Entry]) -> None:
        """Remove these blocks and their checksums."""
        for entry in entries:
            for name in (zbus.block_name(entry.base), topic_log.sums_name(entry.base)):
                with contextlib.suppress(FileNotFoundError):
                    self.files.unlink(os.path.join(self.data, name))
            self.unsynced.discard(entry.base)

    def descriptor(self, base: int) -> int:
        fd = self._descriptors.get(base)
        if fd is None:
            close_each(self._descriptors)
            fd = self._descriptors[base] = self.files.open(self.path_of(base))
            check_regular(self.files.status(fd), self.path_of(base))
        return fd

    def size(self, name: str) -> int:
        """The size of a file in the directory of blocks, in bytes."""
        with Descriptors([self.files.open_to_read(os.path.join(self.data, name))]) as (fd,):
            return self.files.size(fd)

    def write(self, base: int, data: bytes, at: int) -> None:
        """Write messages that the log has too."""
        self.files.write(self.descriptor(base), data, at)
        self.unsynced.add(base)

    def write_ahead(self, base: int, at: int, frames: Iterable[bytes], crc: int) -> tuple[int, int]:
        """Write past the end of a block, where no reader looks; returns the new end, and the block's checksum up to there."""
        fd = self.descriptor(base)
        for data in joined(frames):
            self.files.write(fd, data, at)
            at, crc = at + len(data), crc32(data, crc)
        return at, crc

    def cut(self, block: Block) -> None:
        """Cut the file at the end of the block. Raises `Corrupt` if it is shorter, or missing."""
        if not self.exists(block.base):
            raise Corrupt(f"the block is missing, its messages end at {block.end:,}", path=self.path_of(block.base))
        fd = self.descriptor(block.base)
        size = self.files.size(fd)
        if size < block.end:
            raise Corrupt(
                f"the block has {size:,} bytes, its messages end at {block.end:,}", path=self.path_of(block.base), offset=size
            )
        if size > block.end:
            self.files.truncate(fd, block.end)

    def open_files(self) -> Iterator[tuple[int, str]]:
        """Descriptors, with the paths of their files."""
        yield self.index_fd, self.index_path
        for base, fd in self._descriptors.items():
            yield fd, self.path_of(base)

    # The index

    def open_index(self) -> Index:
        self._index.append(self.files.open(self.index_path))
        check_regular(self.files.status(self.index_fd), self.index_path)
        zbus.check_index_size(self.files.size(self.index_fd), self.index_path)
        return zbus.unpack_index(self.files.read(self.index_fd, zbus.INDEX_HEAD, 0), self.index_path)

    @property
    def index_fd(self) -> int:
        return self._index[0]

    def entry(self, number: int) -> Entry:
        """The index entry of a block, by its number."""
        return zbus.unpack_entry(self.files.read(self.index_fd, zbus.ENTRY, zbus.entry_at(number)))

    def is_marked(self) -> bool:
        """Whether nobody has changed the head of the index since it was written with the mark."""
        data = self.files.read(self.index_fd, zbus.INDEX_HEAD + topic_log.MARK, 0)
        return data[zbus.INDEX_HEAD :] == (crc32(data[: zbus.INDEX_HEAD]) or 1).to_bytes(topic_log.MARK)

    def index_patch(self, state: TopicState, *blocks: Block, mark: bool = False) -> dict[int, bytes]:
        """The bytes that the index must have for these blocks, by offset; its head comes last.

        ``mark``: log and blocks may be on disk later than the index. The mark, in bytes that a zbus server neither reads nor
        writes, tells then that it was not such a server who wrote what the log does not say. And it tells readers: it is there
        before they see such messages, and until all are on disk.
        """
        patch = {
            zbus.entry_at(block.block): zbus.pack_entry(Entry(block.created, block.base, block.end, block.updated))
            for block in blocks
        }
        head = zbus.pack_index(Index(zbus.VERSION, state.count, state.start, state.number))
        patch[0] = head + (crc32(head) or 1).to_bytes(topic_log.MARK) if mark else head
        return patch

    def write_index(self, patch: dict[int, bytes]) -> None:
        for at in sorted(patch, reverse=True):  # the head comes last
            self.files.write(self._index[0], patch[at], at)

    # Durably

    def store(self, state: TopicState) -> None:
        """Bring blocks, their checksums and the index up to the log, durably. The log is on disk, the index has been written."""
        self.sync()
        self.write_index({zbus.INDEX_HEAD: bytes(topic_log.MARK)})
        full = [block for block in state.full if block.pieces]
        for block in full:
            path = os.path.join(self.data, topic_log.sums_name(block.base))
            # Readers that look at it in the meantime find it whole or not at all.
            write_new(self.files, path + ".tmp", topic_log.pack_sums(block.sums()))
            self.files.rename(path + ".tmp", path)
        if full:
            self.files.sync_directory(self.data)
        self.sync_index()

    def sync(self) -> None:
        """Make the messages in all blocks durable."""
        for base in sorted(self.unsynced):
            if self.exists(base):
                self.sync_block(base)
        self.unsynced.clear()
        self.files.sync_directory(self.data)

    def sync_block(self, base: int) -> None:
        self.files.sync(self.descriptor(base))

    def sync_index(self) -> None:
        self.files.sync(self.index_fd)

    def close(self) -> None:
        """Close the files. A second call finishes an interrupted first one."""
        close_each(self._descriptors)
        self._index.close()
