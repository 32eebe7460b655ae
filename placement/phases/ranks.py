"""The other ranks of a group, in a phase transition: all commit, or all go back."""

from __future__ import annotations

from collections.abc import Callable

from placement.group.vote import Agree, GroupVote
from placement.phases.transition import Participant, Transition

# what ranks propose to one another as the next stage, once engines have left
_AFTER_ENGINES = "move what is left"


class Ranks(Participant):
    """Asks the group when everything has moved and can still go back without new memory, and after
    the engines of any rank have left or come.

    `agree`: asks the group. If it raises, everything goes back, unless on CoordinatorLost.
    `propose`: proposes each further stage to the group.
    """

    def __init__(self, agree: Agree, propose: Callable[[str], object]) -> None:
        self._agree = agree
        self._propose = propose

    def prepare(self, transition: Transition) -> None:
        if transition.engines_left:
            self._agree(transition.plan, "engines left", False)
            self._propose(_AFTER_ENGINES)

    def moved(self, transition: Transition) -> None:
        decision = self._agree(transition.plan, "moved", transition.lacks_engines)
        while decision.stage != "moved":
            self._propose(_AFTER_ENGINES)  # the engines of other ranks had to leave first
            decision = self._agree(transition.plan, "moved", transition.lacks_engines)
        transition.lacks_engines = decision.lacks_engines

    def commit(self, transition: Transition) -> None:
        if transition.lacks_engines:
            self._propose("load engines")

    def finish(self, transition: Transition) -> None:
        if transition.lacks_engines:
            self._agree(transition.plan, "engines loaded", False)


class LeavingRanks(Participant):
    """Tells the group that this rank has left a phase, or the device, with the errors of that. What
    was offloaded stays so, whatever the other ranks say. `action`: the same text on all ranks.
    `error`: the user's exception that propagates."""

    def __init__(self, vote: GroupVote, action: str, error: BaseException | None = None) -> None:
        self._vote = vote
        self._action = action
        self._error = error

    def finish(self, transition: Transition) -> None:
        transition.errors = self._vote.left(
            self._action, transition.plan, transition.errors, self._error
        )
