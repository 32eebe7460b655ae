"""One registered object: its machine, its bytes, its counters, and what users may ask of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from placement.core.errors import BrokenHandleError, IntegrityError, NotResidentError
from placement.core.journal import HandleCounters
from placement.core.machine import HandleMachine, Node, TransitionCallbacks
from placement.core.states import State, Trigger
from placement.core.torch_modes import without_modes
from placement.engines.base import Engine
from placement.engines.residency import Residency
from placement.ownership.optimizer import OptimizerAdapter
from placement.registration.initial_step import no_initial_step
from placement.storage.base import NotBuilt, Storage
from placement.storage.managed import ManagedStorage
from placement.tensors.owned import Adapter

if TYPE_CHECKING:
    from placement.ownership.module import ModuleAdapter
    from placement.publish.buckets import WeightInfo
    from placement.publish.lora import Adapters


class Lazy:
    """A factory in place of an object: `register("critic", Lazy(build_critic), role="critic")`.

    The factory is called once, at the first phase transition whose plan wants the handle on the device, and never on a worker whose
    policy does not. It returns what `register` would have taken. It finds the default device and the function modes of whoever
    changes the phase.
    """

    def __init__(self, factory: Callable[[], Any], *, kind: str = "module") -> None:
        self.factory = factory
        self.kind = kind


class Handle:
    """What `Manager.register` returns. Made by the manager only; safe to read from any thread."""

    def __init__(
        self, name: str, *, kind: str, role: str | None, readonly: bool, callbacks: Callable[[Handle], TransitionCallbacks]
    ) -> None:
        self.name = name
        self.kind = kind
        self.role = role
        self.readonly = readonly
        self.owners: tuple[Handle, ...] = ()
        self.counters = HandleCounters()
        self.machine = HandleMachine(name, callbacks(self))
        self.lazy: Lazy | None = None
        self.adapter: Adapter | None = None
        self.storage: Storage = NotBuilt()
        """Where its bytes are, whoever moves them."""
        self.guards: list[Any] = []
        self.phase_now: Callable[[], str] = str
        self.broken: str | None = None
        """Why the handle can go neither forward nor back; None while it is sound."""
        self.strangers = 0
        """Of an optimizer: parameters that were not among its owners' own when it was registered (flat copies, other ranks')."""
        self.unregistered_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        """Of a module: those that stepped its parameters."""
        self.stray_references = 0
        self.stray_names = ""
        """The storages that others held at the last offload, by name."""
        self.drift_bytes = 0
        self.built_object: Any = None
        """What a `Lazy`'s factory made, and an engine: nobody else may hold it."""
        self._object: weakref.ref[Any] | None = None
        self._gathers: str | None = None
        """Of the adapter, as it said when the object was attached."""

    # --- what users read

    @property
    def object(self) -> Any:
        """The registered object; None while a `Lazy` is not built, and after the object has been garbage-collected."""
        return None if self._object is None else self._object()

    @property
    def state(self) -> State:
        return self.machine.state

    @property
    def holding(self) -> ManagedStorage | None:
        """The storage where placement moves the bytes; None where the engine or the framework does, or there is no object."""
        return self.storage if isinstance(self.storage, ManagedStorage) else None

    @property
    def residency(self) -> Residency | None:
        """The storage of an engine that moves its own bytes; None of everything else."""
        return self.storage if isinstance(self.storage, Residency) else None

    @property
    def resident_bytes(self) -> int:
        """Device bytes that it holds now; of an external handle, what its tensors held there at the last phase transition."""
        return self.storage.resident_bytes

    @property
    def num_bytes(self) -> int:
        """Device bytes that it needs while it is on the device. For an optimizer this includes state that its steps have still to create,
        as far as its size can be told."""
        return self.storage.num_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory reserved for its copy."""
        return self.storage.host_bytes

    @property
    def foreign_bytes(self) -> int:
        """Device bytes that a framework keeps for it, offloaded or not (a reducer's buckets); `audit()` names them."""
        return sum(nbytes for _, nbytes in self.kept_by_framework)

    @property
    def kept_by_framework(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of each of these, as of the last offload."""
        return self.storage.kept_by_framework

    @property
    def external(self) -> bool:
        """Whether the framework itself places the bytes: tracked and guarded, never moved."""
        return self.external_reason is not None

    @property
    def external_reason(self) -> str | None:
        return None if self.adapter is None else self.adapter.external

    @property
    def gathers(self) -> str | None:
        """Why its state dict needs the values on the device; of an optimizer, because that of a module it steps does. None: in no state."""
        reason = self._gathers  # asked for every view of every phase transition, so it is looked up once
        for owner in self.owners if reason is None else ():
            reason = owner._gathers or reason
        return None if reason is None or self.external else reason

    @property
    def is_built(self) -> bool:
        return self.adapter is not None

    @property
    def is_streaming(self) -> bool:
        """SYNCING from the host copy, with nothing on the device."""
        return self.state is State.SYNCING and not self.storage.on_device

    @property
    def node(self) -> Node:
        """State and whether the bytes are on the device, as the machine's paths want it."""
        state = self.machine.state
        if state is State.SYNCING:
            return state, self.storage.on_device
        return state, state is not State.CPU_OFFLOADED

    def state_dict(self) -> Any:
        """The object's state dict with the values as they are now, in every state.

        While offloaded its tensors lie in the host copy; they follow the handle when it moves.

        Raises:
            NotResidentError: a `Lazy` that is not built has no state yet, an object that was garbage-collected none any more.
        """
        target = self.object
        if target is None:
            raise NotResidentError(
                f"the object of {self.name!r} is gone: it was garbage-collected"
                if self.is_gone
                else f"{self.name!r} is not built yet; it is built at the first phase whose plan wants it on the device"
            )
        with without_modes():
            if isinstance(self.adapter, OptimizerAdapter) and not self.adapter.state_is_all_born():
                with no_initial_step():
                    return target.state_dict()
            return target.state_dict()

    def weights_info(self, *, dtype: torch.dtype | None = None, adapters: Adapters = "merged") -> list[WeightInfo]:
        """Name, shape and dtype of every weight that `weights` publishes when it is asked the same, in its order.

        In every state; it moves nothing, reads no value and calls no collective. Empty while not built.
        """
        from placement.publish import buckets

        return buckets.weights_info(self, dtype=dtype, adapters=adapters)

    def weights(
        self, *, bucket_bytes: int = 512 << 20, dtype: torch.dtype | None = None, adapters: Adapters = "merged"
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Publish the weights, whole and by clean names: lists of (name, tensor) in torch's own memory, valid until the next iteration.

        Weights that are sharded over ranks are gathered one at a time, so every rank of them has to iterate with the same arguments
        but for `bucket_bytes`, whatever it does with the tensors. A generator that is closed early (a `break`, an exception) takes part
        in the rest of the gathering, so that other ranks go on; one that is never started, or is kept beyond its phase, does not. On
        the device lie one bucket and what making one weight takes: at most another tensor of its size, and this rank's part of it where
        it is cut unevenly or along another dimension than the first. Merging takes what PEFT computes one layer with: two more tensors
        of the weight's size for LoRA, four for DoRA.

        Args:
            bucket_bytes: upper bound of one list, in bytes; a larger tensor comes alone.
            dtype: cast floating-point weights to this.
            adapters: of a PEFT model: "merged", the base weights with the active adapters in them, computed by PEFT and not in the
                model; "separate", the active adapter alone, by PEFT's names; "base", the base weights alone, by their own names.

        Raises:
            PhaseError: the handle is not SYNCING (`with manager.phase("weight_sync")`), or stops being so half-way.
            RegistrationError: a weight of it cannot be published; says which one, and what to do.
            ValueError: `adapters` does not fit the module.
        """
        from placement.publish import buckets

        return buckets.weights(self, bucket_bytes=bucket_bytes, dtype=dtype, adapters=adapters)

    def __repr__(self) -> str:
        return f"<Handle {self.name!r} {self.kind} {self.state} {self.resident_bytes} bytes on the device>"

    # --- what the manager does

    def attach(self, target: Any, adapter: Adapter, when_gone: Callable[[Handle], None]) -> None:
        """Bind the object, weakly: a handle keeps no model alive but one that it alone has (see `built_object`)."""
        me = weakref.ref(self)

        def gone(_: object) -> None:
            handle = me()
            if handle is not None:
                when_gone(handle)

        self.kind, self.adapter, self._object = adapter.kind, adapter, weakref.ref(target, gone)
        self._gathers = adapter.gathers

    def detach(self) -> None:
        """Undo `attach`: the handle of a `Lazy` whose building failed has no object again, and none that could be collected."""
        self._object = self._gathers = None
        self.built_object = self.adapter = None
        self.storage = NotBuilt()

    def module_adapters(self) -> Sequence[ModuleAdapter]:
        """The adapters of its modules: of a module its own, of an engine each one's, of an optimizer and of what is not built none."""
        return () if self.adapter is None else cast("Sequence[ModuleAdapter]", self.adapter.module_adapters())

    def modules(self) -> Sequence[torch.nn.Module]:
        """The module itself, the modules of an engine; none of an optimizer, or where the object is not built or gone."""
        target = self.object
        if isinstance(target, Engine):
            return target.modules()
        return (target,) if isinstance(target, torch.nn.Module) else ()

    def measure(self) -> None:
        """Bring up to date what changes without placement: what a framework has on the device, state that steps have created."""
        self.storage.measure()

    @property
    def is_gone(self) -> bool:
        """Whether the object was garbage-collected."""
        return self._object is not None and self._object() is None

    def detached_parameters(self) -> int:
        """Of an optimizer: how many parameters it steps that none of its owners has."""
        if not isinstance(self.adapter, OptimizerAdapter) or self.adapter.external is not None:
            return 0
        modules = [adapter for owner in self.owners for adapter in owner.module_adapters()]
        if not modules:  # gone, and the optimizer is used on without them
            return 0
        known = {id(parameter) for adapter in modules for parameter in adapter.parameters()}
        return sum(id(parameter) not in known for parameter in self.adapter.parameters())

    @property
    def is_consistent(self) -> bool:
        """Whether its state, its bytes and the journal agree, so that there is nothing to make good."""
        state = self.state
        return self.broken is None and self.counters.state is state and self.storage.is_consistent_in(state)

    def require_sound(self, trigger: Trigger) -> None:
        if self.broken is not None:
            raise BrokenHandleError(f"{self.name!r} is broken and cannot {trigger}: {self.broken}")

    def look_for_strays(self) -> None:
        """See whether what others held at the last offload is still held; while on the device that cannot be told."""
        if (holding := self.holding) is not None and self.stray_references and holding.is_offloaded:
            found = holding.lasting_stray_references()
            self.stray_references, self.stray_names = sum(found.values()), ", ".join([*found][:8])

    def check_integrity(self) -> None:
        """Compare declared and measured for this handle.

        Raises:
            IntegrityError: with the numbers that disagree.
        """
        if self.broken is not None:
            return
        self.storage.check(self.name, self.state)
        if self.counters.state is not self.state:
            raise IntegrityError(f"{self.name!r} is {self.state}, but the journal's last record says {self.counters.state}")
