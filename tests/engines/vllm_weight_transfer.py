"""Stand-ins of the two protocols of vLLM's weight transfer, as the trainer sees them."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import pytest
import torch


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Source033(ABC):
    """`WeightSource` of 0.33.0."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if not isinstance(cls.__dict__.get("metadata", cached_property(len)), cached_property):
            raise TypeError(f"{cls.__name__}.metadata must be a functools.cached_property")

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [each.name for each in self.metadata]

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not Source033.iter_full

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


class Source032(ABC):
    """`WeightSource` of 0.32.0."""

    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...

    def held_names(self) -> None:
        return None


def stand_in(patch: pytest.MonkeyPatch, source: type) -> None:
    """Let `vllm.distributed.weight_transfer` be importable, with this protocol."""
    module(patch, "vllm", path=[])
    module(patch, "vllm.distributed", path=[])
    module(patch, "vllm.distributed.weight_transfer", WeightSource=source, ParamMeta=ParamMeta)


def module(patch: pytest.MonkeyPatch, name: str, *, path: list[str] | None = None, **members: Any) -> None:
    made = ModuleType(name)
    made.__dict__.update(members)
    if path is not None:
        made.__path__ = path
    patch.setitem(sys.modules, name, made)
