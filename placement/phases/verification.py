"""The setting `verify`, in a phase transition."""

from __future__ import annotations

from placement.phases.transition import Participant, Transition
from placement.storage.transfer.verification import Verifier


class Verification(Participant):
    """Notes the fingerprints of host copies, so that every later move is compared with them."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    def finish(self, transition: Transition) -> None:
        handles = transition.handles.values()
        self._verifier.note([h.holding for h in handles if h.holding is not None])
