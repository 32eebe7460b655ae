"""Tensors: plain ones and their dtypes, how they are found in containers and wrappers, and how an
object names those that it owns."""

from __future__ import annotations

import copy
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# Exact types: a subclass may keep its bytes anywhere (DTensor, quantised payloads), so each one
# needs its own adapter.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
SEQUENCES = (list, tuple, deque)
_NOT_PLAIN = (sys.stdlib_module_names - {"argparse", "collections", "types"}) | {
    "torch",
    "placement",
}
"""The packages whose objects `fields_of` does not look into."""
OBJECT_LEVELS = 3
"""How many objects, one inside the other, may lie between a module and a tensor:
`EncoderDecoderCache`, `StaticCache`, a layer of it."""
_SIMPLE = {type(None), bool, int, float, str, bytes}
"""The types of values without a tensor. Most containers (a configuration, a vocabulary) have
nothing else."""
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}  # the short names of dtypes
_carriers: set[tuple[str, str]] = set()


def loaded_class(module: str, name: str) -> type | None:
    """The class of a framework if that framework has been imported, else None: then no object can
    be an instance of it."""
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else None


def is_a(obj: object, module: str, name: str) -> bool:
    """Whether an object is an instance of a framework's class. The framework is not imported for
    the question."""
    cls = loaded_class(module, name)
    return cls is not None and isinstance(obj, cls)


def set_carriers(classes: Iterable[tuple[str, str]]) -> None:
    """Say which further classes (module and name) have their bytes in the tensor's own storage.
    Their framework finds what is beside."""
    _carriers.clear()
    _carriers.update(classes)
    is_plain_type.cache_clear()


@functools.cache
def is_plain_type(cls: type) -> bool:
    """Whether tensors of a class have all their bytes in their own storage."""
    if cls in PLAIN_TYPES:
        return True
    for module, name in _carriers:
        carrier = loaded_class(module, name)
        if carrier is not None and issubclass(cls, carrier):
            return True
    return False


def with_index(device: torch.device) -> torch.device:
    """`device` as tensors report it. "cuda" without an index means the current device."""
    return torch.empty(0, device=device).device


def is_plain(tensor: torch.Tensor, compute_device: torch.device) -> bool:
    """Whether the tensor's storage can be moved as bytes. Runs for every tensor at every scan, so
    it must be cheap."""
    return (
        is_plain_type(type(tensor))
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.device == compute_device)
        and not tensor.is_nested
        and not tensor.is_quantized
    )


def version_of(tensor: torch.Tensor) -> int:
    """The count of writes to a tensor; 0 for an inference tensor, whose writes torch does not
    count."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def problem_of(tensor: torch.Tensor, compute_device: torch.device) -> str | None:
    """The problem of a tensor and its remedy, as text for an error message; None when the tensor
    can be moved."""
    if not is_plain_type(type(tensor)) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if is_lazy(tensor):
            return "has no shape yet: run one forward pass before registering"
        kind = type(tensor)
        return (
            f"is a {kind.__module__}.{kind.__qualname__}: only plain tensors and parameters can be "
            "moved now; convert it to a plain tensor, or register with external=True to have it "
            "tracked and never moved"
        )
    if tensor.is_meta:
        return (
            "is on the meta device, so it has no bytes: materialise it (to_empty, then load "
            "weights) before registering"
        )
    if tensor.is_nested or tensor.is_quantized or tensor.layout is not torch.strided:
        layout = (
            "nested"
            if tensor.is_nested
            else "quantised"
            if tensor.is_quantized
            else str(tensor.layout)
        )
        return (
            f"has a {layout} layout: only dense strided tensors can be moved now; make it dense (a "
            "gradient: zero_grad first)"
        )
    if not (tensor.is_cpu or tensor.device == compute_device):
        where = "the CPU" if compute_device.type == "cpu" else f"the CPU or {compute_device}"
        return (
            f"is on {tensor.device}: all tensors of a handle must be on {where}; move it there "
            "before registering"
        )
    if tensor.is_inference():
        return "is an inference tensor: create or load it outside torch.inference_mode()"
    if tensor.is_cpu and tensor.untyped_storage().is_shared():
        return (
            "lies in shared memory, which other processes may be using: clone it before registering"
        )
    return None


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor's values are not those of its bytes, but their conjugates or negatives
    (`z.conj()`, `z.conj().imag`)."""
    return tensor.is_conj() or tensor.is_neg()


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no result inside a graph. Torch raises for one of several views (`chunk`)
    once the memory was written."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False


def as_lazy_as(tensor: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    """`plain`, seen as the conjugates or negatives of its bytes where a tensor is seen so."""
    seen = plain.conj() if tensor.is_conj() else plain
    return torch._neg_view(seen) if tensor.is_neg() else seen


LAZY_VIEW = (
    "is a lazily conjugated or negated view, so its bytes are not its values: assign its "
    "resolve_conj() or resolve_neg() instead"
)


def nested_tensors(value: Any, name: str, levels: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in `value`, through nested lists, tuples, deques and mappings of any depth, in
    their order, and through `levels` plain objects, one inside the other (see `fields_of`)."""
    stack: list[tuple[str, Any, int]] = [(name, value, levels)]
    visited: set[int] = set()
    while stack:
        path, item, deeper = stack.pop()
        if isinstance(item, torch.Tensor):
            yield path, item
            continue
        if id(item) in visited:
            continue
        held = item
        if not isinstance(item, (*SEQUENCES, Mapping)):
            held = fields_of(item) if deeper else {}
            deeper -= 1
        values = held.values() if isinstance(held, Mapping) else held
        if {*map(type, values)} <= _SIMPLE:  # the common case: lists of numbers
            continue
        visited.add(id(item))
        pairs = list(held.items() if isinstance(held, Mapping) else enumerate(held))
        inner = []
        for index, (key, part) in enumerate(pairs):
            if type(part) not in _SIMPLE:
                # A key may be a parameter, whose text shows all its values. They must not be read,
                # because the parameter may be offloaded.
                label = key if isinstance(key, (str, int)) else f"[{index}]"
                inner.append((f"{path}.{label}", part, deeper))
        stack.extend(reversed(inner))


def fields_of(obj: object) -> dict[str, Any]:
    """The attributes of a plain object of somebody's own class; none of modules, optimizers,
    classes, and what torch or placement made (a mesh, a handle): their tensors are not those of the
    object that refers to them."""
    return attributes_of(obj) if has_fields(type(obj)) else {}


def attributes_of(obj: object) -> dict[str, Any]:
    attributes = {}
    for cls in type(obj).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(obj, name):
                attributes[name] = getattr(obj, name)
    return attributes | getattr(obj, "__dict__", {})


def has_fields(cls: type) -> bool:
    """Whether `fields_of` looks into objects of a class. Of torch's own it does into attention
    masks (`BlockMask`)."""
    is_ours = cls.__module__.partition(".")[0] not in _NOT_PLAIN or cls.__module__.startswith(
        "torch.nn.attention."
    )
    return is_ours and not issubclass(
        cls, (type, ModuleType, torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    )


def with_fields(obj: Any, change: Callable[[Any], Any]) -> Any:
    """A shallow copy of a plain object whose attributes have tensors, each attribute changed; any
    other object itself."""
    if next(nested_tensors(obj, "", levels=1), None) is None:
        return obj
    copied = copy.copy(obj)
    for name, value in fields_of(obj).items():
        object.__setattr__(copied, name, change(value))  # also where the class is frozen
    return copied


def with_parts(container: Any, parts: Iterable[Any]) -> Any:
    """A list, tuple or deque of the same class with other parts."""
    if hasattr(container, "_fields"):
        return type(container)(*parts)
    return (
        deque(parts, container.maxlen) if isinstance(container, deque) else type(container)(parts)
    )


def parts_of(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that hold a tensor's bytes: itself, or those that a wrapper (a DTensor, a
    quantised weight) wraps, to any depth."""
    # the common case first: this runs for every tensor at every scan
    if type(tensor) in PLAIN_TYPES:
        yield name, tensor
        return
    wrapper: Any = tensor
    if not is_traceable_wrapper_subclass(wrapper):
        yield name, tensor
        return
    for attribute in wrapper.__tensor_flatten__()[0]:
        part = getattr(wrapper, attribute)
        if isinstance(part, torch.Tensor):  # a DTensor also lists its mesh
            yield from parts_of(part, f"{name}.{attribute}")


def has_bytes(part: torch.Tensor) -> bool:
    return is_plain_type(type(part)) and has_storage(part) and part.numel() > 0


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has its bytes in one storage, if it has any. One that has not never lies in
    a range, and torch may refuse to ask."""
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested


def plain_parts(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts of a tensor that have bytes of their own."""
    return ((path, part) for path, part in parts_of(tensor, name) if has_bytes(part))


def is_wrapper(tensor: object) -> bool:
    """Whether a tensor keeps its bytes in other tensors, which it wraps."""
    return type(tensor) not in PLAIN_TYPES and is_traceable_wrapper_subclass(tensor)


def local_device(tensor: torch.Tensor) -> torch.device:
    """The device of a tensor's bytes on this rank."""
    return next((part.device for _, part in parts_of(tensor, "")), tensor.device)


def rewrapped(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Apply `change` to a tensor. For a wrapper, make the same wrapper around its changed parts.
    Calls no collective."""
    if not is_wrapper(tensor):
        return change(tensor)
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    parts = {name: getattr(wrapper, name) for name in names}
    inner = {
        name: rewrapped(part, change) if isinstance(part, torch.Tensor) else part
        for name, part in parts.items()
    }
    found: torch.Tensor = type(wrapper).__tensor_unflatten__(
        inner, context, wrapper.size(), wrapper.stride()
    )
    return found


def align(wrapper: torch.Tensor) -> None:
    """Update the metadata that a wrapper reports (its device) from its parts. `.data =` changes
    only that metadata."""
    wrapper.data = rewrapped(wrapper, lambda part: part)


class Outline(NamedTuple):
    """A wrapper's metadata without any tensor, from which the same wrapper can be made around other
    parts."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    context: Any  # the context of `__tensor_flatten__`
    inner: Mapping[str, Outline]  # the outlines of parts that are wrappers themselves

    @classmethod
    def of(cls, wrapper: Any) -> Outline:
        names, context = wrapper.__tensor_flatten__()
        inner = {name: cls.of(part) for name in names if is_wrapper(part := getattr(wrapper, name))}
        return cls(wrapper.dtype, wrapper.size(), wrapper.stride(), context, inner)

    def around(self, wrapper: Any) -> torch.Tensor:
        """A new wrapper with this outline, around the parts of another wrapper."""
        parts = {name: getattr(wrapper, name) for name in wrapper.__tensor_flatten__()[0]}
        parts |= {name: outline.around(parts[name]) for name, outline in self.inner.items()}
        found: torch.Tensor = type(wrapper).__tensor_unflatten__(
            parts, self.context, self.size, self.stride
        )
        return found


def restore(wrapper: torch.Tensor, outline: Outline) -> None:
    """Restore a wrapper's metadata after its parts (`half()` made it report another dtype). Object,
    parts and gradient stay the same."""
    if (wrapper.dtype, wrapper.size(), wrapper.stride()) == outline[:3]:
        return
    fresh = outline.around(wrapper)
    wrapper.data = fresh
    slots = {name for cls in type(wrapper).__mro__ for name in vars(cls).get("__slots__", ())}
    for name in (*slots, *vars(fresh)):
        if hasattr(fresh, name):
            setattr(wrapper, name, getattr(fresh, name))


class Owned(NamedTuple):
    """One tensor of an object."""

    # the name as users would write it: "layers.0.weight", "layers.0.weight.grad", "state.0.exp_avg"
    name: str
    tensor: torch.Tensor
    transient: bool = False
    """Whether the tensor comes and goes between phases (a gradient). Then it gets addresses of its
    own for one offload at a time."""
    wrapper: torch.Tensor | None = None
    """The object through which users write, if another one (a DTensor). Its operations do not count
    in the wrapped tensor's version."""
    held: bool = False
    """Whether only an object that a module holds refers to it. That object may be another's, too:
    what is not this handle's stays."""

    @property
    def version(self) -> int:
        """A count of writes. Some do not count (fused and foreach steps, collectives), so it can
        prove a write, never its absence."""
        return version_of(self.tensor) + (0 if self.wrapper is None else version_of(self.wrapper))


def owned_parts(tensor: torch.Tensor, name: str, transient: bool = False) -> Iterable[Owned]:
    if type(tensor) in PLAIN_TYPES:
        return (Owned(name, tensor, transient),)
    return (
        Owned(path, part, transient, None if part is tensor else tensor)
        for path, part in parts_of(tensor, name)
    )


def align_all(owned: Iterable[Owned]) -> None:
    """Correct the device that each wrapper names, where its parts were rebound to another one."""
    for each in owned:
        if each.wrapper is not None and each.wrapper.device != each.tensor.device:
            align(each.wrapper)


def is_scaled(dtype: torch.dtype) -> bool:
    """Whether values mean nothing without scales: the dtypes of one byte and less, other than bool
    and the integers of one byte."""
    return (
        dtype.itemsize == 1 and dtype not in (torch.bool, torch.int8, torch.uint8)
    ) or dtype is torch.bits16


def dtype_of(given: object) -> torch.dtype | None:
    """A dtype, or the one of this name: "bfloat16", "torch.bfloat16" or "bf16". None stays None.
    ValueError: it is neither."""
    if given is None or isinstance(given, torch.dtype):
        return given
    name = str(given).removeprefix("torch.")
    found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f'{given!r} is no dtype of torch; write torch.bfloat16 or "bfloat16"')  # noqa: TRY004  # the text is wrong
    return found


# --- sparse tensors in coordinate layout: the gradients of `nn.Embedding(sparse=True)`, and
# momentum made of them. Their bytes lie in two dense tensors, indices and values. Each time they
# are asked for, torch returns new tensor objects that share the storages, so rebinding such an
# object does not change the sparse tensor.

_OF_ITS_OWN = 3
"""The references to a storage that only the sparse tensor uses: its own, the requested alias, and
the storage's Python object."""


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a plain tensor in coordinate layout."""
    return type(tensor) is torch.Tensor and tensor.layout is torch.sparse_coo


def sparse_parts(tensor: torch.Tensor, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The indices and values that have elements."""
    parts = ((f"{name}.indices", tensor._indices()), (f"{name}.values", tensor._values()))
    return ((path, part) for path, part in parts if part.numel())


def dense_parts(tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The paths and dense tensors that hold a tensor's bytes."""
    return sparse_parts(tensor, "") if is_sparse(tensor) else parts_of(tensor, "")


def own_storages(tensor: torch.Tensor) -> None:
    """Copy indices or values that lie in another object's storage: an embedding's backward pass
    uses the user's tensor of tokens itself as indices, and moving its storage would take the tokens
    away. The tensor object stays the same."""
    parts = (tensor._indices(), tensor._values())
    shared = [
        torch._C._storage_Use_Count(part.untyped_storage()._cdata) > _OF_ITS_OWN for part in parts
    ]
    if any(shared):
        indices, values = (
            part.clone() if is_shared else part
            for part, is_shared in zip(parts, shared, strict=True)
        )
        put_parts(tensor, indices, values)


def follow(owned: Iterable[Owned]) -> None:
    """Give sparse tensors the indices and values that were found in them and have since been
    rebound to other storages."""
    sparse: dict[int, torch.Tensor] = {}  # by identity
    parts: dict[int, dict[str, torch.Tensor]] = {}
    for part in owned:
        if part.wrapper is not None and is_sparse(part.wrapper):
            sparse[id(part.wrapper)] = part.wrapper
            kind = part.name.rpartition(".")[2]  # "indices" or "values", see `sparse_parts`
            parts.setdefault(id(part.wrapper), {})[kind] = part.tensor
    for identity, tensor in sparse.items():
        indices, values = parts[identity].get("indices"), parts[identity].get("values")
        if indices is None or values is None:
            continue  # one of them has no bytes, and no place
        if values.untyped_storage()._cdata != tensor._values().untyped_storage()._cdata:
            put_parts(tensor, indices, values)


def put_parts(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Replace the indices and values of a sparse tensor. The tensor object stays the same."""
    with torch.no_grad():
        tensor.data = made_of(tensor, indices, values)


def made_of(tensor: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A sparse tensor like another one, with these indices and values."""
    # Not torch.sparse_coo_tensor: before torch 2.13 it warns of checks that are left out, even if
    # it was told to leave them out.
    made: torch.Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        tensor.sparse_dim(),
        tensor.dense_dim(),
        tensor.size(),
        indices,
        values,
        dtype=tensor.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=tensor.is_coalesced(),
    )
    return made


def problem_of_sparse(part: torch.Tensor, compute_device: torch.device) -> str | None:
    """Why a sparse tensor with this part cannot be moved; None where it can."""
    if part.is_cpu and compute_device.type != "cpu":
        what = (
            f"is sparse and on the CPU, so it cannot follow its object to {compute_device}: move "
            "the object there before registering"
        )
        return f"{what}, or drop it (a gradient: zero_grad first)"
    return problem_of(part, compute_device)


def problem_of_any(tensor: torch.Tensor, compute_device: torch.device) -> str | None:
    """Why a tensor of any layout cannot be moved; None where it can."""
    part = next((part for _, part in sparse_parts(tensor, "")), None) if is_sparse(tensor) else None
    return (
        problem_of(tensor, compute_device)
        if part is None
        else problem_of_sparse(part, compute_device)
    )


def nbytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor of any layout. Bytes beside its values are not counted where torch does not
    show them."""
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    if by_row or tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        names = (
            ("crow_indices", "col_indices", "values")
            if by_row
            else ("ccol_indices", "row_indices", "values")
        )
        return sum(getattr(tensor, name)().nbytes for name in names)
    return tensor.numel() * tensor.element_size()
