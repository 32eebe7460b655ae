"""`Turns`: one phase at a time for a framework that says by separate hooks what it does next."""

from __future__ import annotations

from collections.abc import Sequence

from placement.manager import Manager


class Turns:
    """One phase of a manager that stays open over several calls of a framework, and switches from one purpose to the next.

    Args:
        manager: the manager whose phase it is.
    """

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.phase: str | None = None
        """The open phase; None while none is open."""
        self._only: Sequence[str] | None = None

    def to(self, phase: str, *, only: Sequence[str] | None = None) -> None:
        """Switch to a phase, or open it where none is open. Errors are those of `Manager.phase`; then the phase before stays open."""
        if self.phase is None:
            self.manager.enter(phase, only=only)
        elif (self.phase, self._only) != (phase, only):
            self.manager.switch(phase, only=only)
        self.phase, self._only = phase, only

    def over(self, error: BaseException | None = None) -> None:
        """Leave the open phase, if there is one. After an error, failures of leaving become notes on it."""
        if self.phase is not None:
            self.phase = None
            self.manager.leave(error)
