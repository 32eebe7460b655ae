"""Guards: using an offloaded object raises, and reading its state dict works in every state.

Most are hooks of torch; calls of a module are guarded by `CallGuard`. A copy of a module takes no guard along: copied or pickled
while resident they become a function that does nothing, while offloaded they refuse, because the copy would be full of poison.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import torch

from placement.core.call_guard import CHECKS, CallGuard
from placement.core.errors import NotResidentError, PhaseError, PlacementError
from placement.core.loaded_classes import is_a
from placement.core.states import State
from placement.frameworks.known import reading_methods
from placement.registration.initial_step import undo_initial_step
from placement.registration.method_call import MethodCall
from placement.registration.state_dicts import StateDictCall, is_stateless, lies_in, shown
from placement.storage.offloaded.host_reads import is_reading

if TYPE_CHECKING:
    from placement.registration.handle import Handle


class _Removable(Protocol):
    def remove(self) -> None: ...


def is_guard(hook: object) -> bool:
    """Whether a hook is one of ours."""
    return isinstance(hook, _Guard)


def nothing(*_: Any, **__: Any) -> None:
    """What a guard becomes in a copy of its module."""


def _no_guard() -> Callable[..., None]:
    return nothing


class _Guard:
    """A hook that knows its handle, weakly: it must keep neither the handle nor its manager alive."""

    def __init__(self, handle: Handle) -> None:
        self._handle = weakref.ref(handle)
        self._pid = os.getpid()

    def handle(self) -> Handle | None:
        handle = self._handle()
        if handle is not None and os.getpid() != self._pid:
            raise PlacementError(
                f"{handle.name!r} is registered in process {self._pid} and this is a forked child, which has neither its device memory nor "
                "its host copy. Start data loaders before registering, or give them copies."
            )
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        self.refuse_copy()
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        self.refuse_copy()
        return _no_guard, ()

    def refuse_copy(self) -> None:
        handle = self.handle()
        if handle is not None and is_off(handle):
            refuse(handle, "copied or pickled", "copy it inside a phase that has it on the device, or use handle.state_dict()")


def is_off(handle: Handle) -> bool:
    """Whether the object's tensors are poison now."""
    return handle.storage.is_offloaded


def refuse(handle: Handle, what: str, advice: str) -> NoReturn:
    raise NotResidentError(f"{handle.name!r} is {handle.state} in phase {handle.phase_now()!r} and cannot be {what}: {advice}")


def _advise(handle: Handle, advice: str, *phases: str) -> str:
    """Advice that names `phases`, or what is wrong for a caller who is in one of them already."""
    phase = handle.phase_now()
    if phase not in phases:
        return advice
    return (
        f"the plan of this {phase!r} leaves it out (its role: {handle.role!r}). The shipped policies load what a registered optimizer "
        "steps for 'train' and 'restore', by its role for the other phases, and of that only what is named where only= is given"
    )


_NUMBERS = itertools.count()


class ForwardGuard(_Guard):
    """Before a module's forward (see `CallGuard`); of an external one a pre-hook, because its framework may take it away at any time."""

    def __init__(self, handle: Handle) -> None:
        super().__init__(handle)
        self._key = f"{next(_NUMBERS)}"
        CHECKS[self._key] = self

    def __call__(self, module: torch.nn.Module | None, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            if self._is_off():
                from placement.registration.refused_trace import refuse_while_compiling

                refuse_while_compiling(self._key)
            return
        handle = self.handle()
        if handle is None:
            return
        if is_off(handle):
            advice = "open a phase whose plan has it on the device, such as manager.phase('log_prob') or phase('train')"
            refuse(handle, "called", _advise(handle, advice, "log_prob", "train"))
        if handle.adapter is not None and (reason := handle.adapter.away()) is not None:
            refuse(handle, "called", reason)

    def _is_off(self) -> bool:
        """Whether it would refuse, in words that dynamo can trace: it guards what it reads here."""
        handle = self._handle()
        return handle is not None and is_off(handle)


class StepGuard(_Guard):
    """Pre-hook of an optimizer's step."""

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        handle = self.handle()
        if handle is None:
            return
        try:
            self._check(handle)
        except PlacementError as error:
            if undo_initial_step():
                error.add_note(f"A state dict wanted to create state by this step: use the state_dict() of handle {handle.name!r}.")
            raise

    def _check(self, handle: Handle) -> None:
        for each in (handle, *handle.owners):
            advice = _advise(each, "call step() inside manager.phase('train')", "train")
            if is_off(each):
                refuse(each, "stepped", advice)
            if each.state is not State.TRAINING:
                raise PhaseError(
                    f"step() of {handle.name!r} in phase {handle.phase_now()!r} would change {each.name!r}, which is {each.state}: "
                    f"values may change in TRAINING only; {advice}"
                )
            if each.adapter is not None and (reason := each.adapter.away()) is not None:
                refuse(each, "stepped", reason)
        for owner in handle.owners:
            if owner.adapter is not None and owner.adapter.external is None:
                owner.adapter.before_step()


class LoadGuard(_Guard):
    """Pre-hook of load_state_dict, of a module or an optimizer, or in front of the method."""

    def __call__(self, target: Any, given: Any = None, *rest: Any) -> None:
        handle = self.handle()
        holding = None if handle is None else handle.holding
        if handle is None or holding is None or holding.on_device or is_reading():  # a reader writes into the host copy
            return
        if isinstance(given, tuple):  # in front of the method: its arguments
            given = next(iter((*given, *(rest[0].values() if rest else ()))), None)
        if handle.kind == "optimizer" and is_stateless(target) and is_stateless(given):
            return
        advice = _advise(handle, "load it inside manager.phase('restore')", "restore")
        if lies_in(given, holding):
            # `set_model_state_dict(broadcast_from_rank0=True)` writes before it loads: told here, it is no riddle for the next phase
            # transition.
            holding.device.heal_poison()
            holding.forget_writes()
            advice += ". What torch has written in the meantime is lost, and every value is as it was"
        refuse(handle, "given a state dict", advice)


class MergeGuard(_Guard):
    """Before an adapter layer of PEFT adds its adapters to the weights or takes them out: with poison for values it would only note it."""

    def __call__(self, *_: Any) -> None:
        handle = self.handle()
        if handle is None or not is_off(handle):
            return
        if handle.is_streaming:
            advice = (
                "its weights are published from the host copy here (stream_sync=True), with nothing of it on the device. weights() merges "
                "what it publishes and leaves the model as it is; to merge in the model, open a phase that loads it, such as "
                "manager.phase('log_prob')"
            )
        else:
            do = "do it inside a phase that has it on the device, such as manager.phase('log_prob') or phase('train')"
            advice = _advise(handle, do, "log_prob", "train")
        refuse(handle, "merged with its adapters", advice)


class ReadGuard(_Guard):
    """Before a method of a framework that reads or writes tensors past every hook (Megatron's `sharded_state_dict`)."""

    def __call__(self, *_: Any) -> None:
        handle = self.handle()
        if handle is not None and is_off(handle):
            do = "do it inside a phase that has it on the device, such as manager.phase('restore')"
            refuse(handle, "read by its framework", _advise(handle, do, "restore"))


class StateDictGuard(_Guard):
    """Post-hook of state_dict: tensors over a range become tensors that stay readable wherever the handle goes."""

    def __call__(self, owner: Any, state_dict: Any, *_: Any) -> Any:
        handle = self.handle()
        found = state_dict if handle is None else shown(handle, state_dict)
        return None if found is state_dict else found


class PartGuard(StateDictGuard):
    """The same on a submodule, for whoever asks it alone; asked by a module around it, that one's guard answers."""

    def __call__(self, owner: Any, state_dict: Any, *rest: Any) -> Any:
        return None if rest[:1] != ("",) else super().__call__(owner, state_dict)


class GatherGuard(_Guard):
    """Pre-hook of state_dict, where a framework gathers on the device what it shows: it would gather poison."""

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        handle = self.handle()
        reason = None if handle is None or handle.adapter is None else handle.adapter.gathers
        if handle is not None and reason is not None and is_off(handle):
            advice = _advise(handle, "ask inside manager.phase('checkpoint')", "checkpoint", "restore")
            refuse(handle, f"asked for a state dict ({reason})", advice)

    def install(self, module: torch.nn.Module) -> _Removable:
        """In front of the framework's own hook, which torch's registering would put it behind."""
        removable: Any = module.register_state_dict_pre_hook(self)
        hooks: Any = module._state_dict_pre_hooks
        hooks.move_to_end(removable.id, last=False)
        return cast("_Removable", removable)


def _parts(objects: Iterable[Any]) -> Iterable[torch.nn.Module]:
    """The submodules of a handle's modules, each once."""
    modules = [target for target in objects if isinstance(target, torch.nn.Module)]
    return {id(part): part for target in modules for part in target.modules() if not any(part is each for each in modules)}.values()


def install(handle: Handle, objects: Iterable[Any]) -> list[_Removable]:
    """Put guards on a handle's key objects (modules, compiled wrappers, leaf optimizers). Returns what removes them."""
    hooks: list[_Removable] = handle.guards  # entered one by one: an interrupt leaves none that `remove` does not know
    gathers = handle.adapter is not None and handle.adapter.gathers is not None
    for part in _parts(objects):
        hooks.append(part.register_load_state_dict_pre_hook(LoadGuard(handle)))
        hooks.append(part.register_state_dict_post_hook(PartGuard(handle)))
        hooks.append(StateDictCall(_Guard(handle).handle, part))
        if is_a(part, "peft.tuners.tuners_utils", "BaseTunerLayer"):
            hooks += [MethodCall(MergeGuard(handle), part, name) for name in ("merge", "unmerge")]
        if gathers:
            hooks.append(GatherGuard(handle).install(part))
        hooks += [MethodCall(ReadGuard(handle), part, name) for name in reading_methods(part)]
    for target in objects:
        if isinstance(target, torch.nn.Module):
            hooks.append(target.register_load_state_dict_pre_hook(LoadGuard(handle)))
            hooks.append(target.register_state_dict_post_hook(StateDictGuard(handle)))
            hooks.append(StateDictCall(_Guard(handle).handle, target))
            if gathers:
                hooks.append(GatherGuard(handle).install(target))
            hooks += [MethodCall(ReadGuard(handle), target, name) for name in reading_methods(target)]
        elif handle.kind == "optimizer":
            _install_on_optimizer(handle, target, hooks)
    _install_on_calls(handle, [target for target in objects if isinstance(target, torch.nn.Module)], hooks)
    return hooks


def install_on_new(handle: Handle) -> None:
    """Guard the modules that an engine has made itself since: its adapter has found them, and what they hold moves with it."""
    objects = () if handle.adapter is None else handle.adapter.key_objects()
    if new := [target for target in objects if isinstance(target, torch.nn.Module) and not _is_guarded(target, handle)]:
        install(handle, new)


def _is_guarded(module: torch.nn.Module, handle: Handle) -> bool:
    if any(isinstance(hook, CallGuard) and hook.guards(module) for hook in handle.guards):
        return True
    return any(isinstance(hook, ForwardGuard) and hook.handle() is handle for hook in module._forward_pre_hooks.values())


def _install_on_calls(handle: Handle, modules: list[torch.nn.Module], hooks: list[_Removable]) -> None:
    if (holding := handle.holding) is None:
        for module in modules:
            hooks.append(module.register_forward_pre_hook(ForwardGuard(handle), prepend=True))
    elif modules:
        earlier = [hook for hook in hooks if isinstance(hook, CallGuard)]
        calls = CallGuard(ForwardGuard(handle), [*(root for each in earlier for root in each.roots()), *modules])
        hooks.append(calls)
        holding.refuse_calls, holding.allow_calls = calls.refuse, calls.allow
        for each in earlier:  # one guard for all modules of the handle
            each.remove()
            hooks.remove(each)
        if holding.is_offloaded:
            calls.refuse()


def _install_on_optimizer(handle: Handle, target: Any, hooks: list[_Removable]) -> None:
    """By torch's hooks, where its constructor has run; else on the methods themselves (the optimizers inside have hooks as well)."""
    if "_optimizer_step_pre_hooks" in getattr(target, "__dict__", {}):
        hooks.append(target.register_step_pre_hook(StepGuard(handle)))
        hooks.append(target.register_load_state_dict_pre_hook(LoadGuard(handle)))
        hooks.append(target.register_state_dict_post_hook(StateDictGuard(handle)))
        guards: dict[str, Callable[..., None]] = {"load_state_dict": LoadGuard(handle)}
    else:
        guards = {"step": StepGuard(handle), "load_state_dict": LoadGuard(handle)}
        hooks += [MethodCall(ReadGuard(handle), target, name) for name in reading_methods(target)]
    fields = getattr(target, "__dict__", {})
    if hasattr(target, "__dict__") and callable(getattr(target, "state_dict", None)):
        hooks.append(StateDictCall(_Guard(handle).handle, target))
    for name, guard in guards.items() if hasattr(target, "__dict__") else ():
        plain = getattr(type(target), name, None)
        if callable(plain) and plain is not getattr(torch.optim.Optimizer, name) and name not in fields:
            hooks.append(MethodCall(guard, target, name))
