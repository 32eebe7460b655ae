"""One phase transition, and the parts of a manager that take part in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from placement.core.states import Plan, State
from placement.planning.planner import is_there
from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage


@dataclass(eq=False)
class Transition:
    """One phase transition, from its plan to its end.

    An entry and a switch are all or nothing: the first error is raised, and every handle goes back.
    An exit goes as far as it can: it collects its errors.
    """

    name: str  # the phase that is open after it, for which its stall is counted
    plan: Plan
    handles: Mapping[str, Handle]
    participants: Sequence[Participant]
    room_bytes: int = 0
    """Device bytes that the budget leaves beside those in use now. A swap may use them in
    addition."""
    is_exit: bool = False
    errors: list[Exception] = field(default_factory=list)  # what went wrong in an exit
    decisions: list[str] = field(init=False)
    """The word for each handle under which the journal counts what the plan does with it: "keep",
    "load" or "offload"."""
    loads: bool = field(init=False)  # whether a handle comes to the device
    offloads: bool = field(init=False)  # whether a handle leaves the device
    is_there: bool = field(init=False)
    """Whether every handle is where the plan wants it, so that no byte moves."""
    engines_left: bool = False  # whether engines have given memory up
    lacks_engines: bool = False  # whether engines of any rank are still to be loaded
    staying: Mapping[ManagedStorage, int] = field(default_factory=dict)
    """Device bytes of storages that leave which may stay aside, to be saved later."""

    def __post_init__(self) -> None:
        self.is_there = is_there(self.handles, self.plan)
        self.decisions = ["keep"] * len(self.handles) if self.is_there else self._decide()
        self.loads = "load" in self.decisions
        self.offloads = "offload" in self.decisions

    def _decide(self) -> list[str]:
        decisions = []
        for handle in self.handles.values():
            is_here = handle.state is not State.CPU_OFFLOADED and not handle.is_streaming
            is_wanted = self.plan.on_device(handle.name)
            decisions.append("keep" if is_here is is_wanted else "load" if is_wanted else "offload")
        return decisions


class Participant:
    """A part of a manager that takes part in phase transitions beside the handles.

    Every method does nothing unless a subclass overrides it. They are called in the order in which
    they stand here, each for all participants in the order of their list.
    """

    def prepare(self, transition: Transition) -> None:
        """Get ready, before a handle moves. An error ends an entry: nothing has moved."""

    def moved(self, transition: Transition) -> None:
        """Every handle has moved, and can still go back without new memory. An error makes an entry
        go back. Not called in an exit."""

    def commit(self, transition: Transition) -> None:
        """Every handle is where it stays: nothing goes back any more."""

    def finish(self, transition: Transition) -> None:
        """The memory that handles have given up is with the driver. After an error of an entry the
        caller leaves the phase again."""
