"""The index of a topic, made again from the block files where it is not what they say."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise

from qewqew_core.batch.reports import Damage
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files, write_new
from qewqew_core.errors import Corrupt
from qewqew_core.formats import zbus
from qewqew_core.formats.zbus import Entry, Index
from qewqew_core.topic import topic_paths
from qewqew_core.topic.block_numbers import Claim, Numbers, Run, bases_between, number_runs
from qewqew_core.topic.topic_log import Replayed

_SURE, _LIKELY = 1 << 20, 2  # the weight of what has a checksum, and of what has none: an entry of the index


def whole_messages(files: Files, path: str, dialect: str, end: int) -> tuple[int, int | None]:
    """Where the last whole message of a block ends, at most ``end``, and the number of the next one, if there are any."""
    at, following, base = 0, None, zbus.base_of(os.path.basename(path))
    with Descriptors([files.open_to_read(path)]) as (fd,):
        size = min(files.size(fd), end)
        with contextlib.suppress(Corrupt):  # here no whole message begins
            while at < size:
                head = files.read(fd, min(zbus.HEAD, size - at), at)
                after, found = zbus.check_head(head, at, at, size, following, dialect, path)
                # The first one says where it is, and each has a time.
                if found < 0 or not any(head) or (not at and zbus.stored_offset_at(head, 0) not in (base, 0)):
                    break
                at, following = after, found + 1
    return at, following


class IndexRepair:
    """Index and entries of the topic in ``directory``, whose blocks begin at ``bases``. ``image``: the index as it is, if there
    is one; ``log``: what could be read of the log.
    """

    def __init__(
        self, files: Files, directory: str, bases: list[int], image: bytes | None, log: Replayed | None, dialect: str
    ) -> None:
        self.files = files
        self.directory = directory
        self.path = topic_paths.index_of(directory)
        self.bases = bases
        self.image = image
        self.log = log
        self.dialect = dialect
        self.guessed: int | None = None  # from this block on the numbers are a guess
        self.damage: list[Damage] = []

    def as_it_is(self) -> tuple[Index, list[Entry]]:
        """Raises `Corrupt` if it does not agree with the log and the block files."""
        if self.image is None:
            raise Corrupt("the index is missing", path=self.path)
        zbus.check_index_size(len(self.image), self.path)
        index = zbus.unpack_index(self.image, self.path)
        start = self.log.state.start if self.log else 0
        if self.log is not None and (index.start > start or (self.log.clean and index.start < start)):
            raise Corrupt(f"the index begins with block {index.start:,}, the log says {start:,}", path=self.path)
        entries = [entry for _, entry in self._each(range(index.start, index.start + index.blocks))]
        # The last block may have been made by a commit that did not happen, or before its entry was written.
        known = [entry.base for entry in entries] in (self.bases, self.bases[:-1])
        follows = all(entry.base + entry.end == following.base for entry, following in pairwise(entries))
        if known and follows and all(entry.end >= 0 for entry in entries):
            return index, entries
        raise Corrupt("the entries of the index are not those of the blocks that are there", path=self.path)

    def made_again(self) -> tuple[Index, list[Entry]]:
        """By the files. An empty one is made in the place of a block that is missing, so that those behind it keep their
        numbers; `damage` says what is missing.
        """
        known = self._known_entries()
        sizes = self._sizes(known)
        last = self.bases[-1]
        if (
            len(self.bases) > 1
            and not sizes[last]
            and self.bases[-2] + sizes[self.bases[-2]] < last
            and not self._is_logged(last)
        ):
            self.bases.pop()  # nothing is in it, and nobody can count what was before it
            return self.made_again()
        runs, numbers = self._numbered(sizes, known)
        if numbers.known < len(runs):
            self.guessed = numbers.firsts[numbers.known]
        self._note_first(numbers.firsts[0], known)
        for (run, following), (first, after) in zip(pairwise(runs), pairwise(numbers.firsts), strict=True):
            if missing := after - first - len(run.bases):
                between = {block: base for base, block in known}
                made = bases_between(first + len(run.bases), missing, run.end, following.bases[0], between)
                self._make_missing(made, run, following)
                sizes |= dict.fromkeys(made, 0)
        bases = sorted(sizes)
        by_base = {entry.base: entry for entry in known.values()}
        entries = []
        for base, after in pairwise([*bases, bases[-1] + min(sizes[bases[-1]], zbus.LARGEST_BLOCK)]):
            entry = by_base.get(base)
            if entry is None or entry.end != after - base:
                time = self.files.modified(topic_paths.block_of(self.directory, base))
                entry = Entry(time, base, after - base, time)
            entries.append(entry)
        return Index(zbus.VERSION, len(entries), numbers.firsts[0], self.log.state.number if self.log else 0), entries

    def _is_logged(self, base: int) -> bool:
        return self.log is not None and self.log.state.last.base == base

    def _each(self, blocks: Iterable[int]) -> Iterator[tuple[int, Entry]]:
        """Entries of the index, whatever they say."""
        padded = (self.image or b"").ljust(zbus.INDEX_SIZE, b"\0")
        for block in blocks:
            yield block, zbus.unpack_entry(padded, zbus.entry_at(block))

    def _head(self) -> Index | None:
        with contextlib.suppress(Corrupt):
            return zbus.unpack_index(self.image or b"", self.path)
        return None

    def _known_entries(self) -> dict[Claim, Entry]:
        """The entries of the index that can be right. Those that are missing or zeroed say nothing."""
        ranges = []
        if (head := self._head()) is not None:
            ranges.append(range(head.start, head.start + head.blocks))
        if self.log is not None:
            ranges.append(range(self.log.state.start, self.log.state.last.block + 1))
        known = {}
        for block, entry in self._each(chain.from_iterable(ranges or [range(zbus.RING)])):
            if entry.created and 0 <= entry.end <= zbus.LARGEST_BLOCK and 0 <= entry.base < zbus.LARGEST:
                known[entry.base, block] = entry
        return {(base, block): entry for (base, block), entry in known.items() if (base == 0) == (block == 0)}

    def _sizes(self, known: dict[Claim, Entry]) -> dict[int, int]:
        """What each block has, or had: its file may have been cut, or be behind the log."""
        sizes = {}
        for base in self.bases:
            with Descriptors([self.files.open_to_read(topic_paths.block_of(self.directory, base))]) as (fd,):
                sizes[base] = self.files.size(fd)
        begins = {*self.bases, *(base for base, _ in known)}
        for base, end in ((entry.base, entry.end) for entry in known.values()):
            if base in sizes and base + end in begins:
                sizes[base] = max(sizes[base], end)
        for block in (*self.log.state.full, self.log.state.last) if self.log else ():
            if block.base in sizes:
                sizes[block.base] = max(sizes[block.base], block.end)
        return sizes

    def _numbered(self, sizes: dict[int, int], known: dict[Claim, Entry]) -> tuple[list[Run], Numbers]:
        claims = Counter(dict.fromkeys(known, _LIKELY))
        logged = {block.base: block.block for block in (*self.log.state.full, self.log.state.last)} if self.log else {}
        claims.update(dict.fromkeys(logged.items(), _SURE))
        if not self.bases[0]:
            claims[0, 0] += _SURE
        elif self.log is not None and self.log.state.start:  # if no block is missing before the first one
            claims[self.bases[0], self.log.state.start] += 1
        runs: list[Run] = []
        bases: list[int] = []
        for base, following in pairwise([*self.bases, 0]):
            bases.append(base)
            end = base + sizes[base]
            if end < following or not following:
                least = self._least_missing(base, sizes[base], following - end, base in logged) if following else 0
                runs.append(Run(bases, end, least, max(least, (following - end) // zbus.HEAD)))
                bases = []
        numbers = number_runs(runs, claims)
        if self.log is None and self._head() is None and self.bases[0]:
            numbers = numbers._replace(known=0)  # the entries alone do not say in which round of the ring they are
        return runs, numbers

    def _least_missing(self, base: int, size: int, gap: int, logged: bool) -> int:
        """How many blocks must be missing between the end of a block's file and the next block."""
        path = topic_paths.block_of(self.directory, base)
        if not size or (not logged and whole_messages(self.files, path, self.dialect, size)[0] != size):
            return 0  # the file may have been cut
        return max(1, -(-gap // zbus.LARGEST_BLOCK))

    def _note_first(self, first: int, known: dict[Claim, Entry]) -> None:
        head = self._head()
        start = self.log.state.start if self.log else head.start if head else first
        if (missing := first - start) > 0:
            base = next((base for base, block in sorted(known) if block == start), 0)
            path = topic_paths.block_of(self.directory, base) if base or not start else topic_paths.data_of(self.directory)
            lost = None if start else self._first_number(self.bases[0])
            what = "the first block is missing" if missing == 1 else f"the first {missing:,} blocks are missing"
            self.damage.append(Damage(path, None, None, lost, what))

    def _make_missing(self, bases: list[int], run: Run, following: Run) -> None:
        """Empty blocks in the place of those that are missing between two runs."""
        for base in bases:
            path = topic_paths.block_of(self.directory, base)
            write_new(self.files, path, b"")
            self.files.sync_directory(os.path.dirname(path))
        before = topic_paths.block_of(self.directory, run.bases[-1])
        end, number = whole_messages(self.files, before, self.dialect, run.end - run.bases[-1])
        next_number, lost = self._first_number(following.bases[0]), None
        if number is not None and next_number is not None and end == run.end - run.bases[-1] and next_number > number:
            lost = next_number - number
        what = "the block is missing" if len(bases) == 1 else f"this block and {len(bases) - 1:,} behind it are missing"
        path = topic_paths.block_of(self.directory, bases[0])
        self.damage.append(Damage(path, 0, following.bases[0] - bases[0], lost, what))

    def _first_number(self, base: int) -> int | None:
        with Descriptors([self.files.open_to_read(topic_paths.block_of(self.directory, base))]) as (fd,):
            head = self.files.read(fd, zbus.HEAD, 0)
        if len(head) < zbus.HEAD or zbus.stored_offset_at(head, 0) not in (base, 0):
            return None
        number = zbus.number_at(head, 0)
        return number if number >= 0 else None
