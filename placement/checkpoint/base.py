"""The base of checkpoint parts: state dicts by parameter names, read and written where the values are now.

While a handle is offloaded, its host copy is read and written. Loading has three steps, so that values that do not fit change nothing:
a `Change` is prepared from values that were read; `begin` does everything that can fail (`undo` reverts it); `finish` only copies.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import _get_fqns

from placement.core.errors import BrokenHandleError, CheckpointError, NotResidentError, PhaseError
from placement.core.states import State
from placement.core.torch_modes import without_modes
from placement.registration.guards import is_off
from placement.tensors.plain import SEQUENCES, parts_of, rewrapped, with_fields, with_parts

if TYPE_CHECKING:
    from placement.registration.handle import Handle

Path = tuple[str | int, ...]
"""Keys of a checkpoint, from the outermost dict inwards."""


class Shown(dict[str, Any]):
    """The state dict of a part. It knows its part, so that a planner can read into fresh tensors instead of the handle's own."""

    def __init__(self, part: Part, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.part = part

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())  # a copy is a plain dict of copies


class Read(dict[str, Any]):
    """Values that were read from a checkpoint into memory that nothing else uses."""


class Change(abc.ABC):
    """Checked values on their way into one handle."""

    @abc.abstractmethod
    def begin(self) -> None:
        """Do everything that can fail."""

    @abc.abstractmethod
    def undo(self) -> None:
        """Revert `begin`, even one that failed half-way. Idempotent."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Copy into memory that exists already. Cannot fail."""


class Part(abc.ABC):
    """One handle as a `Stateful` of torch.distributed.checkpoint."""

    kind: ClassVar[str]
    noun: ClassVar[str]
    """The word for the part in the names of torch's state dict functions."""

    def __init__(self, handle: Handle) -> None:
        if not hasattr(handle, "kind"):
            raise TypeError(f"{type(self).__name__} takes the handle that register() has returned, not a {type(handle).__name__}")
        if handle.kind != self.kind:
            raise TypeError(f"{handle.name!r} has kind {handle.kind}; {type(self).__name__} takes handles of kind {self.kind}")
        self.handle = handle

    @abc.abstractmethod
    def state_dict(self) -> Shown:
        """The present values, under the names that torch's `get_model_state_dict` and `get_optimizer_state_dict` give them.

        The tensors follow the handle when it moves. Nothing moves for the call, and no optimizer steps.

        Raises:
            NotResidentError: the handle's object is not built yet, or gone.
            CheckpointError: only its framework can save it; the message says how.
            BrokenHandleError: the handle is broken, so its values are invalid.
        """

    @abc.abstractmethod
    def template(self, path: Path, metadata: Metadata) -> Read:
        """The entries to read from the checkpoint for this part. Every tensor is new host memory.

        Args:
            path: the part's place in the checkpoint.

        Raises:
            CheckpointError: the checkpoint does not fit.
        """

    @abc.abstractmethod
    def prepare(self, given: Mapping[str, Any]) -> Change:
        """Check values that are to replace the handle's. Changes nothing.

        Raises:
            CheckpointError: the values do not fit; the message names the handle and the key.
            PhaseError, BrokenHandleError: the handle must not be written now.
        """

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Replace the handle's values where they are now, in the host copy while it is offloaded. Nothing moves.

        Tensor objects, addresses, aliases and an optimizer's keys stay the same. Raises the errors of `prepare`.
        """
        with without_modes(), torch.inference_mode(False):
            apply([self.prepare(given)])

    def _object(self) -> Any:
        handle = self.handle
        if handle.object is None:
            gone = "its object was garbage-collected" if handle.is_gone else "it is not built yet"
            raise NotResidentError(f"{handle.name!r} has no state to save or load: {gone}")
        lost = handle.broken or handle.storage.lost
        if lost is not None:
            raise BrokenHandleError(f"{handle.name!r} is broken and has no values to save: {lost}")
        if handle.gathers is not None and any(is_off(each) for each in (handle, *handle.owners)):
            advice = "save it inside manager.phase('checkpoint'), or leave it out with only="
            raise CheckpointError(f"{handle.name!r}: {handle.gathers}: {advice}")
        return handle.object

    def require_writable(self) -> None:
        """Raise PhaseError, CheckpointError or NotResidentError where the handle's values must not be written now."""
        handle = self.handle
        if handle.gathers is not None:
            raise CheckpointError(
                f"{handle.name!r}: {handle.gathers}, so torch must load it. Inside manager.phase('restore'): state = {{{handle.name!r}: "
                f"get_{self.noun}_state_dict(...)}} of torch.distributed.checkpoint.state_dict, torch.distributed.checkpoint.load(state, "
                f"checkpoint_id=path), set_{self.noun}_state_dict(...). Leave it out here with only="
            )
        self._object()
        if handle.readonly:
            raise CheckpointError(f"{handle.name!r} is readonly: load its values before you register it, or leave it out with only=")
        if handle.state is State.SYNCING:
            raise PhaseError(f"{handle.name!r} is SYNCING in phase {handle.phase_now()!r}: published weights must not be written")

    def _error(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.handle.name!r}: {key} {what}. The handle was not changed.")

    def _check(self, key: str, live: torch.Tensor, new: Any) -> None:
        """Raise unless the tensor `new` can be copied over the tensor `live`."""
        if not isinstance(new, torch.Tensor):
            raise self._error(key, f"is a {type(new).__name__} in the state dict, but a tensor here")
        for what, here, there in (("shape", tuple(live.shape), tuple(new.shape)), ("dtype", live.dtype, new.dtype)):
            if here != there:
                raise self._error(key, f"has {what} {there} in the state dict, but {here} here")
        if _form(live) != _form(new):
            raise self._error(key, "is sharded otherwise in the state dict than here")
        for _, part in parts_of(live, ""):
            if any(size > 1 and stride == 0 for size, stride in zip(part.size(), part.stride(), strict=True)):
                raise self._error(key, "has several elements at one address (expand), so it cannot be written")

    def _saved_like(self, key: str, live: torch.Tensor, saved: Any) -> torch.Tensor:
        """Host memory for a saved tensor, after checking that it fits a live one."""
        if not isinstance(saved, TensorStorageMetadata):
            raise self._error(key, "is not a tensor in the checkpoint, but is one here")
        for what, here, there in (("shape", tuple(live.shape), tuple(saved.size)), ("dtype", live.dtype, saved.properties.dtype)):
            if here != there:
                raise self._error(key, f"has {what} {there} in the checkpoint, but {here} here")
        return in_host_memory(live)


def apply(changes: Sequence[Change], agreed: AbstractContextManager[Any] | None = None) -> None:
    """Make several changes. If one cannot be begun, make none.

    Args:
        agreed: a context that raises at its end if another rank could not begin its changes.
    """
    with without_modes(), torch.inference_mode(False), torch.no_grad():
        try:
            with agreed or nullcontext():
                for change in changes:
                    change.begin()
        except BaseException:
            for change in changes:
                change.undo()
            raise
        for change in changes:
            change.finish()


def in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor of the same form in new host memory. Reads nothing and calls no collective."""
    with torch.no_grad():
        return rewrapped(tensor.detach(), lambda part: torch.empty_like(part, device="cpu"))


def copy_over(live: torch.Tensor, new: torch.Tensor) -> None:
    """Copy values, part by part. Parts that share their memory are skipped."""
    for (_, target), (_, source) in zip(parts_of(live, ""), parts_of(new, ""), strict=True):
        if target.data_ptr() != source.data_ptr():
            target.copy_(source)


def under(metadata: Metadata, path: Path) -> Iterator[tuple[Path, Any]]:
    """The checkpoint's entries below a path: the rest of each entry's path, and its metadata.

    Raises:
        CheckpointError: the checkpoint does not record its paths.
    """
    paths = metadata.planner_data
    if not isinstance(paths, Mapping):
        raise CheckpointError("the checkpoint was written without flatten_state_dict, so its entries cannot be matched with handles")
    for key, found in paths.items():
        if tuple(found[: len(path)]) == path:
            yield tuple(found[len(path) :]), metadata.state_dict_metadata[key]


def _form(tensor: torch.Tensor) -> list[tuple[torch.Size, torch.dtype]]:
    return [(part.size(), part.dtype) for _, part in parts_of(tensor, "")]


def fqn(module: Any, name: str) -> str:
    """A parameter's name in torch's state dicts of distributed models, without the prefixes of wrappers."""
    (found,) = _get_fqns(module, name)
    return str(found)


def same_values(one: Any, other: Any) -> bool:
    """Whether two state dict values are equal. Tensors are compared as bytes: NaN equals NaN, and -0.0 differs from 0.0."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        pairs = zip(parts_of(one, ""), parts_of(other, ""), strict=True) if _form(one) == _form(other) else None
        return pairs is not None and all(torch.equal(_bytes(mine), _bytes(theirs)) for (_, mine), (_, theirs) in pairs)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        mine, theirs = ({str(key): value for key, value in each.items()} for each in (one, other))
        return mine.keys() == theirs.keys() and all(same_values(value, theirs[key]) for key, value in mine.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_values, one, other))
    return bool(one == other) or (isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


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


def put(root: Any, path: Path, value: Any) -> None:
    """Store a value in nested dicts and lists, which are created as needed. An integer key is an index into a list."""
    for key, following in zip(path, path[1:], strict=False):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(root, list):
            root.extend(None for _ in range(int(key) + 1 - len(root)))
            root[int(key)] = empty if root[int(key)] is None else root[int(key)]
            root = root[int(key)]
        else:
            root = root.setdefault(key, empty)
    if isinstance(root, list):
        root.extend(None for _ in range(int(path[-1]) + 1 - len(root)))
        root[int(path[-1])] = value
    else:
        root[path[-1]] = value


def some(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:4]) + (", ..." if len(names) > 4 else "") if names else "nothing"


def refuse_own_cuts(handle: Handle, name: str, value: Any) -> None:
    if hasattr(getattr(value, "_local_tensor", None), "__create_chunk_list__"):
        raise CheckpointError(
            f"{handle.name!r}: {name} is sharded by its framework's own scheme: save it with the framework's checkpoint, and leave it "
            "out here with only="
        )
