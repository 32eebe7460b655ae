"""From a simulation to a forecast: run the steps until they repeat, and add up what they cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from placement.core.states import IDLE, OwnPhases, Policy, State
from placement.forecasting.host_limit import DiskUse, HostLimit
from placement.forecasting.link import Link
from placement.forecasting.report import Forecast, HandleForecast, PhaseForecast
from placement.forecasting.streamed import StepCounts, streamed_steps
from placement.planning.simulated_handles import Moved, SimulatedHandle
from placement.planning.simulation import SimulatedPhase, Simulation, Step

_MOST_CYCLES = 8
"""A policy that has not settled after so many steps is shown as it is then."""
_NO_LIMIT = 1 << 62
"""The budget in bytes where none is given."""


@runtime_checkable
class _Trained(Protocol):
    """A handle with gradients in torch's own memory."""

    @property
    def training_bytes(self) -> int: ...


class Costs:
    """The known facts about time: the link's rates, and the seconds of work in each phase.

    Args:
        work_seconds: by the name of the phase.
        counts: the steps of optimizers in each phase.
    """

    def __init__(self, link: Link | None, work_seconds: Mapping[str, float] | None = None, counts: StepCounts | None = None) -> None:
        self.link = link
        self.counts = counts or StepCounts()
        self.work_seconds = dict(work_seconds or {})
        for phase, seconds in self.work_seconds.items():
            if not 0 <= seconds < math.inf:
                raise ValueError(f"the work seconds of phase {phase!r} must be 0 or more, not {seconds}")

    def arriving_bytes(self, phase: str) -> int:
        """How many bytes can arrive while a phase computes; 0 where its seconds or the link are not known."""
        return 0 if self.link is None else int(self.work_seconds.get(phase, 0) * self.link.to_device_bytes_per_second)

    def stall_seconds(self, step: Step, handles: Iterable[SimulatedHandle]) -> float | None:
        """How long the moves of a phase transition take.

        Engines that place their own memory leave before all others move, and come after. All others move at once, both ways. What the
        link's owner has measured beside the copies comes on top.
        """
        if self.link is None:
            return None
        apart = {handle.name for handle in handles if handle.moves_apart}
        engines = Moved.total(moved for name, moved in step.moved.items() if name in apart)
        others = Moved.total(moved for name, moved in step.moved.items() if name not in apart)
        to_host_bytes = others.offloaded_bytes - others.saved_bytes + others.late_bytes
        to_device_bytes = others.loaded_bytes - others.prefetched_bytes
        both = self.link.seconds(to_device_bytes, to_host_bytes)
        both += self.link.seconds_beside(others.loaded_bytes, others.offloaded_bytes, others.skipped_bytes)  # early ones are mapped, too
        return self.link.seconds(0, engines.offloaded_bytes) + both + self.link.seconds(engines.loaded_bytes, 0)


def in_the_steady_state(
    policy: Policy,
    handles: Sequence[SimulatedHandle],
    cycle: Sequence[SimulatedPhase],
    *,
    budget_bytes: int | None,
    costs: Costs,
    worker_role: str,
    own_phases: OwnPhases | None,
    ranks_per_node: int,
    host_limit_bytes: int | None = None,
    notes: Sequence[str] = (),
) -> Forecast:
    """The forecast of a step that is repeated: its first run and, once two runs are alike, the steady one.

    Args:
        host_limit_bytes: the limit on host memory beyond which host copies are on disk; None: all are in host memory.

    Raises:
        PhaseError: a phase's `only` names a handle that there is not.
    """
    simulation = Simulation(policy, handles, _limit(budget_bytes), worker_role, own_phases, costs.arriving_bytes)
    host = None if host_limit_bytes is None else HostLimit(host_limit_bytes)
    steps, refused = _registered(simulation, host)
    of_phase = _row_maker(handles, costs)
    cycles: list[list[Step]] = []
    rows: list[tuple[PhaseForecast, ...]] = []
    while len(cycles) < 2 or ((cycles[-1], rows[-1]) != (cycles[-2], rows[-2]) and len(cycles) < _MOST_CYCLES):
        cycles.append([])
        found = []
        for phase in (*cycle, SimulatedPhase(IDLE)):
            step, use = _follow(simulation.enter(phase), host)
            cycles[-1].append(step)
            found.append(of_phase(step, use))  # before the next phase transition changes the handles
        rows.append(tuple(found))
        steps += cycles[-1]
    notes = [*notes, *_over_the_limit([*rows[0], *rows[-1]], host_limit_bytes)]
    return _summed_up(policy.name, budget_bytes, rows[-1], steps, handles, ranks_per_node, first=rows[0], notes=notes, refused=refused)


def _limit(budget_bytes: int | None) -> int:
    return _NO_LIMIT if budget_bytes is None else budget_bytes


def _over_the_limit(phases: Sequence[PhaseForecast], limit_bytes: int | None) -> list[str]:
    over = [] if limit_bytes is None else [each for each in phases if each.host_bytes > limit_bytes]
    if not over:
        return []
    names, most = ", ".join(dict.fromkeys(each.phase for each in over)), max(each.host_bytes for each in over)
    return [f"in {names} so much is needed at once that host memory goes over the limit, up to {most:,} bytes"]


def _registered(simulation: Simulation, host: HostLimit | None) -> tuple[list[Step], list[str]]:
    """Register the handles one after the other. Returns also why the limit on host memory refuses some of them."""
    handles, steps, registering = simulation.handles, [], simulation.register()
    refused = []
    for handle in handles:
        if host is not None:
            refused.append(host.admit(handle))
        steps.append(_follow(next(registering), host)[0])
    return steps, [each for each in refused if each]


def _follow(step: Step, host: HostLimit | None) -> tuple[Step, DiskUse]:
    return (step, DiskUse(step.host_bytes, 0)) if host is None else host.follow(step)


def once(
    policy: Policy,
    handles: Sequence[SimulatedHandle],
    phases: Sequence[tuple[SimulatedPhase, float]],
    *,
    budget_bytes: int | None,
    link: Link | None,
    worker_role: str,
    own_phases: OwnPhases | None,
    notes: Sequence[str] = (),
) -> Forecast:
    """The forecast of a run that is given phase by phase, each with the seconds of its work."""
    seconds = 0.0  # of the work that ends now

    def arriving_bytes(_: str) -> int:
        return 0 if link is None else int(seconds * link.to_device_bytes_per_second)

    simulation = Simulation(policy, handles, _limit(budget_bytes), worker_role, own_phases, arriving_bytes)
    costs = Costs(link)
    of_phase = _row_maker(handles, costs)
    steps = [*simulation.register()]
    rows = []
    for phase, work_seconds in phases:
        steps.append(simulation.enter(phase))
        seconds = work_seconds
        rows.append(of_phase(*_follow(steps[-1], None), work_seconds))
    return _summed_up(policy.name, budget_bytes, tuple(rows), steps, handles, 1, notes=notes)


class _RowMaker(Protocol):
    def __call__(self, step: Step, use: DiskUse, work_seconds: float | None = None) -> PhaseForecast: ...


def _row_maker(handles: Sequence[SimulatedHandle], costs: Costs) -> _RowMaker:
    def of_phase(step: Step, use: DiskUse, work_seconds: float | None = None) -> PhaseForecast:
        if work_seconds is None:
            work_seconds = costs.work_seconds.get(step.phase.name)
        steps = streamed_steps(step, handles, costs.counts, costs.link)
        stall = costs.stall_seconds(step, handles)
        moved = Moved.total(step.moved.values())
        training = [each for each in handles if step.states[each.name] is State.TRAINING]
        return PhaseForecast(
            phase=step.phase.name,
            only=step.phase.only,
            fits=not step.is_refused,
            problem=step.problem,
            wanted_bytes=step.device_bytes,
            over_bytes=step.over_bytes,
            device_bytes=step.held_bytes,
            handle_bytes=dict(step.held),
            states=dict(step.states),
            gradient_bytes=sum(each.training_bytes for each in training if isinstance(each, _Trained)),
            loaded_bytes=moved.loaded_bytes + steps.to_device_bytes,
            offloaded_bytes=moved.offloaded_bytes + steps.to_host_bytes,
            streamed_bytes=steps.to_device_bytes + steps.to_host_bytes,
            skipped_bytes=moved.skipped_bytes,
            prefetched_bytes=moved.prefetched_bytes,
            host_bytes=use.host_bytes,
            disk_bytes=use.disk_bytes,
            disk_written_bytes=use.written_bytes,
            disk_read_bytes=use.read_bytes,
            disk_waited_bytes=use.waited_bytes,
            stall_seconds=None if stall is None else stall + steps.seconds,
            work_seconds=work_seconds,
        )

    return of_phase


def _summed_up(
    policy: str,
    budget_bytes: int | None,
    phases: tuple[PhaseForecast, ...],
    steps: Sequence[Step],
    handles: Sequence[SimulatedHandle],
    ranks_per_node: int,
    *,
    first: tuple[PhaseForecast, ...] = (),
    notes: Sequence[str] = (),
    refused: Sequence[str] = (),
) -> Forecast:
    stalls = [each.stall_seconds for each in phases if each.stall_seconds is not None]
    found = tuple(_handle(each, ranks_per_node) for each in handles)
    shared = [each for each in handles if each.is_shared]
    shared_bytes = sum(each.host_bytes for each in shared)
    host_bytes = max(each.host_bytes for each in (*first, *phases))
    disk_bytes = max(each.disk_bytes for each in (*first, *phases))
    return Forecast(
        policy=policy,
        budget_bytes=budget_bytes,
        phases=phases,
        first_phases=first,
        handles=found,
        peak_bytes=max(step.held_bytes for step in steps),
        host_bytes=host_bytes,
        node_host_bytes=(host_bytes - shared_bytes) * ranks_per_node + sum(each.host_bytes_of_all for each in shared),
        disk_bytes=disk_bytes,
        node_disk_bytes=disk_bytes * ranks_per_node,
        fits=not (refused or any(step.is_refused for step in steps)),
        refused_registrations=tuple(refused),
        over_bytes=max(step.over_bytes for step in steps),
        stall_seconds=sum(stalls) if len(stalls) == len(phases) else None,
        loaded_bytes=sum(each.loaded_bytes for each in phases),
        offloaded_bytes=sum(each.offloaded_bytes for each in phases),
        skipped_bytes=sum(each.skipped_bytes for each in phases),
        notes=tuple(notes),
    )


def _handle(handle: SimulatedHandle, ranks_per_node: int) -> HandleForecast:
    facts = handle.facts
    return HandleForecast(
        name=facts.name,
        kind=facts.kind,
        role=facts.role,
        readonly=facts.readonly,
        owners=facts.owners,
        num_bytes=handle.num_bytes,
        host_bytes=handle.host_bytes,
        node_host_bytes=handle.host_bytes_of_all if handle.is_shared else handle.host_bytes * ranks_per_node,
    )


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
