"""Changes to an optimizer's state that keep its keys and objects."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from placement.checkpoint.base import Change, copy_over, mapped, same_values
from placement.core.errors import CheckpointError
from placement.frameworks.base import OwnState
from placement.ownership.optimizer import OptimizerAdapter
from placement.registration.guards import is_off
from placement.tensors.plain import local_device, nested_tensors, parts_of, rewrapped

if TYPE_CHECKING:
    from placement.registration.handle import Handle


class Changes(Change):
    """Several changes as one."""

    def __init__(self, changes: Sequence[Change]) -> None:
        self._changes = changes

    def begin(self) -> None:
        for change in self._changes:
            change.begin()

    def undo(self) -> None:
        for change in self._changes:
            change.undo()

    def finish(self) -> None:
        for change in self._changes:
            change.finish()


class StateChange(Change):
    """Changes state entry by entry: writes existing tensors in place, places new ones, and removes entries that were not saved.

    Args:
        entries: the new state of each parameter, with the live tensors where those stay.
        copies: the live tensors that stay, as a state dict shows them, and their new values.
        groups: the saved settings of each parameter group.
        is_ours: whether nothing else uses the new tensors, so that they may become the state themselves.
    """

    def __init__(
        self,
        handle: Handle,
        optimizer: Any,
        entries: Mapping[Any, Any],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
        groups: Sequence[Mapping[str, Any]],
        *,
        is_ours: bool,
    ) -> None:
        self._handle = handle
        self._is_ours = is_ours
        self._optimizer = optimizer
        self._entries = entries
        self._copies = copies
        self._groups = groups
        self._before: dict[Any, Any] | None = None

    def begin(self) -> None:
        handle, state = self._handle, self._optimizer.state
        handle.storage.wait_for_readers()
        settings = {id(p): saved for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True) for p in group["params"]}
        placed = {key: self._placed(key, entry, settings.get(id(key), {})) for key, entry in self._entries.items()}
        self._before = dict(state)
        state.clear()
        state.update(placed)
        handle.storage.adopt_restored()

    def _placed(self, parameter: Any, entry: Any, settings: Mapping[str, Any]) -> Any:
        """A parameter's state, with new tensors on its device, or on the host for an offloaded handle, which adopts them from there."""
        if not isinstance(parameter, torch.Tensor) or not isinstance(entry, Mapping):
            return entry
        live = {id(each) for each in self._optimizer.state.get(parameter, {}).values()}
        adapter, off = self._handle.adapter, is_off(self._handle)
        assert isinstance(adapter, OptimizerAdapter)

        def place(key: Any, value: Any) -> Any:
            if id(value) in live:
                return value
            home = local_device(parameter)
            if adapter.is_counter(self._optimizer, str(key), settings, value):
                home = torch.device("cpu")

            def to_home(part: torch.Tensor) -> torch.Tensor:
                return part.to(torch.device("cpu") if off and part.numel() else home, copy=not self._is_ours)

            return mapped(value, lambda tensor: rewrapped(tensor, to_home))

        return {key: place(key, value) for key, value in entry.items()}

    def undo(self) -> None:
        if self._before is not None:
            self._optimizer.state.clear()
            self._optimizer.state.update(self._before)

    def finish(self) -> None:
        for live, new in self._copies:
            copy_over(live, new)
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            _take_settings(group, saved)
        self._handle.storage.note_written()


class OwnLoad(Change):
    """Loads state with the optimizer's own `load_state_dict`, which numbers parameters as torch does.

    Afterwards the optimizer's state is compared with what was saved.
    """

    def __init__(
        self, handle: Handle, optimizer: Any, names: Mapping[int, str], state: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._handle = handle
        self._optimizer = optimizer
        self._names = names
        self._before: _Before | None = None
        numbers: dict[str, int] = {}
        packed = []
        for group in optimizer.param_groups:
            mine = [names[id(parameter)] for parameter in group["params"]]
            packed.append(settings_of(groups[mine[0]]) | {"params": [numbers.setdefault(name, len(numbers)) for name in mine]})
        self._wanted = {name: entry for name, entry in state.items() if name in numbers}
        self._state = {"state": {numbers.get(name, name): entry for name, entry in state.items()}, "param_groups": packed}

    def begin(self) -> None:
        self._before = _Before(self._optimizer)
        kind = type(self._optimizer).__name__
        subject = f"{self._handle.name!r}: {kind} loads state by its own load_state_dict()"
        wanted = mapped(self._wanted, lambda tensor: tensor.detach().clone())  # the optimizer may keep these very tensors
        try:
            self._optimizer.load_state_dict(self._state)
        except Exception as error:
            raise CheckpointError(f"{subject}, which raised {type(error).__name__}: {error}. Every value is as it was before.") from error
        found = {self._names.get(id(owner), owner): entry for owner, entry in self._optimizer.state.items()}
        differing = [name for name, entry in wanted.items() if not same_values(found.get(name, {}), entry)]
        if differing:
            raise CheckpointError(
                f"{subject}. It ran, but the state of {differing[0]!r} is not as saved ({len(differing)} differ). Every value is as "
                "it was before. Save and load it by its own state dict inside manager.phase('restore'), and leave it out here with only="
            )

    def undo(self) -> None:
        if self._before is not None:
            self._before.put_back()

    def finish(self) -> None:
        """Nothing to do: `begin` has loaded everything."""


class _Before:
    """A backup of an optimizer: its fields, its state, its groups, and the bytes of their tensors."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._fields = dict(vars(optimizer))
        self._entries = {key: (entry, dict(entry)) for key, entry in optimizer.state.items() if isinstance(entry, dict)}
        self._state = dict(optimizer.state)
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        self._order = list(optimizer.param_groups)
        held = [*self._state.values(), *(settings_of(group) for group in optimizer.param_groups)]
        parts = [part for _, tensor in nested_tensors(held, "") for _, part in parts_of(tensor, "")]
        self._bytes = [(part, part.detach().to("cpu", copy=True)) for part in parts]

    def put_back(self) -> None:
        """Restore the backup. Idempotent."""
        vars(self._optimizer).update(self._fields)
        for fields, before in (*self._entries.values(), *self._groups, (self._optimizer.state, self._state)):
            for key in [key for key in fields if key not in before]:
                del fields[key]
            fields.update(before)
        self._optimizer.param_groups[:] = self._order
        for live, bytes_before in self._bytes:
            live.copy_(bytes_before)


class StateOfItsOwn(Change):
    """Loads state into an optimizer that hides it from `optimizer.state`, in place, by its framework's `OwnState`."""

    def __init__(self, own: OwnState, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        self._own, self._state, self._groups = own, state, groups

    def begin(self) -> None:
        """Nothing to do: everything has been checked, and nothing needs a backup."""

    def undo(self) -> None:
        """Nothing to undo: `begin` changes nothing."""

    def finish(self) -> None:
        self._own.restore(self._state, self._groups)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, without its parameters and their names (which later versions of torch list too)."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _take_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in settings_of(saved).items():
        if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor) and group[key].shape == value.shape:
            group[key].copy_(value)  # a CUDA graph may hold this tensor
        else:
            group[key] = copy.deepcopy(value)
