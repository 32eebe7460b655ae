"""The seam to what carries the words between ranks: a torch.distributed store, a Ray actor, a dictionary in a test."""

from __future__ import annotations

import abc
from collections.abc import Sequence


class BoardLost(Exception):
    """The board does not answer, or not in time."""


class Board(abc.ABC):
    """A few small values that all ranks see, one of them write-once.

    Every call is idempotent: a call whose answer was lost may be made again. Each may raise `BoardLost`, then it is not known
    whether it took place. None blocks for ever: a board that does not answer is lost. Values are at most 64 KiB.
    """

    @abc.abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Write a value that only this rank writes."""

    @abc.abstractmethod
    def claim(self, key: str, value: bytes) -> bytes:
        """Write `value` if nothing was written, and return what stands there: the same for all ranks and for ever."""

    @abc.abstractmethod
    def look(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values, or None while one of them is missing. Does not wait."""

    def present(self, keys: Sequence[str]) -> dict[str, bytes]:
        """Those values that are there, by key. Does not wait."""
        if (found := self.look(keys)) is not None:
            return dict(zip(keys, found, strict=True))
        middle = len(keys) // 2
        return {} if not middle else self.present(keys[:middle]) | self.present(keys[middle:])

    @abc.abstractmethod
    def wait(self, key: str, seconds: float) -> bytes | None:
        """The value as soon as it is there; None when it was not within `seconds`."""

    @abc.abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Forget values that nobody asks for any more. Missing ones are no mistake."""
