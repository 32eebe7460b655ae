"""Run the phases of a job through a real manager on a device of sizes, and note what each phase
holds, moves and takes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from placement.core.errors import DeviceMemoryError, PhaseError, PlacementError
from placement.core.states import IDLE, HandleView, Plan, Policy, State, View, bytes_under
from placement.forecasting.description import Forecast, HandleForecast, Phase, PhaseForecast
from placement.forecasting.device import (
    Object,
    SizedEngine,
    SizedModule,
    SizedOptimizer,
    SizesDevice,
    sized,
)
from placement.manager import Manager
from placement.planning.planner import ask_policy, check_fits, handle_view

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
    """One worker that only has sizes, under a real manager.

    The objects are in registration order; `names` are those of all phases that come. `work_seconds`
    and `steps` (of optimizers) are by phase. The settings are the manager's `worker_role` and
    `phases`.
    """

    def __init__(
        self,
        policy: Policy,
        device: SizesDevice,
        objects: Iterable[Object],
        names: Iterable[str],
        *,
        budget_bytes: int | None,
        work_seconds: Mapping[str, float] | None = None,
        steps: Mapping[str, int] | None = None,
        **settings: Any,
    ) -> None:
        self._asked = Asked(policy)
        self._budget_bytes = _NO_LIMIT if budget_bytes is None else budget_bytes
        outer = dict.fromkeys((_NESTED[name] for name in names if name in _NESTED), 0)
        self._steps, self._work_seconds = {**outer, **(steps or {})}, dict(work_seconds or {})
        self._device = device
        self._objects: dict[str, Object] = {}
        self._manager = Manager(
            device=device,
            policy=self._asked,
            budget_bytes=max(1, self._budget_bytes),
            **settings,
        )
        try:
            for each in objects:
                self._objects[each.name] = each
                self._manager.register(
                    each.name, each.target, role=each.role, readonly=each.readonly
                )
                if isinstance(each.target, SizedModule) and each.sharers is not None:
                    for tensor in each.target.tensors:
                        device.share(tensor, each.sharers)
        except BaseException:
            self.__exit__()
            raise
        self._asked.is_registering = False
        self._counters = self._count()

    def __exit__(self, *_: object) -> None:
        """End the run. Nothing may be handed back, because there are no values."""
        try:
            while self._manager.phase_name != IDLE:
                self._try_to_enter(Phase(IDLE))
        finally:
            for each in self._objects.values():
                each.empty()
            self._manager.close()

    # --- the forecast

    def in_the_steady_state(
        self, cycle: Sequence[Phase], ranks_per_node: int, notes: Sequence[str]
    ) -> Forecast:
        """The forecast of a step that is repeated: its first run and, once two runs are alike, the
        steady one. Raises PhaseError: a phase's `only` names a handle that there is not."""
        cycles: list[tuple[PhaseForecast, ...]] = []
        while len(cycles) < 2 or (cycles[-1] != cycles[-2] and len(cycles) < _MOST_CYCLES):
            cycles.append(tuple([self._go(phase) for phase in (*cycle, Phase(IDLE))]))
        first, phases = cycles[0], cycles[-1]
        stalls = [each.stall_seconds for each in phases if each.stall_seconds is not None]
        handles = self._handles(ranks_per_node)
        shared_bytes = sum(
            each.node_host_bytes - each.host_bytes * ranks_per_node for each in handles
        )
        host_bytes = max(each.host_bytes for each in (*first, *phases))
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
            handles=handles,
            peak_bytes=self._manager.snapshot().peak_bytes,
            host_bytes=host_bytes,
            node_host_bytes=host_bytes * ranks_per_node + shared_bytes,
            node_mirror_bytes=sum(each.mirror_bytes for each in handles) * ranks_per_node,
            fits=not self._asked.unfit and all(each.fits for cycle in cycles for each in cycle),
            over_bytes=max(over_bytes),
            stall_seconds=sum(stalls) if len(stalls) == len(phases) else None,
            **{
                name: sum(getattr(each, name) for each in phases)
                for name in ("loaded_bytes", "offloaded_bytes", "skipped_bytes")
            },
            notes=(*notes, *self._idle_mirrors()),
        )

    def _handles(self, ranks_per_node: int) -> tuple[HandleForecast, ...]:
        found = []
        for name, view in self._views().items():
            facts: dict[str, Any] = {
                key: getattr(view, key)
                for key in ("name", "kind", "role", "readonly", "owners", "num_bytes")
            }
            handle = self._manager.handles[name]
            host_bytes = self._objects[name].own(handle.host_bytes)
            node_bytes = (
                host_bytes * ranks_per_node
                if self._objects[name].sharers is None
                else handle.host_bytes
            )
            facts |= {
                "host_bytes": host_bytes,
                "node_host_bytes": node_bytes,
                "mirror_bytes": handle.storage.mirror_bytes,
            }
            found.append(HandleForecast(**facts))
        return tuple(found)

    def _idle_mirrors(self) -> list[str]:
        """Notes on engines that keep their weights on the host only for weight syncs to fill them
        anew."""
        engines = {
            name: each.target
            for name, each in self._objects.items()
            if isinstance(each.target, SizedEngine)
        }
        return [
            f"{name} keeps {engine.residency.mirror_bytes:,} bytes of weights a GPU on the host, "
            "and each weight_sync fills them anew before use: discarding them (vLLM's level 2, "
            "SGLang without --enable-weights-cpu-backup) spares that memory and its copies"
            for name, engine in engines.items()
            if engine.residency.mirror_bytes and engine.woken_in == {"weight_sync"}
        ]

    # --- phases

    def _go(self, phase: Phase) -> PhaseForecast:
        """End the open phase, begin another one, and do its work; "idle" leaves all."""
        for each in self._objects.values():
            if isinstance(each.target, SizedEngine):
                # a weight sync fills what it discards, whatever phase does that in this cycle
                each.target.residency.stale = None
                each.target.phase = phase.name
        began = self._device.seconds
        problem = self._try_to_enter(phase)
        stall, moved, views = self._device.seconds - began, self._moved(), self._views()
        work_seconds = self._work_seconds.get(phase.name)
        gradient_bytes, streamed = 0, Moved()
        if problem is None:
            plan = self._manager._stack.phases.base_plan()
            wanted_bytes = sum(bytes_under(plan, view) for view in views.values())
            waited, gradient_bytes = self._work(phase.name, work_seconds or 0.0, views)
            stall, streamed = (
                stall + waited,
                Moved.total(self._moved().values())._replace(prefetched_bytes=0),
            )
        else:
            wanted_bytes = getattr(problem, "wanted_bytes", None) or 0
        if (link := self._device.link) is not None:
            managed = Moved.total(
                each
                for name, each in moved.items()
                if not isinstance(self._objects[name].target, SizedEngine)
            )
            stall += link.seconds_beside(*managed[:3])
        held = {name: 0 if view.external else view.resident_bytes for name, view in views.items()}
        return PhaseForecast(
            phase=phase.name,
            only=phase.only,
            fits=problem is None,
            problem=""
            if problem is None or isinstance(problem, DeviceMemoryError)
            else f"{type(problem).__name__}: {problem}",
            wanted_bytes=wanted_bytes,
            over_bytes=max(0, wanted_bytes - self._budget_bytes),
            device_bytes=sum(held.values()),
            handle_bytes=held,
            states={name: view.state for name, view in views.items()},
            gradient_bytes=gradient_bytes,
            **Moved.total((*moved.values(), streamed))._asdict(),
            streamed_bytes=streamed.loaded_bytes + streamed.offloaded_bytes,
            host_bytes=sum(
                self._objects[name].own(handle.host_bytes)
                for name, handle in self._manager.handles.items()
            ),
            stall_seconds=None if link is None else round(stall, 9),
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
        count = self._steps.get(phase, 1) if training else 0
        waited = 0.0
        for _ in range(count):
            self._device.work(seconds / count)
            began = self._device.seconds
            self._step(training)
            waited += self._device.seconds - began
        if not count:
            self._device.work(seconds)
        for name, view in views.items() if phase == "weight_sync" else ():
            target = self._objects[name].target
            if (
                view.role == "rollout"
                and isinstance(target, SizedModule)
                and not view.readonly
                and view.resident_bytes
            ):
                self._device.change(*target.parameters())
        return waited, sum(
            each.nbytes
            for made in training
            if isinstance(made.target, SizedModule)
            for each in made.target.trained
        )

    def _step(self, training: Sequence[Object]) -> None:
        """One training step: gradients come, optimizers step, and values change."""
        modules = [
            (each, each.target.trained) for each in training if isinstance(each.target, SizedModule)
        ]
        for _, trained in modules:
            for parameter in trained:
                parameter.grad = sized(parameter.shape, parameter.dtype)
        for each in training:
            if isinstance(each.target, SizedOptimizer):
                each.target.step()
                self._device.change(*each.target.tensors)
        for each, trained in modules:
            self._device.change(*trained)
            for parameter in [] if each.keeps_gradients else trained:
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
        """The bytes that each handle has moved since the last call over this rank's link."""
        before, self._counters = self._counters, self._count()
        return {
            name: Moved(
                *(
                    self._objects[name].own(now - then)
                    for now, then in zip(after, before[name], strict=True)
                )
            )
            for name, after in self._counters.items()
        }
