"""Register objects: turn each into a handle whose storages have their places."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from placement.core.errors import PhaseError, PlacementError, RegistrationError
from placement.core.journal import logger
from placement.core.modes import callers_function_modes
from placement.core.settings import NAME, Settings
from placement.core.states import KINDS, ROLES, State
from placement.devices.base import Device
from placement.devices.host.file_slab import new_slab_for
from placement.engines.base import Engine, EngineAdapter
from placement.engines.tagged import TaggedAdapter, TaggedEngine
from placement.ownership.adapter import Adapter
from placement.ownership.module import ModuleAdapter
from placement.ownership.optimizer import OptimizerAdapter
from placement.ownership.optimizer_state import optimizers_in, undo_initial_step
from placement.registration import guards
from placement.registration.handle import Handle, Lazy
from placement.registration.streamed_optimizer import (
    StreamedOptimizer,
    Streaming,
    bucket_bytes_of,
)
from placement.storage.adoption import Adoption
from placement.storage.base import ExternalStorage, NotBuilt
from placement.storage.managed import ManagedStorage
from placement.storage.owners import RANGES
from placement.storage.replicated import ReplicatedStorage
from placement.storage.shared import Ranks
from placement.storage.transfer.streamed import most_buckets
from placement.tensors.plain import plain_parts

_MANY = 20_000  # new objects, for which the garbage collector would take milliseconds


@contextlib.contextmanager
def _collecting_later() -> Iterator[None]:
    """The garbage collector waits: for 10,000 parameters it would take longer than the
    registration, all of whose objects stay. Therefore so many go straight to its oldest generation.
    They do not where there are frozen objects, which stay frozen and take long to count."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class Registry:
    """The handles of one manager, in registration order."""

    def __init__(
        self,
        device: Device,
        phase_now: Callable[[], str],
        # also told of a handle that an error has kept from being handed back
        when_gone: Callable[[Handle], None],
        streaming: Streaming,
        settings: Settings,
        when_unused: Callable[[], object],  # see `Range`
    ) -> None:
        # the one table, which all of phases and planning hold; only `add` and `remove` change it
        self.handles: dict[str, Handle] = {}
        self._by_key: dict[int, Handle] = {}
        """Handles by the `id` of their key objects. A dead object's entry goes at the beginning of
        each transition, before any look-up."""
        self._device = device
        self._phase_now = phase_now
        self._when_gone = when_gone
        self._streaming = streaming
        self._settings = settings
        self._when_unused = when_unused
        self._new_slab = new_slab_for(settings, device)
        self._has_warned = False

    def add(
        self,
        name: str,
        target: Any,
        *,
        role: str | None,
        owner: Handle | str | None,
        readonly: bool,
        external: bool,
        ranks: Ranks | None = None,
    ) -> Handle:
        """Make a handle, CPU_OFFLOADED and adopted. If it raises, the object has its values.
        The name and the role are checked already. `ranks`: those that share the host copy."""
        if name in self.handles:
            raise RegistrationError(
                f"{name!r} is registered already; unregister it first or choose another name"
            )
        kind = target.kind if isinstance(target, Lazy) else "module"
        if kind not in KINDS:
            raise RegistrationError(f"{name!r}: kind {kind!r} is none of {', '.join(KINDS)}")
        handle = Handle(name, kind=kind, role=role, readonly=readonly)
        handle.phase_now = self._phase_now
        handle.engines = self._engines
        handle.owners = () if owner is None else (self._owner(name, owner),)
        try:
            if isinstance(target, Lazy):
                handle.lazy = target
            else:
                with _collecting_later():
                    self._bind(handle, target, external, ranks)
            self.handles[name] = handle
        except BaseException:
            self.remove(handle)
            raise
        return handle

    def build(self, handle: Handle) -> None:
        """Call a `Lazy`'s factory and adopt the object that it returns. RegistrationError: the
        factory failed, or the object cannot be registered; the handle stays unbuilt."""
        assert handle.lazy is not None
        try:
            with callers_function_modes():
                target = handle.lazy.factory()
        except Exception as error:
            raise RegistrationError(f"the factory of {handle.name!r} failed: {error}") from error
        before = handle.kind, handle.role, handle.owners
        try:
            handle.built_object = target  # there may be no other reference to the object
            with _collecting_later():
                self._bind(handle, target, external=False)
        except BaseException:
            self._unbind(handle)
            handle.detach()
            # the object that could not be bound has given it other ones
            handle.kind, handle.role, handle.owners = before
            raise
        handle.lazy = None

    def remove(self, handle: Handle) -> None:
        """Remove a handle. Its tensors get ordinary storage, on the device while resident, else on
        the host. Idempotent."""
        self._unbind(handle)
        if self.handles.get(handle.name) is handle:
            del self.handles[handle.name]
        handle.storage.detach()
        handle.storage = NotBuilt()

    def _unbind(self, handle: Handle) -> None:
        """Undo `_bind`: hand the tensors back, and remove the guards. If handing back fails, the
        handle keeps its guards, and the next phase transition tries again."""
        try:
            handle.storage.unadopt()
        except BaseException:
            self._when_gone(handle)
            raise
        # only now, because `unadopt` may fail, and then the handle stays and needs its guards
        for hook in handle.guards:
            hook.remove()
        handle.guards = []
        handle.streamed = None
        entries = self._by_key.items()
        self._by_key = {key: other for key, other in entries if other is not handle}

    def _engines(self) -> list[Handle]:
        """The engines that generate."""
        engines = []
        for handle in self.handles.values():
            if isinstance(handle.object, Engine) and handle.role in (None, "rollout"):
                engines.append(handle)
        return engines

    def check_name_and_role(self, name: object, role: str | None) -> None:
        """Raise RegistrationError unless they are a name and a role."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RegistrationError(f"handle name {name!r} must match {NAME.pattern}")
        if role is not None and role not in ROLES:
            raise RegistrationError(f"{name!r}: role {role!r} is none of {', '.join(ROLES)}")

    def _owner(self, name: str, owner: Handle | str) -> Handle:
        handle = self.handles.get(str(getattr(owner, "name", owner)))
        if handle is None or handle.kind == "optimizer":
            raise RegistrationError(
                f"{name!r}: owner {owner!r} is not a registered module of this manager; register "
                "the module first"
            )
        return handle

    def _bind(
        self, handle: Handle, target: Any, external: bool, ranks: Ranks | None = None
    ) -> None:
        """Make the object's storage, attach the object to the handle, and put guards on it. Raises
        RegistrationError: the object is refused. After any error the caller calls `_unbind`."""
        adapter = self._new_adapter(handle, target, external)
        if ranks is not None:
            _require_shareable(handle.name, adapter)
        keys = [id(key) for key in adapter.key_objects()]
        for key in keys:
            if key in self._by_key:
                raise RegistrationError(
                    f"{handle.name!r}: the object is registered already, as "
                    f"{self._by_key[key].name!r}"
                )
        if isinstance(adapter, OptimizerAdapter):
            if handle.readonly:
                raise RegistrationError(
                    f"{handle.name!r}: each step of an optimizer changes its state, so it cannot "
                    "be readonly; leave readonly=True out"
                )
            self._find_owners(handle, adapter)
            modules = [owner.modules_adapter for owner in handle.owners]
            # may make it external
            adapter.follow([module for module in modules if module is not None])
        if isinstance(adapter, TaggedAdapter):
            self._take_over(handle, adapter.engine)
        elif adapter.external is not None:
            handle.storage = ExternalStorage(adapter)
        else:
            self._adopt(handle, adapter, ranks)
        handle.attach(target, adapter, self._when_gone)
        guards.install(handle, adapter.key_objects())
        handle.guards.append(StepWatch(handle))
        self._by_key.update(dict.fromkeys(keys, handle))

    def _adopt(self, handle: Handle, adapter: Adapter, ranks: Ranks | None) -> None:
        """Give the handle a storage that placement moves, which adopts the object's tensors.
        `ranks`: as for `add`."""
        adoption = Adoption(self._device, self._new_slab, self._when_unused)
        arguments = self._device, adapter, handle.name, handle.readonly, adoption
        if ranks is None:
            holding = ManagedStorage(*arguments)
        else:
            holding = ReplicatedStorage(*arguments, ranks)
        handle.storage = holding
        with torch.no_grad():
            holding.adopt()
            is_predictable = self._reserve_and_measure_state(holding, adapter)
        if isinstance(adapter, OptimizerAdapter):
            handle.streamed = StreamedOptimizer(
                handle, holding, adapter, self._streaming, is_predictable=is_predictable
            )
        warning = None if self._has_warned else _warning_of_captures()
        if warning is not None:
            self._has_warned = True
            logger.warning("%s", warning)

    def _take_over(self, handle: Handle, engine: TaggedEngine) -> None:
        """Give the handle the storage of an engine that places its own memory. The handle keeps the
        engine alive."""
        if handle.readonly and not engine.residency.keeps_weights:
            raise RegistrationError(
                f"{handle.name!r}: an offload discards its weights, so it cannot be readonly; "
                "leave readonly=True out"
            )
        engine.residency.attach(lambda: self._device.memory().free_bytes)
        handle.storage = engine.residency
        handle.built_object = engine

    def _new_adapter(self, handle: Handle, target: Any, external: bool) -> Adapter:
        """Make the adapter for the object's kind. The handle keeps an engine alive from now on.
        Raises RegistrationError: the object is refused."""
        if isinstance(target, TaggedEngine):  # a kind of `Engine`
            if external:
                raise RegistrationError(
                    f"{handle.name!r}: the engine places its own memory itself; register it "
                    "without external=True"
                )
            return TaggedAdapter(target)
        if isinstance(target, Engine):
            # An engine made in the call of register() has no other reference. A `TaggedEngine` is
            # kept by `_take_over`.
            handle.built_object = target
            return EngineAdapter(
                target,
                name=handle.name,
                compute_device=self._device.torch_device,
                external=external,
            )
        if isinstance(target, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            # Modules that share weights are registered as one list, made in the call of register().
            handle.built_object = target
        cls = ModuleAdapter if isinstance(target, torch.nn.Module) else OptimizerAdapter
        return cls(
            target, name=handle.name, compute_device=self._device.torch_device, external=external
        )

    def _reserve_and_measure_state(self, holding: ManagedStorage, adapter: Adapter) -> bool:
        """Reserve host memory for state to be created, which an offload must not lack, and measure
        what is unborn. Returns whether the size of all is known."""
        sizes = adapter.expected_sizes()
        num_ranges = 1
        if adapter.kind == "optimizer":
            num_ranges = most_buckets(sum(sizes or ()), bucket_bytes_of(self._device))
        holding.reserve(sizes or (), num_ranges)
        return sizes is not None

    def _find_owners(self, handle: Handle, adapter: OptimizerAdapter) -> None:
        """Set the owners: those given with `owner=`, and the modules whose parameters the optimizer
        steps. With `owner=`, it may also step copies of its own, which move with its state. A
        handle without a role gets the first owner's. Raises RegistrationError, with nothing set: a
        parameter belongs to no module."""
        owners: dict[str, Handle] = {owner.name: owner for owner in handle.owners}
        modules = list[ModuleAdapter]()
        by_parameter = dict[int, Handle]()
        # A parameter may be another tensor over the module's bytes, or one that the module had
        # before.
        by_holding = dict[int, Handle]()
        # the last entry counts: that of the handle that was registered first
        for other in reversed(self.handles.values()):
            if other.holding is not None:
                by_holding[id(other.holding)] = other
            module = other.modules_adapter
            if module is not None:
                modules.append(module)
                by_parameter.update({id(parameter): other for parameter in module.parameters()})
        copies: list[torch.Tensor] = []
        parameters = adapter.parameters()
        for index, parameter in enumerate(parameters):
            owner = by_parameter.get(id(parameter)) or by_holding.get(id(_holding_of(parameter)))
            if owner is not None:
                owners[owner.name] = owner
            elif any(id(parameter) in module.own_tensors() for module in modules):
                raise _belongs_to_none(handle.name, index, parameter, _SHARDED_ONES)
            elif handle.owners:
                copies.append(parameter)
            elif not adapter.is_stand_in(parameter):  # nothing steps a stand-in: it needs none
                raise _belongs_to_none(handle.name, index, parameter, _MODULES_FIRST)
        module = handle.owners[0].modules_adapter if copies else None
        of_owner = [] if module is None else module.parameters()
        if of_owner:
            # the adapter lists one of the owner's parameters, whichever, in place of the copies
            adapter.take_copies(copies, of_owner[0])
        handle.owners = tuple(owners.values())
        handle.detached_at_registration = sum(
            id(parameter) not in by_parameter for parameter in parameters
        )
        if handle.role is None and handle.owners:
            handle.role = handle.owners[0].role


_SHARDED_ONES = (
    "A sharded module shows it between a forward and reshard() only: make the optimizer of the "
    "sharded parameters."
)
_MODULES_FIRST = (
    "Register the modules first, then the optimizers that step them. An optimizer of copies of its "
    "own (float32 copies of the weights) is registered with owner= of the module that they are "
    "copies of, and they move with it."
)


def _belongs_to_none(
    name: str, index: int, parameter: torch.Tensor, advice: str
) -> RegistrationError:
    shape = tuple(parameter.shape)
    return RegistrationError(
        f"{name!r}: parameter {index} of shape {shape} belongs to no registered module. {advice}"
    )


def _require_shareable(name: str, adapter: Adapter) -> None:
    """Raise RegistrationError unless ranks may share a host copy of the object."""
    if adapter.kind == "module" and adapter.external is None:
        return
    reason = f"it is an {adapter.kind}"
    if adapter.external is not None:
        reason = f"something else places its bytes ({adapter.external})"
    raise RegistrationError(
        f"{name!r}: ranks share frozen tensors of modules that placement moves, and {reason}; "
        "register it without replicated=True"
    )


def _holding_of(parameter: torch.Tensor) -> object:
    """The storage in whose range a parameter lies; None if it is in none."""
    _, part = next(plain_parts(parameter, ""), ("", None))
    return None if part is None else RANGES.owner_of(part.untyped_storage().data_ptr())


def _warning_of_captures() -> str | None:
    """A warning that CUDA graphs with collectives may hang after a handle has moved: NCCL registers
    buffers by their physical memory. The content of a graph cannot be seen, so the warning comes
    whenever NCCL is in use."""
    distributed = torch.distributed
    is_in_use = (
        distributed.is_available()
        and distributed.is_initialized()
        and "nccl" in str(distributed.get_backend_config()).lower()
    )
    if not is_in_use or os.environ.get("NCCL_GRAPH_REGISTER") == "0":
        return None
    return (
        "NCCL is in use and NCCL_GRAPH_REGISTER is not 0: a CUDA graph that captures a collective "
        "over registered memory may hang when it is replayed after that memory was offloaded and "
        "loaded. If you capture any, set NCCL_GRAPH_REGISTER=0 before NCCL starts."
    )


# --- unregistered optimizers that step a registered module's parameters
#
# A second `train()` may make a new optimizer and not register it. Then its state stays on the
# device in every phase, and no guard keeps it from stepping in phases in which its writes are lost.
# While any module is registered, one global torch hook sees the steps of all optimizers. It cannot
# see an optimizer that is not a `torch.optim.Optimizer`.

_ADVICE = (
    "manager.register() it after its module, once, and call step() inside manager.phase('train')"
)
_WATCHED: weakref.WeakSet[Handle] = weakref.WeakSet()


class StepWatch:
    """Keeps the global step hook installed while any handle is registered."""

    _hook: torch.utils.hooks.RemovableHandle | None = None  # the one hook for all handles

    def __init__(self, handle: Handle) -> None:
        self._handle = weakref.ref(handle)
        _WATCHED.add(handle)
        if StepWatch._hook is None:
            StepWatch._hook = register_optimizer_step_pre_hook(_before_step)

    def remove(self) -> None:
        handle = self._handle()
        if handle is not None:
            _WATCHED.discard(handle)
        if not _WATCHED and StepWatch._hook is not None:
            StepWatch._hook.remove()
            StepWatch._hook = None


def unregistered(handle: Handle) -> list[str]:
    """Class names of the unregistered optimizers that have stepped a module's parameters and still
    exist unregistered."""
    names = []
    for optimizer in handle.unregistered_optimizers:
        if not _is_registered(optimizer):
            names.append(type(optimizer).__name__)
    return names


def _before_step(optimizer: Any, *_: Any) -> None:
    """The hook of torch for all optimizers. Refuses a step of an unregistered one where the
    parameters must not change, and notes it elsewhere."""
    if torch.compiler.is_compiling() or _is_guarded(optimizer):
        return
    for handle in {id(handle): handle for handle in _stepped(optimizer)}.values():
        if optimizer not in handle.unregistered_optimizers and _is_registered(optimizer):
            continue
        kind = type(optimizer).__name__
        try:
            if guards.is_off(handle):
                guards.refuse(
                    handle,
                    f"stepped, least of all by an optimizer that is not registered ({kind})",
                    _ADVICE,
                )
            if handle.state is not State.TRAINING:
                raise PhaseError(
                    f"step() of an optimizer that is not registered ({kind}) in phase "
                    f"{handle.phase_now()!r} would change {handle.name!r}, which is "
                    f"{handle.state}: values may change in TRAINING only; {_ADVICE}"
                )
        except PlacementError as error:
            if undo_initial_step():
                error.add_note(
                    "Torch made this step to create state for a state dict: register it and use "
                    "its handle's state_dict()."
                )
            raise
        _note(handle, optimizer)


def _note(handle: Handle, optimizer: Any) -> None:
    """Note that an unregistered optimizer steps a handle's parameters, with a warning the first
    time. Raises RegistrationError: a registered optimizer makes the step."""
    if optimizer in handle.unregistered_optimizers:
        return
    outer = _stepping_optimizer()
    if outer is not None:
        raise RegistrationError(
            f"{outer.name!r} steps an optimizer ({type(optimizer).__name__}) that cannot be found "
            "in it, so its state would stay on the device and be in no checkpoint. Nothing was "
            "stepped. Keep the optimizers in attributes of the registered one, or in lists, tuples "
            "or dicts there, or register each of them in its place"
        )
    handle.unregistered_optimizers.add(optimizer)
    logger.warning(
        "an optimizer that is not registered (%s) steps parameters of %r: its state stays on the "
        "device in every phase, and checkpoints do not have it; manager.register() it after its "
        "module",
        type(optimizer).__name__,
        handle.name,
    )


def _registered_optimizers() -> list[Handle]:
    return [handle for handle in list(_WATCHED) if handle.kind == "optimizer"]


def _stepping_optimizer() -> Handle | None:
    """The registered optimizer whose method makes the present step."""
    handles = {id(handle.object): handle for handle in _registered_optimizers()}
    for frame, _ in traceback.walk_stack(None):
        # the locals of other frames are left alone: to look at them keeps them alive until the
        # frame returns
        code = frame.f_code
        if code.co_name == "step" and code.co_argcount:
            handle = handles.get(id(frame.f_locals.get(code.co_varnames[0])))
            if handle is not None:
                return handle
    return None


def _stepped(optimizer: Any) -> Iterator[Handle]:
    """The registered modules whose parameters an optimizer steps. As this runs at every step, it
    looks at the first parameter of each group only."""
    for group in optimizer.param_groups:
        for parameter in itertools.islice(group["params"], 1):
            holding = _holding_of(parameter)
            if holding is None:
                continue
            for handle in list(_WATCHED):
                if handle.holding is holding and handle.kind == "module":
                    yield handle


def _is_guarded(optimizer: Any) -> bool:
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return any(isinstance(hook, guards.StepGuard) for hook in hooks)


def _is_registered(optimizer: Any) -> bool:
    """Whether an optimizer is registered, or is a part that a registered one makes when it needs it
    (HybridDeviceOptimizer)."""
    if _is_guarded(optimizer):
        return True
    for handle in _registered_optimizers():
        for outer in optimizers_in(handle.object)[0]:
            for value in getattr(outer, "__dict__", {}).values():
                parts = value.values() if isinstance(value, Mapping) else value
                if not isinstance(value, (Mapping, list, tuple)):
                    parts = (value,)
                if any(part is optimizer for part in parts):
                    return True
    return False
