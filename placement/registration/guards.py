"""Guards: using an offloaded object raises, and reading its state dict works in every state.

Most guards are torch hooks; calls of a module are guarded by `CallGuard`. A copy of a module has no
guards. When a resident module is copied or pickled, each guard becomes a function that does
nothing. While it is offloaded, guards refuse to be copied, because the copy would be full of
poison.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placement.core.call_guard import CHECKS, CallGuard
from placement.core.errors import NotResidentError, PhaseError, PlacementError
from placement.core.method_call import MethodCall
from placement.core.states import ROLES, State
from placement.frameworks.base import READ, Reading, reading_methods
from placement.ownership.optimizer import OptimizerAdapter
from placement.ownership.optimizer_state import undo_initial_step
from placement.registration.state_dicts import (
    StateDictCall,
    ZeroCall,
    is_reading,
    is_stateless,
    lies_in,
    shown,
)
from placement.storage.owners import RANGES
from placement.tensors.plain import plain_parts

if TYPE_CHECKING:
    from placement.registration.handle import Handle


def nothing(*_: Any, **__: Any) -> None:
    """Take a guard's place in a copy of its module."""


class Guard:
    """A hook that knows its handle. The reference is weak, because a hook must keep neither the
    handle nor its manager alive."""

    def __init__(self, handle: Handle) -> None:
        self._handle = weakref.ref(handle)
        self._pid = os.getpid()

    def handle(self) -> Handle | None:
        handle = self._handle()
        if handle is not None and os.getpid() != self._pid:
            raise PlacementError(
                f"{handle.name!r} is registered in process {self._pid}, but this is a forked "
                "child, which has neither its device memory nor its host copy. Start data loaders "
                "before registering, or give them copies."
            )
        return handle

    def __reduce__(self) -> tuple[Any, ...]:
        self.refuse_copy()
        return functools.partial, (nothing,)

    def refuse_copy(self) -> None:
        handle = self.handle()
        if handle is not None and is_off(handle):
            refuse(
                handle,
                "copied or pickled",
                "copy it inside a phase that has it on the device, or use handle.state_dict()",
            )


def is_off(handle: Handle) -> bool:
    """Whether the object is offloaded, so that its tensors read poison."""
    holding = handle.holding
    return holding is not None and not holding.on_device


def refuse(handle: Handle, use: str, advice: str) -> NoReturn:
    """Raise NotResidentError: the handle cannot be used so (`use`: a participle), with advice."""
    raise NotResidentError(
        f"{handle.name!r} is {handle.state} in phase {handle.phase_now()!r} and cannot be {use}: "
        f"{advice}"
    )


_PHASES = {"critic": "values", "reward": "reward", "rollout": "rollout"}
"""The phase that computes with a role, where it is not log_prob."""


def _phase_of(handle: Handle) -> str:
    """The phase in which every policy that ships has a module or an engine on the device, by its
    role."""
    return _PHASES.get(handle.role or ("rollout" if handle.kind == "engine" else ""), "log_prob")


def _advise(handle: Handle, advice: str, *phases: str) -> str:
    """The advice, which says to open one of `phases`. If one of them is open already, why it does
    not have the handle on the device."""
    phase = handle.phase_now()
    reason = ""
    if handle.kind == "module" and handle.role is None:
        reason = (
            "it was registered without role=, so it is loaded only to be trained. Register it with "
            f"its role, one of {', '.join(ROLES)}"
        )
    elif handle.kind != "optimizer" and handle.role == "teacher":
        reason = (
            "no phase that ships needs role 'teacher': give the manager one that does, "
            'phases={"distill": ["actor", "teacher"]}, and open manager.phase("distill")'
        )
    elif handle.readonly and phases == ("train",):
        reason = "it was registered with readonly=True, so it is never trained"
    if phase not in phases:
        # the policy knows by roles which handles log_prob needs
        return reason if reason and "log_prob" in phases else advice
    reason = reason or (
        "'train' and 'restore' load a module only if its optimizer is registered, other phases "
        "load modules by their roles"
    )
    return (
        f"the plan of this {phase!r} leaves it out (its role: {handle.role!r}): {reason}; only= "
        "leaves out all that it does not name, and done_with() offloads what it names until the "
        "phase ends"
    )


_TRAINED_WITHOUT = (
    "this phase trains without it. With optimizer_in='optimizer_step', step() belongs into "
    "manager.phase('optimizer_step') inside this one; after phase.done_with() the optimizer comes "
    "back in the next phase that needs it"
)
"""Advice for the step of an optimizer that is offloaded although the phase trains its modules."""
_NUMBERS = itertools.count()


class ForwardGuard(Guard):
    """Runs before a module's forward (see `CallGuard`); for an external one at every call, as its
    framework may take the values away."""

    def __init__(self, handle: Handle) -> None:
        super().__init__(handle)
        self._key = f"{next(_NUMBERS)}"
        CHECKS[self._key] = self

    def __call__(self, module: torch.nn.Module | None, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            # Dynamo traces this, and guards the compiled code on the values that are read.
            traced = self._handle()
            if traced is not None and (
                is_off(traced) or not getattr(traced.storage, "is_consistent", True)
            ):
                from placement.registration.refused_trace import refuse_while_compiling

                refuse_while_compiling(self._key)
            return
        handle = self.handle()
        if handle is None:
            return
        if is_off(handle):
            phase = _phase_of(handle)
            advice = (
                f"open a phase whose plan has it on the device, such as manager.phase({phase!r})"
            )
            if handle.role in ("actor", "critic"):
                advice += " or phase('train')"
            refuse(handle, "called", _advise(handle, advice, phase, "train"))
        if handle.holding is not None and not handle.holding.is_consistent:
            refuse(
                handle,
                "called",
                "its offload has begun, in another thread: end the phase after the last call",
            )
        reason = None if handle.adapter is None else handle.adapter.away()
        if reason is not None:
            refuse(handle, "called", reason)


class StepGuard(Guard):
    """Pre-hook of an optimizer's step, or a guard in front of that method (see `MethodCall`)."""

    def __call__(
        self,
        optimizer: Any,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Any] | None:
        """Check now, and once more when a closure returns, which may have left the phase. Returns
        the arguments with which torch is to call the step; None: those that it has."""
        handle = self.handle()
        if handle is None:
            return None
        try:
            self._check(handle, optimizer)
        except PlacementError as error:
            if undo_initial_step():
                error.add_note(
                    "Torch made this step to create state for a state dict. Use state_dict() of "
                    f"handle {handle.name!r}."
                )
            raise
        closure = kwargs.get("closure")
        if callable(closure):
            checked = functools.partial(self._checked, optimizer, closure)
            return args, {**kwargs, "closure": checked}
        # torch's hooks are given the optimizer among the arguments
        first = 1 if args and args[0] is optimizer else 0
        if len(args) > first and callable(args[first]):
            checked = functools.partial(self._checked, optimizer, args[first])
            return (*args[:first], checked, *args[first + 1 :]), kwargs
        return None

    def _checked(self, optimizer: Any, closure: Callable[[], Any]) -> Any:
        loss = closure()
        handle = self.handle()
        if handle is not None:
            self._check(handle, optimizer)
        return loss

    def _check(self, handle: Handle, optimizer: Any) -> None:
        """Refuse a step unless the optimizer and all of its owners may change and are where a step
        finds them. Called before the step, and after its closure."""
        are_owners_trained = all(owner.state is State.TRAINING for owner in handle.owners)
        for changed in (handle, *handle.owners):
            advice = _advise(changed, "call step() inside manager.phase('train')", "train")
            if changed is handle and handle.owners and are_owners_trained:
                advice = _TRAINED_WITHOUT
            if is_off(changed) and not (changed is handle and handle.is_streaming):
                refuse(changed, "stepped", advice)
            if changed.state is not State.TRAINING:
                raise PhaseError(
                    f"step() of {handle.name!r} in phase {handle.phase_now()!r} would change "
                    f"{changed.name!r}, which is {changed.state}: values may change in TRAINING "
                    f"only; {advice}"
                )
            reason = None if changed.adapter is None else changed.adapter.away()
            if reason is not None:
                refuse(changed, "stepped", reason)
        streamed = handle.streamed
        if handle.is_streaming and (streamed is None or not streamed.may_begin(optimizer)):
            advice = (
                "its steps stream its state, and this one came around the method that does it. "
                "Call step() of the optimizer object itself, looked up at each call; where other "
                "code holds an earlier method, use optimizer_in='train'"
            )
            refuse(handle, "stepped", advice)
        for owner in handle.owners:
            if owner.adapter is not None and owner.adapter.external is None:
                for framework in owner.adapter.frameworks:
                    framework.before_step()


class LoadGuard(Guard):
    """Pre-hook of a module's or an optimizer's load_state_dict, or a guard in front of that method
    (see `MethodCall`)."""

    def __call__(self, target: Any, state_dict: Any = None, *rest: Any) -> None:
        handle = self.handle()
        holding = None if handle is None else handle.holding
        if handle is None or holding is None or holding.on_device:
            return
        # `MethodCall` passes the method's arguments as a tuple and a dict
        if isinstance(state_dict, tuple):
            arguments = [*state_dict, *(rest[0].values() if rest else ())]
            state_dict = arguments[0] if arguments else None
        if handle.kind == "optimizer" and is_stateless(target) and is_stateless(state_dict):
            return
        advice = _advise(handle, "load it inside manager.phase('restore')", "restore")
        if lies_in(state_dict, holding):
            # `set_model_state_dict(broadcast_from_rank0=True)` writes before it loads. The error
            # below reports these writes, so the next phase transition must not report them again.
            holding.device.heal_poison()
            holding.watch.forget_written()
            advice += (
                ". The values that torch wrote before this error are lost, and every value is as "
                "it was"
            )
        refuse(handle, "given a state dict", advice)


class CopyGuard(Guard):
    """Stands in front of an optimizer's `__getstate__`, which `copy`, `pickle` and `torch.save`
    call. They copy its state and the parameters that it steps, and either would be poison while it
    is offloaded."""

    def __call__(self, *_: Any) -> None:
        handle = self.handle()
        if handle is None:
            return
        for copied in (handle, *handle.owners):
            if is_off(copied):
                advice = (
                    f"copy {handle.name!r} inside a phase that has it and what it steps on the "
                    "device, or use its handle.state_dict()"
                )
                refuse(copied, "copied or pickled", advice)


class ReadGuard(Guard):
    """Runs before a framework's method that reads or writes tensors past every hook of torch:
    Megatron's `sharded_state_dict`, PEFT's `merge` (which would only record the merge)."""

    def __init__(self, handle: Handle, reading: Reading = READ) -> None:
        super().__init__(handle)
        self._reading = reading

    def __call__(self, *call: Any) -> None:
        use = self._reading if isinstance(self._reading, str) else self._use(*call)
        handle = None if use is None else self.handle()
        if use is None or handle is None or not is_off(handle):
            return
        phase = "train" if handle.kind == "optimizer" else _phase_of(handle)
        advice = _advise(
            handle,
            f"do it inside a phase that has it on the device, such as manager.phase({phase!r})",
            phase,
        )
        if handle.kind == "module" and handle.is_streaming:
            advice = (
                "its weights are published from the host copy here (stream_sync=True), and nothing "
                "of it is on the device. weights() merges the weights that it publishes and leaves "
                "the model as it is; to do it to the model, open a phase that loads it, such as "
                "manager.phase('log_prob')"
            )
        refuse(handle, use, advice)

    def _use(self, *call: Any) -> str | None:
        """The use that this call makes of tensors. None while the object is on the device, and no
        error then in a forked child, where such methods serve if they need no tensor."""
        assert callable(self._reading)
        handle = self._handle()
        return self._reading(*call) if handle is not None and is_off(handle) else None


class StateDictGuard(Guard):
    """Post-hook of state_dict: replaces tensors in a range by tensors that stay readable wherever
    the handle goes."""

    def __call__(self, owner: Any, state_dict: Any, *_: Any) -> Any:
        handle = self.handle()
        readable = state_dict if handle is None else shown(handle, state_dict)
        return None if readable is state_dict else readable


class PartGuard(StateDictGuard):
    """The post-hook of a submodule's state_dict. It acts only where the submodule itself was asked;
    else its root's guard does."""

    def __call__(self, owner: Any, state_dict: Any, *rest: Any) -> Any:
        return None if rest[:1] != ("",) else super().__call__(owner, state_dict)


class GatherGuard(Guard):
    """Pre-hook of state_dict for a framework that gathers the values on the device: while offloaded
    it would gather poison."""

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        handle = self.handle()
        reason = None if handle is None or handle.adapter is None else handle.adapter.gathers
        if handle is not None and reason is not None and is_off(handle):
            advice = _advise(
                handle, "ask inside manager.phase('checkpoint')", "checkpoint", "restore"
            )
            refuse(handle, f"asked for a state dict ({reason})", advice)


def own_methods(target: Any) -> list[str]:
    """The public methods that the class of an optimizer, or of a wrapper, adds to those of torch's
    Optimizer."""
    if not hasattr(target, "__dict__"):
        return []
    methods = []
    other_names = {*dir(torch.optim.Optimizer), *vars(target)}
    for name in sorted({*dir(type(target))} - other_names):
        is_public = not name.startswith("_")
        if is_public and inspect.isfunction(inspect.getattr_static(type(target), name)):
            methods.append(name)
    return methods


class OwnMethodCall(MethodCall):
    """Stands in for a method that an optimizer's own class adds to torch's (`eval`, `first_step`).
    Many only read or set numbers, and must go on working while the state is offloaded. So the
    method runs. An operation that would read or write a tensor of the optimizer, or write a
    parameter that it steps, raises before it runs. Fields that the method has set until then are
    set back."""

    def run(
        self,
        method: Callable[..., Any],
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        handle: Handle | None = self._guard()
        handles = () if handle is None or is_reading() else (handle, *handle.owners)
        unusable = [used for used in handles if is_off(used) or used.state is State.SYNCING]
        if handle is None or not unusable:
            return method(*args, **kwargs)
        assert isinstance(handle.adapter, OptimizerAdapter)
        saved = list[tuple[dict[Any, Any], dict[Any, Any]]]()
        for part in handle.adapter.objects():
            saved += [(fields, dict(fields)) for fields in _fields_of(part)]
        stepped = {tensor.untyped_storage()._cdata for tensor in handle.adapter.stepped()}
        names = {}
        for used in handles:
            # a streamed optimizer is TRAINING, and off
            may_use = used.state is State.TRAINING and not is_off(used)
            if used.holding is not None and not may_use:
                names[id(used.holding)] = repr(used.name)
        try:
            with _Untouched(names, stepped, self._error(handle, unusable[0])):
                return method(*args, **kwargs)
        except (NotResidentError, PhaseError):
            for fields, values in saved:
                for name in [name for name in fields if name not in values]:
                    del fields[name]
                fields.update(values)
            raise

    def _error(self, handle: Handle, unusable: Handle) -> PlacementError:
        """The error about this call, with "{}" in place of words for the tensors that it uses."""
        streamed = ""
        place = (
            "manager.phase('train'), with optimizer_in='optimizer_step' inside "
            "phase('optimizer_step')"
        )
        if unusable.state is State.TRAINING:
            streamed = " and streams its state"
            place = "manager.phase('restore'), which loads all of it"
        kind = PhaseError if unusable.state is State.SYNCING else NotResidentError
        return kind(
            f"{self._name}() of {handle.name!r} cannot be called in phase {handle.phase_now()!r}: "
            f"it would use {{}}, while {unusable.name!r} is {unusable.state}{streamed}. Call it "
            f"where all of these may change: inside {place}"
        )


def _fields_of(obj: Any) -> Iterator[dict[Any, Any]]:
    """The dictionaries in which an optimizer keeps its flags, options and state."""
    yield vars(obj)
    state = vars(obj).get("state")
    groups = vars(obj).get("param_groups")
    values = [state]
    if isinstance(state, dict):
        values += state.values()
    if isinstance(groups, list):
        values += groups
    yield from (fields for fields in values if isinstance(fields, dict))


class _Untouched(TorchDispatchMode):
    """Raises before an operation on tensors of some objects, unless it reads no value.
    `names`: words for the objects, by identity of their storage.
    `stepped`: storages (`_cdata`) that may be read, but not written. An operation that writes one
    of its tensors counts as writing all of them.
    `error`: raised with words for the tensors in place of "{}"."""

    def __init__(
        self, names: Mapping[int, str], stepped: Collection[int], error: Exception
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self._stepped = stepped
        self._error = error

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if not (func.is_view or name.endswith("_like") or name.startswith("new_")):
            values = tree_leaves((args, kwargs))
            for tensor in [value for value in values if isinstance(value, torch.Tensor)]:
                for _, part in plain_parts(tensor, ""):
                    self._check(part.untyped_storage(), is_written=func._schema.is_mutable)
        return func(*args, **(kwargs or {}))

    def _check(self, storage: torch.UntypedStorage, *, is_written: bool) -> None:
        words = self._names.get(id(RANGES.owner_of(storage.data_ptr())))
        if words is None and is_written and storage._cdata in self._stepped:
            words = "what it steps"
        if words is not None:
            raise type(self._error)(str(self._error).format(words))


def install(handle: Handle, objects: Iterable[Any]) -> None:
    """Put guards on a handle's key objects (see `Adapter.key_objects`) and on their parts, and add
    the guards to `handle.guards`."""
    # appended one by one: if one fails, `Registry.remove` removes all before it
    hooks: list[Any] = handle.guards
    weak_handle = Guard(handle).handle
    gathers = handle.adapter is not None and handle.adapter.gathers is not None
    objects = list(objects)
    roots = [target for target in objects if isinstance(target, torch.nn.Module)]
    load_guard = LoadGuard(handle)
    parts = (part for root in roots for part in root.modules())
    on_state_dict: dict[torch.nn.Module, StateDictGuard] = dict.fromkeys(parts, PartGuard(handle))
    on_state_dict |= dict.fromkeys(roots, StateDictGuard(handle))
    for part, guard in on_state_dict.items():
        hooks.append(part.register_load_state_dict_pre_hook(load_guard))
        hooks.append(part.register_state_dict_post_hook(guard))
        hooks.append(StateDictCall(weak_handle, part, "state_dict"))
        _install_zero_calls(weak_handle, part, hooks)
        if gathers:
            gather_guard = part.register_state_dict_pre_hook(GatherGuard(handle))
            hooks.append(gather_guard)
            # in front of the framework's own hooks
            hooks_of_torch: Any = part._state_dict_pre_hooks
            hooks_of_torch.move_to_end(gather_guard.id, last=False)
        _install_on_reading(handle, part, hooks, is_root=part in roots)
    if isinstance(handle.adapter, OptimizerAdapter):
        for target in objects:
            if target not in roots:
                _install_on_optimizer(handle, target, hooks)
        for target in handle.adapter.objects():
            for name in own_methods(target):
                hooks.append(OwnMethodCall(weak_handle, target, name))
    _install_on_calls(handle, roots, hooks)


def _install_zero_calls(
    weak_handle: Callable[[], Handle | None],
    target: Any,
    hooks: list[Any],
) -> None:
    for name in ("zero_grad", "zero_grad_buffer"):  # the second: Megatron's
        if callable(getattr(type(target), name, None)):
            hooks.append(ZeroCall(weak_handle, target, name))


def _install_on_reading(
    handle: Handle,
    target: Any,
    hooks: list[Any],
    *,
    is_root: bool,
) -> None:
    for name, reading in reading_methods(target, is_root=is_root).items():
        hooks.append(MethodCall(ReadGuard(handle, reading), target, name))


def install_on_new(handle: Handle) -> None:
    """Guard modules that an engine has made since its last offload. Called as placement offloads
    it: its adapter knows them, and their tensors move with it."""
    assert handle.adapter is not None
    assert handle.holding is not None
    announce = handle.holding.announce
    roots = dict[int, torch.nn.Module]()  # by identity
    for hook in handle.guards:
        if isinstance(hook, CallGuard):
            roots.update({id(root): root for root in hook.roots()})
    num_guarded = len(roots)
    for target in handle.adapter.key_objects():
        if isinstance(target, torch.nn.Module):
            roots[id(target)] = target
    if len(roots) == num_guarded:
        return
    for hook in handle.guards:
        hook.remove()
        if isinstance(hook, CallGuard):
            announce.leaving.remove(hook.refuse)
            announce.came.remove(hook.allow)
    handle.guards.clear()
    install(handle, roots.values())  # the old modules, too: their guards are removed


def _install_on_calls(
    handle: Handle,
    modules: list[torch.nn.Module],
    hooks: list[Any],
) -> None:
    """Have calls of the modules refused while the handle is off the device: by a hook that looks at
    each call, or, where placement moves the bytes, by a guard that is on only meanwhile.
    `install_on_new` takes its listeners off again."""
    holding = handle.holding
    if holding is None:
        for module in modules:
            hooks.append(module.register_forward_pre_hook(ForwardGuard(handle), prepend=True))
    elif modules:
        calls = CallGuard(ForwardGuard(handle), modules)
        hooks.append(calls)
        holding.announce.leaving.append(calls.refuse)
        holding.announce.came.append(calls.allow)
        if not holding.on_device:
            calls.refuse()


def _install_on_optimizer(handle: Handle, target: Any, hooks: list[Any]) -> None:
    """Use torch's hooks, as far as the constructor of torch's Optimizer has made room for them,
    else guard the methods themselves. A method of the object's own class has a guard besides,
    because it may act before the hook. Guards of state dicts, copies and zeroing come in any
    case."""
    fields = getattr(target, "__dict__", {})
    for name in (
        "_optimizer_step_pre_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
    ):
        # a wrapper made the dictionary itself, and torch's handles cannot refer to it
        if type(fields.get(name)) is dict:
            fields[name] = OrderedDict(fields[name])
    guards: dict[str, Callable[..., Any]] = {"load_state_dict": LoadGuard(handle)}
    if "_optimizer_step_pre_hooks" in fields:
        hooks.append(target.register_step_pre_hook(StepGuard(handle)))
    else:
        guards["step"] = StepGuard(handle)
        _install_on_reading(handle, target, hooks, is_root=False)
    if "_optimizer_load_state_dict_pre_hooks" in fields:
        hooks.append(target.register_load_state_dict_pre_hook(LoadGuard(handle)))
    if "_optimizer_state_dict_post_hooks" in fields:
        hooks.append(target.register_state_dict_post_hook(StateDictGuard(handle)))
    # not by `__getattr__`: then it is another object's method
    if hasattr(target, "__dict__") and callable(getattr(type(target), "state_dict", None)):
        hooks.append(StateDictCall(Guard(handle).handle, target, "state_dict"))
        hooks.append(MethodCall(CopyGuard(handle), target, "__getstate__"))
        _install_zero_calls(Guard(handle).handle, target, hooks)
    if not hasattr(target, "__dict__"):
        return
    for name, guard in guards.items():
        method = getattr(type(target), name, None)
        is_own = callable(method) and method is not getattr(torch.optim.Optimizer, name)
        if is_own and name not in fields:
            hooks.append(MethodCall(guard, target, name))
