"""A forecast as data: immutable, and JSON by `model_dump_json()`."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from placement.core.states import State


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HandleForecast(_Frozen):
    """One handle of a forecast, in the steady state."""

    name: str
    kind: str
    role: str | None
    readonly: bool
    owners: tuple[str, ...] = ()
    num_bytes: int
    """Device bytes that it needs while it is on the device."""
    host_bytes: int
    """Host bytes of this rank's host copy."""
    node_host_bytes: int
    """Host bytes of the host copies of all ranks of a node."""


class PhaseForecast(_Frozen):
    """One phase, and the phase transition at its beginning. The numbers are those of one rank."""

    phase: str
    only: tuple[str, ...] | None = None
    fits: bool
    """Whether the manager would open the phase. If not, its handles stay as they are in the phase before."""
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
    """Bytes of the gradients during the phase. They lie in torch's own memory, beside the budget."""
    loaded_bytes: int = 0
    offloaded_bytes: int = 0
    skipped_bytes: int = 0
    """Bytes that leave the device without a copy, because the host copy has them."""
    prefetched_bytes: int = 0
    """The part of `loaded_bytes` that came early: its copies began while the phase before computed."""
    streamed_bytes: int = 0
    """The part of `loaded_bytes` and `offloaded_bytes` together that the steps of optimizers copy (`optimizer_in="streamed"`)."""
    host_bytes: int
    """Host bytes of this rank's host copies that are in host memory, at their most."""
    disk_bytes: int = 0
    """Bytes of this rank's files on disk."""
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    disk_waited_bytes: int = 0
    """The part of `disk_read_bytes` that the phase transition waits for. The rest is read while phases compute."""
    stall_seconds: float | None = None
    """How long the moves take and streamed steps keep the link busy, without waits for the disk; None if the link is not known."""
    work_seconds: float | None = None
    """The given duration of the work itself; None if it was not given."""


class Forecast(_Frozen):
    """The bytes and the seconds of a job's phases, on one rank, under one policy."""

    policy: str
    budget_bytes: int | None
    """Device bytes that the handles may hold together; None: no limit was given."""
    phases: tuple[PhaseForecast, ...]
    """One cycle in the steady state; the last entry is the phase "idle", outside all others. For a recording: the whole run."""
    first_phases: tuple[PhaseForecast, ...] = ()
    """The first cycle, in which optimizer state is created."""
    handles: tuple[HandleForecast, ...]
    peak_bytes: int
    """The most device bytes that the handles hold together."""
    host_bytes: int
    """The most host bytes of this rank's host copies."""
    node_host_bytes: int
    """Host bytes of the host copies of all ranks of a node."""
    disk_bytes: int = 0
    """The most bytes of this rank's files on disk."""
    node_disk_bytes: int = 0
    """Bytes of the files of all ranks of a node."""
    fits: bool
    """Whether every registration and every phase fits, the first cycle included."""
    refused_registrations: tuple[str, ...] = ()
    """Why the limit on host memory refuses registrations, a sentence for each; empty where it refuses none."""
    over_bytes: int = 0
    """Bytes by which the largest phase misses the budget."""
    stall_seconds: float | None
    """How long the moves of all `phases` take together; None if the link is not known."""
    loaded_bytes: int
    offloaded_bytes: int
    skipped_bytes: int
    notes: tuple[str, ...] = ()
    """Sentences on what an operator should know besides."""

    def phase(self, name: str) -> PhaseForecast:
        """The first phase of this name.

        Raises:
            KeyError: there is none.
        """
        for each in self.phases:
            if each.phase == name:
                return each
        raise KeyError(f"no phase {name!r}; there are {', '.join(dict.fromkeys(each.phase for each in self.phases))}")


def by_phase(forecast: Forecast) -> Forecast:
    """The same forecast with one entry for all runs of a phase: bytes and seconds added up, sizes at their most."""
    groups: dict[tuple[str, tuple[str, ...] | None], list[PhaseForecast]] = {}
    for each in forecast.phases:
        groups.setdefault((each.phase, each.only), []).append(each)
    return forecast.model_copy(update={"phases": tuple(_together(group) for group in groups.values())})


def _together(group: Sequence[PhaseForecast]) -> PhaseForecast:
    worst = max(group, key=lambda each: (not each.fits, each.over_bytes, each.device_bytes))
    stalls = [each.stall_seconds for each in group if each.stall_seconds is not None]
    works = [each.work_seconds for each in group if each.work_seconds is not None]
    moved = ("loaded_bytes", "offloaded_bytes", "streamed_bytes", "skipped_bytes", "prefetched_bytes")
    added = (*moved, "disk_written_bytes", "disk_read_bytes", "disk_waited_bytes")
    sums = {name: sum(getattr(each, name) for each in group) for name in added}
    return worst.model_copy(
        update={**sums, "stall_seconds": sum(stalls) if stalls else None, "work_seconds": sum(works) if works else None}
    )
