"""The interface between ranks and the medium that carries their messages: a torch.distributed store, a Ray actor, a test's dictionary."""

from __future__ import annotations

import abc
from collections.abc import Sequence


class BoardLost(Exception):
    """The board does not answer, or not in time."""


class Board(abc.ABC):
    """A small key-value store that all ranks see. `put` overwrites a value; `claim` writes a key once and for all.

    Every call is idempotent: a call whose answer was lost may be made again. Each call may raise `BoardLost`, and then it is unknown
    whether it took effect. No call blocks for ever: a board that does not answer counts as lost. A value has at most 64 KiB.
    """

    @abc.abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Write a value under a key that only this rank writes."""

    @abc.abstractmethod
    def claim(self, key: str, value: bytes) -> bytes:
        """Write `value` if the key has none, and return the key's value. All ranks get the same value, for ever."""

    @abc.abstractmethod
    def look(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values of these keys, or None while one of them is missing. Does not wait."""

    def present(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those keys that have one. Does not wait."""
        if (found := self.look(keys)) is not None:
            return dict(zip(keys, found, strict=True))
        middle = len(keys) // 2
        return {} if not middle else self.present(keys[:middle]) | self.present(keys[middle:])

    @abc.abstractmethod
    def wait(self, key: str, seconds: float) -> bytes | None:
        """The key's value as soon as it has one; None when it has none within `seconds`."""

    @abc.abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Delete keys that nobody reads any more. A missing key is no error."""
