"""Changes of a handle's values that leave everything as it was where one of them cannot be made.

A change is a context manager: its beginning does everything that can fail, and its end writes into memory that exists already. After an
error between the two, the handle is as it was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from placement.core.errors import CheckpointError
from placement.core.torch_modes import without_modes
from placement.ownership.optimizer import OptimizerAdapter
from placement.registration.guards import is_off
from placement.tensors.plain import SEQUENCES, local_device, parts_of, rewrapped, with_fields, with_parts

if TYPE_CHECKING:
    from placement.registration.handle import Handle

Change = AbstractContextManager[None]
"""Checked values on their way into one handle."""
Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Tensors of a handle that are written in place, as a state dict shows them, and their new values."""


def apply(changes: Sequence[Change], agreed: AbstractContextManager[Any] | None = None) -> None:
    """Make several changes. If one cannot be begun, make none.

    Args:
        agreed: a context that raises at its end if another rank could not begin its changes.
    """
    with without_modes(), torch.inference_mode(False), torch.no_grad(), ExitStack() as begun, agreed or nullcontext():
        for change in changes:
            begun.enter_context(change)


@contextmanager
def write(handle: Handle, copies: Copies, also: Callable[[], None] | None = None) -> Iterator[None]:
    """A change of tensors in place. `also` loads what is no tensor, after them."""
    handle.storage.wait_for_readers()
    yield
    for live, new in copies:
        copy_over(live, new)
    if also is not None:
        also()
    handle.storage.note_written()


@contextmanager
def replace_state(
    handle: Handle, copies: Copies, optimizer: Any, entries: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]], *, is_ours: bool
) -> Iterator[None]:
    """A change of an optimizer's state that keeps its keys and tensors, places new state, and removes entries that were not saved.

    Args:
        entries: the new state of each parameter, with the live tensors where those stay.
        groups: the saved settings of each parameter group.
        is_ours: whether nothing else uses the new tensors, so that they may become the state themselves.
    """
    state, before = optimizer.state, dict(optimizer.state)
    settings = {id(p): saved for group, saved in zip(optimizer.param_groups, groups, strict=True) for p in group["params"]}
    with write(handle, copies, lambda: _take_settings(optimizer, groups)):
        placed = {key: _placed(handle, optimizer, key, entry, settings.get(id(key), {}), is_ours) for key, entry in entries.items()}
        try:
            state.clear()
            state.update(placed)
            handle.storage.adopt_restored()
            yield
        except BaseException:
            state.clear()
            state.update(before)
            raise


def _placed(handle: Handle, optimizer: Any, parameter: Any, entry: Any, settings: Mapping[str, Any], is_ours: bool) -> Any:
    """A parameter's state, with new tensors on its device, or on the host for an offloaded handle, which adopts them from there."""
    if not isinstance(parameter, torch.Tensor) or not isinstance(entry, Mapping):
        return entry
    live = {id(each) for each in optimizer.state.get(parameter, {}).values()}
    adapter, off, host = handle.adapter, is_off(handle), torch.device("cpu")
    assert isinstance(adapter, OptimizerAdapter)

    def place(key: Any, value: Any) -> Any:
        home = host if adapter.is_counter(optimizer, str(key), settings, value) else local_device(parameter)

        def to_home(part: torch.Tensor) -> torch.Tensor:
            return part.to(host if off and part.numel() else home, copy=not is_ours)

        return mapped(value, lambda tensor: rewrapped(tensor, to_home))

    return {key: value if id(value) in live else place(key, value) for key, value in entry.items()}


def _take_settings(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in settings_of(saved).items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor) and group[key].shape == value.shape:
                group[key].copy_(value)  # a CUDA graph may hold this tensor
            else:
                group[key] = copy.deepcopy(value)


@contextmanager
def load_by_itself(
    subject: str,
    load: Callable[[], object],
    differing: Callable[[], list[str]],
    containers: Sequence[Any],
    tensors: Iterable[torch.Tensor],
) -> Iterator[None]:
    """A change by the object's own `load_state_dict`, for an object on the device. Its state dict is compared with the values afterwards.

    Args:
        subject: the handle's name, and why only the object itself can load the values.
        load: calls its `load_state_dict`.
        differing: returns the names of the values that its state dict does not show as they were saved.
        containers: the dicts and lists in which the object has its tensors. They are put back where the load fails.
        tensors: the object's tensors. Their bytes are put back where the load fails.
    """
    subject = f"{subject}, so only its load_state_dict() can load the saved values"
    parts = {id(part): part.detach() for tensor in tensors for _, part in parts_of(tensor, "")}
    bytes_before = [(part, part.to("cpu", copy=True)) for part in parts.values()]
    before = [(each, copy.copy(each)) for each in containers]
    try:
        try:
            load()
            _keep_objects(before)
        except Exception as error:
            raise CheckpointError(f"{subject}. That raised {type(error).__name__}: {error}. {_UNCHANGED}") from error
        if found := differing():
            names = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
            raise CheckpointError(f"{subject}. It ran, but {names} of the state dict differ from the saved ones. {_UNCHANGED}")
        yield
    except BaseException:
        for container, content in before:
            container.clear()
            (container.update if isinstance(content, dict) else container.extend)(content)
        for live, saved in bytes_before:
            live.copy_(saved)
        raise


def _keep_objects(before: Sequence[tuple[Any, Any]]) -> None:
    """Put the object's own tensors back where loading replaced them (`assign=True`), with the new values: optimizers step them."""
    for container, content in before:
        for name, own in content.items() if isinstance(content, dict) else ():
            now = container.get(name)
            if isinstance(own, torch.Tensor) and isinstance(now, torch.Tensor) and now is not own:
                own.copy_(now)
                container[name] = own


_UNCHANGED = (
    "Every value is as it was before. Give it a load_state_dict() that fits its state_dict(), or leave it out with only= and load it by "
    "its own state dict inside manager.phase('restore')"
)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, without its parameters and their names (which later versions of torch list too)."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def copy_over(live: torch.Tensor, new: torch.Tensor) -> None:
    """Copy values, part by part. Parts that share their memory are skipped."""
    for (_, target), (_, source) in zip(parts_of(live, ""), parts_of(new, ""), strict=True):
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)


def form(tensor: torch.Tensor) -> list[tuple[torch.Size, torch.dtype]]:
    return [(part.size(), part.dtype) for _, part in parts_of(tensor, "")]


def same_values(one: Any, other: Any) -> bool:
    """Whether two state dict values are equal. Tensors are compared as bytes: NaN equals NaN, and -0.0 differs from 0.0."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        pairs = zip(parts_of(one, ""), parts_of(other, ""), strict=True) if form(one) == form(other) else None
        return pairs is not None and all(torch.equal(bytes_of(mine), bytes_of(theirs)) for (_, mine), (_, theirs) in pairs)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        mine, theirs = ({str(key): value for key, value in each.items()} for each in (one, other))
        return mine.keys() == theirs.keys() and all(same_values(value, theirs[key]) for key, value in mine.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_values, one, other))
    return bool(one == other) or (isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other))


def bytes_of(part: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor, in host memory."""
    return part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor], *, is_inside: bool = False) -> Any:
    """A copy of nested containers, with `change` applied to every tensor in them, and in attributes of objects in them.

    A tensor in an object is copied to memory of its own: the object is saved as a whole, with all that its tensors' storages hold.

    Args:
        is_inside: whether the value is inside such an object. Objects inside that one are left as they are.
    """
    if isinstance(value, torch.Tensor):
        return rewrapped(change(value), torch.clone) if is_inside else change(value)
    if isinstance(value, Mapping):
        return {key: mapped(each, change, is_inside=is_inside) for key, each in value.items()}
    if isinstance(value, SEQUENCES):
        return with_parts(value, (mapped(each, change, is_inside=is_inside) for each in value))
    return value if is_inside else with_fields(value, lambda each: mapped(each, change, is_inside=True))
