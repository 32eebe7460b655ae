"""The only orchestrator: registration, phases, and what can be asked of them."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Unpack

from placement.core.errors import PhaseError
from placement.core.journal import Journal, logger
from placement.core.settings import Settings, SettingsKeywords, WorkerRole
from placement.core.snapshot import Audit, Snapshot
from placement.core.summary import summary
from placement.core.weak_set import WeakIdSet
from placement.devices.base import Device
from placement.devices.select import select_device
from placement.phases import audit
from placement.phases.open_phase import here
from placement.phases.phase import PhaseContext
from placement.phases.stack import PhaseStack
from placement.planning.policy_lookup import resolve_policy
from placement.registration.handle import Handle
from placement.registration.replication import Replication

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from placement.core.states import Policy
    from placement.group.agreement import Group
    from placement.observe.discovery import Identity
    from placement.observe.server import MetricsServer


def _end(stack: PhaseStack, entered: list[PhaseContext], servers: Iterable[MetricsServer]) -> None:
    """A manager that nobody holds any more leaves as `close` does: else its models would read poison for ever."""
    if sys.is_finalizing() or os.getpid() != stack.lock.pid:
        return
    stack.is_closing = True
    try:
        if not stack.lock.is_closed:
            _leave_all(stack, entered)
    finally:
        _close_all(servers)


def _close_all(servers: Iterable[MetricsServer]) -> None:
    for server in servers:
        server.close()


def _leave_all(stack: PhaseStack, entered: list[PhaseContext]) -> None:
    while entered:
        phase = entered.pop()
        if stack.open_phases and stack.open_phases[-1] is phase._open:
            # As by an exception: the other ranks of a group have not been asked, and this process may be about to end.
            error = PhaseError(f"the manager was dropped while phase {phase.name!r} was open")
            phase.__exit__(PhaseError, error, None)
            for note in getattr(error, "__notes__", ()):
                logger.error("%s: %s", error, note)
        del phase  # one with another inside it closes when that does, as any phase that nobody holds
    if not stack.open_phases:  # whoever still holds a phase leaves it without the manager
        stack.close()


class ManagerKeywords(SettingsKeywords, total=False):
    """Every keyword of `Manager`, for `Manager.from_settings` and for wrappers that pass keywords on."""

    device: str | Device
    policy: str | Policy | type[Policy]
    budget_bytes: int | str | None
    group: Group | None
    worker_role: WorkerRole


class Manager:
    """Decides, for one device of one process, what sits on it.

    Args:
        device: "auto" (this process's accelerator), "cuda:0", or a `Device`.
        policy: an entry point's name (group "placement.policies"), "package.module:Class", a class, or an instance; a string may have
            options: "colocated(drop_gradients=True)".
        budget_bytes: device bytes that the handles may hold together, also "12GiB"; None: what is free, see `Budget`.
        group: ranks that change phase together (`placement.group.StoreGroup`); None: this process alone.
        worker_role: "trainer", "rollout" or "hybrid": what this process is for.
        settings: the other fields of `Settings` (leases, phases, strict, verify, headroom, pinned_limit_bytes, annotate, discovery, ...).

    Raises:
        ValueError: a keyword is unknown or does not fit.
        PolicyError: the policy cannot be resolved.
        PlacementError: there is no such device.
    """

    def __init__(
        self,
        *,
        device: str | Device = "auto",
        policy: str | Policy | type[Policy] = "colocated",
        budget_bytes: int | str | None = None,
        group: Group | None = None,
        worker_role: WorkerRole = "hybrid",
        **settings: Unpack[SettingsKeywords],
    ) -> None:
        chosen: dict[str, Any] = {"budget_bytes": budget_bytes, "worker_role": worker_role, **settings}
        chosen |= {"device": device} if isinstance(device, str) else {}
        chosen |= {"policy": policy} if isinstance(policy, str) else {}
        self.settings = Settings.from_any(chosen)
        self.policy = resolve_policy(policy)
        is_tight = self.settings.budget_bytes is not None or self.settings.leases is not None
        self.device = select_device(self.settings.device, is_tight=is_tight) if isinstance(device, str) else device
        if self.settings.pinned_limit_bytes is not None:
            self.device.pinned_limit_bytes = self.settings.pinned_limit_bytes
        self.journal = Journal(self.settings.journal_length)
        lease = None
        if self.settings.leases is not None:
            from placement.group.lease import lease_for

            lease = lease_for(self.device, self.settings, self.settings.leases, getattr(group, "deadline_seconds", None))
        self._stack = PhaseStack(self.device, self.policy, self.settings, self.journal, group, lease)
        self._replication = Replication(group)
        self._entered: list[PhaseContext] = []
        self._snapshots = audit.Snapshots(self._stack, self.policy.name, self.settings.worker_role, self.device, self.journal)
        self._servers: WeakIdSet[MetricsServer] = WeakIdSet()
        """Its thread keeps a server alive until it is closed."""
        # Not __del__: a collection unmaps the device's memory before it calls that. This one keeps the stack alive until it
        # has run.
        weakref.finalize(self, _end, self._stack, self._entered, self._servers).atexit = False

    @classmethod
    def from_settings(
        cls, source: Settings | Mapping[str, Any] | str | os.PathLike[str] | None = None, **keywords: Unpack[ManagerKeywords]
    ) -> Manager:
        """A manager from a `Settings`, a mapping, the path of a TOML file, or (None) the environment `PLACEMENT_*`.

        Args:
            keywords: win over the source; a `Device` or a policy object goes here.
        """
        given = Settings.from_any(source).model_dump(exclude_unset=True)
        given.update(keywords)
        return cls(**given)

    # --- handles

    @property
    def handles(self) -> Mapping[str, Handle]:
        """Every handle by name, in registration order."""
        handles = self._stack.registry.handles
        return MappingProxyType({name: handle for name, handle in handles.copy().items() if not handle.is_gone})

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
    ) -> Handle:
        """Register a module, an optimizer, an engine or a `Lazy`; last, after wrapping, loading and resizing, before capturing graphs.

        The object gets its place: its storages are adopted into addresses that stay, its host copy is reserved, and it goes
        where the present phase (outside every phase: `idle`) wants it.

        Args:
            name: `[A-Za-z0-9_.:-]{1,64}`.
            role: what it is for; an optimizer has its owner's.
            owner: for an optimizer whose parameters do not tell: the module handle that it steps.
            readonly: never copied back; a write is an `IntegrityError`.
            external: the framework places the bytes: tracked and guarded, never moved.
            replicated: of a readonly module that every rank of the group has alike, all of them on one machine: one host copy for
                all, of which each rank loads 1/N over its own link and gathers the rest. Every rank registers it at the same place
                of its program. True: gathered by torch.distributed's default process group; or a process group of the same ranks.

        Raises:
            RegistrationError: why it cannot be registered and what to do; the object is as before. Of a replicated one on every
                rank, and before a byte of it has moved when the ranks' values differ.
            HostMemoryError, DeviceMemoryError: no memory for it; the object is as before.
        """
        registry = self._stack.registry
        with self._trying_to_register(replicated), self._stack.lock.transition():
            before = registry.handles.copy()
            try:
                with self._replication.registering(name, target, readonly, replicated) as replicas:
                    ranks, agree = (None, None) if replicas is None else (replicas, replicas.agree)
                    handle = registry.add(name, target, role=role, owner=owner, readonly=readonly, external=external, ranks=ranks)
                    self._stack.join(handle, agree)
            except BaseException:
                for added in [each for known, each in registry.handles.items() if known not in before]:
                    registry.remove(added)
                raise
            return handle

    def _trying_to_register(self, replicated: bool | ProcessGroup) -> AbstractContextManager[None]:
        """A change of the group where the ranks share the handle, also when it is refused before it begins."""
        return nullcontext() if replicated is False else self._stack.lock.attempt(self._replication.together, begins=True, own=True)

    def unregister(self, handle: Handle | str) -> None:
        """Forget a handle. The same tensor objects get ordinary storage: on the device while resident, else on the host."""
        with self._stack.lock.transition():
            found = self._stack.known(handle if isinstance(handle, str) else handle.name)
            dependent = [h.name for h in self.handles.values() if any(owner is found for owner in h.owners)]
            if dependent:
                raise PhaseError(f"{found.name!r} is stepped by {', '.join(dependent)}; unregister that first")
            self._stack.forget(found)

    def close(self) -> None:
        """Unregister everything, optimizers first, give the device back and end what `serve` began; log what was done. Idempotent.

        Raises:
            PhaseError: a phase is open.
        """
        if self._stack.lock.is_closed:
            _close_all(self._servers)  # in case an interrupt kept an earlier call from it
            return
        last = self.snapshot()
        self._stack.close()
        _close_all(self._servers)
        logger.info("closed\n%s", summary(last), extra={"placement": last})

    # --- phases

    @property
    def phase_name(self) -> str:
        """The innermost open phase; "idle" outside every phase."""
        return self._stack.phase_name

    def phase(self, name: str, *, only: Iterable[str | Handle] | None = None) -> PhaseContext:
        """A phase for a `with` statement: every handle goes where the policy wants it, and back at the end.

        Args:
            name: one of `placement.PHASES`, or of `Settings.phases`.
            only: the handles meant or their names, and the optimizers they own. All others stay as in the enclosing phase; where that
                leaves no room, what neither phase needs on the device leaves it, cheapest first.

        Whoever calls `__enter__` by hand holds what this returns until `__exit__`: a phase that nobody holds is left.

        Raises (on entering):
            PhaseError: another thread or task holds a phase, or a graph is being captured.
            PolicyError: no plan; DeviceMemoryError: it does not fit; nothing has moved then.
            Exception: what stopped the moves; what was on the device before is there again.
        """
        return PhaseContext(self._stack, name, only, here(), keeps_alive=self)

    def enter(self, name: str, *, only: Iterable[str | Handle] | None = None) -> None:
        """Open a phase that no thread owns; `leave` closes it, from any thread."""
        phase = PhaseContext(self._stack, name, only, None)
        phase.__enter__()
        self._entered.append(phase)

    def switch(self, name: str, *, only: Iterable[str | Handle] | None = None) -> None:
        """`Phase.switch` for the phase of the last `enter`."""
        self._last_entered(f"switch to {name!r}").switch(name, only=only)

    def leave(self, error: BaseException | None = None) -> None:
        """Close the phase of the last `enter`; with an `error`, as a `with` statement that it passes through."""
        phase = self._last_entered("leave")
        try:
            phase.__exit__(None if error is None else type(error), error, None)
        finally:
            if phase._open is None:
                self._entered.pop()

    def _last_entered(self, what: str) -> PhaseContext:
        with self._stack.lock.attempt(own=True):
            if not self._entered:
                raise PhaseError(f"cannot {what}: no phase was entered with enter()")
        return self._entered[-1]

    def rejoin(self, group: Group) -> None:
        """Go on with a group that was made anew on all ranks, with a new generation, in place of the old one.

        That is what helps after a rank was restarted, and after `CoordinatorLost`: who did not hear a decision has kept what it had
        prepared, and takes part in nothing more. What was kept is brought in line first: every handle goes where it belongs outside
        every phase. The others of the old group do not hear of it: every rank that lives calls this, one that was restarted makes a
        manager.

        A replicated handle stays as it is. Where all ranks that share it live, they load it together, as before; where one was
        restarted, each loads it over its own link, until it is unregistered and registered anew on all ranks.

        Raises:
            PhaseError: a phase is open; leave it first. With a decision that is not known, that loses nothing.
            ValueError: `group` is no group, it is in doubt, or this manager was made without one.
            Exception: a handle could not be brought in line; the old group stays.
        """
        with self._stack.lock.transition():
            self._stack.rejoin(group)
            self._replication.rejoin(group)

    # --- asking

    def snapshot(self) -> Snapshot:
        """Everything at this moment, immutable and JSON-able. Takes no lock, so that a scrape never waits for a move."""
        return self._snapshots.take()

    def audit(self) -> Audit:
        """Compare declared and measured for every handle, by looking at every tensor. Reports, changes nothing.

        What was written into offloaded memory is found again at each audit, until the next phase transition raises it.
        """
        with self._stack.lock.transition():
            plan, writes = self._stack.base_plan(), self._stack.executor.writes
            writes.look(wait=True, at_counters=True)
            return audit.audit(self.handles, plan, self.device, writes.findings)

    def check_integrity(self) -> None:
        """Raise if anything disagrees.

        Raises:
            IntegrityError: with the numbers that disagree.
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
    ) -> MetricsServer:
        """Serve /metrics, /healthz, /state, /trace and the status page; `server.url`, `server.target`, `server.close()`.

        Until the server or the manager is closed; it does not keep a manager alive that nobody else holds.

        Args:
            port: 0 takes a free one.
            address: loopback unless told otherwise: whoever reaches it reads what this worker does.
            discovery: a folder for Prometheus' file discovery, where this worker writes a file of its own until it ends; None:
                `Settings.discovery`.
            identity: who the worker is in its run; None: as torchrun or Slurm say.

        Raises:
            PlacementError: the address and port cannot be bound, the folder cannot be written, or the manager is closed.
        """
        from placement.observe.discovery import Identity
        from placement.observe.nvml import OtherProcesses
        from placement.observe.server import MetricsServer

        self._stack.lock.check_process()
        if identity is None:
            identity = Identity.from_launcher(run=self.settings.run, gpu_uuid=self.device.uuid)
        if self._snapshots.others is None:
            self._snapshots.others = OtherProcesses(self.device.uuid)
        snapshots, stack = self._snapshots, self._stack  # not the manager, which the server would keep alive
        server = MetricsServer(snapshots.take, is_over=lambda: stack.lock.is_closed, journal=self.journal, port=port, address=address)
        self._servers.add(server)
        try:
            server.announce(self.settings.discovery if discovery is None else discovery, identity)
        except BaseException:
            server.close()
            raise
        return server
