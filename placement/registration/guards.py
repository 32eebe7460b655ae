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
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    return (holding := handle.holding) is not None and not holding.on_device


def refuse(handle: Handle, what: str, advice: str) -> NoReturn:
    raise NotResidentError(
        f"{handle.name!r} is {handle.state} in phase {handle.phase_now()!r} and cannot be {what}: "
        f"{advice}"
    )


def _advise(handle: Handle, advice: str, *phases: str) -> str:
    """The advice, which says to open one of `phases`. If one of them is open already, why it does
    not have the handle on the device."""
    phase, why = handle.phase_now(), ""
    if handle.kind == "module" and handle.role is None:
        why = (
            "it was registered without role=, so it is loaded only to be trained. Register it with "
            f"its role, one of {', '.join(ROLES)}"
        )
    elif handle.kind != "optimizer" and handle.role == "teacher":
        why = (
            "no phase that ships needs role 'teacher': give the manager one that does, "
            'phases={"distill": ["actor", "teacher"]}, and open manager.phase("distill")'
        )
    if phase not in phases:
        # the policy knows by roles what log_prob needs
        return why if why and "log_prob" in phases else advice
    why = why or (
        "'train' and 'restore' load the modules that a registered optimizer steps, other phases "
        "modules by their roles"
    )
    return (
        f"the plan of this {phase!r} leaves it out (its role: {handle.role!r}): {why}; only= "
        "leaves out all that it does not name, and done_with() offloads what it names until the "
        "phase ends"
    )


_TRAINED_WITHOUT = (
    "this phase trains without it. With optimizer_in='optimizer_step', step() belongs into "
    "manager.phase('optimizer_step') inside this one; after phase.done_with() the optimizer comes "
    "back in the next phase that needs it"
)
"""Advice for the step of an optimizer that is offloaded although the phase trains what it steps."""
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
            if (known := self._handle()) is not None and (
                is_off(known) or not getattr(known.storage, "is_consistent", True)
            ):
                from placement.registration.refused_trace import refuse_while_compiling

                refuse_while_compiling(self._key)
            return
        handle = self.handle()
        if handle is None:
            return
        if is_off(handle):
            advice = (
                "open a phase whose plan has it on the device, such as manager.phase('log_prob') "
                "or phase('train')"
            )
            refuse(handle, "called", _advise(handle, advice, "log_prob", "train"))
        if handle.holding is not None and not handle.holding.is_consistent:
            refuse(
                handle,
                "called",
                "its offload has begun, in another thread: end the phase after the last call",
            )
        if handle.adapter is not None and (reason := handle.adapter.away()) is not None:
            refuse(handle, "called", reason)


class StepGuard(Guard):
    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Check now, and once more when a closure returns, which may have left the phase. Returns
        what torch is to call the step with."""
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
        if callable(closure := kwargs.get("closure")):
            return args, {**kwargs, "closure": functools.partial(self._checked, optimizer, closure)}
        # torch's hooks are given the optimizer among the arguments
        first = 1 if args and args[0] is optimizer else 0
        if len(args) > first and callable(args[first]):
            return (
                *args[:first],
                functools.partial(self._checked, optimizer, args[first]),
                *args[first + 1 :],
            ), kwargs
        return None

    def _checked(self, optimizer: Any, closure: Callable[[], Any]) -> Any:
        loss = closure()
        handle = self.handle()
        if handle is not None:
            self._check(handle, optimizer)
        return loss

    def _check(self, handle: Handle, optimizer: Any) -> None:
        for each in (handle, *handle.owners):
            advice = _advise(each, "call step() inside manager.phase('train')", "train")
            if (
                each is handle
                and handle.owners
                and all(owner.state is State.TRAINING for owner in handle.owners)
            ):
                advice = _TRAINED_WITHOUT
            if is_off(each) and not (each is handle and handle.is_streaming):
                refuse(each, "stepped", advice)
            if each.state is not State.TRAINING:
                raise PhaseError(
                    f"step() of {handle.name!r} in phase {handle.phase_now()!r} would change "
                    f"{each.name!r}, which is {each.state}: values may change in TRAINING only; "
                    f"{advice}"
                )
            if each.adapter is not None and (reason := each.adapter.away()) is not None:
                refuse(each, "stepped", reason)
        if handle.is_streaming and (
            handle.streamed is None or not handle.streamed.may_begin(optimizer)
        ):
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

    def __call__(self, target: Any, given: Any = None, *rest: Any) -> None:
        handle = self.handle()
        holding = None if handle is None else handle.holding
        if handle is None or holding is None or holding.on_device:
            return
        # `MethodCall` passes the method's arguments as a tuple and a dict
        if isinstance(given, tuple):
            given = next(iter((*given, *(rest[0].values() if rest else ()))), None)
        if handle.kind == "optimizer" and is_stateless(target) and is_stateless(given):
            return
        advice = _advise(handle, "load it inside manager.phase('restore')", "restore")
        if lies_in(given, holding):
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
        for each in (handle, *handle.owners):
            if is_off(each):
                do = (
                    f"copy {handle.name!r} inside a phase that has it and what it steps on the "
                    "device, or use its handle.state_dict()"
                )
                refuse(each, "copied or pickled", do)


class ReadGuard(Guard):
    """Runs before a framework's method that reads or writes tensors past every hook of torch:
    Megatron's `sharded_state_dict`, PEFT's `merge` (which would only record the merge)."""

    def __init__(self, handle: Handle, what: Reading = READ) -> None:
        super().__init__(handle)
        self._what = what

    def __call__(self, *call: Any) -> None:
        what = self._what if isinstance(self._what, str) else self._asked(*call)
        if what is None or (handle := self.handle()) is None or not is_off(handle):
            return
        phase = "train" if handle.kind == "optimizer" else "log_prob"
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
        refuse(handle, what, advice)

    def _asked(self, *call: Any) -> str | None:
        """The answer for this call. None while the object is on the device, and nothing is raised
        then in a forked child, where such methods serve if they need no tensor."""
        assert callable(self._what)
        known = self._handle()
        return self._what(*call) if known is not None and is_off(known) else None


class StateDictGuard(Guard):
    """Post-hook of state_dict: replaces tensors in a range by tensors that stay readable wherever
    the handle goes."""

    def __call__(self, owner: Any, state_dict: Any, *_: Any) -> Any:
        handle = self.handle()
        found = state_dict if handle is None else shown(handle, state_dict)
        return None if found is state_dict else found


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
    names = sorted({*dir(type(target))} - {*dir(torch.optim.Optimizer), *vars(target)})
    return [
        name
        for name in names
        if not name.startswith("_")
        and inspect.isfunction(inspect.getattr_static(type(target), name))
    ]


class OwnMethodCall(MethodCall):
    """Stands in for a method that an optimizer's own class adds to torch's (`eval`, `first_step`).
    Many only read or set numbers, and must go on working while the state is offloaded. So the
    method runs, but the first operation that would read or write a tensor of it, or of what it
    steps, raises before it runs, and what the method had set until then is undone."""

    def run(
        self, method: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        handle: Handle | None = self._guard()
        known = () if handle is None or is_reading() else (handle, *handle.owners)
        unusable = next(
            (each for each in known if is_off(each) or each.state is State.SYNCING), None
        )
        if handle is None or unusable is None:
            return method(*args, **kwargs)
        assert isinstance(handle.adapter, OptimizerAdapter)
        before = [
            (fields, dict(fields))
            for each in handle.adapter.objects()
            for fields in _fields_of(each)
        ]
        error = PhaseError if unusable.state is State.SYNCING else NotResidentError
        streamed, where = (
            "",
            (
                "manager.phase('train'), with optimizer_in='optimizer_step' inside "
                "phase('optimizer_step')"
            ),
        )
        if unusable.state is State.TRAINING:
            streamed, where = (
                " and streams its state",
                ("manager.phase('restore'), which loads all of it"),
            )
        text = (
            f"{self._name}() of {handle.name!r} cannot be called in phase {handle.phase_now()!r}: "
            f"it would use {{}}, while {unusable.name!r} is {unusable.state}{streamed}. Call it "
            f"where all of these may change: inside {where}"
        )
        stepped = {
            each.untyped_storage()._cdata: "what it steps" for each in handle.adapter.stepped()
        }
        # a streamed optimizer is TRAINING, and off
        may_use = [each for each in known if each.state is State.TRAINING and not is_off(each)]
        held = {
            id(each.holding): repr(each.name)
            for each in known
            if each.holding is not None and each not in may_use
        }
        mode = _Untouched(held, stepped, error(text))
        try:
            with mode:
                return method(*args, **kwargs)
        except (NotResidentError, PhaseError):
            for fields, values in before:
                for name in [name for name in fields if name not in values]:
                    del fields[name]
                fields.update(values)
            raise


def _fields_of(obj: Any) -> Iterator[dict[Any, Any]]:
    """The dictionaries in which an optimizer keeps its flags, options and state."""
    yield vars(obj)
    state, groups = vars(obj).get("state"), vars(obj).get("param_groups")
    held = [
        state,
        *(state.values() if isinstance(state, dict) else ()),
        *(groups if isinstance(groups, list) else ()),
    ]
    yield from (each for each in held if isinstance(each, dict))


class _Untouched(TorchDispatchMode):
    """Raises before an operation on tensors of some objects, unless it reads no value. `names` are
    words for the objects, by identity of their storage, and `stepped` by `_cdata` for what may be
    read, but not written. The `error` has "{}" in place of such words."""

    def __init__(
        self, names: Mapping[int, str], stepped: Mapping[int, str], error: Exception
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._stepped, self._error = names, stepped, error

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if not (func.is_view or name.endswith("_like") or name.startswith("new_")):
            tensors = (
                each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
            )
            for storage in (
                part.untyped_storage() for tensor in tensors for _, part in plain_parts(tensor, "")
            ):
                found = self._names.get(id(RANGES.owner_of(storage.data_ptr())))
                if found is None and func._schema.is_mutable:
                    found = self._stepped.get(storage._cdata)
                if found is not None:
                    raise type(self._error)(str(self._error).format(found))
        return func(*args, **(kwargs or {}))


def install(handle: Handle, objects: Iterable[Any]) -> None:
    """Put guards on a handle's key objects (modules, compiled wrappers, leaf optimizers): each is
    added to `handle.guards`."""
    # appended one by one: if one fails, `Registry.remove` finds every one
    hooks: list[Any] = handle.guards
    owner = Guard(handle).handle
    gathers = handle.adapter is not None and handle.adapter.gathers is not None
    objects = list(objects)
    roots = [target for target in objects if isinstance(target, torch.nn.Module)]
    load_guard = LoadGuard(handle)
    parts = (part for root in roots for part in root.modules())
    guards: dict[torch.nn.Module, StateDictGuard] = dict.fromkeys(parts, PartGuard(handle))
    guards |= dict.fromkeys(roots, StateDictGuard(handle))
    for part, guard in guards.items():
        hooks.append(part.register_load_state_dict_pre_hook(load_guard))
        hooks.append(part.register_state_dict_post_hook(guard))
        hooks.append(StateDictCall(owner, part, "state_dict"))
        _install_zero_calls(owner, part, hooks)
        if gathers:
            of_torch: Any = part._state_dict_pre_hooks
            hooks.append(gather := part.register_state_dict_pre_hook(GatherGuard(handle)))
            of_torch.move_to_end(gather.id, last=False)  # in front of the framework's own hooks
        _install_on_reading(handle, part, hooks, is_root=part in roots)
    if isinstance(handle.adapter, OptimizerAdapter):
        for target in objects:
            if target not in roots:
                _install_on_optimizer(handle, target, hooks)
        for each in handle.adapter.objects():
            hooks.extend(OwnMethodCall(owner, each, name) for name in own_methods(each))
    _install_on_calls(handle, roots, hooks)


def _install_zero_calls(owner: Callable[[], Handle | None], target: Any, hooks: list[Any]) -> None:
    names = ("zero_grad", "zero_grad_buffer")  # the second: Megatron's
    hooks.extend(
        ZeroCall(owner, target, name)
        for name in names
        if callable(getattr(type(target), name, None))
    )


def _install_on_reading(handle: Handle, target: Any, hooks: list[Any], *, is_root: bool) -> None:
    hooks.extend(
        MethodCall(ReadGuard(handle, what), target, name)
        for name, what in reading_methods(target, is_root=is_root).items()
    )


def install_on_new(handle: Handle) -> None:
    """Guard modules that an engine has made after its registration. Its adapter knows them, and
    their tensors move with it."""
    assert handle.adapter is not None
    known = [root for hook in handle.guards if isinstance(hook, CallGuard) for root in hook.roots()]
    modules = [
        target for target in handle.adapter.key_objects() if isinstance(target, torch.nn.Module)
    ]
    if all(any(module is root for root in known) for module in modules):
        return
    for hook in handle.guards:
        hook.remove()
        if isinstance(hook, CallGuard) and handle.holding is not None:
            handle.holding.announce.leaving.remove(hook.refuse)
            handle.holding.announce.came.remove(hook.allow)
    handle.guards.clear()
    # the old ones, too: what they had is offloaded
    install(handle, {id(module): module for module in (*known, *modules)}.values())


def _install_on_calls(handle: Handle, modules: list[torch.nn.Module], hooks: list[Any]) -> None:
    """Have calls of the modules refused while the handle is off the device: by a hook that looks at
    each call, or, where placement moves the bytes, by a guard that is on only meanwhile."""
    if (holding := handle.holding) is None:
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
    else guard the methods themselves."""
    fields = getattr(target, "__dict__", {})
    for name in (
        "_optimizer_step_pre_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
    ):
        # a wrapper made it itself, and torch's handles cannot refer to it
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
    # not by `__getattr__`: then it is another's
    if hasattr(target, "__dict__") and callable(getattr(type(target), "state_dict", None)):
        hooks.append(StateDictCall(Guard(handle).handle, target, "state_dict"))
        hooks.append(MethodCall(CopyGuard(handle), target, "__getstate__"))
        _install_zero_calls(Guard(handle).handle, target, hooks)
    for name, guard in guards.items() if hasattr(target, "__dict__") else ():
        plain = getattr(type(target), name, None)
        if (
            callable(plain)
            and plain is not getattr(torch.optim.Optimizer, name)
            and name not in fields
        ):
            hooks.append(MethodCall(guard, target, name))
