"""The parts of a checkpoint: a handle's values by parameter names, read and written where they are
now.

While a handle is offloaded, its host copy is read and written, and nothing moves. Values that only
the object's own code can load need the object on the device.

Values are written by changes. A change is a context manager: its beginning does everything that can
fail, and its end writes into memory that exists already. After an error between the two, the handle
is as it was, unless its own code has loaded it.
"""

from __future__ import annotations

import abc
import copy
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from placement.core.call_guard import without_modes
from placement.core.errors import BrokenHandleError, CheckpointError, NotResidentError, PhaseError
from placement.core.states import State
from placement.ownership.optimizer import OptimizerAdapter
from placement.registration.guards import is_off
from placement.tensors.plain import (
    OBJECT_LEVELS,
    SEQUENCES,
    fields_of,
    has_bytes,
    local_device,
    nested_tensors,
    parts_of,
    rewrapped,
    with_fields,
    with_parts,
)

if TYPE_CHECKING:
    from placement.registration.handle import Handle

_ALIGNMENT = 16  # of every tensor's address, in bytes: the size of the largest element
Path = tuple[str | int, ...]  # keys of a checkpoint, from the outermost dict inwards


class Shown(dict[str, Any]):
    """The state dict of a part. It knows its part, so that a planner can read into fresh tensors
    instead of the handle's own."""

    def __init__(self, part: Part, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.part = part

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (), None, None, iter(self.items())  # a copy is a plain dict of copies


class Read(dict[str, Any]):
    """Values that were read from a checkpoint into memory that nothing else uses."""


class Part(abc.ABC):
    """One handle as a `Stateful` of torch.distributed.checkpoint."""

    kind: ClassVar[str]
    noun: ClassVar[str]  # the word for the part in the names of torch's state dict functions

    def __init__(self, handle: Handle) -> None:
        if not hasattr(handle, "kind"):
            raise TypeError(
                f"{type(self).__name__} takes the handle that register() has returned, not a "
                f"{type(handle).__name__}"
            )
        if handle.kind != self.kind:
            raise TypeError(
                f"{handle.name!r} has kind {handle.kind}; {type(self).__name__} takes handles of "
                f"kind {self.kind}"
            )
        self.handle = handle

    @abc.abstractmethod
    def state_dict(self) -> Shown:
        """The present values, under the names that torch's `get_model_state_dict` and
        `get_optimizer_state_dict` give them.

        The tensors follow the handle when it moves. Nothing moves for the call, and no optimizer
        steps.

        Raises:
            NotResidentError: the handle's object is not built yet, or gone.
            CheckpointError: only its framework can save it; the message says how.
            BrokenHandleError: the handle is broken, so its values are invalid.
        """

    @abc.abstractmethod
    def template(self, path: Path, metadata: Metadata) -> Read:
        """The entries to read for the part at `path` of the checkpoint, in new host memory.
        CheckpointError where they do not fit."""

    @abc.abstractmethod
    def needs_device(self) -> str | None:
        """Why values can be loaded only while the object is on the device; None if they can be
        loaded in every state."""

    @abc.abstractmethod
    def prepare(self, given: Mapping[str, Any]) -> list[Change]:
        """Check values that are to replace the handle's. Changes nothing. Raises the errors of
        `load_state_dict`."""

    def load_state_dict(self, given: Mapping[str, Any]) -> None:
        """Replace the handle's values where they are now, in the host copy while it is offloaded.
        Nothing moves.

        Tensor objects, addresses, aliases and an optimizer's keys stay the same.

        Raises:
            CheckpointError: the values do not fit; the message names the handle and the key.
            NotResidentError: they can be loaded only on the device.
            PhaseError, BrokenHandleError: the handle must not be written now.
        """
        with without_modes(), torch.inference_mode(False):
            apply(self.prepare(given))

    def require_writable(self) -> None:
        handle = self.handle
        if handle.gathers is not None:
            raise CheckpointError(
                f"{handle.name!r}: {handle.gathers}, so torch must load it. Inside "
                f"manager.phase('restore'): state = {{{handle.name!r}: "
                f"get_{self.noun}_state_dict(...)}} of torch.distributed.checkpoint.state_dict, "
                "torch.distributed.checkpoint.load(state, checkpoint_id=path), "
                f"set_{self.noun}_state_dict(...). Leave it out here with only="
            )
        self._object()
        if handle.readonly:
            raise CheckpointError(
                f"{handle.name!r} is readonly: load its values before you register it, or leave it "
                "out with only="
            )
        if handle.state is State.SYNCING:
            raise PhaseError(
                f"{handle.name!r} is SYNCING in phase {handle.phase_now()!r}: published weights "
                "must not be written"
            )

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

    def _require_resident(self) -> None:
        if is_off(self.handle) and (why := self.needs_device()) is not None:
            raise NotResidentError(
                f"{self.handle.name!r}: {why}, so it can be loaded only inside a phase that has it "
                "on the device, such as manager.phase('restore')"
            )

    def _error(self, key: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self.handle.name!r}: {key} {what}. The handle was not changed.")

    def _fits(
        self, key: str, live: torch.Tensor, size: torch.Size, dtype: torch.dtype, where: str
    ) -> None:
        for what, here, there in (
            ("shape", tuple(live.shape), tuple(size)),
            ("dtype", live.dtype, dtype),
        ):
            if here != there:
                raise self._error(key, f"has {what} {there} in the {where}, but {here} here")

    def _check(self, key: str, live: torch.Tensor, new: Any) -> None:
        """Raise unless the tensor `new` can be copied over the tensor `live`."""
        if not isinstance(new, torch.Tensor):
            raise self._error(
                key, f"is a {type(new).__name__} in the state dict, but a tensor here"
            )
        self._fits(key, live, new.shape, new.dtype, "state dict")
        if form(live) != form(new):
            raise self._error(key, "is sharded otherwise in the state dict than here")
        for _, part in parts_of(live, ""):
            if any(
                size > 1 and stride == 0
                for size, stride in zip(part.size(), part.stride(), strict=True)
            ):
                raise self._error(
                    key, "has several elements at one address (expand), so it cannot be written"
                )

    def _require_one_value(self, copies: Copies) -> None:
        """Raise unless tensors that lie in the same memory (tied weights) get the same bytes."""
        parts = sorted(
            (
                (target, source, name)
                for name, live, new in copies
                for (_, target), (_, source) in zip(
                    parts_of(live, ""), parts_of(new, ""), strict=True
                )
                if has_bytes(target)
            ),
            key=lambda part: part[0].data_ptr(),
        )
        open_parts: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        for target, source, name in parts:
            open_parts = [each for each in open_parts if _end_of(each[0]) > target.data_ptr()]
            for other, others_source, others_name in open_parts:
                if not _agree(other, others_source, target, source):
                    raise self._error(
                        f"{others_name} and {name}",
                        "are tied here, and have different values in the checkpoint",
                    )
            open_parts.append((target, source, name))

    def _saved_like(self, key: str, live: torch.Tensor, saved: Any) -> torch.Tensor:
        """Host memory for a saved tensor, after checking that it fits a live one. Reads nothing and
        calls no collective."""
        if not isinstance(saved, TensorStorageMetadata):
            raise self._error(key, "is not a tensor in the checkpoint, but is one here")
        self._fits(key, live, saved.size, saved.properties.dtype, "checkpoint")
        with torch.no_grad():
            return rewrapped(live.detach(), lambda part: torch.empty_like(part, device="cpu"))


class Model(Part):
    """A module handle for torch.distributed.checkpoint: `{"model":
    placement.checkpoint.Model(actor)}`."""

    kind = "module"
    noun = "model"

    def state_dict(self) -> Shown:
        module = self._object()
        with without_modes(), torch.inference_mode(False):
            try:
                found = get_model_state_dict(module)
            except (AssertionError, AttributeError, RuntimeError) as error:
                raise CheckpointError(
                    f"torch cannot name the tensors of {self.handle.name!r} ({error}): save its "
                    "handle.state_dict(), or use its framework"
                ) from error
        for name, value in found.items():
            refuse_own_cuts(self.handle, name, value)
        return Shown(self, found)

    def template(self, path: Path, metadata: Metadata) -> Read:
        live = self.state_dict()
        found: dict[str, Any] = {}
        for rest, saved in under(metadata, path):
            key = str(rest[0])
            if key not in live:
                raise self._error(
                    ".".join(map(str, rest)),
                    "is in the checkpoint, but the module has no such parameter or buffer",
                )
            if _is_extra(key):  # may have any shape, and may be flattened into several entries
                set_element(found, rest, fresh(saved))
            else:
                found[key] = self._saved_like(key, live[key], saved)
        for key in live:
            if key not in found and not _is_extra(key):
                raise self._error(
                    key,
                    f"is not in the checkpoint, which has {some(found)} for "
                    f"{'.'.join(map(str, path))!r}",
                )
        return Read(found)

    def prepare(self, given: Mapping[str, Any]) -> list[Change]:
        self.require_writable()
        live = self.state_dict()
        for key, value in live.items():
            if not _is_extra(key):
                if key not in given:
                    raise self._error(key, "is missing")
                self._check(key, value, given[key])
        for key in given:
            if key not in live:
                raise self._error(key, "is not a parameter or buffer of the module")
        copies = [(key, value, given[key]) for key, value in live.items() if not _is_extra(key)]
        self._require_one_value(copies)
        self._require_resident()
        if self.needs_device() is None:
            return [write(self.handle, copies)]
        options = StateDictOptions(strict=False)
        return [
            load_by_itself(
                self.handle,
                lambda: set_model_state_dict(self.handle.object, dict(given), options=options),
            )
        ]

    def needs_device(self) -> str | None:
        shown = self.state_dict()
        if extra := {key: None for key in shown if _is_extra(key)}:
            return f"only the module itself can load its extra state ({some(extra)})"
        return (
            None
            if self._is_own(shown)
            else ("its state dict shows copies (a hook, an overridden state_dict())")
        )

    def _is_own(self, shown: Mapping[str, Any]) -> bool:
        """Whether the tensors of a state dict are the handle's own memory, so that writing to them
        counts."""
        assert self.handle.adapter is not None
        module: torch.nn.Module = self.handle.object
        moved = (owned.tensor for owned in self.handle.adapter.owned() if not owned.transient)
        # some stay on the CPU on purpose
        tensors = itertools.chain(moved, module.parameters(), module.buffers())
        addresses = {
            part.untyped_storage().data_ptr()
            for tensor in tensors
            for _, part in parts_of(tensor, "")
        }
        parts = (part for value in shown.values() for _, part in parts_of(value, ""))
        return all(
            part.numel() == 0
            or part.untyped_storage().data_ptr() in addresses
            or self.handle.storage.has_place(part)
            for part in parts
        )


def _is_extra(key: str) -> bool:
    # which a module saves beside its tensors (`get_extra_state`)
    return key.rpartition(".")[2] == "_extra_state"


def under(metadata: Metadata, path: Path) -> Iterator[tuple[Path, Any]]:
    """The checkpoint's entries below a path: the rest of each entry's path, and its metadata."""
    paths = metadata.planner_data
    if not isinstance(paths, Mapping):
        raise CheckpointError(
            "the checkpoint was written without flatten_state_dict, so its entries cannot be "
            "matched with handles"
        )
    for key, found in paths.items():
        if tuple(found[: len(path)]) == path:
            yield tuple(found[len(path) :]), metadata.state_dict_metadata[key]


def fresh(saved: Any) -> torch.Tensor | None:
    """New host memory for a saved tensor; None for another value."""
    return (
        torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
        if isinstance(saved, TensorStorageMetadata)
        else None
    )


def some(names: Mapping[str, Any]) -> str:
    return ", ".join(list(names)[:4]) + (", ..." if len(names) > 4 else "") if names else "nothing"


def refuse_own_cuts(handle: Handle, name: str, value: Any) -> None:
    if hasattr(getattr(value, "_local_tensor", None), "__create_chunk_list__"):
        raise CheckpointError(
            f"{handle.name!r}: {name} is sharded by its framework's own scheme: save it with the "
            "framework's checkpoint, and leave it out here with only="
        )


Change = AbstractContextManager[None]  # checked values on their way into one handle
Copies = Sequence[tuple[str, torch.Tensor, torch.Tensor]]
"""Tensors of a handle that are written in place, as a state dict shows them, with their names and
their new values."""


def apply(changes: Sequence[Change], agreed: AbstractContextManager[Any] | None = None) -> None:
    """Make all changes, or none if one cannot be begun. The context `agreed` raises at its end if
    another rank could not begin its own."""
    with (
        without_modes(),
        torch.inference_mode(False),
        torch.no_grad(),
        ExitStack() as begun,
        agreed or nullcontext(),
    ):
        for change in changes:
            begun.enter_context(change)


@contextmanager
def write(handle: Handle, copies: Copies, also: Callable[[], None] | None = None) -> Iterator[None]:
    """A change of tensors in place. `also` loads what is no tensor, after them."""
    handle.storage.wait_for_readers()
    yield
    for _, live, new in copies:
        for (_, target), (_, source) in zip(parts_of(live, ""), parts_of(new, ""), strict=True):
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
    if also is not None:
        also()
    handle.storage.note_written()
    handle.note_loaded()


@contextmanager
def load_by_itself(handle: Handle, load: Callable[[], object]) -> Iterator[None]:
    """A change by the own code of an object that is on the device. Where that raises, some values
    may be the new ones."""
    handle.note_loaded()
    try:
        load()
    except Exception as error:
        what = (
            f"{handle.name!r} was being loaded by its own code, which raised "
            f"{type(error).__name__}: {error}"
        )
        raise CheckpointError(
            f"{what}. Some of its values may be the saved ones: load it anew"
        ) from error
    yield


@contextmanager
def replace_state(
    handle: Handle,
    copies: Copies,
    optimizer: Any,
    entries: Mapping[Any, Any],
    groups: Sequence[Mapping[str, Any]],
    *,
    is_ours: bool,
) -> Iterator[None]:
    """A change of an optimizer's state that keeps its keys and tensors, places new state, and
    removes entries that were not saved. `entries` has the live tensors where those stay. With
    `is_ours` the new tensors, which nothing else uses, may become the state."""
    state, before = optimizer.state, dict(optimizer.state)
    settings = {
        id(p): saved
        for group, saved in zip(optimizer.param_groups, groups, strict=True)
        for p in group["params"]
    }
    with write(handle, copies, lambda: _take_settings(optimizer, groups)):
        placed = {
            key: _placed(handle, optimizer, key, entry, settings.get(id(key), {}), is_ours)
            for key, entry in entries.items()
        }
        try:
            state.clear()
            state.update(placed)
            handle.storage.adopt_restored()
            yield
        except BaseException:
            state.clear()
            state.update(before)
            raise


def _placed(
    handle: Handle,
    optimizer: Any,
    parameter: Any,
    entry: Any,
    settings: Mapping[str, Any],
    is_ours: bool,
) -> Any:
    """A parameter's state, with new tensors on its device, or on the host for an offloaded handle,
    which adopts them from there."""
    if not isinstance(parameter, torch.Tensor) or not isinstance(entry, Mapping):
        return entry
    live = {id(each) for each in optimizer.state.get(parameter, {}).values()}
    adapter, off, host = handle.adapter, is_off(handle), torch.device("cpu")
    assert isinstance(adapter, OptimizerAdapter)

    def place(key: Any, value: Any) -> Any:
        home = (
            host
            if adapter.is_counter(optimizer, str(key), settings, value)
            else local_device(parameter)
        )

        def to_home(part: torch.Tensor) -> torch.Tensor:
            return part.to(host if off and part.numel() else home, copy=not is_ours)

        return mapped(value, lambda tensor: rewrapped(tensor, to_home))

    return {key: value if id(value) in live else place(key, value) for key, value in entry.items()}


def _take_settings(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in settings_of(saved).items():
            if (
                isinstance(group.get(key), torch.Tensor)
                and isinstance(value, torch.Tensor)
                and group[key].shape == value.shape
            ):
                group[key].copy_(value)  # a CUDA graph may hold this tensor
            else:
                group[key] = copy.deepcopy(value)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, without its parameters and their names (which later
    versions of torch list too)."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def same(one: Any, other: Any) -> bool:
    """Whether two settings are equal, tensors and numbers bit by bit. Their text may be shortened,
    and NaN is not equal to itself."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        parts = zip(parts_of(one, ""), parts_of(other, ""), strict=False)
        return form(one) == form(other) and all(
            torch.equal(as_bytes(mine), as_bytes(theirs)) for (_, mine), (_, theirs) in parts
        )
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, SEQUENCES):
        return len(one) == len(other) and all(map(same, one, other))
    if next(nested_tensors(one, "", levels=OBJECT_LEVELS), None) is not None:
        return same(fields_of(one), fields_of(other))
    try:
        return pickle.dumps(one) == pickle.dumps(other)
    except (pickle.PicklingError, AttributeError, TypeError):  # a function inside another one
        return False


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, in order, on the host."""
    return part.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _end_of(part: torch.Tensor) -> int:
    """The address behind a tensor's last element."""
    steps = ((size - 1) * stride for size, stride in zip(part.size(), part.stride(), strict=True))
    return part.data_ptr() + (sum(steps) + 1) * part.element_size()


def _agree(
    one: torch.Tensor, value: torch.Tensor, other: torch.Tensor, others_value: torch.Tensor
) -> bool:
    """Whether two tensors, whose memory may overlap, can both have their values."""
    if (one.data_ptr(), form(one), one.stride()) == (other.data_ptr(), form(other), other.stride()):
        return torch.equal(as_bytes(value), as_bytes(others_value))
    # write both into memory that overlaps in the same way, and look whether the first stays
    start = min(one.data_ptr(), other.data_ptr())
    start -= start % _ALIGNMENT
    scratch = torch.empty(
        max(_end_of(one), _end_of(other)) - start, dtype=torch.uint8, device="cpu"
    ).untyped_storage()
    first, second = (
        torch.empty(0, dtype=part.dtype, device="cpu").set_(
            scratch,
            (part.data_ptr() - start) // part.element_size(),
            part.size(),
            part.stride(),
        )
        for part in (one, other)
    )
    first.copy_(value)
    second.copy_(others_value)
    return torch.equal(as_bytes(first), as_bytes(value))


def form(tensor: torch.Tensor) -> list[tuple[torch.Size, torch.dtype]]:
    return [(part.size(), part.dtype) for _, part in parts_of(tensor, "")]


def mapped(
    value: Any, change: Callable[[torch.Tensor], torch.Tensor], *, is_inside: bool = False
) -> Any:
    """A copy of nested containers, with `change` applied to every tensor in them, and in attributes
    of objects in them. A tensor in an object (`is_inside`) is copied to memory of its own: the
    object is saved as a whole, with all that its tensors' storages hold. Objects inside that one
    are left as they are."""
    if isinstance(value, torch.Tensor):
        return rewrapped(change(value), torch.clone) if is_inside else change(value)
    if isinstance(value, Mapping):
        return {key: mapped(each, change, is_inside=is_inside) for key, each in value.items()}
    if isinstance(value, SEQUENCES):
        return with_parts(value, (mapped(each, change, is_inside=is_inside) for each in value))
    return (
        value
        if is_inside
        else with_fields(value, lambda each: mapped(each, change, is_inside=True))
    )
