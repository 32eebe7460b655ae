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
from placement.ownership.optimizer import OptimizerAdapter
from placement.registration.initial_step import no_initial_step
from placement.storage.managed import ManagedStorage
from placement.tensors.owned import Adapter

if TYPE_CHECKING:
    from placement.engines.residency import Residency
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

    def __init__(self, name: str, *, kind: str, role: str | None, readonly: bool, moves: Callable[[Handle], TransitionCallbacks]) -> None:
        self.name = name
        self.kind = kind
        self.role = role
        self.readonly = readonly
        self.owners: tuple[Handle, ...] = ()
        self.counters = HandleCounters()
        self.machine = HandleMachine(name, moves(self))
        self.lazy: Lazy | None = None
        self.adapter: Adapter | None = None
        self.holding: ManagedStorage | None = None
        self.residency: Residency | None = None
        """Of an engine that places its own memory: the book of its tags, in place of a holding."""
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
        self._external_bytes = 0
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
    def resident_bytes(self) -> int:
        """Device bytes it holds now. Of an external handle what its tensors held there at the last phase transition."""
        if self.residency is not None:
            return self.residency.resident_bytes
        return self._external_bytes if self.holding is None else self.holding.resident_bytes

    @property
    def num_bytes(self) -> int:
        """Device bytes it needs while it is on the device; of an optimizer with what its steps have still to create, as far as that can be
        told."""
        if self.residency is not None:
            return self.residency.num_bytes
        return 0 if self.holding is None else self.holding.num_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory reserved for its copy."""
        return 0 if self.holding is None else self.holding.storages.host_bytes

    @property
    def foreign_bytes(self) -> int:
        """Device bytes that a framework keeps for it, offloaded or not (a reducer's buckets); `audit()` names them."""
        return sum(nbytes for _, nbytes in self.kept_by_framework)

    @property
    def kept_by_framework(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of each of these, as of the last offload."""
        return () if self.holding is None else self.holding.storages.kept_by_framework

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
        return self.state is State.SYNCING and not self.external and not self._on_device

    @property
    def _on_device(self) -> bool:
        if self.residency is not None:
            return bool(self.residency.resident)
        return self.holding is not None and self.holding.on_device

    @property
    def node(self) -> Node:
        """State and whether the bytes are on the device, as the machine's paths want it."""
        state = self.machine.state
        if state is State.SYNCING:
            return state, self.external or self._on_device
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
        self.built_object = self.adapter = self.holding = self.residency = None

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
        """Look at what an external handle has on the accelerator, each storage once, and for state that was born there. All else that we
        place counts itself."""
        if self.adapter is not None and self.adapter.external is not None:
            storages = (owned.tensor.untyped_storage() for owned in self.adapter.owned())
            self._external_bytes = sum({each._cdata: each.nbytes() for each in storages if each.device.type != "cpu"}.values())
        elif self.holding is not None and self.holding.on_device:
            self.holding.storages.measure_births()

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
        """Whether its state, its bytes and the journal agree, so that there is nothing to make good; of an engine never known."""
        state, holding = self.state, self.holding
        if self.residency is not None or self.broken is not None or self.counters.state is not state:
            return False
        if holding is None or self.external:
            return True
        on_device = holding.on_device if state is State.SYNCING else state is not State.CPU_OFFLOADED
        return holding.is_consistent and holding.on_device is on_device

    def require_sound(self, trigger: Trigger) -> None:
        if self.broken is not None:
            raise BrokenHandleError(f"{self.name!r} is broken and cannot {trigger}: {self.broken}")

    def look_for_strays(self) -> None:
        """See whether what others held at the last offload is still held; while on the device that cannot be told."""
        if self.holding is not None and self.stray_references and not self.holding.on_device:
            found = self.holding.lasting_stray_references()
            self.stray_references, self.stray_names = sum(found.values()), ", ".join([*found][:8])

    def check_integrity(self) -> None:
        """Compare declared and measured for this handle.

        Raises:
            IntegrityError: with the numbers that disagree.
        """
        if self.residency is not None and self.broken is None and self._on_device is (self.state is State.CPU_OFFLOADED):
            raise IntegrityError(f"{self.name!r} is {self.state}, but of its tags {sorted(self.residency.resident)} are on the device")
        if self.holding is None or self.broken is not None:
            return
        on_device = self.state is not State.CPU_OFFLOADED and not self.is_streaming
        if self.state is State.CPU_OFFLOADED and self.holding.on_device:
            raise IntegrityError(f"{self.name!r} is {self.state}, but its bytes are on the device")
        for index, r in enumerate(self.holding.ranges):
            sizes = tuple(r.chunks[position].nbytes for position in sorted(r.chunks))
            wanted = r.chunk_sizes if on_device else ()
            if sizes != wanted:
                raise IntegrityError(
                    f"{self.name!r} is {self.state}, so range {index} of {r.nbytes} bytes needs chunks {wanted} behind it, but has {sizes}"
                )
            if r.slab.nbytes < r.nbytes:
                raise IntegrityError(f"{self.name!r}: range {index} has {r.nbytes} bytes, its host slab only {r.slab.nbytes}")
            if r.claims is not None:
                raise IntegrityError(f"{self.name!r}: {len(r.claims)} storages were never moved into range {index}")
        if self.counters.state is not self.state:
            raise IntegrityError(f"{self.name!r} is {self.state}, but the journal's last record says {self.counters.state}")
