"""What a Java program may have made of a queue since we closed it. Java knows the chunk files, and not our log.

Our log says what header and pointers were, and has a checksum of every record. The Java library changes them in few ways, in
a fixed order of stores, and it may be killed at any point. A state that it can have left is believed; every other state is
damage. This is what it does:

- It takes records: the head of the first chunk moves to the beginning of another record. A chunk that was read to its end is
  removed, then the header names the next one. The last chunk of all is not removed: it starts over (head 10, then tail 10).
- It puts records: behind the tail of the last chunk; when that is full, its `next` becomes the following id, and a file with
  that id is made.
- It clears: the header becomes 0, then the first chunk starts over, then the others are removed, the first of them first.
- It closes. If the queue is empty, it gives the lock back first and then removes its chunk and the header. So the header may
  vanish after another process has opened the queue.
- It begins a queue if the header is 0 or missing: with chunk 1, over any file of that name. (We never give that id to a chunk.)

So chunks in the middle do not change, and neither do the bytes between the head and the tail that we have stored. If a record
that the log knows may have been taken, but may as well have been lost, it is not dropped without a word: `Corrupt`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from qewqew_core.crc import crc32
from qewqew_core.disk.descriptors import Descriptors
from qewqew_core.disk.files import Files
from qewqew_core.errors import Corrupt
from qewqew_core.formats import chunk
from qewqew_core.formats.chunk_state import Chunk
from qewqew_core.queue import log as logs
from qewqew_core.queue import paths
from qewqew_core.queue.found import Found, chain_of, follow
from qewqew_core.queue.log import Replayed
from qewqew_core.queue.reading import OnDisk, read_piece, read_pointers, records_before, scan, step_over, unread
from qewqew_core.queue.state import State

Pointers = tuple[int, int, int]


@dataclass
class Believed:
    """What a queue is: the state, chunk files without records that are to be removed, and what a person should know."""

    state: State
    empty: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class Vanishing(Corrupt):
    """The header names a chunk that is not there: a Java program is closing the queue just now, or the file was lost."""


def is_as_closed(files: Files, found: Found, *, all_chunks: bool = False) -> bool:
    """Whether header and pointers say what a clean log says. All chunk files must be there, but only the first and the last are
    opened: a Java program reads from the first and writes to the last.
    """
    assert found.log is not None
    state = found.log.state
    if found.header != state.first:
        return False
    all_regular = found.has_regular(state.chain)
    if not (all_regular or state.chain.keys() <= found.ids):
        return False
    expected = state.pointers()
    looked_at = {chunk_state.id for chunk_state, _ in (expected if all_chunks else (*expected[:1], *expected[-1:]))}
    looked_at.update(() if all_regular else found.irregular)  # that is refused
    for chunk_state, pointers in expected:
        if chunk_state.id in looked_at:
            on_disk = read_pointers(files, chunk.chunk_path(found.path, chunk_state.id))
            if on_disk[1:] != pointers or on_disk.size < chunk_state.tail:
                return False
    return not may_be_made_anew(files, found) or all_as_committed(files, found.path, state)


def checkpoint_identity(files: Files, path: str) -> bytes:
    """The body of a checkpoint, by which `may_be_made_anew` knows the files again."""
    return logs.checkpoint(files.identity(path + paths.LOG)[0], *files.identity(path))


def may_be_made_anew(files: Files, found: Found) -> bool:
    """Whether a Java program may have removed the queue, empty, and begun another one, with the same chunk ids.

    Then its header is younger than the checkpoint, and names chunk 1. In a copy of the directory nothing can be told: there
    the log is another file too.
    """
    assert found.log is not None
    if found.header != chunk.JAVA_FIRST or chunk.JAVA_FIRST not in found.log.state.chain or not found.log.checkpoint_identity:
        return False
    return _is_where_it_was(files, found) and not _has_the_same_header(files, found)


def _is_where_it_was(files: Files, found: Found) -> bool:
    """Whether the log is the file that had the checkpoint, and not a copy."""
    assert found.log is not None
    return files.identity(found.path + paths.LOG)[:1] == found.log.checkpoint_identity[:1]


def _has_the_same_header(files: Files, found: Found) -> bool:
    """Whether the header is the file of the last checkpoint, and not changed since. In a copy that is never known."""
    assert found.log is not None
    return _is_where_it_was(files, found) and files.identity(found.path) == found.log.checkpoint_identity[1:]


def was_made_anew(files: Files, found: Found) -> bool:
    """The same, for sure: the header is younger, and records were written over, though perhaps not the pointers.

    After a handover records may be missing because the disk has lost them. But then the header is not younger.
    """
    assert found.log is not None
    return (
        may_be_made_anew(files, found)
        and files.identity(found.path)[1] > found.log.checkpoint_identity[2]
        and not all_as_committed(files, found.path, found.log.state)
    )


def all_as_committed(files: Files, path: str, state: State) -> bool:
    return all(as_committed(files, chunk.chunk_path(path, chunk_state.id), chunk_state) for chunk_state in state.chain.values())


def as_committed(files: Files, path: str, chunk_state: Chunk) -> bool:
    """Whether the records of a chunk have the checksums of the log."""
    try:
        with Descriptors([files.open_to_read(path)]) as (fd,):
            for _ in unread(files, fd, path, chunk_state):
                pass
    except Corrupt:
        return False
    return True


def _written_over(files: Files, path: str, chunk_state: Chunk, end: int) -> bool:
    """Whether some of the bytes before ``end`` are no longer those that the log knows."""
    try:
        with Descriptors([files.open_to_read(path)]) as (fd,):
            for index, piece in enumerate(chunk_state.pieces):
                if piece.offset < end:
                    read_piece(files, fd, path, chunk_state, index)
    except Corrupt:
        return True
    return end <= chunk_state.base  # of those nothing is known


def believed(files: Files, found: Found) -> Believed:
    """What a queue with a clean log is, if the files do not say the same. Raises `Corrupt`, and changes no file."""
    assert found.log is not None
    if _is_written_over(files, found):
        return _made_anew(files, found)
    return _Successor(files, found, found.log).believed()


def _is_written_over(files: Files, found: Found) -> bool:
    """Whether other records are in all chunks that are left of those that the log knows: a Java program has emptied the queue,
    which removes the header, and begun another one.
    """
    assert found.log is not None
    state, left = found.log.state, found.log.state.chain.keys() & found.ids
    if not left or found.header == chunk.NONE or (found.header == chunk.JAVA_FIRST and _has_the_same_header(files, found)):
        return False
    for chunk_id in left:
        chunk_state, path = state.chain[chunk_id], chunk.chunk_path(found.path, chunk_id)
        end = min(read_pointers(files, path).tail, chunk_state.tail)
        if end <= chunk_state.base or not _written_over(files, path, chunk_state, end):
            return False
    return True


def _made_anew(files: Files, found: Found) -> Believed:
    """Another queue of a Java program, from chunk 1 on. Our files are gone, except those whose names it uses."""
    assert found.log is not None
    old = found.log.state
    chain, empty = chain_of(files, found)
    strangers = (old.chain.keys() & found.ids) - chain.keys() - set(empty)
    if strangers:
        raise Corrupt(
            "the chunk file is one of those that the log knows, but the chain of chunks does not lead to it; the records of "
            f"others are not those of the log. Nothing was changed; {_BRING_BACK}",
            path=chunk.chunk_path(found.path, min(strangers)),
        )
    return Believed(State.of(chain).with_batches_of(old), empty)


_FEW_ZEROS = 8  # bytes: so few empty records a program puts; one bit of the tail that is wrong mostly makes more of them
_BRING_BACK = "restore the files as they were"


class _Successor:
    """Goes from what the log says to what the files say, by changes that a Java program makes."""

    def __init__(self, files: Files, found: Found, log: Replayed) -> None:
        self._files, self._found, self._path = files, found, found.path
        self._state = log.state
        self._result = Believed(log.state)
        self._expected = log.state.pointers()

    def believed(self) -> Believed:
        state, ids = self._state, self._found.ids
        removed = [chunk_state for chunk_state, _ in takewhile(lambda pair: pair[0].id not in ids, self._expected)]
        left = self._expected[len(removed) :]
        if not left:
            return self._all_removed()
        for chunk_state, _ in left:
            if chunk_state.id not in ids:
                if not removed and self._was_cleared(*left[0]):
                    return self._nothing()
                raise self._refused(
                    chunk_state.id,
                    "the chunk file is missing; the log says that it holds records, and others before it are there",
                )
        self._check_header(removed, left)
        for chunk_state in removed:  # a Java program has read them to their end
            state.take(chunk_state.id, chunk_state.head, chunk_state.tail, chunk_state.records)
        state.dropped.clear()
        state.emptied.clear()
        for number, (chunk_state, pointers) in enumerate(left):
            disk = read_pointers(self._files, self._chunk(chunk_state.id))
            if disk.size < chunk_state.tail:
                raise self._refused(
                    chunk_state.id, f"the chunk file has {disk.size} bytes, its records end at {chunk_state.tail}: it was cut"
                )
            first, last = number == 0, number == len(left) - 1
            path = self._chunk(chunk_state.id)
            if self._found.is_handed_over and len(left) > 1 and not as_committed(self._files, path, chunk_state):
                raise self._refused(chunk_state.id, "records are not those of the log")  # a disk may have lost them
            if last:
                self._last_chunk(chunk_state, pointers, disk, alone=first)
            elif disk[2:] != pointers[1:] or (not first and disk.head != pointers[0]):
                raise self._pointers(chunk_state, pointers, disk)
            elif first:
                self._move_head(chunk_state, pointers, disk)
                chunk_state.stored = disk[1:]
        return self._result

    # The header

    def _check_header(self, removed: list[Chunk], left: list[tuple[Chunk, Pointers]]) -> None:
        header, first = self._found.header, left[0][0].id
        if header == first:
            return
        if removed and header == removed[-1].id:  # it is moved on after the chunk was removed
            if header == self._state.first:  # nothing else tells that a Java program was here
                raise self._refused(
                    header,
                    "the chunk file is missing; the header names it, and the log says that it holds records. Perhaps a Java "
                    "program had read them and was killed just after it removed the file",
                )
            return
        if header == chunk.NONE and removed:  # such a program removes the header of an empty queue alone
            raise self._refused(
                removed[0].id,
                "the chunk file is missing, and the header names no chunk, though later chunks are there: no Java program leaves "
                "that",
            )
        if header == chunk.NONE:
            self._note(f"the header named no chunk; it names chunk {first} again, as the log says")
        elif not removed and header not in self._state.chain and self._is_untouched(left):
            self._note(
                f"the header named chunk {header}: it was damaged, or another program began a queue of its own there. It names "
                f"chunk {first} again, as the log says; if the other chunk has records, `qewqew orphans` offers them"
            )
        else:
            raise Corrupt(
                f"the header names chunk {header}, and not chunk {first}, whose records nobody has taken. Nothing was changed; "
                f"{_BRING_BACK}",
                path=self._path,
                offset=0,
            )

    def _is_untouched(self, left: list[tuple[Chunk, Pointers]]) -> bool:
        return all(read_pointers(self._files, self._chunk(chunk_state.id))[1:] == pointers for chunk_state, pointers in left)

    # Chunks that are gone

    def _all_removed(self) -> Believed:
        """Nothing is left of what the log knows. A Java program may have put records into chunks of its own."""
        if self._expected and self._found.header == self._state.first:  # nothing tells that a Java program was here
            raise Vanishing(
                f"the chunk file is missing; the header names it, and the log says that it holds {self._expected[0][0].records} "
                f"records. Nothing was changed; {_BRING_BACK}",
                path=self._chunk(self._found.header),
            )
        chain, empty = chain_of(self._files, self._found)
        if records := self._state.records:
            self._note(
                f"all chunk files are gone, and the log has {records:,} as not taken: another program has read the queue to its "
                "end and closed it. If none has, header and chunks were removed; restore them"
            )
        return Believed(State.of(chain).with_batches_of(self._state), empty, self._result.notes)

    def _was_cleared(self, chunk_state: Chunk, pointers: Pointers) -> bool:
        """Whether nothing but the first chunk is left, and that is no longer part of the queue: what `clear` leaves."""
        if self._found.header != chunk.NONE or any(
            other in self._found.ids for other in self._state.chain if other != chunk_state.id
        ):
            return False
        disk = read_pointers(self._files, self._chunk(chunk_state.id))
        return disk.head == chunk.BEGIN and disk.next == chunk.NONE and disk[1:] != pointers

    def _nothing(self) -> Believed:
        """What is in the files is an orphan."""
        return Believed(State().with_batches_of(self._state), [], self._result.notes)

    # Chunks that are there

    def _move_head(self, chunk_state: Chunk, pointers: Pointers, disk: OnDisk) -> None:
        """Records of the chunk were taken. (It is set to 10 just before a chunk that was read starts over.)"""
        head = pointers[0] if disk.head == chunk.BEGIN else disk.head
        if not pointers[0] <= head < chunk_state.tail:
            raise self._pointers(chunk_state, pointers, disk)
        if head > chunk_state.head:
            before = records_before(self._files, self._chunk(chunk_state.id), chunk_state, head)
            self._state.take(chunk_state.id, chunk_state.head, head, before - chunk_state.taken)

    def _last_chunk(self, chunk_state: Chunk, pointers: Pointers, disk: OnDisk, alone: bool) -> None:
        following = disk.next
        if following not in (chunk.NONE, chunk.successor(chunk_state.id)) or following in self._state.chain:
            raise self._pointers(chunk_state, pointers, disk)
        if not chunk.BEGIN <= disk.head <= disk.tail <= disk.size:
            raise self._pointers(chunk_state, pointers, disk)
        path = self._chunk(chunk_state.id)
        chunk_state.size = disk.size  # with a larger chunk size it makes files longer, and puts more into them
        kept = disk.tail >= chunk_state.tail and (not alone or as_committed(self._files, path, chunk_state))
        if alone and (disk.head, disk.tail) == (chunk.BEGIN, chunk.BEGIN):
            self._begun_anew(chunk_state, None)
        elif kept and (alone or disk.head == pointers[0]):
            self._grow(chunk_state, pointers, disk)
            self._move_head(chunk_state, pointers, disk)
        elif alone and not kept and _written_over(self._files, path, chunk_state, min(disk.tail, chunk_state.tail)):
            # Something was written over the records that the log knows. If records begin where they must, it is not damage.
            begun = scan(self._files, path, chunk_state.id, disk._replace(head=chunk.BEGIN), self._state.clock)
            taken = 0
            if disk.head > chunk.BEGIN:
                taken = records_before(self._files, path, begun, disk.head) if disk.head < disk.tail else -1
            if taken < 0:
                raise self._pointers(chunk_state, pointers, disk)
            self._begun_anew(chunk_state, begun)
            if taken:
                self._state.take(chunk_state.id, chunk.BEGIN, disk.head, taken)
        else:
            raise self._pointers(chunk_state, pointers, disk)
        if chunk_state.id in self._state.chain:
            self._state.chain[chunk_state.id].stored = disk[1:]
        if following in self._found.ids:
            self._add(*follow(self._files, self._found, following, chunk_state.id))

    def _grow(self, chunk_state: Chunk, pointers: Pointers, disk: OnDisk) -> None:
        path, time, something = self._chunk(chunk_state.id), self._files.modified(self._chunk(chunk_state.id)), False
        for frames, records in step_over(self._files, path, chunk_state.tail, disk.tail):
            self._state.append(chunk_state.id, len(frames), records, crc32(frames, chunk_state.crc), time)
            something = something or any(frames)
        if disk.tail > pointers[1] and not something:  # zeros are empty records, or space that nobody has used
            if disk.tail - pointers[1] > _FEW_ZEROS and (pointers[1] ^ disk.tail).bit_count() == 1:
                raise self._pointers(chunk_state, pointers, disk)
            self._note(
                f"the tail of chunk {chunk_state.id} moved from {pointers[1]} to {disk.tail}, over zeros: another program put "
                "empty records, or this is damage. They are in the queue now"
            )

    def _begun_anew(self, chunk_state: Chunk, content: Chunk | None) -> None:
        """All that the log knows of the chunk was taken. If nothing came after it, the file goes."""
        state = self._state
        state.records -= chunk_state.records
        state.bytes -= chunk_state.bytes
        if self._found.header == chunk.NONE:  # by `clear`, whose chunk no longer belongs to the queue
            content = None
        elif content is None:
            self._result.empty.append(chunk_state.id)
        if content is None:
            del state.chain[chunk_state.id]
        else:
            self._add({chunk_state.id: content}, [])

    def _add(self, chain: dict[int, Chunk], empty: list[int]) -> None:
        state = self._state
        state.chain.update(chain)
        state.records += sum(chunk_state.records for chunk_state in chain.values())
        state.bytes += sum(chunk_state.bytes for chunk_state in chain.values())
        self._result.empty += empty

    # What is said

    def _chunk(self, chunk_id: int) -> str:
        return chunk.chunk_path(self._path, chunk_id)

    def _note(self, text: str) -> None:
        self._result.notes.append(f"{self._path}: {text}")

    def _refused(self, chunk_id: int, what: str) -> Corrupt:
        return Corrupt(f"{what}. Nothing was changed; {_BRING_BACK}", path=self._chunk(chunk_id), offset=0)

    def _pointers(self, chunk_state: Chunk, pointers: Pointers, disk: OnDisk) -> Corrupt:
        return self._refused(
            chunk_state.id,
            f"head, tail, next are {disk[1:]}; they were {pointers} at the last close, and no single Java program changes "
            "them like that",
        )
