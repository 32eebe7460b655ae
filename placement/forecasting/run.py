"""Run the phases of a job through a real manager on a device of sizes, and note what each phase transition holds, moves and takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from placement.core.errors import DeviceMemoryError, PhaseError, PlacementError
from placement.core.states import IDLE, HandleView, OwnPhases, Plan, Policy, State, View
from placement.forecasting.device import SizesDevice
from placement.forecasting.host_limit import DiskUse, HostLimit, HostUse
from placement.forecasting.link import Link
from placement.forecasting.objects import Object, SizedEngine, SizedModule, SizedOptimizer, empty
from placement.forecasting.report import Forecast, HandleForecast, PhaseForecast
from placement.manager import Manager
from placement.planning import plan_checks
from placement.planning.budget import check_fits

NESTED = {"optimizer_step": "train"}
"""Phases that workers open inside another one."""
_WEIGHT_SYNC = "weight_sync"
_MOST_CYCLES = 8
"""A policy that has not settled after so many steps is shown as it is then."""
_NO_LIMIT = 1 << 62
"""The budget in bytes where none is given."""


class Phase(NamedTuple):
    """One phase of a run."""

    name: str
    only: tuple[str, ...] | None = None
    """The handles for which the phase is, as in `manager.phase(name, only=...)`; None: for all."""


@dataclass(frozen=True)
class Costs:
    """The known facts about time and training.

    Raises:
        ValueError: a number is negative.
    """

    link: Link | None = None
    work_seconds: Mapping[str, float] = field(default_factory=dict)
    """The seconds of work in each phase, by its name."""
    steps: Mapping[str, int] = field(default_factory=dict)
    """The steps of optimizers in each phase, by its name."""

    def __post_init__(self) -> None:
        for phase, seconds in self.work_seconds.items():
            if not 0 <= seconds < math.inf:
                raise ValueError(f"the work seconds of phase {phase!r} must be 0 or more, not {seconds}")
        for phase, count in self.steps.items():
            if count < 0:
                raise ValueError(f"the number of steps in phase {phase!r} must be 0 or more, not {count}")


class Moved(NamedTuple):
    """Bytes that one handle, or several together, have moved."""

    loaded_bytes: int = 0
    offloaded_bytes: int = 0
    skipped_bytes: int = 0
    """Bytes that left the device without a copy, because the host copy has them."""
    prefetched_bytes: int = 0
    """The part of `loaded_bytes` that had arrived before."""

    @classmethod
    def total(cls, each: Iterable[Moved]) -> Moved:
        return cls(*map(sum, zip(cls(), *each, strict=True)))


class Asked:
    """A policy, with what it was shown and has answered last in each phase."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name
        self.answers: dict[str, tuple[View, Plan]] = {}
        self.is_registering = True
        """Whether the handles are still being registered. Meanwhile a handle for which there is no plan, or no room, is off the device."""
        self.unfit: list[PlacementError] = []
        """Why there is none."""

    def plan(self, view: View) -> Plan:
        if not view.budget_bytes:  # what is needed in any case
            return self._policy.plan(view)
        if self.is_registering:
            return self._plan_of_a_registration(view)
        plan = self._policy.plan(view)
        if isinstance(plan, Plan):
            self.answers[view.phase] = view, plan
        return plan

    def _plan_of_a_registration(self, view: View) -> Plan:
        try:
            plan = plan_checks.ask(self._policy, view)
            self.answers[view.phase] = view, plan
            check_fits(view, plan)
        except PlacementError as error:
            self.unfit.append(error.with_traceback(None))
            plan = Plan(dict.fromkeys(view.handles, State.CPU_OFFLOADED))
        return plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


class Run:
    """One worker that only has sizes, under a real manager. It holds the only references to its objects.

    Args:
        objects: in registration order.
        phases: the names of all phases that come.
        host_limit_bytes: the limit on host memory beyond which host copies are on disk; None: all are in host memory.
    """

    def __init__(
        self,
        policy: Policy,
        device: SizesDevice,
        objects: Iterable[Object],
        phases: Iterable[str],
        *,
        costs: Costs,
        budget_bytes: int | None,
        worker_role: str = "hybrid",
        own_phases: OwnPhases | None = None,
        host_limit_bytes: int | None = None,
    ) -> None:
        self.asked = Asked(policy)
        self.budget_bytes = _NO_LIMIT if budget_bytes is None else budget_bytes
        self.refused_registrations: list[str] = []
        """Why the limit on host memory refuses registrations."""
        self._costs = costs
        self._outer = {NESTED[name] for name in phases if name in NESTED}
        self._device = device
        self._objects: dict[str, Object] = {}
        self._limit = None if host_limit_bytes is None else HostLimit(host_limit_bytes)
        self._open: list[str] = []
        given: dict[str, Any] = {"worker_role": worker_role, "phases": dict(own_phases or {}), "nan_check": False}
        self._manager = Manager(device=device, policy=self.asked, budget_bytes=max(1, self.budget_bytes), **given)
        for each in objects:
            self._register(each)
        self.asked.is_registering = False

    def close(self) -> None:
        """End the run."""
        while self._open:
            self._try_to_enter(Phase(IDLE))
        empty(self._objects.values())
        self._manager.close()

    @property
    def peak_bytes(self) -> int:
        """The most device bytes that the handles have held together."""
        return self._manager.snapshot().peak_bytes

    def views(self) -> dict[str, HandleView]:
        """The handles as a policy sees them now."""
        return {name: plan_checks.handle_view(handle) for name, handle in self._manager.handles.items()}

    def handles(self, ranks_per_node: int) -> tuple[HandleForecast, ...]:
        """The handles as they are now."""
        found = []
        for name, view in self.views().items():
            each, nbytes = self._objects[name], self._manager.handles[name].host_bytes
            own = each.own(nbytes) if each.is_shared else nbytes
            found.append(
                HandleForecast(
                    name=name,
                    kind=view.kind,
                    role=view.role,
                    readonly=view.readonly,
                    owners=view.owners,
                    num_bytes=view.num_bytes,
                    host_bytes=own,
                    node_host_bytes=nbytes if each.is_shared else nbytes * ranks_per_node,
                )
            )
        return tuple(found)

    # --- registering

    def _register(self, each: Object) -> None:
        self._objects[each.name] = each
        self._manager.register(each.name, each.to_register(), role=each.role, readonly=each.readonly, external=each.external)
        if isinstance(each.target, SizedModule) and each.part != (1, 1):
            for tensor in each.target.tensors():
                self._device.share(tensor, *each.part)
        if self._limit is not None:
            view = self.views()[each.name]
            refused = self._limit.admit(each.name, self._host_use(view, Moved()), view.owners)
            self.refused_registrations += [refused] if refused else []
            self._follow(IDLE, {})

    # --- phases

    def go(self, phase: Phase, work_seconds: float | None = None) -> PhaseForecast:
        """End the open phase, begin another one, and do its work; "idle" leaves all.

        Args:
            work_seconds: the seconds of work; None: as the costs say.

        Raises:
            PhaseError: `only` names a handle that there is not.
        """
        self._fill_engines()
        before, began = self._counters(), self._device.seconds
        problem = self._try_to_enter(phase)
        stall, moved, views = self._device.seconds - began, self._moved_since(before), self.views()
        is_refused = problem is not None
        again, use = self._follow(phase.name, moved) if not is_refused else (0, self._stay())
        if work_seconds is None:
            work_seconds = self._costs.work_seconds.get(phase.name)
        before = self._counters()
        waited, gradient_bytes = self._work(phase, work_seconds or 0.0, views) if not is_refused else (0.0, 0)
        streamed, total = Moved.total(self._moved_since(before).values()), Moved.total(moved.values())
        link, wanted_bytes = self._costs.link, self._wanted_bytes(problem, phase.name, views)
        if link is not None:
            stall += waited + again / link.to_host_bytes_per_second
            stall += link.seconds_beside(*Moved.total(each for name, each in moved.items() if not self._is_engine(name))[:3])
        return PhaseForecast(
            phase=phase.name,
            only=phase.only,
            fits=not is_refused,
            problem="" if problem is None or isinstance(problem, DeviceMemoryError) else f"{type(problem).__name__}: {problem}",
            wanted_bytes=wanted_bytes,
            over_bytes=max(0, wanted_bytes - self.budget_bytes),
            device_bytes=sum(0 if view.external else view.resident_bytes for view in views.values()),
            handle_bytes={name: 0 if view.external else view.resident_bytes for name, view in views.items()},
            states={name: view.state for name, view in views.items()},
            gradient_bytes=gradient_bytes,
            loaded_bytes=total.loaded_bytes + streamed.loaded_bytes,
            offloaded_bytes=total.offloaded_bytes + again + streamed.offloaded_bytes,
            streamed_bytes=streamed.loaded_bytes + streamed.offloaded_bytes,
            skipped_bytes=total.skipped_bytes - again,
            prefetched_bytes=total.prefetched_bytes,
            host_bytes=use.host_bytes,
            disk_bytes=use.disk_bytes,
            disk_written_bytes=use.written_bytes,
            disk_read_bytes=use.read_bytes,
            disk_waited_bytes=use.waited_bytes,
            stall_seconds=None if link is None else round(stall, 9),
            work_seconds=work_seconds,
        )

    def _try_to_enter(self, phase: Phase) -> PlacementError | None:
        """Enter a phase. Returns why the manager refuses it; then the phase before goes on."""
        try:
            self._enter(phase)
        except PhaseError:
            raise
        except PlacementError as error:
            return error.with_traceback(None)
        return None

    def _enter(self, phase: Phase) -> None:
        if phase.name == IDLE:
            while self._open:
                self._open.pop()
                self._manager.leave()
            return
        is_nested = self._open == [NESTED.get(phase.name)]
        while len(self._open) > 1:
            self._open.pop()
            self._manager.leave()
        if is_nested or not self._open:
            self._manager.enter(phase.name, only=phase.only)
            self._open.append(phase.name)
        else:
            self._manager.switch(phase.name, only=phase.only)
            self._open = [phase.name]

    def _wanted_bytes(self, problem: PlacementError | None, phase: str, views: Mapping[str, HandleView]) -> int:
        """Device bytes that the plan of a phase needs, or needed where it was refused."""
        if isinstance(problem, DeviceMemoryError) and problem.wanted_bytes is not None:
            return problem.wanted_bytes
        if problem is not None:
            return 0
        wanted = 0
        for view in views.values():
            is_stepped = view.streaming and view.state is State.TRAINING
            on_device = view.state is not State.CPU_OFFLOADED and not view.streaming and not view.external
            wanted += view.window_bytes * is_stepped + (view.resident_bytes if view.tags else view.num_bytes) * on_device
        return wanted

    def _fill_engines(self) -> None:
        """Let every engine have valid weights: a weight sync fills those that it discards, whatever phase does that in this cycle."""
        for each in self._objects.values():
            if isinstance(each.target, SizedEngine):
                each.target.residency.stale = None

    def _is_engine(self, name: str) -> bool:
        return isinstance(self._objects[name].target, SizedEngine)

    # --- work

    def _work(self, phase: Phase, seconds: float, views: Mapping[str, HandleView]) -> tuple[float, int]:
        """Do the work of a phase. Returns the seconds that steps wait for the link, and the bytes of gradients."""
        training = [self._objects[name] for name, view in views.items() if view.state is State.TRAINING]
        count = self._costs.steps.get(phase.name, 0 if phase.name in self._outer else 1) if training else 0
        if not count:
            self._device.work(seconds)
        waited = 0.0
        for _ in range(count):
            self._device.work(seconds / count)
            began = self._device.seconds
            self._step(training)
            waited += self._device.seconds - began
        if phase.name == _WEIGHT_SYNC:
            for name, view in views.items():
                each = self._objects[name].target
                if view.role == "rollout" and isinstance(each, SizedModule) and not view.readonly and view.resident_bytes:
                    self._change(each.parameters())
        return waited, sum(each.gradient_bytes for each in training)

    def _step(self, training: Sequence[Object]) -> None:
        """One training step: gradients come, optimizers step, and values change."""
        modules = [each for each in training if isinstance(each.target, SizedModule)]
        optimizers = [each.target for each in training if isinstance(each.target, SizedOptimizer)]
        for each in modules:
            each.give_gradients()
        for optimizer in optimizers:
            optimizer.step()
            self._change(optimizer.tensors())
        for each in modules:
            assert isinstance(each.target, SizedModule)
            self._change(each.target.trained())
            each.clear_gradients()

    def _change(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            self._device.change(tensor)

    # --- counting

    def _counters(self) -> dict[str, Moved]:
        snapshots = self._manager.snapshot().handles
        return {each.name: Moved(each.loaded_bytes, each.offloaded_bytes, each.skipped_bytes, each.prefetch_used_bytes) for each in snapshots}

    def _moved_since(self, before: Mapping[str, Moved]) -> dict[str, Moved]:
        """The bytes that each handle has moved since then over this rank's link."""
        now = self._counters()
        return {
            name: Moved(*(self._objects[name].own(after - then) for after, then in zip(now[name], before[name], strict=True)))
            for name in now
        }

    def _follow(self, phase: str, moved: Mapping[str, Moved]) -> tuple[int, DiskUse]:
        if self._limit is None:
            return 0, self._stay()
        return self._limit.follow(phase, {name: self._host_use(view, moved.get(name, Moved())) for name, view in self.views().items()})

    def _stay(self) -> DiskUse:
        if self._limit is not None:
            return self._limit.stay()
        return DiskUse(sum(each.host_bytes for each in self.handles(1)))

    def _host_use(self, view: HandleView, moved: Moved) -> HostUse:
        each, handle = self._objects[view.name], self._manager.handles[view.name]
        counters = self._counters()[view.name]
        return HostUse(
            nbytes=each.own(handle.host_bytes) if each.is_shared else handle.host_bytes,
            is_readonly=view.readonly,
            is_fixed=each.is_shared or (view.kind == "optimizer" and not (counters.loaded_bytes or counters.offloaded_bytes)),
            on_device=view.state is not State.CPU_OFFLOADED and not view.streaming,
            has_early=bool(view.prefetched_bytes),
            is_streamed=view.streaming,
            is_stepped=view.streaming and view.state is State.TRAINING,
            offloaded_bytes=moved.offloaded_bytes,
            skipped_bytes=moved.skipped_bytes,
        )


def in_the_steady_state(run: Run, cycle: Sequence[Phase], *, ranks_per_node: int, notes: Sequence[str], limit_bytes: int | None) -> Forecast:
    """The forecast of a step that is repeated: its first run and, once two runs are alike, the steady one.

    Raises:
        PhaseError: a phase's `only` names a handle that there is not.
    """
    cycles: list[tuple[PhaseForecast, ...]] = []
    while len(cycles) < 2 or (cycles[-1] != cycles[-2] and len(cycles) < _MOST_CYCLES):
        cycles.append(tuple([run.go(phase) for phase in (*cycle, Phase(IDLE))]))
    notes = [*notes, *_over_the_limit([*cycles[0], *cycles[-1]], limit_bytes)]
    over = [each for phases in cycles for each in phases]
    return summed_up(run, cycles[-1], over, ranks_per_node, first=cycles[0], notes=notes)


def _over_the_limit(phases: Sequence[PhaseForecast], limit_bytes: int | None) -> list[str]:
    over = [] if limit_bytes is None else [each for each in phases if each.host_bytes > limit_bytes]
    if not over:
        return []
    names, most = ", ".join(dict.fromkeys(each.phase for each in over)), max(each.host_bytes for each in over)
    return [f"in {names} so much is needed at once that host memory goes over the limit, up to {most:,} bytes"]


def summed_up(
    run: Run,
    phases: tuple[PhaseForecast, ...],
    everything: Sequence[PhaseForecast],
    ranks_per_node: int,
    *,
    first: tuple[PhaseForecast, ...] = (),
    notes: Sequence[str] = (),
) -> Forecast:
    """The forecast of these phases.

    Args:
        everything: all phases of the run, which must all fit.
    """
    stalls = [each.stall_seconds for each in phases if each.stall_seconds is not None]
    handles = run.handles(ranks_per_node)
    shared = [each for each in handles if each.host_bytes * ranks_per_node != each.node_host_bytes]
    host_bytes = max(each.host_bytes for each in (*first, *phases))
    disk_bytes = max(each.disk_bytes for each in (*first, *phases))
    unfit = [error.wanted_bytes or 0 for error in run.asked.unfit if isinstance(error, DeviceMemoryError)]
    return Forecast(
        policy=run.asked.name,
        budget_bytes=None if run.budget_bytes == _NO_LIMIT else run.budget_bytes,
        phases=phases,
        first_phases=first,
        handles=handles,
        peak_bytes=run.peak_bytes,
        host_bytes=host_bytes,
        node_host_bytes=(host_bytes - sum(each.host_bytes for each in shared)) * ranks_per_node + sum(each.node_host_bytes for each in shared),
        disk_bytes=disk_bytes,
        node_disk_bytes=disk_bytes * ranks_per_node,
        fits=not run.refused_registrations and not run.asked.unfit and all(each.fits for each in everything),
        refused_registrations=tuple(run.refused_registrations),
        over_bytes=max([0, *(each.over_bytes for each in everything), *(wanted - run.budget_bytes for wanted in unfit)]),
        stall_seconds=sum(stalls) if len(stalls) == len(phases) else None,
        loaded_bytes=sum(each.loaded_bytes for each in phases),
        offloaded_bytes=sum(each.offloaded_bytes for each in phases),
        skipped_bytes=sum(each.skipped_bytes for each in phases),
        notes=tuple(notes),
    )
