"""`Turns`: one phase at a time for a framework that says by separate hooks what it does next; and the manager of such a framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from placement.core.settings import Settings
from placement.core.states import State
from placement.manager import Manager
from placement.phases.phase import Hold


def manager_with_phases(phases: Mapping[str, Sequence[str] | Mapping[str, State | str]]) -> Manager:
    """A manager of this process alone with the settings of the environment. `PLACEMENT_PHASES` adds to `phases` and takes precedence.

    Raises:
        ValueError: a setting is invalid.
    """
    return Manager.from_settings(phases={**phases, **Settings.from_any(None).phases})


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
