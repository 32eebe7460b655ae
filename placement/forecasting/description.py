"""The facts about a job beside its registered objects (the phases of a step, the link), and the
forecast as data.

A `Forecast` is immutable, and JSON by `model_dump_json()`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import Field

from placement.core.settings import nearest, parse_bytes
from placement.core.snapshot import Frozen, TransitionSeconds
from placement.core.states import IDLE, PHASES, OwnPhases, State

CYCLES: Mapping[str, tuple[str, ...]] = {
    "grpo": ("rollout", "log_prob", "train", "weight_sync"),
    "ppo": ("rollout", "reward", "log_prob", "values", "train", "weight_sync"),
}
"""The steps that have a name."""


class Phase(NamedTuple):
    """One phase of a run."""

    name: str
    only: tuple[str, ...] | None = None
    """The handles for which the phase is, as in `manager.phase(name, only=...)`; None: for all."""


def cycle_of(
    cycle: str | Sequence[str],
    own: OwnPhases | None = None,
) -> tuple[Phase, ...]:
    """The phases of one step, in order: of a name of `CYCLES`, or as given, such as
    "log_prob[actor+ref]" for a phase with `only`.

    The phase "idle" between two others means that one is left before the next is entered, instead
    of switching. Raises ValueError: a phase is unknown, or there is none.
    """
    if isinstance(cycle, str):
        words = [word for word in cycle.split(",") if word.strip()]
        cycle = CYCLES.get(cycle) or words
    names = (*PHASES, *(own or {}))
    phases = []
    for word in map(str.strip, cycle):
        name, has_handles, handles = word.removesuffix("]").partition("[")
        name = name.strip()
        if bool(has_handles) is not word.endswith("]"):
            raise ValueError(f"phase {word!r}: write handles as in 'log_prob[actor+ref]'")
        if name not in names:
            raise ValueError(
                f"unknown phase {name!r}{nearest(name, (*names, *CYCLES)) or ';'} known: "
                f"{', '.join(names)}. Declare your own in Settings.phases"
            )
        only = tuple(handle.strip() for handle in handles.split("+")) if has_handles else None
        phases.append(Phase(name, only))
    while phases and phases[-1].name == IDLE:  # the step ends there anyway
        phases.pop()
    if not phases:
        raise ValueError("the cycle has no phase; give at least one")
    return tuple(phases)


class Link(Frozen):
    """The rates of the link in bytes a second, and further figures of `placement doctor`.

    Raises:
        ValueError: a rate is not positive.
    """

    to_device_bytes_per_second: float = Field(gt=0)
    to_host_bytes_per_second: float = Field(gt=0)
    both_bytes_per_second: float | None = Field(default=None, gt=0)
    """Both directions at once, added up; None: the sum of the two."""
    free_bytes: int | None = None
    """Free bytes of the device; None: not known. So with the following."""
    chunk_bytes: int | None = None
    transitions: TransitionSeconds | None = None
    """The seconds that phase transitions take on top of the copies; None: none."""

    @classmethod
    def of(cls, source: Link | float | str | os.PathLike[str]) -> Link:
        """A link as it is, one with the same rate each way (bytes a second, or text such as
        "50GB"), or the one in a file of `placement doctor --json`.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a file, or the rate is not positive.
        """
        if isinstance(source, Link):
            return source
        if isinstance(source, str):
            with contextlib.suppress(ValueError):
                source = parse_bytes(source)
        if isinstance(source, (int, float)):
            if source <= 0:
                raise ValueError(
                    f"link: {source} bytes a second is no rate; write one such as 50GB"
                )
            return cls(to_device_bytes_per_second=source, to_host_bytes_per_second=source)
        path = Path(source)
        advice = "write one with: placement doctor --json > doctor.json"
        try:
            measured: Any = json.loads(path.read_text(encoding="utf-8"))
            names = ("free_bytes", "chunk_bytes", "transitions")
            return cls(**measured["link"], **{name: measured.get(name) for name in names})
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no file {path}; {advice}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} has no link with rates; {advice} ({type(error).__name__}: {error})"
            ) from error

    def seconds_beside(
        self, loaded_bytes: int, offloaded_bytes: int, skipped_bytes: int, early_bytes: int
    ) -> float:
        """The seconds that a phase transition takes beside its copies. `early_bytes`: the part of
        `loaded_bytes` that came before it."""
        beside = self.transitions
        if beside is None:
            return 0.0
        if not (loaded_bytes or offloaded_bytes or skipped_bytes):
            return beside.alone
        # memory goes back while the bytes that come are copied
        loading_seconds = (loaded_bytes - early_bytes) / self.to_device_bytes_per_second
        skipping_seconds = max(0.0, skipped_bytes * beside.skipped_byte - loading_seconds)
        return (
            beside.moving
            + loaded_bytes * beside.loaded_byte
            + offloaded_bytes * beside.offloaded_byte
            + skipping_seconds
        )

    def seconds_beside_steps(self, streamed_bytes: int) -> float:
        """The seconds that the streamed steps of optimizers take beside their copies."""
        return 0.0 if self.transitions is None else streamed_bytes * self.transitions.streamed_byte


class HandleForecast(Frozen):
    """One handle of a forecast, in the steady state."""

    name: str
    num_bytes: int
    """Device bytes that it needs while it is on the device."""
    host_bytes: int
    """Host bytes of its host copy; of an engine, those of its mirror: the copy of its weights that
    it keeps by itself."""


class PhaseForecast(Frozen):
    """One phase, and the phase transition at its beginning. The numbers are those of one rank."""

    phase: str
    only: tuple[str, ...] | None = None
    fits: bool
    """Whether the manager would open the phase. If not, its handles stay as they are in the phase
    before."""
    problem: str = ""
    """Why the policy gives no plan; empty if it gives one."""
    wanted_bytes: int
    """Device bytes that the plan needs."""
    over_bytes: int = 0
    """Bytes by which it misses the budget; 0 if it fits."""
    device_bytes: int
    """Device bytes that the handles hold in the phase."""
    handle_bytes: dict[str, int]
    states: dict[str, State]
    gradient_bytes: int = 0
    """Bytes of the gradients during the phase. They lie in torch's own memory, beside the
    budget."""
    loaded_bytes: int = 0
    offloaded_bytes: int = 0
    skipped_bytes: int = 0
    """Bytes that leave the device without a copy, because the host copy has them."""
    prefetched_bytes: int = 0
    """The part of `loaded_bytes` that came early: its copies began while the phase before
    computed."""
    streamed_bytes: int = 0
    """The part of `loaded_bytes` and `offloaded_bytes` together that the steps of optimizers copy
    (`optimizer_in="streamed"`)."""
    host_bytes: int
    """Host bytes of the host copies."""
    stall_seconds: float | None = None
    """How long the moves take and streamed steps keep the link busy; None if the link is not
    known."""
    work_seconds: float | None = None
    """The given duration of the work itself; None if it was not given."""


class Forecast(Frozen):
    """The bytes and the seconds of a job's phases, on one rank, under one policy."""

    policy: str
    budget_bytes: int | None
    """Device bytes that the handles may hold together; None: no limit was given."""
    phases: tuple[PhaseForecast, ...]
    """One cycle in the steady state; the last entry is the phase "idle", outside all others."""
    first_phases: tuple[PhaseForecast, ...]
    """The first cycle, in which optimizer state is created."""
    handles: tuple[HandleForecast, ...]
    peak_bytes: int
    """The most device bytes that the handles hold together."""
    host_bytes: int
    """The most host bytes of the host copies. A node needs as many for each of its ranks."""
    fits: bool
    """Whether every registration and every phase fits, the first cycle included."""
    over_bytes: int = 0
    """Bytes by which the largest phase misses the budget."""
    stall_seconds: float | None
    """How long the moves of all `phases` take together; None if the link is not known."""
    loaded_bytes: int
    offloaded_bytes: int
    skipped_bytes: int
    notes: tuple[str, ...] = ()
    """Further sentences for an operator."""

    def phase(self, name: str) -> PhaseForecast:
        """The first phase of this name.

        Raises:
            KeyError: there is none.
        """
        for phase in self.phases:
            if phase.phase == name:
                return phase
        raise KeyError(f"no phase {name!r}; there are {', '.join(p.phase for p in self.phases)}")
