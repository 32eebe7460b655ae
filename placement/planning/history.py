"""The phases that a worker has run, from which the next ones are expected."""

from __future__ import annotations

from collections import deque


class PhaseHistory:
    """The recent phases in the order in which they began."""

    _LENGTH = 64

    def __init__(self) -> None:
        self._names: deque[str] = deque(maxlen=self._LENGTH)

    def began(self, phase: str) -> None:
        """Note that a phase is open now."""
        self._names.append(phase)

    def upcoming(self, phase: str) -> tuple[str, ...]:
        """The phases that followed the last time this phase began; empty if it has not run yet."""
        names = tuple(self._names)
        for index in range(len(names) - 1, -1, -1):
            if names[index] == phase:
                return names[index + 1 :]
        return ()
