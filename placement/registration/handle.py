"""The handle of one registered object: its state machine, its storage, its counters, and the
methods for users.

The state machine is the package `transitions`, driven by the table in `placement.core.states`. A
trigger is the commit of a state transition: its caller has done the work before, so that an error
of the work leaves the source state. Features of the package that run foreign code are not used:
callbacks, conditions (a false one refuses silently), `on_exception` and `finalize_event` (they
swallow exceptions), automatic `to_STATE()` triggers, and the queue. The manager's lock protects the
machine.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transitions import Machine

from placement.core.errors import BrokenHandleError, IntegrityError, NotResidentError, PhaseError
from placement.core.journal import HandleCounters
from placement.core.modes import without_modes
from placement.core.states import TRANSITIONS, WEIGHTS, HandleView, State, Trigger
from placement.engines.base import HALF_OF_ADAPTERS, UNPUBLISHED, Engine
from placement.ownership.adapter import Adapter
from placement.ownership.module import ModuleAdapter
from placement.ownership.optimizer import OptimizerAdapter
from placement.ownership.optimizer_state import no_initial_step
from placement.storage.base import NotBuilt, Storage
from placement.storage.managed import ManagedStorage
from placement.storage.watch.strays import lasting_stray_references

if TYPE_CHECKING:
    from placement.publish.buckets import Convert, Dtype, WeightInfo
    from placement.publish.changes import Changes, Published
    from placement.publish.checkpoint_names import Names
    from placement.publish.lora import Adapters
    from placement.registration.streamed_optimizer import StreamedOptimizer


# the package logs one INFO line for each callback
logging.getLogger("transitions").setLevel(logging.WARNING)

_MACHINE = Machine(
    model=None,
    states=State,
    transitions=[
        {"trigger": trigger.value, "source": source, "dest": target}
        for trigger, source, target in TRANSITIONS
    ],
    initial=State.CPU_OFFLOADED,
    auto_transitions=False,
    queued=False,
)

Node = tuple[State, bool]
"""A state, and whether the bytes are on the device. SYNCING and TRAINING exist both ways, each
other state only one way."""
OFFLOADED: Node = (State.CPU_OFFLOADED, False)
RESIDENT: Node = (State.GPU_RESIDENT, True)

_FROM_HOST = (
    Trigger.LOAD,
    Trigger.BEGIN_STREAM,
    Trigger.END_STREAM,
    Trigger.BEGIN_STREAMED_TRAIN,
    Trigger.END_STREAMED_TRAIN,
)
"""The triggers of a handle whose bytes are not on the device."""


_Paths = dict[tuple[Node, Node], tuple[Trigger, ...]]


def _all_paths() -> _Paths:
    edges: dict[Node, list[tuple[Trigger, Node]]] = {}
    for trigger, source, target in TRANSITIONS:
        on_device = trigger not in _FROM_HOST
        goes_on_device = trigger is Trigger.LOAD or (on_device and trigger is not Trigger.OFFLOAD)
        edge = trigger, (target, goes_on_device)
        edges.setdefault((source, on_device), []).append(edge)
    paths: _Paths = {(node, node): () for node in edges}
    for _ in edges:  # each round finds the paths that are one trigger longer
        for (start, end), path in [*paths.items()]:
            for trigger, next_node in edges[end]:
                paths.setdefault((start, next_node), (*path, trigger))
    return paths


PATHS = _all_paths()
"""The shortest sequence of triggers from one node to another. Every node can reach every other."""


class Lazy:
    """A factory that is registered in place of an object: `register("critic", Lazy(build_critic),
    role="critic")`.

    The factory is called once, at the first phase transition whose plan wants the handle on the
    device. On a worker whose policy never wants it there, it is never called. It returns the object
    to register. It runs with the default device and the torch function modes of the caller that
    changes the phase. Raises TypeError: `factory` is a module.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        kind: str = "module",
    ) -> None:
        if isinstance(factory, torch.nn.Module):
            raise TypeError(
                f"Lazy takes a function that makes a module, not a {type(factory).__name__}: "
                "register a module that exists without Lazy"
            )
        self.factory = factory
        self.kind = kind


def _parameters_of(modules: Iterable[torch.nn.Module]) -> set[int]:
    """The parameters of these modules, by identity."""
    parameters = set[int]()
    for module in modules:
        parameters.update(map(id, module.parameters()))
    return parameters


class Handle:
    """One registered object. `Manager.register` makes and returns it. It is safe to read from any
    thread."""

    def __init__(
        self,
        name: str,
        *,
        kind: str,
        role: str | None,
        readonly: bool,
    ) -> None:
        self.name = name  # the name under which the object is registered
        self.kind = kind  # the kind of the object: "module", "optimizer" or "engine"
        self.role = role
        """The purpose of the object, by which a policy knows which phases need it; None if none was
        given. An optimizer has its owner's role."""
        self.readonly = readonly  # whether the values never change
        # for an optimizer: the module handles whose parameters it steps
        self.owners: tuple[Handle, ...] = ()
        self.counters = HandleCounters()
        self.state: State = State.CPU_OFFLOADED
        """The state, which says how the object may be used. Only `fire` changes it, by the machine
        that all handles share."""
        self.lazy: Lazy | None = None
        self.adapter: Adapter | None = None
        self.storage: Storage = NotBuilt()  # says where the bytes are
        self.guards: list[Any] = []
        self.streamed: StreamedOptimizer | None = None
        """For an optimizer whose state placement moves: its steps that stream the state; None for
        other handles."""
        self.published: Published | None = None  # the last complete publication of `weight_changes`
        # return the name of the open phase, and the engines that generate. Set by the registry.
        self.phase_now: Callable[[], str] = str
        self.engines: Callable[[], Iterable[Handle]] = tuple
        # restores the handle inside a phase transition of its own. Set when it has joined a manager
        self.restored_by: Callable[[Handle], object] = lambda _: None
        # why the handle can go neither forward nor back; None while it is sound
        self.broken: str | None = None
        self.detached_at_registration = 0
        """For an optimizer: the number of parameters that were not its owners' own at registration
        (flat copies, other ranks')."""
        self.unregistered_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        """For a module: the unregistered optimizers that have stepped its parameters."""
        self.stray_references = 0
        self.stray_names = ""  # names of their storages
        self.drift_bytes = 0
        self.last_view: tuple[dict[str, Any], HandleView] | None = None
        """The view of this handle that a policy was shown last, with its fields."""
        self.built_object: Any = None
        """An object that the handle must keep alive, because there may be no other reference to it:
        one that a `Lazy`'s factory made, an engine, or a list of modules."""
        self._object: weakref.ref[Any] | None = None
        self._gathers: str | None = None  # the adapter's `gathers` when the object was attached

    # --- what users read

    @property
    def object(self) -> Any:
        """The registered object; None while a `Lazy` is not built, and after the object has been
        garbage-collected."""
        return None if self._object is None else self._object()

    @property
    def holding(self) -> ManagedStorage | None:
        """The storage, if placement moves its bytes; None if an engine or a framework does, or
        there is no object."""
        return self.storage if isinstance(self.storage, ManagedStorage) else None

    @property
    def resident_bytes(self) -> int:
        """Device bytes that the object holds now. For an external handle: bytes of its tensors
        there at the last phase transition."""
        return self.storage.resident_bytes

    @property
    def prefetched_bytes(self) -> int:
        """Device bytes of an offloaded handle that were prefetched (`Plan.prefetch`), or that its
        offload has left to be saved."""
        return self.storage.prefetched_bytes

    @property
    def num_bytes(self) -> int:
        """Device bytes that the object needs while it is on the device.

        For an optimizer this includes state that its steps have still to create, as far as its size
        can be told.
        """
        return self.storage.num_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory of the host copy, with the part that is reserved for state that is
        not created yet. See `disk_bytes`."""
        return self.storage.host_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of the host copy, with the part that is reserved for state that is not created yet,
        in files (`Settings.disk_directory`). They are not part of `host_bytes`."""
        return self.storage.disk_bytes

    @property
    def foreign_bytes(self) -> int:
        """Device bytes that a framework keeps for the object, offloaded or not (a reducer's
        buckets). `audit()` names them."""
        return sum(nbytes for _, nbytes in self.storage.kept_by_framework)

    @property
    def external(self) -> bool:
        """Whether the framework itself places the bytes. Then placement tracks and guards the
        object, but never moves it."""
        return self.adapter is not None and self.adapter.external is not None

    @property
    def external_reason(self) -> str | None:
        return None if self.adapter is None else self.adapter.external

    @property
    def stale(self) -> str | None:
        """Why an engine's weights must be published before it can generate; None if they need
        not."""
        return self.object.stale if isinstance(self.object, Engine) else None

    def note_loaded(self) -> None:
        """Note that a checkpoint has replaced the values. Engines need the actor's values before
        they can generate, except for engines that have its very tensors."""
        if self.kind != "module" or self.role != "actor":
            return
        own_parameters = _parameters_of(self.modules())
        for handle in self.engines():
            engine = handle.object
            parameters = _parameters_of(engine.modules())
            shares_tensors = parameters and parameters <= own_parameters
            if engine.stale in (None, HALF_OF_ADAPTERS) and not shares_tensors:
                engine.stale = UNPUBLISHED

    def note_published(self) -> None:
        """Note that all of the weights were published, for the engines that could take them."""
        for handle in self.engines():
            has_weights = handle.is_on_device and WEIGHTS not in handle.storage.offloaded_tags
            if has_weights and handle.stale == UNPUBLISHED:
                handle.object.weights_filled()

    @property
    def gathers(self) -> str | None:
        """Why the state dict, or that of an owner, can be made on the device alone; None where it
        can be made in every state."""
        # asked for every view of every phase transition, so it is looked up once
        reason = self._gathers
        if reason is None:
            for owner in self.owners:
                reason = owner._gathers or reason
        return None if reason is None or self.external else reason

    @property
    def is_built(self) -> bool:
        return self.adapter is not None

    @property
    def is_streaming(self) -> bool:
        """Whether the handle is used from its host copy, with nothing on the device: published
        (SYNCING) or stepped (TRAINING)."""
        return self.state in (State.SYNCING, State.TRAINING) and not self.storage.on_device

    @property
    def window_bytes(self) -> int:
        """The most device bytes that a streamed step holds of an optimizer's state at a time; 0
        where no plan may stream it."""
        streamed = self.streamed
        if streamed is None or streamed.refusal is not None:
            return 0
        whole_bytes = streamed.storage.device_bytes + streamed.storage.unborn_bytes
        if whole_bytes <= streamed.buckets_bytes:
            return whole_bytes
        return streamed.measured().window_bytes

    @property
    def node(self) -> Node:
        """The state, and whether the bytes are on the device: a node in the paths of the state
        machine."""
        state = self.state
        if state is State.SYNCING or state is State.TRAINING:
            return state, self.storage.on_device
        return state, state is not State.CPU_OFFLOADED

    @property
    def is_on_device(self) -> bool:
        """Whether the bytes are on the device, as the state says. An external handle's state does
        not say where they are."""
        return self.node[1]

    def state_dict(self) -> Any:
        """The object's state dict with its present values, in every state.

        While the object is offloaded, the tensors lie in the host copy. They follow the handle when
        it moves.

        Raises:
            NotResidentError: there is no state: a `Lazy` is not built yet, or the object was
                garbage-collected.
            BrokenHandleError: values are lost since an earlier failure.

        Example:
            ::

                torch.save(actor.state_dict(), "actor.pt")  # on the device or not
        """
        target = self.object
        if target is None:
            reason = "is not built yet: no phase has wanted it on the device"
            if self.is_gone:
                reason = "is gone: it was garbage-collected"
            raise NotResidentError(f"the object of {self.name!r} {reason}")
        with without_modes():
            lacks_state = False
            if isinstance(self.adapter, OptimizerAdapter):
                lacks_state = not self.adapter.state_is_all_born()
            with no_initial_step() if lacks_state else nullcontext():
                return target.state_dict()

    def restore(self) -> None:
        """Point every tensor of the offloaded object to its place again, with its registered value.

        A handle does not move after its tensors were replaced while it was offloaded: by `half()`,
        `to()`, `.data =`, `share_memory()`, or a new parameter. This call drops the present values
        of such tensors; `unregister()` keeps them instead. Added tensors stay. An optimizer goes on
        stepping the parameter objects that it was given.

        The hooks that average gradients are gone where parameters changed dtype or device. Wrap
        such a module anew, and register it again. Without replaced tensors the call does nothing.

            with manager.phase("rollout"):
                actor_net.half()      # reads NaN: the actor is off the device
            actor.restore()           # float32 again, with the values of before

        Raises:
            PhaseError: the object is on the device. Its values are those that its tensors have
                there.
            IntegrityError: the values were lost by an earlier failure.
            RegistrationError: a present tensor is on the meta device, or in another handle's
                memory.
        """
        self.restored_by(self)

    def weights_info(
        self,
        *,
        dtype: Dtype = None,
        adapters: Adapters = "merged",
        names: Names = "module",
        convert: Convert | None = None,
    ) -> list[WeightInfo]:
        """Name, shape and dtype of every weight that `weights` publishes for the same arguments, in
        the same order.

        It works in every state. It moves nothing, reads no value and calls no collective. The list
        is empty while the object is not built.

        Raises:
            ValueError, TypeError: an argument does not fit (see `weights`).

        Example:
            ::

                receiver = {
                    info.name: torch.empty(info.shape, dtype=info.dtype)
                    for info in actor.weights_info(dtype="bfloat16")
                }
        """
        from placement.publish import buckets

        return buckets.weights_info(
            self, dtype=dtype, adapters=adapters, names=names, convert=convert
        )

    def weights(
        self,
        *,
        bucket_bytes: int | str = 512 << 20,
        dtype: Dtype = None,
        adapters: Adapters = "merged",
        names: Names = "module",
        convert: Convert | None = None,
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Publish the weights, unsharded and under their clean names: lists of (name, tensor),
        valid until the next iteration.

        The tensors are in torch's own memory. Weights that are sharded over ranks are gathered one
        at a time. So every rank that has a shard must iterate, with the same arguments except
        `bucket_bytes`. A generator that is closed early (a `break`, an exception) takes part in the
        rest of the gathering, so that other ranks go on. One that is never started, or is kept
        beyond its phase, does not.

        The device memory needed is one bucket plus the memory for making one weight. That is at
        most another tensor of the weight's size. This rank's part of it comes on top if the weight
        is cut unevenly or along another dimension than the first. Merging adapters takes the
        tensors with which PEFT computes one layer: two more of the weight's size for LoRA, four for
        DoRA. The memory that `convert` needs for one weight comes on top. So does the next bucket
        where the weights are published from the host copy.

        Args:
            bucket_bytes: upper bound of one list as it is sent, in bytes; "512MiB" works too. A
                larger tensor comes alone.
            dtype: the dtype to which floating-point parameters are cast, or its name ("bfloat16");
                None: they keep theirs. Not cast are buffers, quantised weights (float8, packed)
                with the scales beside them, and parameters that transformers keeps in float32
                (`_keep_in_fp32_modules`).
            adapters: for a PEFT model. "merged": the base weights with the active adapters merged
                by PEFT, which leaves the model as it is. "separate": the active adapter alone,
                under PEFT's names. "base": the base weights alone, under their own names.
            names: "module": as the module names its parameters. "checkpoint": for a model of
                transformers 5, names and form as `save_pretrained` writes them, which loaders of
                rollout engines expect: one tensor an expert, where the module has the experts of a
                layer in one parameter. Such a parameter takes up to two more of its size while its
                parts are made.
            convert: a function of a published name and its full value, such as
                `lambda name, tensor: tensor if "router" in name else tensor.bfloat16()`. The tensor
                that it returns, of any shape and dtype, is published in the weight's place. It is
                called after `dtype`, `adapters` and `names`, without gradients, for one weight
                after the other on every rank. Before, it is called for each with a tensor on the
                meta device, because buckets are planned by shapes and dtypes.

        Raises:
            PhaseError: the handle is not SYNCING (`with manager.phase("weight_sync")`), or stops
                being so half-way.
            RegistrationError: a weight cannot be published; the message says which one, and what to
                do.
            ValueError, TypeError: `adapters` or `names` does not fit the module; `bucket_bytes` is
                no number of bytes; `dtype` is no floating-point dtype; `convert` needs values, or
                returns no tensor.

        Example:
            ::

                with manager.phase("weight_sync"):
                    for bucket in actor.weights(bucket_bytes="512MiB", dtype="bfloat16"):
                        engine.update_weights(bucket)
        """
        from placement.publish import buckets

        return buckets.weights(
            self,
            bucket_bytes=bucket_bytes,
            dtype=dtype,
            adapters=adapters,
            names=names,
            convert=convert,
        )

    def weight_changes(
        self,
        *,
        since: int | None,
        bucket_bytes: int | str = 512 << 20,
        dtype: Dtype = None,
        adapters: Adapters = "merged",
        names: Names = "module",
    ) -> Iterator[Changes]:
        """Publish the changes since a version that the receivers have: lists of `WeightChange`,
        valid until the next iteration.

        Each rank publishes its own part of a sharded weight, as positions and values, with the
        part's offset. No weight is gathered. The bits of the published dtype are compared. A list
        has the `version` that receivers have afterwards, to be given as `since` the next time. It
        has the `base` that they must have before; None if every weight is whole.

        The device is compared with the host copy, which has the last publication's values until an
        offload or an asynchronous checkpoint overwrites them. So publish before that. A weight is
        whole in these cases:

        * the first time, and after a generator that was closed early;
        * after an offload of trained weights, or one that failed;
        * after a write into the host copy (a state dict, `checkpoint.load`);
        * where `dtype`, the names or the places have changed;
        * where changes would take more bytes than the weight;
        * where it is computed (merged adapters, converted names, quantised).

        A model that is still on the device when training begins again is first copied to the host
        copy, as by an offload.

        Args:
            since: the `version` that the receivers have; None if they have none. Any other version
                than that of the last complete publication makes every weight whole.
            bucket_bytes, dtype, adapters, names: see `weights`.

        Raises:
            PhaseError, RegistrationError, ValueError, TypeError: see `weights`.

        Example:
            ::

                with manager.phase("weight_sync"):
                    for changes in actor.weight_changes(since=version):
                        send(changes)
                        version = changes.version
        """
        from placement.publish import buckets

        return buckets.weight_changes(
            self,
            since=since,
            bucket_bytes=bucket_bytes,
            dtype=dtype,
            adapters=adapters,
            names=names,
        )

    def __repr__(self) -> str:
        return (
            f"<Handle {self.name!r} {self.kind} {self.state} {self.resident_bytes} bytes on the "
            "device>"
        )

    # --- what the manager calls

    def attach(
        self,
        target: Any,
        adapter: Adapter,
        when_gone: Callable[[Handle], None],
    ) -> None:
        """Bind the object, by a weak reference: `Registry` sets `built_object` where a strong one
        is needed. `when_gone`: called once the object was garbage-collected."""
        reference = weakref.ref(self)

        def note_gone(_: object) -> None:
            handle = reference()
            if handle is not None:
                when_gone(handle)

        self.kind = adapter.kind
        self.adapter = adapter
        self._object = weakref.ref(target, note_gone)
        self._gathers = adapter.gathers

    def detach(self) -> None:
        """Undo `attach` after the building of a `Lazy` has failed. The handle has no object again,
        and none that could be collected."""
        self._object = self._gathers = None
        self.built_object = self.adapter = None
        self.storage = NotBuilt()

    @property
    def modules_adapter(self) -> ModuleAdapter | None:
        """The adapter of a module or of an engine's modules; None for another object, or where
        there is no object."""
        return self.adapter if isinstance(self.adapter, ModuleAdapter) else None

    def modules(self) -> Sequence[torch.nn.Module]:
        """The module itself, or an engine's modules. Empty for an optimizer, and if the object is
        not built or gone."""
        target = self.object
        if isinstance(target, Engine):
            return target.modules()
        return (target,) if isinstance(target, torch.nn.Module) else ()

    @property
    def is_gone(self) -> bool:
        return self._object is not None and self._object() is None

    def detached_parameters(self) -> int:
        """For an optimizer: the number of parameters that it steps but none of its owners has. 0
        for other handles."""
        if not isinstance(self.adapter, OptimizerAdapter) or self.adapter.external is not None:
            return 0
        parameters = {id(parameter): parameter for parameter in self.adapter.parameters()}
        has_modules = False  # stays so where the owners' modules are gone: none is detached then
        for owner in self.owners:
            modules = owner.modules_adapter
            if modules is not None:
                has_modules = True
                for parameter in modules.parameters():
                    parameters.pop(id(parameter), None)
        return len(parameters) if has_modules else 0

    def require(self, trigger: Trigger) -> None:
        """Raise PhaseError if the table has no such transition from here, BrokenHandleError if the
        handle is broken."""
        if self.state not in _MACHINE.events[trigger].transitions:
            raise PhaseError(f"{self.name!r} cannot {trigger} while it is {self.state}")
        if self.broken is not None:
            raise BrokenHandleError(f"{self.name!r} is broken and cannot {trigger}: {self.broken}")

    def fire(self, trigger: Trigger) -> None:
        """Commit one state transition, whose work is done. PhaseError: the table has no such
        transition. The package's own `trigger` would do the same in 80 calls, for callbacks that
        are not used here."""
        transitions = _MACHINE.events[trigger].transitions.get(self.state)
        if transitions is None:
            raise PhaseError(f"{self.name!r} cannot {trigger} while it is {self.state}")
        _MACHINE.set_state(transitions[0].dest or self.state, self)

    def look_for_strays(self) -> None:
        """Update the stray references of the last offload: see which of them still exist. No figure
        changes while the object is on the device."""
        holding = self.holding
        if holding is not None and self.stray_references and not holding.on_device:
            strays = lasting_stray_references(holding.stray_references)
            self.stray_references = sum(strays.values())
            self.stray_names = ", ".join([*strays][:8])

    def stray_error(self) -> IntegrityError | None:
        """The error about stray references at the last offload that still exist; None if there are
        none."""
        self.look_for_strays()
        if not self.stray_references:
            return None
        return IntegrityError(
            f"{self.stray_references} references to storages of {self.name!r} were alive at its "
            f"offload ({self.stray_names}). They read poison now. Drop such references before the "
            "phase ends, or use handle.state_dict() instead."
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError with the numbers if the declared and the measured figures of this
        handle disagree."""
        if self.broken is not None:
            return
        self.storage.check(self.name, self.state)
        if self.counters.state is not self.state:
            raise IntegrityError(
                f"{self.name!r} is {self.state}, but the journal's last record says "
                f"{self.counters.state}"
            )
