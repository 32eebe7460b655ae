"""Why the policy has each handle where it is, in the policy's own words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from placement.core.journal import logger
from placement.core.states import View


class Reasons:
    """Asks a policy for its reasons, if it has a method `reasons(view)`. Holds the last view of each phase.

    The policy is asked when somebody wants to know, on that thread, and once for each view.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._ask: Callable[[View], Mapping[str, str]] | None = getattr(policy, "reasons", None)
        self._views: dict[str, View] = {}
        self._said: dict[str, tuple[View, dict[str, str]]] = {}

    def note(self, view: View) -> None:
        """Remember the view that a plan was made from."""
        if self._ask is not None:
            self._views[view.phase] = view

    def of(self, phase: str) -> Mapping[str, str]:
        """The reasons for the last plan of a phase, by handle; empty if there was none, or if the policy gives no reasons."""
        view = self._views.get(phase)
        if view is None or self._ask is None:
            return {}
        known = self._said.get(phase)
        if known is None or known[0] is not view:
            known = self._said[phase] = view, self._reasons(self._ask, view)
        return known[1]

    def _reasons(self, ask: Callable[[View], Mapping[str, str]], view: View) -> dict[str, str]:
        try:
            return {str(name): str(words) for name, words in ask(view).items()}
        except Exception as error:  # a user's code, asked by a page: the page goes on without it
            logger.warning("policy %r gives no reasons for phase %s: %s", getattr(self._policy, "name", "?"), view.phase, repr(error))
            return {}
