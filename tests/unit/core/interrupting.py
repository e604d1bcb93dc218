"""Ctrl-C at any moment at which Python would notice it in the core."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
import linecache
import os
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from stride import Every

import qewqew_core

CORE = Path(qewqew_core.__file__).parent


HELPERS = {contextlib.__file__, threading.__file__}  # Python of the library in which our `with` begins and ends


@functools.cache
def _points(code: CodeType) -> frozenset[int]:
    """Before which instructions CPython looks for signals: after calls, and where a function begins."""
    return frozenset(
        later.offset
        for instruction, later in itertools.pairwise(dis.get_instructions(code))
        if instruction.opname in ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX")
    )


@functools.cache
def _jumps(code: CodeType) -> frozenset[int]:
    """After which it looks, too: where a loop goes back."""
    return frozenset(each.offset for each in dis.get_instructions(code) if each.opname == "JUMP_BACKWARD")


class Interrupt:
    """Raises KeyboardInterrupt where a signal may: at the n-th point of these modules, and of the library where they call it."""

    def __init__(self, point: int, modules: Collection[str], passing: Collection[str]) -> None:
        self.point = self.left = point
        self.where = ""
        self._watched = {str(CORE / f"{name}.py") for name in modules}
        self._passing = passing  # functions and classes that are left alone
        self._before: tuple[FrameType | None, int] = None, 0  # the instruction before, and in which frame

    def is_watched(self, frame: FrameType) -> bool:
        outer = frame
        while outer.f_code.co_filename in HELPERS and outer.f_back is not None:
            outer = outer.f_back
        return outer.f_code.co_filename in self._watched and not self._passes(frame.f_code) and not self._is_in_del(frame)

    def pass_by(self, frame: FrameType) -> None:
        """The instruction that comes next may be one before which a signal is looked for."""
        before, self._before = self._before, (frame, frame.f_lasti)
        if frame.f_lasti in _points(frame.f_code) or (before[0] is frame and before[1] in _jumps(frame.f_code)):
            self.left -= 1
            if self.left == 0:
                name, line = frame.f_code.co_filename, frame.f_lineno
                self.where = f"{os.path.basename(name)}:{line} {linecache.getline(name, line).strip()}"
                raise KeyboardInterrupt

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
        _watch(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _watch(None)
        self._before = None, 0  # a frame keeps alive what it knows


if sys.version_info < (3, 12):

    def _watch(interrupt: Interrupt | None) -> None:
        """Have it see each instruction that comes next; None: no more."""

        def at(frame: FrameType, event: str, argument: object) -> Any:
            if event == "opcode":
                assert interrupt is not None
                interrupt.pass_by(frame)
            return at

        def called(frame: FrameType, event: str, argument: object) -> Any:
            assert interrupt is not None
            if not interrupt.is_watched(frame):
                return None
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            return at

        sys.settrace(None if interrupt is None else called)

else:  # which tells a tracer only of some instructions
    _TOOL = 4
    _INSTRUCTION = sys.monitoring.events.INSTRUCTION

    def _watch(interrupt: Interrupt | None) -> None:
        """Have it see each instruction that comes next; None: no more."""

        def at(code: CodeType, offset: int) -> None:
            frame = sys._getframe(1)
            if interrupt is not None and interrupt.is_watched(frame):
                interrupt.pass_by(frame)

        if sys.monitoring.get_tool(_TOOL) is None:
            sys.monitoring.use_tool_id(_TOOL, "interrupting")
            for code in _codes():
                sys.monitoring.set_local_events(_TOOL, code, _INSTRUCTION)
        sys.monitoring.register_callback(_TOOL, _INSTRUCTION, None if interrupt is None else at)

    def _codes() -> Iterator[CodeType]:
        """Of all functions of the core, and of the library that it calls."""
        gc.unfreeze()  # else it does not tell of what pytest has frozen
        # `type`, not isinstance, which asks `__class__`, and a lazy object of Airflow imports what it stands for, or fails
        functions = [function for function in gc.get_objects() if type(function) is FunctionType]
        gc.freeze()
        left = [
            function.__code__ for function in functions if function.__code__.co_filename in HELPERS or _is_ours(function.__code__)
        ]
        while left:
            code = left.pop()
            yield code
            left += [constant for constant in code.co_consts if isinstance(constant, CodeType)]

    def _is_ours(code: CodeType) -> bool:
        return Path(code.co_filename).is_relative_to(CORE)


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
