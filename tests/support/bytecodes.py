"""A function that is called before each bytecode of chosen code: what it raises there is raised as a signal handler would raise it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any


class BytecodeTrace:
    """Calls `visit(frame)` before each bytecode of this thread's frames of chosen code, from `on()` to `off()` or in a `with` statement.

    Args:
        chosen: whether a frame of this code is followed; asked when the frame begins.
        visit: `frame.f_lasti` is the offset of the bytecode. If it raises, Python ends the tracing of this thread.
    """

    def __init__(self, chosen: Callable[[CodeType], bool], visit: Callable[[FrameType], object]) -> None:
        self._chosen = chosen
        self._visit = visit
        self._before: Any = None

    def on(self) -> None:
        self._before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 traces bytecodes only if a frame has asked for it before `settrace`
        sys.settrace(self._call)

    def off(self) -> None:
        sys.settrace(self._before)

    def __enter__(self) -> None:
        self.on()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.off()

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self._chosen(frame.f_code):
            return None
        frame.f_trace = self._each  # Python 3.13 asks for it before `f_trace_opcodes` is set
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._each

    def _each(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self._visit(frame)
        return self._each
