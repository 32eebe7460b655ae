"""Module handles in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from placement.checkpoint.base import Change, Part, Path, Read, Shown, copy_over, fqn, put, refuse_own_cuts, some, under
from placement.checkpoint.take_over import TakeOver, owns_memory
from placement.core.errors import CheckpointError, NotResidentError
from placement.core.torch_modes import without_modes
from placement.registration.guards import is_off

if TYPE_CHECKING:
    from placement.registration.handle import Handle

_EXTRA = "_extra_state"


class Model(Part):
    """A module handle for torch.distributed.checkpoint: `{"model": placement.checkpoint.Model(actor)}`."""

    kind = "module"
    noun = "model"

    def state_dict(self) -> Shown:
        module = self._object()
        with without_modes(), torch.inference_mode(False):
            try:
                found = get_model_state_dict(module)
            except (AssertionError, AttributeError, RuntimeError) as error:
                raise CheckpointError(
                    f"torch cannot name the tensors of {self.handle.name!r} ({error}): save its handle.state_dict(), or use its framework"
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
                raise self._error(".".join(map(str, rest)), "is in the checkpoint, but the module has no such parameter or buffer")
            if _is_extra(key):  # may have any shape, and may be flattened into several entries
                is_tensor = isinstance(saved, TensorStorageMetadata)
                put(found, rest, torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu") if is_tensor else None)
            else:
                found[key] = self._saved_like(key, live[key], saved)
        for key in live:
            if key not in found and not _is_extra(key):
                raise self._error(key, f"is not in the checkpoint, which has {some(found)} for {'.'.join(map(str, path))!r}")
        return Read(found)

    def prepare(self, given: Mapping[str, Any]) -> Change:
        self.require_writable()
        live = self.state_dict()
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        extra: dict[str, Any] = {}
        for key, value in live.items():
            if _is_extra(key):
                if key in given:
                    extra[key] = given[key]
            elif key not in given:
                raise self._error(key, "is missing")
            else:
                self._check(key, value, given[key])
                copies.append((value, given[key]))
        for key in given:
            if key not in live:
                raise self._error(key, "is not a parameter or buffer of the module")
        if extra and is_off(self.handle):
            raise NotResidentError(
                f"{self.handle.name!r} has extra state ({some(extra)}), which only the module itself can load: load the checkpoint inside "
                "a phase in which it is on the device, such as manager.phase('restore')"
            )
        owns = owns_memory(self.handle)
        own = [(value, new) for value, new in copies if owns(value)]
        if len(own) == len(copies):
            return _ModelChange(self.handle, copies, extra)
        return TakeOver(self, {key: given[key] for key in live if key in given}, own)


class _ModelChange(Change):
    def __init__(self, handle: Handle, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], extra: Mapping[str, Any]) -> None:
        self._handle = handle
        self._copies = copies
        self._extra = extra

    def begin(self) -> None:
        self._handle.storage.wait_for_readers()

    def undo(self) -> None:
        """Nothing to undo: `begin` changes nothing."""

    def finish(self) -> None:
        for live, new in self._copies:
            copy_over(live, new)
        module = self._handle.object
        takers = {fqn(module, f"{path}.{_EXTRA}".lstrip(".")): part for path, part in module.named_modules()} if self._extra else {}
        for key, value in self._extra.items():
            takers[key].set_extra_state(value)
        self._handle.storage.note_written()


def _is_extra(key: str) -> bool:
    """Whether torch's key belongs to extra state, which a module saves beside its tensors (`get_extra_state`)."""
    return key.rpartition(".")[2] == _EXTRA
