"""Calls of `state_dict()` on a registered object. In every state they return true values in tensors
that stay readable.

Torch's state dict hooks see neither the values that an overridden method computes nor an exception
in between. So the method itself is replaced. Hooks of state dicts, `get_extra_state` and overridden
methods compute with the live tensors, which read poison while they are offloaded. So then the whole
call runs inside `FromHostCopies`, where every torch function gets the host copy instead of such a
tensor. The tensors themselves stay as they are, with their identity, addresses, versions, gradient
accumulators and use counts, for other threads and after an exception, too. The tensors that the
call returns follow the handle.
"""

from __future__ import annotations

import functools
import operator
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from placement.core.errors import BrokenHandleError, NotResidentError, PlacementError
from placement.core.method_call import MethodCall
from placement.core.modes import without_modes
from placement.devices.poisoned import has_nan
from placement.storage.managed import ManagedStorage
from placement.storage.owners import RANGES
from placement.storage.watch.state_dicts import was_handed_out
from placement.tensors.plain import (
    SEQUENCES,
    dense_parts,
    has_bytes,
    has_storage,
    is_plain_type,
    is_wrapper,
    nested_tensors,
    parts_of,
    rewrapped,
    with_fields,
    with_parts,
)

if TYPE_CHECKING:
    from placement.registration.handle import Handle

_WHERE = frozenset({"device", "is_cpu", "is_cuda", "__cuda_array_interface__"})
"""Properties that tell where a tensor's bytes are: answered by the host copy. The live tensor
answers all others."""
_OF_THE_OBJECT = frozenset(
    {
        "__set__",
        "__delete__",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
    }
)
"""Functions that change the tensor object but no byte. They are given the live tensor."""
_WRITES_WHAT_IT_ASKS_FOR = "_load_optim_state_dict"
"""A function of `torch.distributed.checkpoint.state_dict`. It writes the loaded values into the
state dict that it asks for, and loads that."""


class StateDictCall(MethodCall):
    """Stands in for `state_dict` of a module, a submodule or an optimizer. Its guard returns the
    handle; None once that is gone."""

    def run(
        self,
        method: Callable[..., Any],
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A state dict whose tensors follow the handle, in every state."""
        handle: Handle | None = self._guard()
        if handle is None:
            return method(*args, **kwargs)
        if is_reading() or not _is_offloaded(handle):
            state_dict = method(*args, **kwargs)
            if args or kwargs.get("destination") is not None:
                return state_dict  # to an outer module's call, which does the rest
            if is_reading() or not _is_offloaded(handle):
                return shown(handle, state_dict, hand_out_once)
            # Another thread has offloaded the handle meanwhile, so the values may be NaN.
        state_dict = self._run_over_host_copy(handle, method, args, kwargs)
        state_dict = shown(handle, state_dict, hand_out_once)
        _refuse_poison(handle, state_dict)
        return state_dict

    def _run_over_host_copy(
        self,
        handle: Handle,
        method: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The state dict of an offloaded handle, computed from the host copy. Raises
        NotResidentError: torch would load values into what it is given."""
        callers = [frame.f_code.co_name for frame, _ in traceback.walk_stack(None)]
        if _WRITES_WHAT_IT_ASKS_FOR in callers:
            raise NotResidentError(
                f"{handle.name!r} is {handle.state} in phase {handle.phase_now()!r} and cannot be "
                "given a state dict: load it inside manager.phase('restore')"
            )
        try:
            with FromHostCopies():
                return method(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, PlacementError):
                error.add_note(
                    f"{handle.name!r} is {handle.state} in phase {handle.phase_now()!r}, so its "
                    "state dict was computed from the host copy, in host memory. If its code needs "
                    "the values on the device, ask inside a phase that has it there."
                )
            raise


class ZeroCall(StateDictCall):
    """Stands in for `zero_grad` of a module or an optimizer. While gradients are offloaded, the
    call zeroes their host copies."""

    def run(
        self,
        method: Callable[..., Any],
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        handle = self._guard()
        with nullcontext() if handle is None or not _is_offloaded(handle) else FromHostCopies():
            return method(*args, **kwargs)


def _is_offloaded(handle: Handle) -> bool:
    return handle.storage.is_on_host or any(owner.storage.is_on_host for owner in handle.owners)


_HandOut = Callable[[ManagedStorage, torch.Tensor], torch.Tensor]


def hand_out(holding: ManagedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a state dict may show it: readable now, and pointed to the bytes wherever they
    move, also in another thread."""
    owner = _owner_of(holding, tensor)
    if holding.adapter.kind == "optimizer" and isinstance(tensor, torch.nn.Parameter):
        tensor = tensor.detach()  # the live one is for a module's state_dict(keep_vars=True)
    tensors = owner.state_dict_tensors
    num_pointings = -1
    # once more where the bytes have moved meanwhile
    while num_pointings != tensors.num_pointings:
        num_pointings = tensors.num_pointings
        from_host = owner.is_on_host
        if from_host:
            owner.host_has_newest.wait()
            owner.make_host_copies_own()
        shown = tensors.hand_out(tensor, from_host=from_host)
    return shown


def hand_out_once(holding: ManagedStorage, tensor: torch.Tensor) -> torch.Tensor:
    """As `hand_out`; the tensor itself where it was handed out before."""
    return tensor if was_handed_out(tensor) else hand_out(holding, tensor)


def _owner_of(holding: ManagedStorage, tensor: torch.Tensor) -> ManagedStorage:
    """The storage in whose memory a tensor of the object lies: its own, or another object's (state
    that is a parameter)."""
    for _, part in dense_parts(tensor):
        is_plain = is_plain_type(type(part)) and has_storage(part)
        if not is_plain or holding.has_place(part):
            continue
        owner = RANGES.owner_of(part.untyped_storage().data_ptr())
        if not isinstance(owner, ManagedStorage):
            break
        if owner.lost is not None:
            raise BrokenHandleError(
                f"a tensor of {holding.name!r} lies in {owner.name!r}, which is broken: "
                f"{owner.lost}"
            )
        return owner
    return holding


def shown(handle: Handle, state_dict: Any, hand_out: _HandOut = hand_out) -> Any:
    """Replace the handle's live tensors in a state dict by tensors that stay readable wherever the
    handle goes. A module's dictionary is changed in place, another one is copied."""
    holding = handle.holding
    if holding is None:
        return state_dict
    if holding.lost is not None:
        raise BrokenHandleError(
            f"{handle.name!r} is broken and its values must not be saved: {holding.lost}"
        )
    # the tensors must follow the handle later, which inference tensors cannot
    with without_modes(), torch.inference_mode(False):
        if handle.kind == "optimizer" or not isinstance(state_dict, MutableMapping):
            # copied, because an optimizer's dict holds its live state
            return _readable(holding, state_dict, hand_out)
        for key, value in [*state_dict.items()]:  # in place, because nested calls share one dict
            readable = _readable(holding, value, hand_out)
            if readable is not value:
                state_dict[key] = readable
    return state_dict


def _readable(
    holding: ManagedStorage, value: Any, hand_out: _HandOut, *, is_inside: bool = False
) -> Any:
    """The value with readable tensors, also in attributes of objects in it, but not of objects
    inside these (`is_inside`)."""
    if isinstance(value, torch.Tensor):
        return hand_out(holding, value)
    readable = functools.partial(_readable, holding, hand_out=hand_out, is_inside=is_inside)
    if isinstance(value, dict):
        parts = dict(value.items())  # copied: the live dict may get new state in a later step
        for key, part in parts.items():
            parts[key] = readable(part)
        if not is_inside:
            return parts
        items = [*value.items()]
        return value if all(parts.get(key) is part for key, part in items) else parts
    if isinstance(value, SEQUENCES):
        sequence = [readable(part) for part in value]
        if all(map(operator.is_, sequence, value)):
            return value
        return with_parts(value, sequence)
    return value if is_inside else with_fields(value, functools.partial(readable, is_inside=True))


def is_stateless(optimizer: Any) -> bool:
    """Whether an optimizer, or its state dict, has no state."""
    if isinstance(optimizer, dict):
        state = optimizer.get("state", True)
    else:
        state = getattr(optimizer, "state", True)
    return isinstance(state, Mapping) and not state


def lies_in(state_dict: Any, holding: ManagedStorage) -> bool:
    """Whether a state dict that is being loaded holds the object's own tensors, in its ranges. Then
    torch may have written to poison before a guard could refuse the call."""
    if not isinstance(state_dict, Mapping):
        return False
    for value in state_dict.values():
        if not isinstance(value, torch.Tensor):
            continue
        for _, part in parts_of(value, ""):
            if has_bytes(part):
                storage = part.untyped_storage()
                if RANGES.owner_of(storage.data_ptr()) is holding:
                    return True
    return False


def _refuse_poison(handle: Handle, state_dict: Any) -> None:
    """Raise NotResidentError if there is NaN among the computed values, but none in the object's:
    code has read past torch."""
    handles = (handle, *handle.owners)
    names = list[str]()
    for path, tensor in nested_tensors(state_dict, ""):
        for name, part in parts_of(tensor, path.lstrip(".")):
            if not has_bytes(part) or any(source.storage.has_place(part) for source in handles):
                continue  # its values are the object's own
            if has_nan(part):
                names.append(name)
    if names and not any(_has_nan(source) for source in handles):
        raise NotResidentError(
            f"{', '.join(names[:8])} of the state dict of {handle.name!r} came out as NaN, but the "
            f"values it was computed from have none. {handle.name!r} is {handle.state} in phase "
            f"{handle.phase_now()!r}, and a hook or method of its state dict reads its device "
            "memory past torch (a kernel of its own, another thread), or makes NaN itself. Ask for "
            "the state dict inside a phase that has it on the device."
        )


def _has_nan(handle: Handle) -> bool:
    """Whether the values of an offloaded handle have NaN, those of new tensors beside its places
    included."""
    if handle.adapter is None or not handle.storage.is_on_host:
        return False
    for owned in handle.adapter.owned():
        tensor: torch.Tensor | None = owned.tensor
        if handle.storage.has_place(owned.tensor):
            tensor = handle.storage.read_host(owned.tensor)
        if tensor is not None and has_nan(tensor):
            return True
    return False


# --- reading the host copy


class FromHostCopies(TorchFunctionMode):
    """Gives torch functions the host copy in place of tensors that are offloaded, in the thread
    that entered it. Writes go there, too."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if _is_about_the_object(func):
            return func(*args, **(kwargs or {}))
        live: dict[int, torch.Tensor] = {}
        result = func(*_on_host(args, live), **_on_host(kwargs or {}, live))
        # an in-place function must return the tensor that it was given
        return live.get(id(result), result) if live else result


def is_reading() -> bool:
    """Whether this thread is inside `FromHostCopies`."""
    return any(isinstance(mode, FromHostCopies) for mode in _get_current_function_mode_stack())


def _is_about_the_object(func: Callable[..., Any]) -> bool:
    """Whether a torch function reads or changes the tensor object alone, and no byte."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _WHERE  # type: ignore[attr-defined]
    return name in _OF_THE_OBJECT


def _on_host(value: Any, live: dict[int, torch.Tensor]) -> Any:
    """Arguments with the host copy in place of every offloaded tensor in them. `live` gets the
    tensor that each host copy stands for."""
    if isinstance(value, torch.Tensor):
        host = _host_copy(value)
        if host is not value:
            live[id(host)] = value
        return host
    if type(value) in (tuple, list):
        return type(value)([_on_host(argument, live) for argument in value])
    if type(value) is dict:
        return {key: _on_host(argument, live) for key, argument in value.items()}
    return value


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the host copy of an offloaded one; the tensor itself where it is not
    offloaded."""
    if is_wrapper(tensor):
        parts = [part for _, part in parts_of(tensor, "") if part is not tensor]
        is_offloaded = any(_host_copy(part) is not part for part in parts)
        return rewrapped(tensor, _host_copy) if is_offloaded else tensor
    if not is_plain_type(type(tensor)) or tensor.layout is not torch.strided:
        return tensor
    if tensor.is_meta or tensor.is_nested:
        return tensor
    owner = RANGES.owner_of(tensor.untyped_storage().data_ptr())
    host = owner.show_host(tensor) if isinstance(owner, ManagedStorage) else None
    if host is None:
        return tensor
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return host
    # keeps the attributes that the tensor's framework has put on it
    carrier = host.as_subclass(type(tensor))
    vars(carrier).update(vars(tensor))
    return carrier
