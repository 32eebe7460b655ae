"""Changes to an optimizer's state, its keys and objects kept."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from placement.adapters import hybrid
from placement.adapters.optimizer import OptimizerAdapter
from placement.adapters.tensors import local_device, rewrapped
from placement.checkpoint.base import Change, copy_over, mapped, note_written, wait_for_readers
from placement.guards import is_off

if TYPE_CHECKING:
    from placement.handle import Handle


class Changes(Change):
    """Several as one."""

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
    """State entry by entry: what is there is written in place, what is new gets a place, what was not saved goes.

    Args:
        entries: the state of each parameter as it will be, with the live tensors where those stay.
        copies: live tensors that stay, as a state dict shows them, and their new values.
        groups: the saved settings of each parameter group.
        is_ours: the new tensors are nobody else's and may become the state themselves.
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
        wait_for_readers(handle)
        settings = {id(p): saved for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True) for p in group["params"]}
        placed = {key: self._placed(key, entry, settings.get(id(key), {})) for key, entry in self._entries.items()}
        self._before = dict(state)
        state.clear()
        state.update(placed)
        if handle.holding is None:
            return
        if handle.holding.on_device:
            handle.holding.adopted.look()
        else:
            handle.holding.take_in_restored()

    def _placed(self, parameter: Any, entry: Any, settings: Mapping[str, Any]) -> Any:
        """A parameter's state with the new tensors on its device; of an offloaded one on the host, from where they are taken in."""
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
        note_written(self._handle)


class OwnLoad(Change):
    """State for an optimizer that has its own way of taking it over, with parameters by number as torch has them."""

    def __init__(self, optimizer: Any, names: Mapping[int, str], state: Mapping[str, Any], groups: Mapping[str, Mapping[str, Any]]) -> None:
        self._optimizer = optimizer
        numbers: dict[str, int] = {}
        packed = []
        for group in optimizer.param_groups:
            mine = [names[id(parameter)] for parameter in group["params"]]
            packed.append(settings_of(groups[mine[0]]) | {"params": [numbers.setdefault(name, len(numbers)) for name in mine]})
        self._state = {"state": {numbers.get(name, name): entry for name, entry in state.items()}, "param_groups": packed}

    def begin(self) -> None:
        """Its own way does everything at once."""

    def undo(self) -> None:
        """Nothing has begun."""

    def finish(self) -> None:
        self._optimizer.load_state_dict(self._state)


class HybridLoad(Change):
    """State for Megatron's HybridDeviceOptimizer: written into what is there, where its own load builds everything anew."""

    def __init__(self, optimizer: Any, state: Mapping[Any, Any], groups: Sequence[Mapping[str, Any]]) -> None:
        self._optimizer, self._state, self._groups = optimizer, state, groups

    def begin(self) -> None:
        """Everything has been checked, and nothing has to be set aside."""

    def undo(self) -> None:
        """Nothing has begun."""

    def finish(self) -> None:
        hybrid.restore(self._optimizer, self._state, self._groups)


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group has beside its parameters, whose names a later version of torch also lists."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _take_settings(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for key, value in settings_of(saved).items():
        if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor) and group[key].shape == value.shape:
            group[key].copy_(value)  # a graph may hold it
        else:
            group[key] = copy.deepcopy(value)
