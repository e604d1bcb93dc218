"""Every input that the fuzzer has kept, through the same targets, without the fuzzer; and the fuzzer itself, as a soak test."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from qewqew_core.formats import zbus
from qewqew_core.queue.writing import Framed
from qewqew_core.topic import reader_log
from qewqew_core.topic.reader_state import ReaderState
from qewqew_core.topic.topic_state import Block

FUZZ = Path(__file__).parents[2] / "fuzz"
sys.path.insert(0, str(FUZZ))

import fuzz_targets  # noqa: E402

TARGETS = sorted(fuzz_targets.TARGETS)


@pytest.fixture(autouse=True)
def targets_use_the_directory_of_the_test(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def inputs(target: str) -> list[Path]:
    return sorted((fuzz_targets.CORPUS / target).iterdir())


@pytest.mark.parametrize("target", TARGETS)
def test_every_input_of_the_corpus_gives_a_named_error_or_the_right_result(target):
    assert len(inputs(target)) >= 5
    for path in inputs(target):
        try:
            fuzz_targets.TARGETS[target](path.read_bytes())
        except BaseException as error:
            error.add_note(f"from the corpus of {target}: {path.name}")
            raise


def test_the_corpus_is_small():
    sizes = [path.stat().st_size for target in TARGETS for path in inputs(target)]
    assert max(sizes) < fuzz_targets.MAX_BYTES
    assert sum(sizes) < 300 << 10


def frame_end_without_checksum(data: bytes, generation: int, at: int) -> int | None:
    end = at + 13 + int.from_bytes(data[at : at + 4])
    return end if end <= len(data) and data[at + 12] else None


def append_without_checksum(block: Block, messages: int, size: int, crc: int, time: int, elapsed: int) -> None:
    block.end += size
    block.messages += messages
    block.updated = time


def load_without_flights(body: bytes, load: Callable[[bytes], ReaderState] = reader_log._load) -> ReaderState:
    state = load(body)
    state.in_flight.clear()
    return state


def unchecked(run: Framed, *_: object) -> Framed:
    return run


def check_head_of_any_number(data: bytes, start: int, at: int, *_: object) -> tuple[int, int]:
    number, _, length = zbus.keys_at(data, at - start + zbus.NUMBER_AT)
    return at + zbus.HEAD + length, number


MUTANTS = {
    "split": ("fuzz_targets.split", lambda frames, limit=None: ([frames], len(frames))),
    "chain": ("qewqew_core.queue.found.check_reference", lambda chunk_id, path, offset: None),
    "log": ("qewqew_core.disk.journal._frame_end", frame_end_without_checksum),
    "manifest": ("qewqew_core.batch.segments.SegmentFile.read", lambda file, start, end: file.pread(start + 1, end + 1)),
    "topic_log": ("qewqew_core.topic.topic_state.Block.append", append_without_checksum),
    "reader_log": ("qewqew_core.topic.reader_log._load", load_without_flights),
    "topic": ("qewqew_core.formats.zbus.check_head", check_head_of_any_number),
    "request": ("qewqew_core.queue.group_commit._checked", unchecked),
}


@pytest.mark.parametrize("target", TARGETS)
def test_the_targets_notice_a_parser_that_is_wrong(target, monkeypatch):
    monkeypatch.setattr(*MUTANTS[target])
    with pytest.raises((AssertionError, ValueError)):
        test_every_input_of_the_corpus_gives_a_named_error_or_the_right_result(target)


@pytest.mark.soak
@pytest.mark.parametrize("target", TARGETS)
def test_a_minute_of_fuzzing_finds_nothing(target, tmp_path):
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris is not here: it is made for Linux on x86-64 with Python 3.11 to 3.13")
    (tmp_path / "found").mkdir()
    run = [sys.executable, FUZZ / "fuzz.py", target, tmp_path / "found", "-max_total_time=60"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
