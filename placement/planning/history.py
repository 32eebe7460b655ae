"""Which phases have begun, and which are expected next."""

from __future__ import annotations

from collections import deque

MOST_PHASES = 64
"""How far back a history goes."""


class PhaseHistory:
    """The phases that have begun, oldest first, as far back as 64 of them."""

    def __init__(self) -> None:
        self._phases: deque[str] = deque(maxlen=MOST_PHASES)
        self._lengths: list[int] = []
        """For each place in the history: how many phases up to it are the same as the last ones."""

    def began(self, phase: str) -> None:
        """Note that a phase is open now."""
        was_full = len(self._phases) == MOST_PHASES
        lengths = [before + 1 if name == phase else 0 for name, before in zip(self._phases, [0, *self._lengths], strict=False)]
        self._phases.append(phase)
        self._lengths = [*lengths, len(self._phases)][was_full:]

    def upcoming(self, phase: str) -> tuple[str, ...]:
        """The phases that are expected after this one, nearest first, for one whole cycle; empty if none has been seen.

        What followed the last time is expected again. Where a phase has several places in the cycle, the one counts before which the same
        phases were as here, for longest, and of equal ones the last. A phase that is not in the history (`idle`, or one that begins for
        the first time) is taken as one that was put in after the last phase.
        """
        if phase in self._phases:
            lengths = [0, *self._lengths]
            after = max((lengths[i], i) for i, name in enumerate(self._phases) if name == phase)[1]
        else:
            length, after = max([(length, i) for i, length in enumerate(self._lengths[:-1])], default=(0, 0))
            if not length:
                return ()
        return tuple(self._phases)[after + 1 :]
