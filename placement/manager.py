"""`Manager`: registers handles, runs phases, and reports their state. It is the only
orchestrator."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack

from placement.core.errors import PhaseError, PlacementError
from placement.core.interrupts import is_background
from placement.core.journal import Journal, logger
from placement.core.settings import PREFIX, Settings, SettingsKeywords, WorkerRole, control_token
from placement.core.snapshot import Audit, Snapshot, SuspensionRequest, SuspensionStatus, summary
from placement.core.weak import WeakIdSet
from placement.devices.base import Device
from placement.devices.select import name_or_device, select_device
from placement.observe.figures import figures_of
from placement.phases import audit
from placement.phases.hold import Hold
from placement.phases.phase import PhaseContext, here, names_of
from placement.phases.stack import PhaseStack
from placement.planning.policy_lookup import resolve_policy
from placement.registration.handle import Handle
from placement.registration.replication import Replication

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from placement.core.states import Policy
    from placement.group.protocol import Group
    from placement.observe.discovery import Identity
    from placement.observe.server import MetricsServer


def _end(stack: PhaseStack, servers: Iterable[MetricsServer]) -> None:
    """Close a manager that was garbage-collected without `close()`. Otherwise its offloaded models
    would read poison for ever."""
    if sys.is_finalizing() or os.getpid() != stack.lock.pid:
        return
    if is_background():
        threading.Thread(target=_end, args=(stack, servers), name="placement-close").start()
        return
    stack.members.is_closing = True
    try:
        for phase in stack.phases.all:
            # `enter` has opened it, and no caller is left to leave it
            phase.is_abandoned |= phase.holder is None and not phase.in_any_order
        # another one, which the user still holds, can be left without the manager
        if all(phase.is_abandoned for phase in stack.phases.all):
            stack.close()
    finally:
        _close_all(servers)


def _close_all(servers: Iterable[MetricsServer]) -> None:
    for server in servers:
        server.close()


class ManagerKeywords(SettingsKeywords, total=False):
    """Every keyword of `Manager`, for `Manager.from_settings` and for wrappers that pass keywords
    on."""

    device: str | int | torch.device | Device
    policy: str | Policy | type[Policy]
    budget_bytes: int | str | None
    group: Group | None
    worker_role: WorkerRole


class Manager:
    """Moves models, optimizers and rollout engines of one process on and off one device, phase by
    phase.

    Each registered object is a handle. Opening a phase asks the policy for a plan, which says where
    every handle belongs, and moves the handles there.

    Args:
        device: a name such as "cuda:0" or "simulated:1GiB", or a `Device`. "auto" is the device of
            the environment variable `PLACEMENT_DEVICE`, else this process's accelerator. A
            `torch.device` and the index of a CUDA device are taken, too.
        policy: the name of an entry point in the group "placement.policies",
            "package.module:Class", a class, or an instance. A string may include options:
            "colocated(drop_gradients=True)".
        budget_bytes: device bytes that all handles together may hold, as a number or as text
            ("12GiB"). None: the free bytes and those that the handles hold, less the bytes that
            other users of the device need.
        group: the ranks that change phase together (`placement.group.StoreGroup`). None: this
            process alone.
        worker_role: the work of this process: "trainer", "rollout" or "hybrid".
        settings: the other fields of `Settings` (turns, phases, strict, verify,
            pinned_limit_bytes, discovery, ...).

    Raises:
        ValueError: a keyword is unknown, or its value is invalid.
        TypeError: `device` is none of these.
        PolicyError: the policy was not found or could not be made.
        PlacementError: the device does not exist.

    Example:
        ::

            manager = placement.Manager(device="cuda:0", policy="cyclic", budget_bytes="60GiB")
            manager.register("actor", model, role="actor")
            with manager.phase("train"):
                ...
    """

    def __init__(
        self,
        *,
        device: str | int | torch.device | Device = "auto",
        policy: str | Policy | type[Policy] = "colocated",
        budget_bytes: int | str | None = None,
        group: Group | None = None,
        worker_role: WorkerRole = "hybrid",
        **settings: Unpack[SettingsKeywords],
    ) -> None:
        values: dict[str, Any] = {
            "budget_bytes": budget_bytes,
            "worker_role": worker_role,
            **settings,
        }
        device = name_or_device(device)
        if isinstance(device, str):
            values["device"] = device
        if isinstance(policy, str):
            values["policy"] = policy
        self.settings = Settings.from_any(values)
        self.policy = resolve_policy(policy)
        if isinstance(device, str):
            is_tight = self.settings.budget_bytes is not None or self.settings.turns is not None
            device = select_device(self.settings.device, is_tight=is_tight)
        self.device = device
        if self.settings.pinned_limit_bytes is not None:
            self.device.pinned_limit_bytes = self.settings.pinned_limit_bytes
        self.journal = Journal()
        self._stack = PhaseStack(self.device, self.policy, self.settings, self.journal, group)
        self._replication = Replication(group)
        self._entered: list[PhaseContext] = []
        self._servers: WeakIdSet[MetricsServer] = WeakIdSet()
        """The servers that `serve` started. A server's own thread keeps it alive until it is
        closed."""
        # A finalizer instead of __del__, because a garbage collection may unmap the device's memory
        # before it calls __del__. The finalizer keeps the stack, and so the memory, alive until it
        # has run.
        weakref.finalize(self, _end, self._stack, self._servers).atexit = False

    @classmethod
    def from_settings(
        cls,
        source: Settings | Mapping[str, Any] | str | os.PathLike[str] | None = None,
        **keywords: Unpack[ManagerKeywords],
    ) -> Manager:
        """A manager from a `Settings`, a mapping, the path of a TOML file, or (None) the
        environment `PLACEMENT_*`.

        Args:
            keywords: arguments of `Manager`, which take precedence over the source. Pass a `Device`
                or a policy object here.

        An error about a value has a note that tells the variables of the environment.
        """
        settings = Settings.from_any(source).model_dump(exclude_unset=True)
        variables = []
        if source is None:
            for key, value in settings.items():
                if key not in keywords:
                    variables.append(f"{PREFIX}{key.upper()}={value!r}")
        settings.update(keywords)
        try:
            return cls(**settings)
        except (PlacementError, ValueError) as error:
            if variables:  # the message is about a value, which was set by a variable
                error.add_note(f"placement: set in the environment: {', '.join(variables)}")
            raise

    # --- handles

    @property
    def handles(self) -> Mapping[str, Handle]:
        """All registered handles by name, in registration order. Read-only, and not updated
        later."""
        registered = self._stack.registry.handles.copy()
        alive = {name: handle for name, handle in registered.items() if not handle.is_gone}
        return MappingProxyType(alive)

    def register(
        self,
        name: str,
        target: Any,
        *,
        role: str | None = None,
        owner: Handle | str | None = None,
        readonly: bool = False,
        external: bool = False,
        replicated: bool | ProcessGroup = False,
        replace: bool = False,
    ) -> Handle:
        """Register a module, an optimizer, an engine or a `Lazy`, and return its handle.

        Call it after wrapping, loading and resizing the object, and before capturing CUDA graphs of
        it. Its tensors get device addresses that do not change any more, and its bytes are copied
        to the host. It moves where the open phase (outside every phase: `idle`) wants it.

        Args:
            name: the handle's name: 1 to 64 letters, digits and `_.:-`.
            target: the object to register. Keep a reference to a module or an optimizer: if it is
                garbage-collected, its handle goes, too. A `ModuleList` or `ModuleDict` is kept
                until `unregister`.
            role: the purpose of the object, for the policy: actor, ref, critic, reward, teacher or
                rollout. An optimizer has its owner's role.
            owner: the module handle whose parameters an optimizer steps; needed only where
                placement cannot tell from the parameters. With it, parameters of no registered
                module (float32 copies of the owner's) move with the optimizer.
            readonly: the values never change. They are never copied back to the host; a write in
                place is reported as an `IntegrityError`. New tensors in place of registered ones
                (`half()`, `load_state_dict(assign=True)`, `.data =`), which are put in while it is
                on the device, are its values from then on.
            external: the object's framework moves its bytes. placement tracks and guards it, and
                never moves it.
            replicated: for a module of which several ranks of the group have the same frozen
                values: all of a readonly one, and else the parameters that need no gradient (the
                base under adapters). The ranks of one machine share one host copy of these. Each of
                N ranks loads 1/N over its own link and gathers the rest from the others. All ranks
                of the group must register it at the same place of their program. A process group:
                its ranks have the same, and are on one machine. True: the process group of a
                `DistributedDataParallel` (torch's, or Megatron-Core's); the replicate dimension of
                a device mesh (HSDP); else torch.distributed's default one; of their ranks those of
                this machine.
            replace: for set-up code that runs again. If the name is taken by this very object, its
                handle is returned as it is. If it is taken by another object, that one is
                unregistered first, with the optimizers that step it. They stay unregistered if the
                new one is refused.

        Raises:
            RegistrationError: the object cannot be registered; the message has the reason and
                advice. For a replicated object every rank raises it; if the ranks' values differ,
                before any byte has moved.
            HostMemoryError, DeviceMemoryError: there is not enough memory for it.

        After any error the object is not registered and has its values. Where its host copy was
        made already, its tensors are in host memory now.

        Example:
            ::

                actor = manager.register("actor", model, role="actor")
                manager.register("actor.optimizer", optimizer)
                manager.register("ref", ref_model, role="ref", readonly=True)
        """
        registry = self._stack.registry
        lock = self._stack.lock
        attempt: AbstractContextManager[Any] = nullcontext()
        registering: AbstractContextManager[Any] = nullcontext()
        if replicated is not False:
            # The group is told of a replicated handle whose registration fails here, even if it is
            # refused before any work begins.
            attempt = lock.attempt(self._replication.vote, begins_phase=True, raises_own_error=True)
            registering = self._replication.registering(name, target, replicated)
        with attempt, lock.transition():
            registry.check_name_and_role(name, role)
            old = registry.handles.get(name) if replace else None
            if old is not None:
                if old.object is target:
                    return old
                for handle in (*self._stack.members.steppers_of(old), old):
                    self._stack.members.forget(handle)
            is_new = name not in registry.handles
            try:
                with registering as ranks:
                    handle = registry.add(
                        name,
                        target,
                        role=role,
                        owner=owner,
                        readonly=readonly,
                        external=external,
                        ranks=ranks,
                    )
                    self._stack.members.join(handle, None if ranks is None else ranks.agree)
            except BaseException:
                if is_new and name in registry.handles:
                    registry.remove(registry.handles[name])
                raise
            return handle

    def unregister(self, handle: Handle | str, *, on_device: bool = False) -> None:
        """Stop managing a handle. Its tensor objects stay, in ordinary memory: on the device if the
        handle is there, else on the host.

        Args:
            handle: the handle or its name.
            on_device: load it first, so that its tensors are handed back on the device.

        Raises:
            PhaseError: no handle has this name, or a registered optimizer steps it: unregister the
                optimizer first.
            DeviceMemoryError: `on_device` was asked, and the handle does not fit. It stays
                registered.
        """
        with self._stack.lock.transition():
            handle = self._stack.members.find(handle)
            steppers = [optimizer.name for optimizer in self._stack.members.steppers_of(handle)]
            if steppers:
                raise PhaseError(
                    f"{handle.name!r} is stepped by {', '.join(steppers)}; unregister that first"
                )
            if on_device:
                self._stack.members.bring((handle.name,))
            self._stack.members.forget(handle)

    def close(self, *, on_device: Iterable[str | Handle] = ()) -> None:
        """Unregister all handles, optimizers first, release the device's memory and stop the
        servers. Logs a summary. Idempotent.

        Args:
            on_device: handles or their names, whose tensors are handed back on the device, for code
                that goes on with them. All others are handed back on the host.

        Raises:
            PhaseError: a phase is open; leave it first. Or no handle has one of the names.
            DeviceMemoryError: the handles of `on_device` do not fit. The manager stays open.
        """
        if self._stack.lock.is_closed:
            # an interrupt may have stopped an earlier call before it got here
            _close_all(self._servers)
            return
        last = self.snapshot()
        self._stack.close(names_of(on_device, "on_device") or ())
        _close_all(self._servers)
        logger.info("closed\n%s", summary(last), extra={"placement": last})

    # --- phases

    @property
    def phase_name(self) -> str:
        """The name of the innermost open phase; "idle" outside every phase."""
        return self._stack.phases.name

    def phase(
        self,
        name: str,
        *,
        only: Iterable[str | Handle] | None = None,
    ) -> PhaseContext:
        """A phase for a `with` statement: `with manager.phase("train") as phase:`.

        Entering moves every handle where the policy wants it in this phase. Leaving moves every
        handle where the enclosing phase wants it (outside every phase: `idle`). If you call
        `__enter__` yourself, keep what `phase` returned until you call its `__exit__`: a phase
        whose object is garbage-collected is left.

        Args:
            name: one of `placement.PHASES`, or a key of `Settings.phases`.
            only: handles or their names. The phase concerns these handles and the optimizers that
                step them; all other handles stay as in the enclosing phase. If that does not fit
                the budget, handles that neither phase needs are offloaded, cheapest first.

        Raises (on entering):
            PhaseError: another thread or asyncio task has a phase open, or a CUDA graph is being
            captured.
            PolicyError: the policy gave no valid plan. Nothing has moved.
            DeviceMemoryError: the plan does not fit the budget. Nothing has moved.
            Exception: the error that stopped the moves. The handles that were on the device before
            are there again.
        """
        return PhaseContext(self._stack, name, only, here(), keeps_alive=self)

    def hold(
        self,
        name: str,
        *,
        only: Iterable[str | Handle] | None = None,
    ) -> Hold:
        """Open a phase that is left by `Hold.release`: for code that loads in one call and offloads
        in another, in any order.

        A hold belongs to no thread, and several may be open at once. The latest that concerns a
        handle decides about it: name the handles with `only`, so that each hold speaks of its own.
        Arguments and errors are those of `phase`.
        """
        return Hold(self._stack, name, only, keeps_alive=self)

    def enter(
        self,
        name: str,
        *,
        only: Iterable[str | Handle] | None = None,
    ) -> None:
        """Open a phase that belongs to no thread, for frameworks with separate hooks. `leave`
        closes it, from any thread.

        Arguments and errors are those of `phase`.
        """
        phase = PhaseContext(self._stack, name, only, None)
        phase.__enter__()
        self._entered.append(phase)

    def switch(
        self,
        name: str,
        *,
        only: Iterable[str | Handle] | None = None,
    ) -> None:
        """End the phase that `enter` opened last, and begin `name` in its place, in one phase
        transition. See `Phase.switch`."""
        self._last_entered(f"switch to {name!r}").switch(name, only=only)

    def leave(self, error: BaseException | None = None) -> None:
        """Close the phase that `enter` opened last.

        Args:
            error: the exception that ended the phase, if any. The phase is then left as a `with`
                statement leaves it on an exception: failures of leaving become notes on this
                exception, instead of being raised.

        Raises:
            PhaseError: no phase was opened with `enter`.
        """
        self._last_entered("leave").__exit__(None if error is None else type(error), error, None)

    def _last_entered(self, action: str) -> PhaseContext:
        with self._stack.lock.attempt(raises_own_error=True):
            while self._entered and not self._entered[-1].is_open:
                self._entered.pop()
            if not self._entered:
                raise PhaseError(f"cannot {action}: no phase was entered with enter()")
        return self._entered[-1]

    def suspend(
        self,
        deadline: float = 60.0,
        *,
        drop: Iterable[str | Handle] = (),
        resume_after_seconds: float | None = None,
        epoch: int | None = None,
    ) -> SuspensionStatus:
        """Take every handle off the device at the end of the open phases, or at once outside of
        them. The next phase waits until `resume`.

        Call it in another thread than that of the phases. Any rank of a group may be asked: all
        suspend as they next begin or leave an outermost phase, or none.

        Args:
            deadline: seconds to wait for the end of the open phases.
            drop: engines, or their names, that sleep without a copy of their weights on the host
                (vLLM's level 2). They need a weight sync before they can generate.
            resume_after_seconds: after how long it ends by itself. None: never.
            epoch: its number, above that of the last suspension; None: the next. To ask for the
                present one again changes nothing.

        Raises:
            PhaseError: it was not possible in time, the epoch is old, this thread has a phase open,
                or `drop` names no such engine. The message says what is on the device.
            TypeError: `drop` is one string, or has something else than names and engines.
            ValueError: an argument is not a number, or too small or large.
        """
        request = SuspensionRequest(
            deadline_seconds=deadline,
            resume_after_seconds=resume_after_seconds,
            epoch=epoch,
            drop=names_of(drop, "drop") or (),
        )
        return self._stack.suspension.suspend(request)

    def resume(self, epoch: int | None = None) -> SuspensionStatus:
        """End a suspension, on all ranks of a group. Does nothing while there is none.

        Args:
            epoch: the suspension that is to end; None: the present one.

        Raises:
            PhaseError: the epoch is not that of the last suspension on this rank.
            CoordinatorLost: the other ranks cannot be told. All stay suspended. Ask again.
        """
        return self._stack.suspension.resume(epoch)

    def rejoin(self, group: Group) -> None:
        """Replace the group of ranks by a new one, after a rank was restarted or after
        `CoordinatorLost`; or join the first one.

        Every surviving rank calls this with a new group of a new generation; a restarted rank makes
        a new manager instead. The old group is not told. A rank that did not hear a decision has
        stayed as it was, and takes no further part in the old group. Here it first moves every
        handle where it belongs outside every phase, and then uses the new group.

        Replicated handles stay registered. If all ranks that share one are still alive, they go on
        loading it together. If one of them was restarted, each rank loads the whole over its own
        link, until all ranks unregister it and register it again.

        Raises:
            PhaseError: a phase is open; leave it first. Nothing is lost by leaving, even if a
                decision is unknown.
            ValueError: `group` is not a group, or a decision of it is unknown.
            Exception: a handle could not be moved where it belongs. The old group stays in use.
        """
        with self._stack.lock.transition():
            self._stack.rejoin(group)
            self._replication.rejoin(group)

    # --- asking

    def snapshot(self) -> Snapshot:
        """The state of the manager and all handles at this moment: phases, bytes, counters.
        Immutable, and can be written as JSON.

        Takes no lock, so that a scrape of the metrics never waits for a move.
        """
        return self._stack.take_snapshot()

    def metrics(self, *, totals: bool = False) -> dict[str, float]:
        """Figures for a trainer's own log, of the time since the last call: gigabytes (10**9
        bytes), seconds, and counts. Takes no lock.

        The names begin with `placement/`, as in `placement/stall_seconds/train`; "Running jobs" has
        a table of them.

        Args:
            totals: add the figures since the manager was made, as `placement/total/...`.
        """
        return figures_of(self._stack.take_snapshot(), self.journal, totals=totals)

    def audit(self) -> Audit:
        """Compare the declared state of every handle with its tensors and with the device. Moves
        nothing.

        Looks at every tensor, so it is not for every step. The result's `ok` tells whether
        everything agrees; `findings` lists the differences (drift, leaks, stray references, writes
        into offloaded memory), and `report` is a table for people. A write into offloaded memory is
        reported by every audit until the next phase transition raises it.

        Call it where the models are used, not in a thread beside: it looks at gradients, and torch
        may crash if one thread looks at a gradient while another frees it. `snapshot` and `serve`
        look at no tensor, and may be called from any thread.
        """
        with self._stack.lock.transition():
            plan = self._stack.phases.base_plan()
            self._stack.reconciler.changes.look_everywhere(wait=True)
            return self._stack.take_audit(plan)

    def check_integrity(self) -> None:
        """Raise if the bytes that the handles declare differ from those that the device holds.

        Raises:
            IntegrityError: they differ; the message has both numbers.
        """
        with self._stack.lock.transition():
            audit.check_integrity(self.handles, self.device)

    def serve(
        self,
        port: int = 0,
        address: str = "127.0.0.1",
        *,
        discovery: str | os.PathLike[str] | None = None,
        identity: Identity | None = None,
        control: str | None = None,
    ) -> MetricsServer:
        """Serve Prometheus metrics (/metrics), /healthz, /state, /trace and a status page over
        HTTP, from a thread of its own.

        The returned server has `url`, `target`, `port` and `close()`. It runs until it or the
        manager is closed. It does not keep the manager alive.

        Args:
            port: the TCP port; 0 takes a free one.
            address: the address to listen on. The default is loopback, because every client that
                can connect can read the phases and handles of this worker.
            discovery: a folder for Prometheus' file-based service discovery. The worker keeps a
                file of its own there until the server closes. None: `Settings.discovery`.
            identity: the worker's identity in its run (rank, node, ...). None: taken from the
                environment that torchrun or Slurm sets.
            control: the token with which `POST /suspend` and `POST /resume` are served. None: the
                environment variable `PLACEMENT_CONTROL_TOKEN`; without it they are not served.

        Raises:
            PlacementError: the address or port cannot be bound, the folder cannot be written, the
                token is empty or not visible ASCII, or the manager is closed.
        """
        from placement.observe.discovery import Identity
        from placement.observe.server import MetricsServer

        self._stack.lock.check_process()
        token = control_token(control)  # before anything is begun
        asked = self._stack.suspension
        if identity is None:
            identity = Identity.from_launcher(gpu_uuid=self.device.uuid)
        self._stack.reconciler.outside.watch(self.device.uuid)
        stack = self._stack  # not the manager: the server would keep it alive
        server = MetricsServer(
            self._stack.take_snapshot,
            is_over=lambda: stack.lock.is_closed,
            journal=self.journal,
            port=port,
            address=address,
            control={"/suspend": asked.suspend, "/resume": lambda it, _: asked.resume(it.epoch)},
            token=token,
        )
        self._servers.add(server)
        try:
            server.announce(self.settings.discovery if discovery is None else discovery, identity)
        except BaseException:
            server.close()
            raise
        return server
