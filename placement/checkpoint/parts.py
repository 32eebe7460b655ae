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

from placement.core.errors import BrokenHandleError, CheckpointError, NotResidentError, PhaseError
from placement.core.modes import without_modes
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
    def prepare(self, values: Mapping[str, Any]) -> list[Change]:
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
            reason = "it is not built yet"
            if handle.is_gone:
                reason = "its object was garbage-collected"
            raise NotResidentError(f"{handle.name!r} has no state to save or load: {reason}")
        lost = handle.broken or handle.storage.lost
        if lost is not None:
            raise BrokenHandleError(f"{handle.name!r} is broken and has no values to save: {lost}")
        if handle.gathers is not None and any(map(is_off, (handle, *handle.owners))):
            advice = "save it inside manager.phase('checkpoint'), or leave it out with only="
            raise CheckpointError(f"{handle.name!r}: {handle.gathers}: {advice}")
        return handle.object

    def _require_resident(self) -> None:
        reason = self.needs_device() if is_off(self.handle) else None
        if reason is not None:
            raise NotResidentError(
                f"{self.handle.name!r}: {reason}, so it can be loaded only inside a phase that has "
                "it on the device, such as manager.phase('restore')"
            )

    def _error(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.handle.name!r}: {key} {problem}. The handle was not changed."
        )

    def _require_same(
        self,
        key: str,
        live: torch.Tensor,
        size: torch.Size,
        dtype: torch.dtype,
        source: str,
    ) -> None:
        """Raise unless a tensor of this size and dtype in the `source` fits the tensor `live`."""
        if tuple(live.shape) != tuple(size):
            raise self._error(
                key, f"has shape {tuple(size)} in the {source}, but {tuple(live.shape)} here"
            )
        if live.dtype != dtype:
            raise self._error(key, f"has dtype {dtype} in the {source}, but {live.dtype} here")

    def _require_writable_by(self, key: str, live: torch.Tensor, new: Any) -> None:
        """Raise unless the tensor `new` can be copied over the tensor `live`."""
        if not isinstance(new, torch.Tensor):
            raise self._error(
                key, f"is a {type(new).__name__} in the state dict, but a tensor here"
            )
        self._require_same(key, live, new.shape, new.dtype, "state dict")
        if form(live) != form(new):
            raise self._error(key, "is sharded otherwise in the state dict than here")
        for _, part in parts_of(live, ""):
            if _is_expanded(part):
                raise self._error(
                    key, "has several elements at one address (expand), so it cannot be written"
                )

    def _require_one_value(self, copies: Copies) -> None:
        """Raise unless tensors that lie in the same memory (tied weights) get the same bytes."""
        parts = []
        for name, live, new in copies:
            for target, source in _pairs(live, new):
                if has_bytes(target):
                    parts.append((target, source, name))
        parts.sort(key=lambda part: part[0].data_ptr())
        # those that reach beyond the beginning of the next
        open_parts: list[tuple[torch.Tensor, torch.Tensor, str]] = []
        for target, source, name in parts:
            open_parts = [part for part in open_parts if _end_of(part[0]) > target.data_ptr()]
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
        self._require_same(key, live, saved.size, saved.properties.dtype, "checkpoint")
        with torch.no_grad():
            return rewrapped(live.detach(), lambda part: torch.empty_like(part, device="cpu"))


class Model(Part):
    """A module handle for torch.distributed.checkpoint.

    Example:
        ::

            state = {"model": placement.checkpoint.Model(actor)}
            torch.distributed.checkpoint.save(state, checkpoint_id=path)
    """

    kind = "module"
    noun = "model"

    def state_dict(self) -> Shown:
        module = self._object()
        with without_modes(), torch.inference_mode(False):
            try:
                # not strict: a module without values, such as a reward by rules, has an empty one
                values = get_model_state_dict(module, options=StateDictOptions(strict=False))
            except (AssertionError, AttributeError, RuntimeError) as error:
                raise CheckpointError(
                    f"torch cannot name the tensors of {self.handle.name!r} ({error}): save its "
                    "handle.state_dict(), or use its framework"
                ) from error
        for name, value in values.items():
            refuse_own_cuts(self.handle, name, value)
        return Shown(self, values)

    def template(self, path: Path, metadata: Metadata) -> Read:
        live = self.state_dict()
        values: dict[str, Any] = {}
        for keys, saved in under(metadata, path):
            name = str(keys[0])
            if name not in live:
                raise self._error(
                    ".".join(map(str, keys)),
                    "is in the checkpoint, but the module has no such parameter or buffer",
                )
            if _is_extra(name):  # may have any shape, and may be flattened into several entries
                set_element(values, keys, fresh(saved))
            else:
                values[name] = self._saved_like(name, live[name], saved)
        for name in live:
            if name not in values and not _is_extra(name):
                part = ".".join(map(str, path))
                raise self._error(
                    name, f"is not in the checkpoint, which has {some(values)} for {part!r}"
                )
        return Read(values)

    def prepare(self, values: Mapping[str, Any]) -> list[Change]:
        self.require_writable()
        live = self.state_dict()
        copies = []
        for name, tensor in live.items():
            if not _is_extra(name):
                if name not in values:
                    raise self._error(name, "is missing")
                self._require_writable_by(name, tensor, values[name])
                copies.append((name, tensor, values[name]))
        for name in values:
            if name not in live:
                raise self._error(name, "is not a parameter or buffer of the module")
        self._require_one_value(copies)
        self._require_resident()
        if self.needs_device() is None:
            return [write(self.handle, copies)]
        options = StateDictOptions(strict=False)

        def load() -> None:
            set_model_state_dict(self.handle.object, dict(values), options=options)

        return [load_by_itself(self.handle, load)]

    def needs_device(self) -> str | None:
        values = self.state_dict()
        extra = {name: None for name in values if _is_extra(name)}
        if extra:
            return f"only the module itself can load its extra state ({some(extra)})"
        if not self._is_own(values):
            return "its state dict shows copies (a hook, an overridden state_dict())"
        return None

    def _is_own(self, values: Mapping[str, Any]) -> bool:
        """Whether the tensors of a state dict are the handle's own memory, so that writing to them
        counts."""
        assert self.handle.adapter is not None
        module: torch.nn.Module = self.handle.object
        moved = (owned.tensor for owned in self.handle.adapter.owned() if not owned.transient)
        addresses = set()
        # some parameters stay on the CPU on purpose
        for tensor in itertools.chain(moved, module.parameters(), module.buffers()):
            for _, part in parts_of(tensor, ""):
                addresses.add(part.untyped_storage().data_ptr())
        for value in values.values():
            for _, part in parts_of(value, ""):
                if part.numel() == 0 or part.untyped_storage().data_ptr() in addresses:
                    continue
                if not self.handle.storage.has_place(part):
                    return False
        return True


def _is_extra(key: str) -> bool:
    # which a module saves beside its tensors (`get_extra_state`)
    return key.rpartition(".")[2] == "_extra_state"


def under(metadata: Metadata, path: Path) -> Iterator[tuple[Path, Any]]:
    """The checkpoint's entries below a path: each entry's path from there, and its metadata."""
    paths = metadata.planner_data
    if not isinstance(paths, Mapping):
        raise CheckpointError(
            "the checkpoint was written without flatten_state_dict, so its entries cannot be "
            "matched with handles"
        )
    for key, keys in paths.items():
        if tuple(keys[: len(path)]) == path:
            yield tuple(keys[len(path) :]), metadata.state_dict_metadata[key]


def fresh(saved: Any) -> torch.Tensor | None:
    """New host memory for a saved tensor; None for another value."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")


def some(names: Mapping[str, Any]) -> str:
    """The first names of many, for a message."""
    if not names:
        return "nothing"
    more = ", ..." if len(names) > 4 else ""
    return ", ".join([*names][:4]) + more


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
def write(
    handle: Handle,
    copies: Copies,
    load_settings: Callable[[], None] | None = None,
) -> Iterator[None]:
    """A change of tensors in place. `load_settings` loads the values that are no tensors, after
    them."""
    handle.storage.wait_for_readers()
    yield
    for _, live, new in copies:
        for target, source in _pairs(live, new):
            if target.data_ptr() != source.data_ptr():
                target.copy_(source)
    if load_settings is not None:
        load_settings()
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
        raise CheckpointError(
            f"{handle.name!r} was being loaded by its own code, which raised "
            f"{type(error).__name__}: {error}. Some of its values may be the saved ones: load it "
            "anew"
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
    state = optimizer.state
    before = dict(state)
    settings: dict[int, Mapping[str, Any]] = {}
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        settings.update({id(parameter): saved for parameter in group["params"]})
    with write(handle, copies, lambda: _take_settings(optimizer, groups)):
        placed = {}
        for key, entry in entries.items():
            group_settings = settings.get(id(key), {})
            placed[key] = _placed(handle, optimizer, key, entry, group_settings, is_ours)
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
    live = set(map(id, optimizer.state.get(parameter, {}).values()))
    adapter = handle.adapter
    assert isinstance(adapter, OptimizerAdapter)
    goes_to_host = is_off(handle)

    def place(key: Any, value: Any) -> Any:
        is_counter = adapter.is_counter(optimizer, str(key), settings, value)
        home = torch.device("cpu") if is_counter else local_device(parameter)

        def to_home(part: torch.Tensor) -> torch.Tensor:
            device = torch.device("cpu") if goes_to_host and part.numel() else home
            return part.to(device, copy=not is_ours)

        return mapped(value, lambda tensor: rewrapped(tensor, to_home))

    placed = dict(entry)
    for key, value in entry.items():
        if id(value) not in live:
            placed[key] = place(key, value)
    return placed


def _take_settings(optimizer: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in settings_of(saved).items():
            present = group.get(key)
            are_tensors = isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor)
            if are_tensors and present.shape == value.shape:
                present.copy_(value)  # a CUDA graph may hold this tensor
            else:
                group[key] = copy.deepcopy(value)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, without its parameters and their names (which later
    versions of torch list too)."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def same(setting: Any, other: Any) -> bool:
    """Whether two settings are equal, tensors and numbers bit by bit. Their text may be shortened,
    and NaN is not equal to itself."""
    if setting is other:
        return True
    if type(setting) is not type(other):
        return False
    if isinstance(setting, torch.Tensor):
        if form(setting) != form(other):
            return False
        pairs = _pairs(setting, other)
        return all(torch.equal(as_bytes(part), as_bytes(twin)) for part, twin in pairs)
    if isinstance(setting, Mapping):
        if setting.keys() != other.keys():
            return False
        return all(same(setting[key], other[key]) for key in setting)
    if isinstance(setting, SEQUENCES):
        return len(setting) == len(other) and all(map(same, setting, other))
    if next(nested_tensors(setting, "", levels=OBJECT_LEVELS), None) is not None:
        return same(fields_of(setting), fields_of(other))
    try:
        return pickle.dumps(setting) == pickle.dumps(other)
    except (pickle.PicklingError, AttributeError, TypeError):  # a function inside another one
        return False


def _pairs(
    tensor: torch.Tensor, other: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The plain parts of two tensors of the same form."""
    named_parts = zip(parts_of(tensor, ""), parts_of(other, ""), strict=True)
    for (_, part), (_, others_part) in named_parts:
        yield part, others_part


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's elements, in order, on the host."""
    elements = part.detach().cpu().contiguous().reshape(-1)
    return elements.view(torch.uint8)


def _is_expanded(part: torch.Tensor) -> bool:
    dimensions = zip(part.size(), part.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in dimensions)


def _end_of(part: torch.Tensor) -> int:
    """The address behind a tensor's last element."""
    last_element = 0
    for size, stride in zip(part.size(), part.stride(), strict=True):
        last_element += (size - 1) * stride
    return part.data_ptr() + (last_element + 1) * part.element_size()


def _agree(
    tensor: torch.Tensor,
    value: torch.Tensor,
    other: torch.Tensor,
    others_value: torch.Tensor,
) -> bool:
    """Whether two tensors, whose memory may overlap, can both have their values."""
    is_same_place = tensor.data_ptr() == other.data_ptr() and tensor.stride() == other.stride()
    if is_same_place and form(tensor) == form(other):
        return torch.equal(as_bytes(value), as_bytes(others_value))
    # write both into memory that overlaps in the same way, and see whether the first stays
    start = min(tensor.data_ptr(), other.data_ptr())
    start -= start % _ALIGNMENT
    nbytes = max(_end_of(tensor), _end_of(other)) - start
    scratch = torch.empty(nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
    first = _view_like(tensor, scratch, start)
    second = _view_like(other, scratch, start)
    first.copy_(value)
    second.copy_(others_value)
    return torch.equal(as_bytes(first), as_bytes(value))


def _view_like(part: torch.Tensor, scratch: torch.UntypedStorage, start: int) -> torch.Tensor:
    """A tensor in `scratch`, which stands for the memory from `start`, at the place of `part`."""
    offset = (part.data_ptr() - start) // part.element_size()
    view = torch.empty(0, dtype=part.dtype, device="cpu")
    return view.set_(scratch, offset, part.size(), part.stride())


def form(tensor: torch.Tensor) -> list[tuple[torch.Size, torch.dtype]]:
    return [(part.size(), part.dtype) for _, part in parts_of(tensor, "")]


def mapped(
    value: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    *,
    is_inside: bool = False,
) -> Any:
    """A copy of nested containers, with `change` applied to every tensor in them, and in attributes
    of objects in them. A tensor in an object (`is_inside`) is copied to memory of its own: the
    object is saved as a whole, with all bytes of its tensors' storages. Objects inside that one are
    left as they are."""
    if isinstance(value, torch.Tensor):
        changed = change(value)
        return rewrapped(changed, torch.clone) if is_inside else changed
    if isinstance(value, Mapping):
        return {key: mapped(entry, change, is_inside=is_inside) for key, entry in value.items()}
    if isinstance(value, SEQUENCES):
        return with_parts(value, (mapped(entry, change, is_inside=is_inside) for entry in value))
    if is_inside:
        return value
    return with_fields(value, lambda field: mapped(field, change, is_inside=True))
