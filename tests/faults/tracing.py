"""An exception at one bytecode of one of our own frames, as a signal would raise it."""

from __future__ import annotations

import os
from collections import Counter
from types import CodeType, FrameType

import placement
import placement.policies
from tests.support.bytecodes import BytecodeTrace

_OURS = tuple(os.path.dirname(os.path.abspath(each)) + os.sep for each in (placement.__file__, placement.policies.__file__))

Point = tuple[CodeType, int]
"""A code object and the offset of a bytecode in it."""


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS)


def describe(point: Point, visit: int) -> str:
    code, offset = point
    line = next((number for start, end, number in code.co_lines() if start <= offset < end), None)
    return f"{os.path.basename(code.co_filename)}:{line} {code.co_qualname}+{offset}, visit {visit}"


class Recorder(BytecodeTrace):
    """Counts how often each bytecode of our frames is reached while it is on."""

    def __init__(self) -> None:
        super().__init__(is_ours, self._count)
        self.visits: Counter[Point] = Counter()

    def _count(self, frame: FrameType) -> None:
        self.visits[frame.f_code, frame.f_lasti] += 1


class Interrupter(BytecodeTrace):
    """Raises at one visit of one point, once, and traces nothing else."""

    def __init__(self, point: Point, visit: int, error: type[BaseException]) -> None:
        super().__init__(lambda code: code is self._code and not self.fired, self._count)
        self._code, self._offset = point
        self._left = visit
        self._error = error
        self.fired = False

    def _count(self, frame: FrameType) -> None:
        if frame.f_lasti == self._offset and not self.fired:
            self._left -= 1
            if self._left == 0:
                self.fired = True
                raise self._error("raised by the test")
