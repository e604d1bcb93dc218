"""Keep the few inputs that together run every step of the core that all of them run: minimize.py TARGET DIRECTORY...

Reads the corpus of the target and the given directories, and writes the corpus anew. Needs nothing but Python.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import fuzz_targets

import qewqew_core

WATCHED = (os.path.dirname(qewqew_core.__file__), fuzz_targets.__file__)
Step = tuple[str, int, int]


def features(target: str, data: bytes) -> set[tuple[Step, int]]:
    """The pairs of lines that follow each other in this run, each with how often they do (once, twice, some, many times)."""
    count: Counter[Step] = Counter()
    last: dict[int, int] = {}

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        line = frame.f_lineno if event == "line" else -frame.f_code.co_firstlineno
        count[frame.f_code.co_filename, last.get(id(frame), 0), line] += event != "call"
        last[id(frame)] = line
        return trace

    sys.settrace(trace)
    try:
        fuzz_targets.TARGETS[target](data)
    finally:
        sys.settrace(None)
    return {(step, min(times, 7).bit_length()) for step, times in count.items()}


def minimize(target: str, folders: list[Path]) -> None:
    inputs = {path.read_bytes() for folder in folders if folder.is_dir() for path in folder.iterdir()}
    run = {data: features(target, data) for data in inputs if len(data) < fuzz_targets.MAX_BYTES}
    covered: set[tuple[Step, int]] = set()
    kept: dict[str, bytes] = {}
    # The one that adds most comes next; what it adds can only have become less since it was counted.
    waiting = [(-len(steps), len(data), data) for data, steps in run.items()]
    heapq.heapify(waiting)
    while waiting:
        _, size, data = heapq.heappop(waiting)
        new = len(run[data] - covered)
        if new and waiting and -new > waiting[0][0]:
            heapq.heappush(waiting, (-new, size, data))
        elif new:
            covered |= run[data]
            kept[hashlib.sha1(data, usedforsecurity=False).hexdigest()[:16]] = data
    home = fuzz_targets.CORPUS / target
    home.mkdir(parents=True, exist_ok=True)
    for path in home.iterdir():
        if path.name not in kept:
            path.unlink()
    for name, data in kept.items():
        (home / name).write_bytes(data)
    print(f"{target}: {len(inputs)} inputs, kept {len(kept)} of together {sum(map(len, kept.values())):,} bytes")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in fuzz_targets.TARGETS:
        sys.exit(__doc__)
    fuzz_targets.use_private_directory()
    minimize(sys.argv[1], [fuzz_targets.CORPUS / sys.argv[1], *map(Path, sys.argv[2:])])
