"""A repair makes the batches of a reader whole: manifests from the reader's log and the blocks, damaged files from the blocks.

A batch that stays unreadable is set aside, and the reader goes on: with its messages, unless it was acknowledged or dead.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from qewqew_core.batch import places
from qewqew_core.batch.batch_operations import Forget
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import BLOCK, MANIFEST, Manifest, Segment, check_of, describing, parse
from qewqew_core.batch.reports import Damage, RepairReport
from qewqew_core.batch.segments import read_batch, read_records
from qewqew_core.disk.files import Files, read_whole
from qewqew_core.errors import BadManifest, Corrupt, QewQewError
from qewqew_core.formats.tags import Filter
from qewqew_core.limits import now_ms
from qewqew_core.secrecy import excerpt
from qewqew_core.topic import topic_paths
from qewqew_core.topic.block_segments import first_segment
from qewqew_core.topic.block_sums import pieces_of
from qewqew_core.topic.reader_batches import merged
from qewqew_core.topic.reader_state import Change, PutBack, Range, ReaderState
from qewqew_core.topic.view import View


class BatchRepair:
    """Repairs the batches of one reader, whose log says this state. ``set_aside`` moves a path away, under a name."""

    def __init__(
        self,
        view: View,
        reader: str,
        state: ReaderState,
        files: Files,
        report: RepairReport,
        set_aside: Callable[[str, str], None],
    ) -> None:
        self._view, self._reader, self._state = view, reader, state
        self._files, self._report, self._set_aside = files, report, set_aside
        self._stem = topic_paths.stem_of(view.directory, reader)
        self._data = topic_paths.data_of(view.directory)

    def repair(self) -> bool:
        """Repair all, durably; returns whether the state says less now, and must be stored."""
        forgotten = False
        for there, home in places.bring_home(self._files, self._stem, self._state.with_history()):
            self._report.damage.append(Damage(home, None, None, 0, f"the batch was in {there}; it was moved back"))
        for batch in self._state.with_history():
            directory = places.directory_of(self._stem, batch)
            if places.is_strange(self._files, directory, "reader"):
                continue  # that stays
            try:
                if (away := places.away_at(self._files, self._stem, batch)) is not None:
                    places.roll_forward_place(self._files, self._stem, batch)
                    self._report.damage.append(Damage(directory, None, None, 0, f"files were in {away}; they were moved back"))
                for _ in read_batch(self._files, directory, batch):
                    pass
                continue
            except (QewQewError, OSError) as error:
                problem = error
            if not self._is_mended(batch, directory):
                self._forget(batch, directory, problem)
                forgotten = True
        return forgotten

    def _is_mended(self, batch: BatchState, directory: str) -> bool:
        """Whether the blocks, with the manifest or with another one, have its messages."""
        for find in (self._manifest, self._made_anew):
            try:
                self._mend(batch, directory, find(batch, directory))
            except (QewQewError, OSError):
                continue
            return True
        return False

    def _mend(self, batch: BatchState, directory: str, body: Manifest) -> None:
        damaged = [name for name in body.files() if not _has(directory, body, name)]
        for name in damaged:
            _read(self._data, body, name)
        home = places.make_home(self._files, self._stem, places.DEAD if batch.state == "dead" else places.BATCHES)
        if not self._files.is_directory(directory):
            self._files.make_directory(directory)
            self._files.sync_directory(home)
        for name in damaged:
            path = os.path.join(directory, name)
            if self._files.exists(path):
                self._set_aside(path, f"{batch.id}.{name}")
            self._files.link(os.path.join(self._data, name), path)
            what = "the file is missing or damaged; it was replaced by the block of the topic, which is whole"
            self._report.damage.append(Damage(path, None, None, 0, what))
        self._files.sync_directory(directory)
        try:
            whole = self._manifest(batch, directory) == body
        except QewQewError:
            whole = False
        if not whole:
            places.write_manifest(self._files, directory, body)
            what = "the manifest is missing or not that of the batch; it was written again"
            self._report.damage.append(Damage(os.path.join(directory, MANIFEST), 0, None, 0, what))

    def _manifest(self, batch: BatchState, directory: str) -> Manifest:
        """The manifest as it is, whatever the files are like."""
        path = os.path.join(directory, MANIFEST)
        try:
            body = parse(json.loads(read_whole(self._files, path)), path)
        except (ValueError, RecursionError, OSError) as error:
            raise BadManifest(f"it cannot be read: {error}", path=path) from error
        check_of(body, directory, batch.id, batch.records, batch.bytes, batch.created)
        return body

    def _made_anew(self, batch: BatchState, directory: str) -> Manifest:
        return _made_anew(self._files, self._view, self._reader, self._state, batch)

    def _forget(self, batch: BatchState, directory: str, problem: Exception) -> None:
        """Nobody can read it: it must not be in the way of all that follows."""
        living = batch.state in ("leased", "returned")
        if living:
            pending = merged([*self._state.ranges[batch.id], *self._state.pending])
            self._state.apply(PutBack(batch.id, pending))
        else:
            self._state.apply(Change(Forget([batch.id], False), now_ms()))
        if self._files.is_directory(directory):
            self._set_aside(directory, batch.id)
        key = excerpt(batch.keys[-1], 80)
        what = f"batch {batch.id} ({batch.state}, key {key}) cannot be read: {problem}. It was set aside, and "
        what += "what the topic still has of its messages comes again" if living else "the reader has forgotten it"
        self._report.damage.append(Damage(directory, None, None, None if living else batch.records, what))


def _read(directory: str, body: Manifest, name: str) -> None:
    """Raise what is wrong with a file of the batch that is in this directory."""
    for segment in body.segments:
        if segment.file == name:
            for _ in read_records(directory, body, segment):
                pass


def _has(directory: str, body: Manifest, name: str) -> bool:
    try:
        _read(directory, body, name)
    except (QewQewError, OSError):
        return False
    return True


def _made_anew(files: Files, view: View, reader: str, state: ReaderState, batch: BatchState) -> Manifest:
    """Of messages that are still in the topic. The reader may have had another filter since; counts tell."""
    topic = os.path.basename(view.directory)
    for chosen in dict.fromkeys((state.filter, None)):
        segments, size = _segments(files, view, Filter(chosen), state.ranges.get(batch.id, []))
        if (sum(segment.records for segment in segments), size) == (batch.records, batch.bytes):
            return describing(batch, topic, segments, BLOCK, reader, view.dialect, chosen)
    raise Corrupt(
        f"its {batch.records} messages cannot be found in the topic: they were removed, or the reader had another filter",
        path=view.directory,
    )


def _segments(files: Files, view: View, chosen: Filter, ranges: list[Range]) -> tuple[list[Segment], int]:
    """What these ranges hold, as `ReaderBatches` cuts it, and its payload bytes."""
    found: list[Segment] = []
    total = 0
    for wanted in ranges:
        end = wanted.start
        while wanted.stop is not None and end[:2] < wanted.stop[:2]:
            at = Range(end, wanted.stop)
            segment, size, _, end, _ = first_segment(
                view, chosen, lambda entry: pieces_of(files, view.directory, entry.base), at, sys.maxsize, sys.maxsize, False
            )
            if segment is not None:
                found.append(segment)
                total += size
            if end == at.start:
                break
    return found, total
