"""Compute a state dict from the host copy while the code that computes it uses the offloaded tensors.

Hooks of state dicts, `get_extra_state` and overridden methods compute with the live tensors, which read poison while they are
offloaded. Inside `from_host_copies` every torch function gets the host copy instead of such a tensor. The tensors themselves are not
touched: identity, addresses, versions, gradient accumulators and use counts stay the same, other threads notice nothing, and an
exception or an interrupt leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode

from placement.storage.address_map import RANGES
from placement.storage.managed import ManagedStorage
from placement.tensors.plain import is_plain_type, is_wrapper, parts_of, rewrapped

_WHERE = frozenset({"device", "is_cpu", "is_cuda", "__cuda_array_interface__"})
"""Properties that tell where a tensor's bytes are: answered by the host copy. The live tensor answers all others."""
_OF_THE_OBJECT = frozenset(
    {"__set__", "__delete__", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"}
)
"""Functions that change the tensor object but no byte. They are given the live tensor."""


class _HostReads(TorchFunctionMode):
    """Gives torch functions the host copy in place of tensors that are offloaded, in the thread that entered it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _is_about_the_object(func):
            return func(*args, **(kwargs or {}))
        live: dict[int, torch.Tensor] = {}
        found = func(*_on_host(args, live), **_on_host(kwargs or {}, live))
        return live.get(id(found), found) if live else found  # an in-place function must return the tensor that it was given


def is_reading() -> bool:
    """Whether this thread is inside `from_host_copies`."""
    return any(isinstance(mode, _HostReads) for mode in _get_current_function_mode_stack())


@contextmanager
def from_host_copies() -> Iterator[None]:
    """Let every torch function that this thread calls with an offloaded tensor use its host copy. Writes go into the host copy, too."""
    mode = _HostReads()
    try:
        with mode:
            yield
    finally:
        stack = _get_current_function_mode_stack()
        if stack and stack[-1] is mode:  # an interrupt came while the mode was being entered
            _pop_mode()


def _is_about_the_object(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _WHERE  # type: ignore[attr-defined]
    return name in _OF_THE_OBJECT


def _on_host(value: Any, live: dict[int, torch.Tensor]) -> Any:
    """The same arguments with the host copy in place of every offloaded tensor. `live` gets the tensor that each host copy stands for."""
    if isinstance(value, torch.Tensor):
        found = _host_copy(value)
        if found is not value:
            live[id(found)] = value
        return found
    if type(value) in (tuple, list):
        return type(value)([_on_host(each, live) for each in value])
    if type(value) is dict:
        return {key: _on_host(each, live) for key, each in value.items()}
    return value


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    if is_wrapper(tensor):
        is_offloaded = any(_host_copy(part) is not part for _, part in parts_of(tensor, "") if part is not tensor)
        return rewrapped(tensor, _host_copy) if is_offloaded else tensor
    if not is_plain_type(type(tensor)) or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
        return tensor
    owner = RANGES.owner_of(tensor.untyped_storage().data_ptr())
    if not isinstance(owner, ManagedStorage) or (host := owner.host_copy(tensor)) is None:
        return tensor
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return host
    carrier = host.as_subclass(type(tensor))  # keeps the attributes that the tensor's framework has put on it
    vars(carrier).update(vars(tensor))
    return carrier
