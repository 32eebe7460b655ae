"""Calls of `state_dict()` on a registered object: what they show is readable in every state, and true.

Torch's hooks of a state dict see neither what an overridden method computes nor an exception in between, so the method itself is
stood in for. While the object is offloaded all of the call reads the host copy; what it returns follows the handle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from placement.core.errors import BrokenHandleError, NotResidentError, PlacementError
from placement.core.torch_modes import without_modes
from placement.registration.method_call import MethodCall
from placement.storage.managed import ManagedStorage
from placement.storage.offloaded.host_reads import from_host_copies, is_reading
from placement.tensors.plain import has_bytes, nested_tensors, parts_of

if TYPE_CHECKING:
    from placement.registration.handle import Handle


class StateDictCall(MethodCall):
    """In place of `state_dict` of a module, a submodule or an optimizer.

    Args:
        handle: gives the handle while there is one.
    """

    def __init__(self, handle: Callable[[], Handle | None], target: Any) -> None:
        super().__init__(handle, target, "state_dict")
        self._handle = handle

    def run(self, method: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handle = self._handle()
        if handle is None:
            return method(*args, **kwargs)
        is_offloaded = any(each.storage.is_on_host for each in (handle, *handle.owners))
        if is_reading() or not is_offloaded:
            is_part = bool(args) or kwargs.get("destination") is not None  # called by a module around it, whose own call looks at it all
            found = method(*args, **kwargs)
            return found if is_part else _shown(handle, found, ManagedStorage.hand_out_once)
        try:
            with from_host_copies():
                found = method(*args, **kwargs)
        except Exception as error:
            if not isinstance(error, PlacementError):
                error.add_note(
                    f"{handle.name!r} is {handle.state} in phase {handle.phase_now()!r}: its state dict was computed from the host copy, "
                    "in host memory. What needs its values on the device can be asked inside a phase that has it there."
                )
            raise
        found = _shown(handle, found, ManagedStorage.hand_out_once)
        _refuse_poison(handle, found)
        return found


def shown(handle: Handle, live: Any) -> Any:
    """What a state dict shows of a handle's live tensors: those over a range become tensors that stay readable wherever it goes.

    A dictionary that nothing has to be changed in is returned as it is, a module's is changed in place, another is copied.

    Raises:
        BrokenHandleError: the values are not what they should be.
    """
    return _shown(handle, live, ManagedStorage.hand_out)


_HandOut = Callable[[ManagedStorage, torch.Tensor], torch.Tensor]


def _shown(handle: Handle, found: Any, hand_out: _HandOut) -> Any:
    holding = handle.holding
    if holding is None:
        return found
    if holding.lost is not None:
        raise BrokenHandleError(f"{handle.name!r} is broken and its values must not be saved: {holding.lost}")
    with without_modes(), torch.inference_mode(False):  # what is handed out follows the handle later, which inference tensors cannot
        if handle.kind == "optimizer" or not isinstance(found, MutableMapping):
            return _readable(holding, found, hand_out)  # an optimizer's dict holds its live state
        for key, value in [*found.items()]:  # nested calls share one dict, and torch wants it changed in place
            if (readable := _readable(holding, value, hand_out)) is not value:
                found[key] = readable
    return found


def _readable(holding: ManagedStorage, value: Any, hand_out: _HandOut) -> Any:
    if isinstance(value, torch.Tensor):
        return hand_out(holding, value)
    if isinstance(value, dict):
        return _changed(value, {key: _readable(holding, each, hand_out) for key, each in value.items()})
    if isinstance(value, (list, tuple)):
        return _changed(value, dict(enumerate(_readable(holding, each, hand_out) for each in value)))
    return value


def _changed(value: Any, parts: dict[Any, Any]) -> Any:
    """A container of the same kind with other parts; itself where they are the same."""
    own = value if isinstance(value, dict) else dict(enumerate(value))
    if all(parts[key] is own[key] for key in own):
        return value
    if isinstance(value, dict):
        return parts
    return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())


def is_stateless(optimizer: Any) -> bool:
    """Whether an optimizer, or its state dict, has no state."""
    state = optimizer.get("state", True) if isinstance(optimizer, dict) else getattr(optimizer, "state", True)
    return isinstance(state, Mapping) and not state


def lies_in(state_dict: Any, holding: ManagedStorage) -> bool:
    """Whether a state dict has tensors at the device addresses of an object: its own parameters."""
    bases = [(r.layout.addresses.base, r.nbytes) for r in holding.ranges]
    tensors = [value for value in (state_dict.values() if isinstance(state_dict, Mapping) else ()) if isinstance(value, torch.Tensor)]
    parts = [part.untyped_storage().data_ptr() for value in tensors for _, part in parts_of(value, "") if has_bytes(part)]
    return any(0 <= address - base < nbytes for address in parts for base, nbytes in bases)


def _refuse_poison(handle: Handle, found: Any) -> None:
    """Raise where a value was computed by code that went past torch (a kernel given an address, another thread).

    Raises:
        NotResidentError: NaN in what was computed, and none in the host copies it was computed from.
    """
    storages = [each.storage for each in (handle, *handle.owners)]
    computed = [
        (name, part)
        for path, value in nested_tensors(found, "")
        for name, part in parts_of(value, path.lstrip("."))
        if has_bytes(part) and not any(each.has_place(part) for each in storages)
    ]
    wrong = [name for name, part in computed if _has_nan(part)]
    if wrong and not any(_has_nan(host) for each in (handle, *handle.owners) for host in _host_copies(each)):
        raise NotResidentError(
            f"{', '.join(wrong[:8])} of the state dict of {handle.name!r} came out as NaN, and the values it was computed from have none: "
            f"{handle.name!r} is {handle.state} in phase {handle.phase_now()!r}, and a hook or method of its state dict reads past torch "
            "what lies on the device (a kernel of its own, another thread). Ask inside a phase that has it on the device."
        )


def _host_copies(handle: Handle) -> list[torch.Tensor]:
    assert handle.adapter is not None
    if not handle.storage.is_on_host:
        return []
    return [host for owned in handle.adapter.owned() if (host := handle.storage.over_host(owned.tensor)) is not None]


def _has_nan(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    return bool((tensor.float() if tensor.dtype.itemsize == 1 else tensor).isnan().any().item())
