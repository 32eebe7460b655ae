"""Run the phases of a job through a real manager on a device of sizes, and note what each phase
holds, moves and takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
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
    def total(cls, each: Iterable[Moved]) -> Moved:
        return cls(*map(sum, zip(cls(), *each, strict=True)))


class Asked:
    """A policy. While handles are registered, they are off the device where it gives no plan, or
    one that does not fit."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name = policy.name
        self.is_registering = True
        self.unfit: list[PlacementError] = []  # the errors of its plans meanwhile

    def plan(self, view: View) -> Plan:
        # without a budget it is asked for what is needed in any case
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
        self._device, self._shards = device, shards
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
            for each in self._objects.values():
                if not isinstance(each, SizedEngine):
                    each.empty()
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
        cycles: list[tuple[PhaseForecast, ...]] = []
        while len(cycles) < 2 or (cycles[-1] != cycles[-2] and len(cycles) < _MOST_CYCLES):
            cycles.append(tuple([self._go(phase) for phase in (*cycle, Phase(IDLE))]))
        first, phases = cycles[0], cycles[-1]
        stalls = [each.stall_seconds for each in phases if each.stall_seconds is not None]
        over_bytes = [each.over_bytes for cycle in cycles for each in cycle]
        over_bytes += [
            max(0, (getattr(error, "wanted_bytes", None) or 0) - self._budget_bytes)
            for error in self._asked.unfit
        ]
        return Forecast(
            policy=self._asked.name,
            budget_bytes=None if self._budget_bytes == _NO_LIMIT else self._budget_bytes,
            phases=phases,
            first_phases=first,
            handles=self._handles(),
            peak_bytes=self._manager.snapshot().peak_bytes,
            host_bytes=max(phase.host_bytes for phase in (*first, *phases)),
            fits=not self._asked.unfit and all(each.fits for cycle in cycles for each in cycle),
            over_bytes=max(over_bytes),
            stall_seconds=sum(stalls) if len(stalls) == len(phases) else None,
            **{
                name: sum(getattr(each, name) for each in phases)
                for name in ("loaded_bytes", "offloaded_bytes", "skipped_bytes")
            },
            notes=tuple(notes),
        )

    def _handles(self) -> tuple[HandleForecast, ...]:
        return tuple(
            HandleForecast(
                name=name,
                num_bytes=view.num_bytes,
                host_bytes=self._manager.handles[name].host_bytes,
            )
            for name, view in self._views().items()
        )

    # --- phases

    def _go(self, phase: Phase) -> PhaseForecast:
        """End the open phase, begin another one, and do its work; "idle" leaves all."""
        for each in self._objects.values():
            if isinstance(each, SizedEngine):
                # a weight sync fills what it discards, whatever phase does that in this cycle
                each.residency.stale = None
        began = self._device.seconds
        problem = self._try_to_enter(phase)
        stall_seconds, moved, views = self._device.seconds - began, self._moved(), self._views()
        link = self._device.link
        if link is not None:
            managed = [
                bytes_of_one
                for name, bytes_of_one in moved.items()
                if not isinstance(self._objects[name], SizedEngine)
            ]
            stall_seconds += link.seconds_beside(*Moved.total(managed)[:3])
        work_seconds = self._work_seconds.get(phase.name)
        gradient_bytes, streamed = 0, Moved()
        if problem is None:
            plan = self._manager._stack.phases.base_plan()
            wanted_bytes = sum(bytes_under(plan, view) for view in views.values())
            waited, gradient_bytes = self._work(phase.name, work_seconds or 0.0, views)
            stall_seconds += waited
            streamed = Moved.total(self._moved().values())._replace(prefetched_bytes=0)
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
            streamed_bytes=streamed.loaded_bytes + streamed.offloaded_bytes,
            host_bytes=sum(handle.host_bytes for handle in self._manager.handles.values()),
            stall_seconds=None if link is None else round(stall_seconds, 9),
            work_seconds=work_seconds,
        )

    def _try_to_enter(self, phase: Phase) -> PlacementError | None:
        """Enter a phase. Returns why the manager refuses it; then the phase before goes on."""
        opened = list(self._manager.snapshot().phases)
        is_nested = opened == [_NESTED.get(phase.name)]
        try:
            while len(opened) > (phase.name != IDLE):
                opened.pop()
                self._manager.leave()
            if phase.name != IDLE:
                go = self._manager.enter if is_nested or not opened else self._manager.switch
                go(phase.name, only=phase.only)
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
        training = [
            self._objects[name] for name, view in views.items() if view.state is State.TRAINING
        ]
        self._device.work(seconds)
        began = self._device.seconds
        if training and phase not in self._outer:
            self._step(training)
        waited = self._device.seconds - began
        for name, view in views.items() if phase == "weight_sync" else ():
            target = self._objects[name]
            if (
                view.role == "rollout"
                and isinstance(target, SizedModule)
                and not view.readonly
                and view.resident_bytes
            ):
                self._device.change(*target.parameters())
        modules = [each for each in training if isinstance(each, SizedModule)]
        return waited, sum(each.nbytes for module in modules for each in module.trained)

    def _step(self, training: Sequence[SizedModule | SizedOptimizer | SizedEngine]) -> None:
        """One training step: gradients come, optimizers step, values change, gradients go."""
        parameters = [
            parameter
            for module in training
            if isinstance(module, SizedModule)
            for parameter in module.trained
        ]
        for parameter in parameters:
            parameter.grad = sized(parameter.shape, parameter.dtype)
        for optimizer in training:
            if isinstance(optimizer, SizedOptimizer):
                optimizer.step()
                self._device.change(*optimizer.tensors)
        self._device.change(*parameters)
        for parameter in parameters:
            parameter.grad = None

    # --- counting

    def _views(self) -> dict[str, HandleView]:
        return {name: handle_view(handle) for name, handle in self._manager.handles.items()}

    def _count(self) -> dict[str, Moved]:
        names = ("loaded_bytes", "offloaded_bytes", "skipped_bytes", "prefetch_used_bytes")
        return {
            name: Moved(*attrgetter(*names)(handle.counters))
            for name, handle in self._manager.handles.items()
        }

    def _moved(self) -> dict[str, Moved]:
        """The bytes that each handle has moved since the last call."""
        before, self._counters = self._counters, self._count()
        return {
            name: Moved(*(now - then for now, then in zip(after, before[name], strict=True)))
            for name, after in self._counters.items()
        }
