"""Ctrl-C at any moment at which Python would notice it in the core."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import linecache
import os
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from stride import Every

import qewqew_core

CORE = Path(qewqew_core.__file__).parent


HELPERS = {contextlib.__file__, threading.__file__}  # Python of the library in which our `with` begins and ends


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    """Before which instructions CPython looks for signals: after calls, where a function begins, and where a loop goes back."""
    instructions = list(dis.get_instructions(code))
    after = (
        later.offset
        for one, later in itertools.pairwise(instructions)
        if one.opname in ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX")
    )
    back = (one.argval for one in instructions if one.opname == "JUMP_BACKWARD")
    return frozenset(after) | frozenset(back)


class Interrupt:
    """Raises KeyboardInterrupt where a signal may: at the n-th point of these modules, and of the library where they call it."""

    def __init__(self, point: int, modules: Collection[str], passing: Collection[str]) -> None:
        self.point = self.left = point
        self.where = ""
        self._watched = {str(CORE / f"{name}.py") for name in modules}
        self._passing = passing  # functions and classes that are left alone

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        outer = frame
        while outer.f_code.co_filename in HELPERS and outer.f_back is not None:
            outer = outer.f_back
        if outer.f_code.co_filename not in self._watched or self._passes(frame.f_code) or self._is_in_del(frame):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._at

    def _at(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and frame.f_lasti in _points(frame.f_code):
            self.left -= 1
            if self.left == 0:
                name, line = frame.f_code.co_filename, frame.f_lineno
                self.where = f"{os.path.basename(name)}:{line} {linecache.getline(name, line).strip()}"
                raise KeyboardInterrupt
        return self._at

    def _passes(self, code: CodeType) -> bool:
        return code.co_name in self._passing or code.co_qualname.partition(".")[0] in self._passing

    def _is_in_del(self, frame: FrameType | None) -> bool:
        """There errors are lost."""
        while frame is not None:
            if frame.f_code.co_name == "__del__":
                return True
            frame = frame.f_back
        return False

    def __enter__(self) -> Interrupt:
        sys._getframe().f_trace_opcodes = True  # Python 3.12 tells of opcodes only if a frame wanted them before settrace
        sys.settrace(self)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.settrace(None)


def interrupts(
    every: Every, modules: Collection[str], *, quick: int, full: int = 1, passing: Collection[str] = ()
) -> Iterator[Interrupt]:
    """An interrupt at each point that this run has, until one is behind the last: the caller runs the same with each of them."""
    for point in every(range(1, 20_000), quick=quick, full=full):
        interrupt = Interrupt(point, modules, passing)
        yield interrupt
        if interrupt.left > 0:
            return
    raise AssertionError("it was interrupted each time")
