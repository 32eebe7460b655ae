"""Interrupts at every bytecode of what moves memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from types import FrameType

import placement
from tests.support.bytecodes import BytecodeTrace

OURS = tuple(os.path.join(os.path.dirname(placement.__file__), room, "") for room in ("devices", "storage"))


class Interrupter:
    """Counts the bytecodes of our frames, and raises KeyboardInterrupt at one of them."""

    def __init__(self, point: int | None) -> None:
        self.point = point
        self.seen: list[tuple[object, int]] = []

    def _visit(self, frame: FrameType) -> None:
        if len(self.seen) == self.point:
            raise KeyboardInterrupt
        self.seen.append((frame.f_code, frame.f_lasti))

    def run(self, operation: Callable[[], object]) -> bool:
        """Whether the operation was cut. What it made dies untraced."""
        made = None
        gc.disable()  # what a collection calls of ours would be counted in one run and not in the next
        try:
            with BytecodeTrace(lambda code: code.co_filename.startswith(OURS), self._visit):
                made = operation()
        except KeyboardInterrupt:
            return True
        finally:
            gc.enable()
            del made
        return False

    def first_and_last_visits(self) -> list[int]:
        first = {place: point for point, place in reversed([*enumerate(self.seen)])}
        last = {place: point for point, place in enumerate(self.seen)}
        return sorted({*first.values(), *last.values()})


def at_each_point(attempt: Callable[[Interrupter], bool]) -> int:
    """Attempt it whole, then cut at the first and the last visit of each bytecode. Returns how often it was cut.

    Args:
        attempt: does it under the interrupter that it is given, checks what is left, and says whether it was cut.
    """
    survey = Interrupter(None)
    assert not attempt(survey)
    points = survey.first_and_last_visits()
    assert points, "no bytecode of ours was traced"
    for point in points:
        assert attempt(Interrupter(point)), "the interrupt was not raised"
    return len(points)
