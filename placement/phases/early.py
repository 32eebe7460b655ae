"""A phase transition prepares later ones: pages come early, and pages stay aside."""

from __future__ import annotations

from placement.phases.moves import Mover
from placement.phases.transition import Participant, Transition
from placement.planning.prefetcher import NOTHING_AHEAD, Prefetcher


class EarlyCopies(Participant):
    """Carries out `Plan.prefetch`. Does nothing for a plan without it while nothing is early."""

    def __init__(self, prefetcher: Prefetcher, mover: Mover) -> None:
        self._prefetcher = prefetcher
        self._mover = mover
        self._ahead = NOTHING_AHEAD

    def prepare(self, transition: Transition) -> None:
        plan, prefetcher = transition.plan, self._prefetcher
        self._ahead = NOTHING_AHEAD
        if prefetcher.has_any:
            prefetcher.pause()
        if plan.prefetch or plan.streamed or prefetcher.has_any:
            self._ahead, freed_bytes = prefetcher.look_ahead(
                transition.name, plan, self._mover.chunk_pool
            )
            transition.room_bytes += freed_bytes
            transition.staying = self._ahead.staying

    def finish(self, transition: Transition) -> None:
        """Pages that come early get the memory that the transition has freed. An exit has none
        left, and begins nothing after an error."""
        if self._ahead.begin is not None and not transition.errors:
            self._ahead.begin(self._mover.chunk_pool)
