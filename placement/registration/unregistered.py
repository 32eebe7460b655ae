"""Find unregistered optimizers that step a registered module's parameters.

A second `train()` may make a new optimizer and not register it. Then its state stays on the device in every phase, and no guard keeps it
from stepping in phases in which its writes are lost. While any module is registered, one global torch hook sees the steps of all
optimizers. It cannot see an optimizer that is not a `torch.optim.Optimizer`.
"""

from __future__ import annotations

import itertools
import traceback
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from placement.core.errors import PhaseError, PlacementError, RegistrationError
from placement.core.journal import logger
from placement.core.states import State
from placement.ownership.optimizer_state import find, undo_initial_step
from placement.registration.guards import StepGuard, is_off, refuse
from placement.storage.range import RANGES
from placement.tensors.plain import plain_parts

if TYPE_CHECKING:
    from placement.registration.handle import Handle

_ADVICE = "manager.register() it after its module, once, and call step() inside manager.phase('train')"


_WATCHED: weakref.WeakSet[Handle] = weakref.WeakSet()


class StepWatch:
    """Keeps the global step hook installed while a handle, a module's or an optimizer's, is registered."""

    _hook: torch.utils.hooks.RemovableHandle | None = None  # the one hook for all handles

    def __init__(self, handle: Handle) -> None:
        self._handle = weakref.ref(handle)
        _WATCHED.add(handle)
        if StepWatch._hook is None:
            StepWatch._hook = register_optimizer_step_pre_hook(_before_step)

    def remove(self) -> None:
        if (handle := self._handle()) is not None:
            _WATCHED.discard(handle)
        if not _WATCHED and StepWatch._hook is not None:
            StepWatch._hook.remove()
            StepWatch._hook = None


def living(handle: Handle) -> list[str]:
    """Class names of the unregistered optimizers that have stepped a module's parameters and still exist unregistered."""
    return [type(each).__name__ for each in handle.unregistered_optimizers if not _is_known(each)]


def _before_step(optimizer: Any, *_: Any) -> None:
    if torch.compiler.is_compiling() or _is_guarded(optimizer):
        return
    for handle in {id(each): each for each in _stepped(optimizer)}.values():
        if optimizer not in handle.unregistered_optimizers and _is_known(optimizer):
            continue
        try:
            _check(handle, type(optimizer).__name__)
        except PlacementError as error:
            if undo_initial_step():
                error.add_note("Torch made this step to create state for a state dict: register it and use its handle's state_dict().")
            raise
        _note(handle, optimizer)


def _check(handle: Handle, kind: str) -> None:
    if is_off(handle):
        refuse(handle, f"stepped, least of all by an optimizer that is not registered ({kind})", _ADVICE)
    if handle.state is not State.TRAINING:
        raise PhaseError(
            f"step() of an optimizer that is not registered ({kind}) in phase {handle.phase_now()!r} would change {handle.name!r}, which "
            f"is {handle.state}: values may change in TRAINING only; {_ADVICE}"
        )


def _note(handle: Handle, optimizer: Any) -> None:
    if optimizer in handle.unregistered_optimizers:
        return
    if (outer := _stepped_by()) is not None:
        raise RegistrationError(
            f"{outer.name!r} steps an optimizer ({type(optimizer).__name__}) that cannot be found in it, so its state would stay on the "
            "device and be in no checkpoint. Nothing was stepped. Keep the optimizers in attributes of the registered one, or in lists, "
            "tuples or dicts there, or register each of them in its place"
        )
    handle.unregistered_optimizers.add(optimizer)
    logger.warning(
        "an optimizer that is not registered (%s) steps parameters of %r: its state stays on the device in every phase, and checkpoints "
        "do not have it; manager.register() it after its module",
        type(optimizer).__name__,
        handle.name,
    )


def _stepped_by() -> Handle | None:
    """The registered optimizer whose method makes the present step."""
    known = {id(each.object): each for each in list(_WATCHED) if each.kind == "optimizer"}
    for frame, _ in traceback.walk_stack(None):
        code = frame.f_code  # the locals of other frames are left alone: to look at them keeps them alive until the frame returns
        if code.co_name == "step" and code.co_argcount and (found := known.get(id(frame.f_locals.get(code.co_varnames[0])))) is not None:
            return found
    return None


def _stepped(optimizer: Any) -> Iterator[Handle]:
    """The registered modules whose parameters an optimizer steps. As this runs at every step, it looks at each group's first one only."""
    for group in optimizer.param_groups:
        for parameter in itertools.islice(group["params"], 1):
            for _, part in itertools.islice(plain_parts(parameter, ""), 1):
                holding = RANGES.owner_of(part.untyped_storage().data_ptr())
                if holding is not None:
                    yield from (each for each in list(_WATCHED) if each.holding is holding and each.kind == "module")


def _is_guarded(optimizer: Any) -> bool:
    return any(isinstance(hook, StepGuard) for hook in optimizer._optimizer_step_pre_hooks.values())


def _is_known(optimizer: Any) -> bool:
    """Whether an optimizer is registered, or is a part that a registered one makes when it needs it (HybridDeviceOptimizer)."""
    if _is_guarded(optimizer):
        return True
    roots = [each.object for each in list(_WATCHED) if each.kind == "optimizer"]
    held = (value for root in roots for each in find(root)[0] for value in getattr(each, "__dict__", {}).values())
    parts = (each.values() if isinstance(each, Mapping) else each if isinstance(each, (list, tuple)) else (each,) for each in held)
    return any(part is optimizer for part in itertools.chain.from_iterable(parts))
