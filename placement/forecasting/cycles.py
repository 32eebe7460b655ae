"""The order of phases in a step of a job."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from placement.core.states import IDLE, PHASES, OwnPhases
from placement.planning.simulation import SimulatedPhase

CYCLES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("rollout", "log_prob", "train", "weight_sync"),
    "ppo": ("rollout", "reward", "log_prob", "values", "train", "weight_sync"),
}
"""The steps that have a name."""
_PHASE = re.compile(r"([^\[\]]+?)\s*(?:\[([^\[\]]*)\])?")


def cycle_of(cycle: str | Sequence[str | SimulatedPhase], own: OwnPhases | None = None) -> tuple[SimulatedPhase, ...]:
    """The phases of one step, in order.

    Args:
        cycle: a name of `CYCLES`, or the phases: "log_prob", or "log_prob[actor+ref]" for a phase with `only`. The phase "idle" between
            two others means that one is left before the next is entered, instead of switching.
        own: the user's own phases, as in `Settings.phases`.

    Raises:
        ValueError: a phase is unknown, or there is none.
    """
    if isinstance(cycle, str):
        if cycle not in CYCLES:
            raise ValueError(f"no cycle {cycle!r}; known: {', '.join(CYCLES)}; or give the phases")
        cycle = CYCLES[cycle]
    known = (*PHASES, *(own or {}))
    phases = tuple(each if isinstance(each, SimulatedPhase) else _phase(each) for each in cycle)
    for each in phases:
        if each.name not in known:
            near = difflib.get_close_matches(each.name.lower(), (*known, *CYCLES) if len(phases) == 1 else known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ";"
            raise ValueError(f"unknown phase {each.name!r}{hint} known: {', '.join(known)}. Declare your own in Settings.phases")
    while phases and phases[-1].name == IDLE:  # the step ends there anyway
        phases = phases[:-1]
    if not phases:
        raise ValueError("the cycle has no phase; give at least one")
    return phases


def _phase(text: str) -> SimulatedPhase:
    match = _PHASE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no phase; write 'train', or 'log_prob[actor+ref]' for the named handles only")
    only = None if match[2] is None else tuple(name.strip() for name in match[2].split("+") if name.strip())
    return SimulatedPhase(match[1], only)


def listed(text: str) -> tuple[str, ...] | str:
    """A cycle from a command line: a name, or phases separated by commas."""
    names = tuple(each.strip() for each in text.split(",") if each.strip())
    return names[0] if len(names) == 1 and names[0] in CYCLES else names
