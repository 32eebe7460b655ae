"""The work of a phase transition for later ones: pages that come early, and pages that stay
aside."""

from __future__ import annotations

from placement.phases.moves import Mover
from placement.phases.transition import Participant, Transition
from placement.planning.prefetcher import Prefetcher


class EarlyCopies(Participant):
    """Carries out `Plan.prefetch`. Does nothing for a plan without it while nothing is early."""

    def __init__(self, prefetcher: Prefetcher, mover: Mover) -> None:
        self._prefetcher = prefetcher
        self._mover = mover

    def prepare(self, transition: Transition) -> None:
        plan, prefetcher = transition.plan, self._prefetcher
        if plan.prefetch or plan.streamed or prefetcher.has_any:
            transition.staying, freed_bytes = prefetcher.look_ahead(
                transition.name, plan, self._mover.chunk_pool
            )
            transition.room_bytes += freed_bytes
            transition.begins_early = True

    def finish(self, transition: Transition) -> None:
        """Early copies get the memory that the transition has freed. An exit has none left, and
        begins none after an error."""
        if transition.begins_early and not transition.errors:
            self._prefetcher.begin(transition.name, transition.plan, self._mover.chunk_pool)
