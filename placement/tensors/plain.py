"""What a plain tensor is, and how tensors are found in nested containers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from placement.core.loaded_classes import loaded_class

# Exact types: a subclass may keep its bytes anywhere (DTensor, quantised payloads), so each one needs an adapter of its own.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_carriers: set[tuple[str, str]] = set()


def set_carriers(classes: Iterable[tuple[str, str]]) -> None:
    """Say which further classes (module and name) have their bytes in the tensor's own storage, as a plain tensor has.

    What they keep beside it their framework finds.
    """
    _carriers.clear()
    _carriers.update(classes)
    is_plain_type.cache_clear()


@functools.cache
def is_plain_type(cls: type) -> bool:
    """Whether tensors of a class have their bytes in their own storage, and nowhere else that we do not know."""
    known = (loaded_class(*each) for each in _carriers)
    return cls in PLAIN_TYPES or any(carrier is not None and issubclass(cls, carrier) for carrier in known)


def with_index(device: torch.device) -> torch.device:
    """`device` as tensors report it: "cuda" without an index is the current one."""
    return torch.empty(0, device=device).device


def reference(obj: Any) -> Callable[[], Any]:
    """A weak reference, so that an adapter does not keep its object alive; a strong one where the class allows no weak ones."""
    try:
        return weakref.ref(obj)
    except TypeError:
        return lambda: obj


def is_plain(tensor: torch.Tensor, compute_device: torch.device) -> bool:
    """Whether the tensor's storage can be moved as bytes. Runs for every tensor at every boundary, so it stays cheap."""
    return (
        is_plain_type(type(tensor))
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.device == compute_device)
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_inference()
    )


def problem_of(tensor: torch.Tensor, compute_device: torch.device) -> str | None:
    """What is wrong with a tensor and what to do about it, for an error message; None when it can be moved."""
    if is_lazy(tensor):
        return "has no shape yet: run one forward pass before registering"
    if not is_plain_type(type(tensor)) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        kind = type(tensor)
        return (
            f"is a {kind.__module__}.{kind.__qualname__}: only plain tensors and parameters can be moved now; "
            "convert it to a plain tensor, or register with external=True to have it tracked and never moved"
        )
    if tensor.is_meta:
        return "is on the meta device, so it has no bytes: materialise it (to_empty, then load weights) before registering"
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        layout = "nested" if tensor.is_nested else "quantised" if tensor.is_quantized else str(tensor.layout)
        return f"has a {layout} layout: only dense strided tensors can be moved now; make it dense (a gradient: zero_grad first)"
    if not (tensor.is_cpu or tensor.device == compute_device):
        where = "the CPU" if compute_device.type == "cpu" else f"the CPU or {compute_device}"
        return f"is on {tensor.device}: one handle lives on {where}; move it there before registering"
    if tensor.is_inference():
        return "is an inference tensor: create or load it outside torch.inference_mode()"
    if tensor.is_cpu and tensor.untyped_storage().is_shared():
        return "lies in shared memory, which other processes may be using: clone it before registering"
    return None


def nested_tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in `value`, through lists, tuples and mappings nested in any depth, in their own order."""
    stack: list[tuple[str, Any]] = [(name, value)]
    visited: set[int] = set()
    while stack:
        path, item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield path, item
        elif isinstance(item, (list, tuple, Mapping)) and item and id(item) not in visited:
            visited.add(id(item))
            pairs = list(item.items() if isinstance(item, Mapping) else enumerate(item))
            # A key may be a parameter, and its text all of its values: nobody may read them here, least of all where there are none.
            labels = (key if isinstance(key, (str, int)) else f"[{index}]" for index, key in enumerate(key for key, _ in pairs))
            stack.extend([(f"{path}.{label}", part) for label, (_, part) in zip(labels, pairs, strict=True)][::-1])


def parts_of(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that hold a tensor's bytes: itself, or what a wrapper subclass (a DTensor, a quantised weight) wraps, to any depth."""
    if type(tensor) in PLAIN_TYPES:  # at every phase transition for every tensor: the common case first
        yield name, tensor
        return
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        yield name, tensor
        return
    for attribute in wrapper.__tensor_flatten__()[0]:
        part = getattr(wrapper, attribute)
        if isinstance(part, torch.Tensor):  # a DTensor lists its mesh as well
            yield from parts_of(part, f"{name}.{attribute}")


def has_bytes(part: torch.Tensor) -> bool:
    """Whether a part is a plain tensor with bytes behind it."""
    return is_plain_type(type(part)) and part.layout is torch.strided and not part.is_meta and part.numel() > 0


def plain_parts(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a tensor's parts that have bytes of their own."""
    return ((path, part) for path, part in parts_of(tensor, name) if has_bytes(part))


def is_wrapper(tensor: object) -> bool:
    """Whether a tensor has its bytes in other tensors, which it wraps."""
    return type(tensor) not in PLAIN_TYPES and is_traceable_wrapper_subclass(tensor)


def local_device(tensor: torch.Tensor) -> torch.device:
    """Where a tensor's bytes are on this rank."""
    return next((part.device for _, part in parts_of(tensor, "")), tensor.device)


def rewrapped(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """What `change` makes of a tensor; of a wrapper the same wrapper around what it makes of the parts. Calls no collective."""
    if not is_wrapper(tensor):
        return change(tensor)
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    parts = {name: getattr(wrapper, name) for name in names}
    inner = {name: rewrapped(part, change) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
    found: torch.Tensor = type(wrapper).__tensor_unflatten__(inner, context, wrapper.size(), wrapper.stride())
    return found


def align(wrapper: torch.Tensor) -> None:
    """Make a wrapper's outside say what its parts are now (their device). `.data =` reaches the outside alone."""
    wrapper.data = rewrapped(wrapper, lambda part: part)


class Outline(NamedTuple):
    """What a wrapper says of itself, in words that hold no tensor: how to make the same one around other parts."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    context: Any
    """Of `__tensor_flatten__`."""
    inner: Mapping[str, Outline]
    """Of the parts that are wrappers themselves."""

    @classmethod
    def of(cls, wrapper: Any) -> Outline:
        names, context = wrapper.__tensor_flatten__()
        inner = {name: cls.of(part) for name in names if is_wrapper(part := getattr(wrapper, name))}
        return cls(wrapper.dtype, wrapper.size(), wrapper.stride(), context, inner)

    def around(self, wrapper: Any) -> torch.Tensor:
        """A new wrapper like this around the parts that another one has."""
        parts = {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}
        parts |= {name: outline.around(parts[name]) for name, outline in self.inner.items()}
        found: torch.Tensor = type(wrapper).__tensor_unflatten__(parts, self.context, self.size, self.stride)
        return found


def restore(wrapper: torch.Tensor, outline: Outline) -> None:
    """Make a wrapper say again what it said of itself, once its parts are what they were: `half()` made it say another dtype.

    The object stays, with its parts and its gradient.
    """
    if (wrapper.dtype, wrapper.size(), wrapper.stride()) == outline[:3]:
        return
    fresh = outline.around(wrapper)
    wrapper.data = fresh
    slots = {name for cls in type(wrapper).__mro__ for name in vars(cls).get("__slots__", ())}
    for name in (*slots, *vars(fresh)):
        if hasattr(fresh, name):
            setattr(wrapper, name, getattr(fresh, name))
