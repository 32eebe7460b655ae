"""A group's board between a rank and the real one, for faults on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from placement.group import Board


class ForwardingBoard(Board):
    """Hands every call on to another board; a subclass changes the calls that it is about."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def put(self, key: str, value: bytes) -> None:
        self._board.put(key, value)

    def claim(self, key: str, value: bytes) -> bytes:
        return self._board.claim(key, value)

    def look(self, keys: Sequence[str]) -> list[bytes] | None:
        return self._board.look(keys)

    def wait(self, key: str, seconds: float) -> bytes | None:
        return self._board.wait(key, seconds)

    def remove(self, keys: Sequence[str]) -> None:
        self._board.remove(keys)


STEPS = (
    "before put proposal",
    "after put proposal",
    "before claim basis",
    "after wait basis",
    "before put vote",
    "after put vote",
    "before claim decision",
    "after claim decision",
    "after wait decision",
    "after put at",
)
"""The steps of the protocol, as the calls of a board that make them up."""


class FailingBoard(ForwardingBoard):
    """A board whose process is killed, stopped or fails where it passes a step, once `arm` was
    called.

    Attributes:
        has_happened: whether it has come to the step.
    """

    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self._step, self._action = "", ""
        self.has_happened = False

    def arm(self, step: str, action: str) -> None:
        """Act at the next passage. `action`: kill (SIGKILL), stop (SIGSTOP), or raise
        (RuntimeError)."""
        self._step, self._action = step, action

    def put(self, key: str, value: bytes) -> None:
        self._pass("before put", key)
        super().put(key, value)
        self._pass("after put", key)

    def claim(self, key: str, value: bytes) -> bytes:
        self._pass("before claim", key)
        stands = super().claim(key, value)
        self._pass("after claim", key)
        return stands

    def wait(self, key: str, seconds: float) -> bytes | None:
        found = super().wait(key, seconds)
        if found is not None:
            self._pass("after wait", key)
        return found

    def _pass(self, call: str, key: str) -> None:
        if self.has_happened or self._step not in [f"{call} {name}" for name in key.split("/")]:
            return
        self.has_happened = True
        if self._action == "raise":
            raise RuntimeError(f"at step {self._step}")
        os.kill(os.getpid(), signal.SIGKILL if self._action == "kill" else signal.SIGSTOP)
