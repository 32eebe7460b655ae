"""VeOmni's expert parallelism: each rank has some of the experts, and a parameter's own shape and placements do not show the others.

VeOmni splits a parameter along a mesh of experts before `fully_shard` shards it further, and records that only in its notes
(`_fqn2spec_info`). This does not matter to moves. A published weight contains the experts of every rank.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from placement.core.lazy_names import is_a
from placement.frameworks.base import Framework
from placement.frameworks.fsdp2 import FSDP2
from placement.frameworks.weights import Reader, Weight, weight_of

_NOTES = "veomni.distributed.parallel_plan"


class ExpertWeight(Weight):
    """A weight that is split evenly along a further mesh, that of the experts."""

    def __init__(self, part: Weight, mesh: Any, placement: Any) -> None:
        shape = list(part.shape)
        shape[placement.dim] *= mesh.size()
        super().__init__(torch.Size(shape), part.dtype)
        self._part = part
        self._mesh = mesh
        self._placement = placement

    @property
    def is_collective(self) -> bool:
        return self._mesh.size() > 1 or self._part.is_collective

    @property
    def problem(self) -> str | None:
        return self._part.problem

    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        from torch.distributed.tensor import DTensor

        local = self._part.whole(reader, dtype).contiguous()
        full: torch.Tensor = DTensor.from_local(local, self._mesh, [self._placement], run_check=False).full_tensor()
        return full


class VeOmni(Framework):
    """All models of a module tree that VeOmni split by experts."""

    packages = ("veomni",)

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = weakref.ref(root)

    @classmethod
    def find(cls, root: torch.nn.Module) -> VeOmni | None:
        return cls(root) if _NOTES in sys.modules and any(_notes(part) for part in root.modules()) else None

    def weights(self) -> Mapping[int, Mapping[str, Weight | None]]:
        root = self._root()
        found: dict[int, dict[str, Weight | None]] = {}
        sharded = FSDP2.find(root) if root is not None else None
        instead = {} if sharded is None else sharded.own_tensors()
        for model in () if root is None else root.modules():
            for name, note in _notes(model).items():
                path, _, own = name.rpartition(".")
                part = model.get_submodule(path)
                shown = part._parameters.get(own)
                if shown is not None and note.para_mesh is not None and note.placement.is_shard():
                    weight = weight_of(instead.get(id(shown), shown))
                    found.setdefault(id(part), {})[own] = ExpertWeight(weight, note.para_mesh, note.placement)
        return found


def _notes(model: torch.nn.Module) -> dict[str, Any]:
    """VeOmni's notes on a model's parameters, by the parameter's name."""
    notes = vars(model).get("_fqn2spec_info")
    if not isinstance(notes, dict):
        return {}
    return {name: note for name, note in notes.items() if is_a(note, _NOTES, "SpecInfo")}
