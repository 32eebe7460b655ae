"""An exception at one bytecode of one of our own frames, as a signal would raise it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import placement
import placement.policies

_OURS = tuple(os.path.dirname(os.path.abspath(each)) + os.sep for each in (placement.__file__, placement.policies.__file__))

Point = tuple[CodeType, int]
"""A code object and the offset of a bytecode in it."""


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS)


def describe(point: Point, visit: int) -> str:
    code, offset = point
    line = next((number for start, end, number in code.co_lines() if start <= offset < end), None)
    return f"{os.path.basename(code.co_filename)}:{line} {code.co_qualname}+{offset}, visit {visit}"


class Recorder:
    """Counts how often each bytecode of our frames is reached while `on` is called until `off`."""

    def __init__(self) -> None:
        self.visits: Counter[Point] = Counter()

    def on(self) -> None:
        sys.settrace(self._call)

    def off(self) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if not is_ours(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "opcode":
            self.visits[frame.f_code, frame.f_lasti] += 1
        return self._opcode


class Interrupter:
    """Raises at one visit of one point, once, and traces nothing else."""

    def __init__(self, point: Point, visit: int, error: type[BaseException]) -> None:
        self._code, self._offset = point
        self._left = visit
        self._error = error
        self.fired = False

    def on(self) -> None:
        sys.settrace(self._call)

    def off(self) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_code is not self._code or self.fired:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._opcode

    def _opcode(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "opcode" and frame.f_lasti == self._offset and not self.fired:
            self._left -= 1
            if self._left == 0:
                self.fired = True
                raise self._error("raised by the test")
        return self._opcode
