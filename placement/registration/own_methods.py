"""Methods that an optimizer's own class adds to torch's (`eval`, `first_step`), called while its state or what it steps is offloaded.

Many of them only read or set numbers, and must go on working. So the method runs, but the first operation that would read or write a
tensor of the optimizer or of the modules that it steps raises before it runs, and what the method had set until then is undone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placement.core.errors import NotResidentError, PhaseError
from placement.core.states import State
from placement.ownership.optimizer import OptimizerAdapter
from placement.registration.method_call import MethodCall
from placement.storage.address_map import RANGES
from placement.storage.offloaded.host_reads import is_reading
from placement.tensors.plain import plain_parts

if TYPE_CHECKING:
    from placement.registration.handle import Handle


def own_methods(target: Any) -> list[str]:
    """The public methods that the class of an optimizer, or of a wrapper, adds to those of torch's Optimizer."""
    if not hasattr(target, "__dict__"):
        return []
    names = sorted({*dir(type(target))} - {*dir(torch.optim.Optimizer), *vars(target)})
    return [name for name in names if not name.startswith("_") and inspect.isfunction(inspect.getattr_static(type(target), name))]


class OwnMethodCall(MethodCall):
    """Stands in for such a method.

    Args:
        handle: returns the optimizer's handle; None once it is gone.
    """

    def __init__(self, handle: Callable[[], Handle | None], target: Any, name: str) -> None:
        self._handle = handle  # before the call is in place of the method
        super().__init__(handle, target, name)

    def run(self, method: Callable[..., Any], target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handle = self._handle()
        known = () if handle is None or is_reading() else (handle, *handle.owners)
        unusable = next((each for each in known if each.storage.is_offloaded or each.state is State.SYNCING), None)
        if handle is None or unusable is None:
            return method(*args, **kwargs)
        assert isinstance(handle.adapter, OptimizerAdapter)
        before = [(fields, dict(fields)) for each in handle.adapter.objects() for fields in _fields_of(each)]
        error = PhaseError if unusable.state is State.SYNCING else NotResidentError
        text = (
            f"{self._name}() of {handle.name!r} cannot be called in phase {handle.phase_now()!r}: it would use {{}}, while "
            f"{unusable.name!r} is {unusable.state}. Call it where all of these may change: inside manager.phase('train'), with "
            "optimizer_in='optimizer_step' inside phase('optimizer_step')"
        )
        stepped = {each.untyped_storage()._cdata: "what it steps" for each in handle.adapter.stepped()}
        held = {id(each.holding): repr(each.name) for each in known if each.holding is not None and each.state is not State.TRAINING}
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
    held = [state, *(state.values() if isinstance(state, dict) else ()), *(groups if isinstance(groups, list) else ())]
    yield from (each for each in held if isinstance(each, dict))


class _Untouched(TorchDispatchMode):
    """Raises before an operation on tensors of some objects, unless it reads no value.

    Args:
        names: words for the objects, by identity of their storage.
        stepped: the same for the storages (`_cdata`) of what is stepped. In training these may be read, but not written.
        error: what to raise, with "{}" in place of such words.
    """

    def __init__(self, names: Mapping[int, str], stepped: Mapping[int, str], error: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._stepped, self._error = names, stepped, error

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if not (func.is_view or name.endswith("_like") or name.startswith("new_")):
            tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
            for storage in (part.untyped_storage() for tensor in tensors for _, part in plain_parts(tensor, "")):
                found = self._names.get(id(RANGES.owner_of(storage.data_ptr())))
                if found is None and func._schema.is_mutable:
                    found = self._stepped.get(storage._cdata)
                if found is not None:
                    raise type(self._error)(str(self._error).format(found))
        return func(*args, **(kwargs or {}))
