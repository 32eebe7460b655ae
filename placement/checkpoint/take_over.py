"""Load values into a module whose state dict shows copies. Values written into those copies would be lost.

State dict hooks and overridden methods compute the values that they show. Only the module's own `load_state_dict` can reverse
that, so it is called, and afterwards the module's state dict is compared with the given values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from placement.checkpoint.base import Change, Part, copy_over, same_values
from placement.core.errors import CheckpointError
from placement.registration.guards import is_off
from placement.registration.state_dicts import from_host_copies
from placement.storage.point import byte_view
from placement.tensors.plain import parts_of

if TYPE_CHECKING:
    from placement.registration.handle import Handle


class TakeOver(Change):
    """Loads values by the module's own `load_state_dict`; into the host copy while the module is offloaded.

    Args:
        given: all values, by the names of the state dict.
        own: the state dict's tensors that are the module's own memory, with their new values.
    """

    def __init__(self, part: Part, given: Mapping[str, Any], own: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._part = part
        self._given = given
        self._own = own
        self._before: Before | None = None

    def begin(self) -> None:
        handle = self._part.handle
        handle.storage.wait_for_readers()
        self._before = Before(handle)
        for live, new in self._own:
            copy_over(live, new)
        if not self._differing():  # writing the tensors from which the copies are computed was enough
            return
        try:
            with from_host_copies() if is_off(handle) else nullcontext():
                set_model_state_dict(handle.object, dict(self._given), options=StateDictOptions(strict=False))
                self._before.keep_objects()
        except Exception as error:
            raise CheckpointError(f"{self._subject()}. That raised {type(error).__name__}: {error}. {_UNCHANGED}") from error
        handle.storage.adopt_restored()
        if differing := self._differing():
            names = ", ".join(differing[:4]) + (", ..." if len(differing) > 4 else "")
            raise CheckpointError(f"{self._subject()}. It ran, but {names} of the state dict differ from the saved ones. {_UNCHANGED}")

    def undo(self) -> None:
        if self._before is not None:
            self._before.put_back()
            self._part.handle.storage.note_written()

    def finish(self) -> None:
        self._part.handle.storage.note_written()

    def _subject(self) -> str:
        return (
            f"{self._part.handle.name!r}: its state dict shows copies (a hook, an overridden state_dict()), so its own load_state_dict() "
            "has to load the saved values"
        )

    def _differing(self) -> list[str]:
        """The names of tensors that the module's state dict does not show with the given values."""
        shown = self._part.state_dict()
        return [key for key, new in self._given.items() if isinstance(new, torch.Tensor) and not same_values(shown.get(key), new)]


_UNCHANGED = "Every value is as it was before. Give the module a load_state_dict() that fits its state_dict(), or leave it out with only="


class Before:
    """A backup of a module: every value and where it lies. The values are kept in host memory of their own."""

    def __init__(self, handle: Handle) -> None:
        modules = [*handle.object.modules()]
        fields = [each for module in modules for each in (vars(module), vars(module)["_parameters"], vars(module)["_buffers"])]
        self._fields = [(each, dict(each)) for each in fields]
        self._bytes = [(live, live.to("cpu", copy=True)) for live in _memory(handle)]

    def keep_objects(self) -> None:
        """Put the module's own tensors back where loading replaced them (`assign=True`), with the new values: optimizers step them."""
        for fields, before in self._fields:
            for name, own in before.items():
                now = fields.get(name)
                if isinstance(own, torch.Tensor) and isinstance(now, torch.Tensor) and now is not own:
                    own.copy_(now)
                    fields[name] = own

    def put_back(self) -> None:
        """Restore the backup. Idempotent."""
        for fields, before in self._fields:
            for name in [name for name in fields if name not in before]:
                del fields[name]
            fields.update(before)
        for live, bytes_before in self._bytes:
            live.copy_(bytes_before)


def owns_memory(handle: Handle) -> Callable[[torch.Tensor], bool]:
    """A function that tells whether a tensor of the handle's state dict is the handle's own memory, so that writing to it counts."""
    addresses = {tensor.untyped_storage().data_ptr() for tensor in _tensors(handle)}

    def owns(part: torch.Tensor) -> bool:
        if part.numel() == 0 or part.untyped_storage().data_ptr() in addresses:
            return True
        return handle.storage.has_place(part)

    return lambda shown: all(owns(part) for _, part in parts_of(shown, ""))


def _tensors(handle: Handle) -> list[torch.Tensor]:
    """The tensors with the module's values, including those that stay on the CPU on purpose."""
    assert handle.adapter is not None
    found = [owned.tensor for owned in handle.adapter.owned() if not owned.transient]
    module: torch.nn.Module = handle.object
    return found + [part for tensor in (*module.parameters(), *module.buffers()) for _, part in parts_of(tensor, "")]


def _memory(handle: Handle) -> list[torch.Tensor]:
    """The bytes of each storage with the module's values, where they are now."""
    found: dict[int, torch.Tensor] = {}
    for tensor in _tensors(handle):
        host = handle.storage.over_host(tensor) if is_off(handle) else None
        storage = (tensor if host is None else host).untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), byte_view(storage))
    return [*found.values()]
