"""`Turns`: one phase at a time for a framework that says by separate hooks what it does next."""

from __future__ import annotations

from collections.abc import Sequence

from placement.manager import Manager
from placement.phases.hold import Hold


class Turns:
    """One phase of a manager that stays open over several calls of a framework, and switches from one purpose to the next.

    Args:
        manager: the manager whose phase it is.
    """

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self._hold: Hold | None = None
        self._only: Sequence[str] | None = None

    @property
    def phase(self) -> str | None:
        """The name of the open phase; None while none is open."""
        return self._hold.name if self._hold is not None and self._hold.is_open else None

    def to(self, phase: str, *, only: Sequence[str] | None = None) -> None:
        """Switch to a phase, or open it where none is open. Errors are those of `Manager.phase`; then the phase before stays open."""
        if self._hold is None or not self._hold.is_open:
            self._hold = self.manager.hold(phase, only=only)
        elif (self._hold.name, self._only) != (phase, only):
            self._hold.switch(phase, only=only)
        self._only = only

    def over(self, error: BaseException | None = None) -> None:
        """Leave the open phase, if there is one. After an error, failures of leaving become notes on it."""
        if self._hold is not None:
            self._hold.release(error)
