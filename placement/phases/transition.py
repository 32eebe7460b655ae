"""One phase transition, and the parts of a manager that take part in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from placement.core.states import Plan
from placement.planning.planner import is_there
from placement.registration.handle import Handle
from placement.storage.managed import ManagedStorage
from placement.storage.transfer.verification import Verifier


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
    offloads: bool = False  # whether placement moves a handle off the device
    is_there: bool = field(init=False)
    """Whether every handle is where the plan wants it, so that no byte moves."""
    engines_left: bool = False  # whether engines have given memory up
    lacks_engines: bool = False  # whether engines of any rank are still to be loaded
    staying: Mapping[ManagedStorage, int] = field(default_factory=dict)
    """Device bytes of storages that leave which stay aside, for a later load."""
    begins_early: bool = False  # whether pages may come early after it

    def __post_init__(self) -> None:
        self.is_there = is_there(self.handles, self.plan)
        self.decisions = ["keep"] * len(self.handles) if self.is_there else self._decide()

    def _decide(self) -> list[str]:
        decisions = []
        for handle in self.handles.values():
            is_here, is_wanted = handle.is_on_device, self.plan.on_device(handle.name)
            if is_here is is_wanted:
                decisions.append("keep")
            elif is_wanted:
                decisions.append("load")
            else:
                decisions.append("offload")
                self.offloads |= not handle.external
        return decisions

    def unmet_loads(self) -> str:
        """A note for an error of the device that refused the memory for these loads."""
        loads = []
        for handle, decision in zip(self.handles.values(), self.decisions, strict=True):
            if decision == "load":
                loads.append(f"{handle.name} ({handle.num_bytes:,} bytes)")
        return (
            f"placement: phase {self.name!r} was to load {', '.join(loads) or 'nothing'} within "
            "the budget, but the device has less: manager.audit().report says who holds it. Free "
            "it, or lower budget_bytes"
        )

    def while_copying(self) -> None:
        for participant in self.participants:
            participant.while_copying(self)


class Participant:
    """A part of a manager that takes part in phase transitions beside the handles.

    Every method does nothing unless a subclass overrides it. They are called in the order in which
    they stand here, each for all participants in the order of their list. In an exit
    the others are still called after an error of one.
    """

    def prepare(self, transition: Transition) -> None:
        """Get ready, before a handle moves. An error ends an entry."""

    def while_copying(self, transition: Transition) -> None:
        """The link has work, if any byte moves. The place for what takes the host long. An error
        makes an entry go back. Called whenever storages exchange their places, so never where no
        handle moves, and for each handle of an exit whose exchange failed."""

    def moved(self, transition: Transition) -> None:
        """Every handle has moved, and can still go back without new memory. An error makes an entry
        go back. Not called in an exit."""

    def commit(self, transition: Transition) -> None:
        """Every handle is where it stays: nothing goes back any more. Not called in an exit."""

    def finish(self, transition: Transition) -> None:
        """Where engines are still to be loaded, the memory that handles have given up is with the
        driver, on all ranks. After an error of an entry the caller leaves the phase again."""


class Verification(Participant):
    """The setting `verify`: notes the fingerprints of host copies, so that every later move is
    compared with them."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def finish(self, transition: Transition) -> None:
        handles = transition.handles.values()
        self._verifier.note([h.holding for h in handles if h.holding is not None])
