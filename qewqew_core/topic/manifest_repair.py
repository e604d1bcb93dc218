"""A repair rewrites a missing or damaged manifest of a topic's batch, from the reader's log and the blocks."""

from __future__ import annotations

import os
import sys

from qewqew_core.batch import places
from qewqew_core.batch.batch_state import BatchState
from qewqew_core.batch.manifest import BLOCK, MANIFEST, Manifest, Segment, describing
from qewqew_core.batch.reports import Damage, RepairReport
from qewqew_core.batch.segments import read_batch, read_records
from qewqew_core.disk.files import Files
from qewqew_core.errors import Corrupt, QewQewError
from qewqew_core.formats.tags import Filter
from qewqew_core.topic import topic_paths
from qewqew_core.topic.block_segments import first_segment
from qewqew_core.topic.block_sums import pieces_of
from qewqew_core.topic.reader_state import Range, ReaderState
from qewqew_core.topic.view import View


def repair_manifests(files: Files, view: View, reader: str, state: ReaderState, report: RepairReport) -> None:
    """Rewrite the manifests, durably, so that their batches can be read again. A batch that stays unreadable is noted."""
    stem = topic_paths.stem_of(view.directory, reader)
    for batch in state.with_history():
        directory = places.directory_of(stem, batch)
        try:
            places.roll_forward_place(files, stem, batch)
            for _ in read_batch(directory, batch):
                pass
            continue
        except (QewQewError, OSError) as error:
            problem = error
        try:
            body = _made_anew(files, view, reader, state, batch)
            home = places.make_home(files, stem, places.DEAD if batch.state == "dead" else places.BATCHES)
            if not files.is_directory(directory):
                files.make_directory(directory)
                files.sync_directory(home)
            for name in body.files():
                if not files.exists(os.path.join(directory, name)):
                    files.link(os.path.join(topic_paths.data_of(view.directory), name), os.path.join(directory, name))
            for segment in body.segments:
                for _ in read_records(directory, body, segment):
                    pass
            places.write_manifest(files, directory, body)
        except (QewQewError, OSError) as error:
            report.notes.append(
                f"batch {batch.id} cannot be read, and is left as it is: {problem}. Its manifest cannot be rebuilt: {error}"
            )
        else:
            what = "the manifest is missing or not that of the batch; it was written again"
            report.damage.append(Damage(os.path.join(directory, MANIFEST), 0, None, 0, what))


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
