"""Run the phases of a job through a real manager on a device of sizes, and note the bytes and the
seconds of each phase."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from placement.core.errors import DeviceMemoryError, PhaseError, PlacementError
from placement.core.states import IDLE, HandleView, Plan, Policy, State, View, bytes_under
from placement.forecasting.description import Forecast, HandleForecast, Phase, PhaseForecast
from placement.forecasting.device import (
    SizedEngine,
    SizedModule,
    SizedOptimizer,
    SizesDevice,
    sized,
)
from placement.forecasting.stand_ins import Rollout, module_without_bytes, optimizer_without_bytes
from placement.manager import Manager
from placement.planning.planner import ask_policy, check_fits, handle_view
from placement.registration.handle import Handle

_NESTED = {"optimizer_step": "train"}  # phases that workers open inside another one
_MOST_CYCLES = 8  # a policy that has not settled after so many steps is shown as it is then
_NO_LIMIT = 1 << 62  # the bytes where no budget is given


class Moved(NamedTuple):
    """Bytes that one handle, or several together, have moved: fields of `PhaseForecast`."""

    loaded_bytes: int = 0
    offloaded_bytes: int = 0
    skipped_bytes: int = 0
    prefetched_bytes: int = 0

    @classmethod
    def total(cls, parts: Iterable[Moved]) -> Moved:
        return cls(*map(sum, zip(cls(), *parts, strict=True)))

    def since(self, before: Moved) -> Moved:
        return Moved(*map(operator.sub, self, before))


class Asked:
    """A policy. While handles are registered, they are off the device where it gives no plan, or
    one that does not fit."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name
        self.is_registering = True
        self.unfit: list[PlacementError] = []  # the errors of its plans meanwhile

    def plan(self, view: View) -> Plan:
        # without a budget it is asked for the needs of the phase alone
        if not self.is_registering or not view.budget_bytes:
            return self._policy.plan(view)
        try:
            plan = ask_policy(self._policy, view)
            check_fits(view, plan)
        except PlacementError as error:
            self.unfit.append(error.with_traceback(None))
            return view.total_plan({})
        return plan


class Run(contextlib.AbstractContextManager["Run"]):
    """A worker that only has sizes, under a real manager. `placement.forecast` makes it, and calls
    the worker's own function with it.

    `shards`: the ranks that share each parameter. `work_seconds` are by phase. The settings are the
    manager's `worker_role` and `phases`.
    """

    def __init__(
        self,
        policy: Policy,
        device: SizesDevice,
        *,
        shards: int = 1,
        budget_bytes: int | None,
        work_seconds: Mapping[str, float] | None = None,
        **settings: Any,
    ) -> None:
        self._asked = Asked(policy)
        self._budget_bytes = _NO_LIMIT if budget_bytes is None else budget_bytes
        self._work_seconds = dict(work_seconds or {})
        self._device = device
        self._shards = shards
        self._objects: dict[str, SizedModule | SizedOptimizer | SizedEngine] = {}
        # the parameter without bytes for each parameter of a registered module
        self._stand_ins: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        self._outer: set[str] = set()  # the phases whose optimizer step is in one inside them
        self._manager = Manager(
            device=device,
            policy=self._asked,
            budget_bytes=max(1, self._budget_bytes),
            **settings,
        )

    def register(
        self,
        name: str,
        target: torch.nn.Module | torch.optim.Optimizer | Rollout,
        *,
        role: str | None = None,
        owner: Handle | str | None = None,
        readonly: bool = False,
        external: bool = False,
        replicated: object = False,
    ) -> Handle:
        """Register an object as `Manager.register` does. A stand-in without bytes takes its place.

        Args:
            target: a module, best on the meta device; a torch optimizer over parameters of modules
                that are registered already; or a `Rollout`.
            replicated: ignored. The forecast is of a rank with a host copy of its own.

        Raises:
            ValueError: the module has no tensors or cannot be sharded, or the optimizer's state is
                not known without values.
            TypeError: the target is something else.
            RegistrationError: as `Manager.register`.
        """
        stand_in: SizedModule | SizedOptimizer | SizedEngine
        if isinstance(target, torch.nn.Module):
            stand_in, parameters = module_without_bytes(name, target, self._shards)
            # a module that is registered twice: an optimizer steps the one before it
            self._stand_ins |= parameters
        elif isinstance(target, torch.optim.Optimizer):
            stand_in = optimizer_without_bytes(name, target, self._stand_ins)
        elif isinstance(target, Rollout):
            stand_in = SizedEngine(self._device, target.tags, keeps_weights=target.keeps_weights)
        else:
            raise TypeError(
                f"{name!r} is an object of {type(target).__name__}; a forecast knows modules, "
                "torch optimizers and Rollout(...)"
            )
        handle = self._manager.register(
            name, stand_in, role=role, owner=owner, readonly=readonly, external=external
        )
        self._objects[name] = stand_in
        return handle

    def __exit__(self, *_: object) -> None:
        """End the run. Nothing may be handed back, because there are no values."""
        try:
            while self._manager.phase_name != IDLE:
                self._try_to_enter(Phase(IDLE))
        finally:
            self._stand_ins.clear()
            for stand_in in self._objects.values():
                if not isinstance(stand_in, SizedEngine):
                    stand_in.empty()
            self._manager.close()

    # --- the forecast

    def in_the_steady_state(self, cycle: Sequence[Phase], notes: Sequence[str]) -> Forecast:
        """The forecast of a step that is repeated: its first run and, once two runs are alike, the
        steady one. Raises PhaseError: a phase's `only` names a handle that there is not."""
        if not self._objects:
            raise ValueError("there is no handle to forecast; register at least one model")
        self._asked.is_registering = False
        self._counters = self._count()
        self._outer = {_NESTED[phase.name] for phase in cycle if phase.name in _NESTED}
        cycles = self._run_until_steady(cycle)
        first = cycles[0]
        phases = cycles[-1]
        stalls = [phase.stall_seconds for phase in phases if phase.stall_seconds is not None]
        all_phases = [*itertools.chain.from_iterable(cycles)]
        over_bytes = [phase.over_bytes for phase in all_phases]
        for error in self._asked.unfit:
            wanted_bytes = getattr(error, "wanted_bytes", None) or 0
            over_bytes.append(max(0, wanted_bytes - self._budget_bytes))
        return Forecast(
            policy=self._asked.name,
            budget_bytes=None if self._budget_bytes == _NO_LIMIT else self._budget_bytes,
            phases=phases,
            first_phases=first,
            handles=self._handles(),
            peak_bytes=self._manager.snapshot().peak_bytes,
            host_bytes=max(phase.host_bytes for phase in (*first, *phases)),
            fits=not self._asked.unfit and all(phase.fits for phase in all_phases),
            over_bytes=max(over_bytes),
            stall_seconds=sum(stalls) if len(stalls) == len(phases) else None,
            loaded_bytes=sum(phase.loaded_bytes for phase in phases),
            offloaded_bytes=sum(phase.offloaded_bytes for phase in phases),
            skipped_bytes=sum(phase.skipped_bytes for phase in phases),
            notes=tuple(notes),
        )

    def _run_until_steady(self, cycle: Sequence[Phase]) -> list[tuple[PhaseForecast, ...]]:
        """Run cycles until two are alike, two at least."""
        cycles = []
        for _ in range(_MOST_CYCLES):
            phases = [self._run_phase(phase) for phase in (*cycle, Phase(IDLE))]
            cycles.append(tuple(phases))
            if len(cycles) > 1 and cycles[-1] == cycles[-2]:
                break
        return cycles

    def _handles(self) -> tuple[HandleForecast, ...]:
        handles = []
        for name, view in self._views().items():
            host_bytes = self._manager.handles[name].host_bytes
            handles.append(
                HandleForecast(name=name, num_bytes=view.num_bytes, host_bytes=host_bytes)
            )
        return tuple(handles)

    # --- phases

    def _run_phase(self, phase: Phase) -> PhaseForecast:
        """End the open phase, begin another one, and do its work; "idle" leaves all."""
        for stand_in in self._objects.values():
            if isinstance(stand_in, SizedEngine):
                # a phase of this cycle fills the weights that it discards
                stand_in.residency.stale = None
        began = self._device.seconds
        problem = self._try_to_enter(phase)
        stall_seconds = self._device.seconds - began
        moved = self._moved()
        views = self._views()
        link = self._device.link
        if link is not None:
            stall_seconds += link.seconds_beside(*self._moved_by_manager(moved))
        work_seconds = self._work_seconds.get(phase.name)
        gradient_bytes = 0
        streamed = Moved()
        streamed_bytes = 0
        if problem is None:
            plan = self._manager._stack.phases.base_plan()
            wanted_bytes = sum(bytes_under(plan, view) for view in views.values())
            waited, gradient_bytes = self._work(phase.name, work_seconds or 0.0, views)
            stall_seconds += waited
            streamed = Moved.total(self._moved().values())._replace(prefetched_bytes=0)
            streamed_bytes = streamed.loaded_bytes + streamed.offloaded_bytes
            if link is not None:
                stall_seconds += link.seconds_beside_steps(streamed_bytes)
        else:
            wanted_bytes = getattr(problem, "wanted_bytes", None) or 0
        is_unplanned = problem is not None and not isinstance(problem, DeviceMemoryError)
        held = {name: view.resident_bytes for name, view in views.items()}
        return PhaseForecast(
            phase=phase.name,
            only=phase.only,
            fits=problem is None,
            problem=f"{type(problem).__name__}: {problem}" if is_unplanned else "",
            wanted_bytes=wanted_bytes,
            over_bytes=max(0, wanted_bytes - self._budget_bytes),
            device_bytes=sum(held.values()),
            handle_bytes=held,
            states={name: view.state for name, view in views.items()},
            gradient_bytes=gradient_bytes,
            **Moved.total((*moved.values(), streamed))._asdict(),
            streamed_bytes=streamed_bytes,
            host_bytes=sum(handle.host_bytes for handle in self._manager.handles.values()),
            stall_seconds=None if link is None else round(stall_seconds, 9),
            work_seconds=work_seconds,
        )

    def _moved_by_manager(self, moved: Mapping[str, Moved]) -> Moved:
        """The bytes that all handles but engines have moved."""
        parts = []
        for name, of_handle in moved.items():
            if not isinstance(self._objects[name], SizedEngine):
                parts.append(of_handle)
        return Moved.total(parts)

    def _try_to_enter(self, phase: Phase) -> PlacementError | None:
        """Enter a phase. Returns why the manager refuses it; then the phase before goes on."""
        opened = list(self._manager.snapshot().phases)
        is_nested = opened == [_NESTED.get(phase.name)]
        try:
            while len(opened) > (phase.name != IDLE):
                opened.pop()
                self._manager.leave()
            if phase.name == IDLE:
                return None
            if is_nested or not opened:
                self._manager.enter(phase.name, only=phase.only)
            else:
                self._manager.switch(phase.name, only=phase.only)
        except PhaseError:
            raise
        except PlacementError as error:
            return error.with_traceback(None)
        return None

    # --- work

    def _work(
        self, phase: str, seconds: float, views: Mapping[str, HandleView]
    ) -> tuple[float, int]:
        """Do the work of a phase. Returns the seconds that steps wait for the link, and the bytes
        of gradients."""
        parameters = []
        optimizers = []
        for name, view in views.items():
            stand_in = self._objects[name]
            if view.state is not State.TRAINING:
                continue
            if isinstance(stand_in, SizedModule):
                parameters += stand_in.trained
            elif isinstance(stand_in, SizedOptimizer):
                optimizers.append(stand_in)
        self._device.work(seconds)
        began = self._device.seconds
        if phase not in self._outer:
            self._step(parameters, optimizers)
        waited = self._device.seconds - began
        if phase == "weight_sync":
            self._fill_rollout_models(views)
        return waited, sum(parameter.nbytes for parameter in parameters)

    def _fill_rollout_models(self, views: Mapping[str, HandleView]) -> None:
        for name, view in views.items():
            stand_in = self._objects[name]
            if not isinstance(stand_in, SizedModule) or view.role != "rollout":
                continue
            if view.resident_bytes and not view.readonly:
                self._device.change(*stand_in.parameters())

    def _step(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizers: Sequence[SizedOptimizer],
    ) -> None:
        """One training step: gradients come, optimizers step, values change, gradients go."""
        for parameter in parameters:
            parameter.grad = sized(parameter.shape, parameter.dtype)
        for optimizer in optimizers:
            optimizer.step()
            self._device.change(*optimizer.tensors)
        self._device.change(*parameters)
        for parameter in parameters:
            parameter.grad = None

    # --- counting

    def _views(self) -> dict[str, HandleView]:
        return {name: handle_view(handle) for name, handle in self._manager.handles.items()}

    def _count(self) -> dict[str, Moved]:
        counts = {}
        for name, handle in self._manager.handles.items():
            counters = handle.counters
            counts[name] = Moved(
                counters.loaded_bytes,
                counters.offloaded_bytes,
                counters.skipped_bytes,
                counters.prefetch_used_bytes,
            )
        return counts

    def _moved(self) -> dict[str, Moved]:
        """The bytes that each handle has moved since the last call."""
        before = self._counters
        self._counters = self._count()
        moved = {}
        for name, count in self._counters.items():
            moved[name] = count.since(before[name])
        return moved
