"""A group's board between a rank and the real one, for faults on the way."""

from __future__ import annotations

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
