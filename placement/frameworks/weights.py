"""One weight as it is published: whole and in torch's own memory, wherever its parts are now."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from placement.core.loaded_classes import loaded_class
from placement.devices.host.slab import upload
from placement.tensors.plain import PLAIN_TYPES


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads tensors where their values are now."""

    device: torch.device
    """Where weights are published."""
    over_host: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    """Gives a tensor over the host copy, where that is the authoritative one; None: values are where the tensors are."""

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Copy a plain tensor's value into `target`, cast to its type."""
        shown = None if self.over_host is None else self.over_host(source)
        # What lies in no range (empty, or on the CPU by right) is readable where it is.
        return target.copy_(source) if shown is None else upload(target, shown)

    def read(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A plain tensor's value in torch's own memory on the device."""
        return self.fill(torch.empty_like(source, dtype=dtype, device=self.device, requires_grad=False), source.detach())


class Weight(abc.ABC):
    """How one weight becomes whole. It reads nothing before `whole`, and keeps what it reads from for no longer than itself.

    Attributes:
        shape, dtype: of the whole weight.
    """

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape = shape
        self.dtype = dtype

    @property
    def is_collective(self) -> bool:
        """Whether `whole` takes every rank that has a part of it."""
        return False

    @property
    def problem(self) -> str | None:
        """Why it cannot be published, the same on every rank, and what to do; None where it can."""
        return None

    @abc.abstractmethod
    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        """The weight in memory of its own on the reader's device. Called without gradients, outside inference mode."""

    def write(self, value: torch.Tensor) -> None:
        """Take over a whole value, or this rank's part of it. Calls no collective. Called as `whole`, with the weight on the device.

        Raises:
            ValueError: nothing can be written into such a weight; says why.
        """
        raise ValueError("is made of several weights")


class LocalWeight(Weight):
    """A weight that this rank has whole: a plain tensor, or a wrapper of some (quantised)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor

    @property
    def problem(self) -> str | None:
        kind = type(self._tensor)
        value: Any = self._tensor
        if kind in PLAIN_TYPES or is_traceable_wrapper_subclass(value):
            return None
        what = f"is a {kind.__module__}.{kind.__qualname__}, whose values are not its bytes"
        return f"{what}; for LoRA over it, adapters='separate' leaves it out"

    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        value = read_parts(reader, self._tensor, dtype)
        return value if value.dtype is dtype else value.to(dtype)

    def write(self, value: torch.Tensor) -> None:
        if (problem := self.problem) is not None:
            raise ValueError(problem)
        if type(self._tensor) not in PLAIN_TYPES and type(value) is not type(self._tensor):
            here, comes = type(self._tensor).__qualname__, type(value).__qualname__
            raise ValueError(f"is a {here} here and comes as a {comes}: publish it from a module that is quantised alike")
        self._tensor.copy_(value)


class ShardedWeight(Weight):
    """A DTensor: each rank has its part, and torch knows which."""

    def __init__(self, tensor: Any) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self._tensor = tensor

    @property
    def is_collective(self) -> bool:
        return self._tensor.device_mesh.size() > 1 and not all(placement.is_replicate() for placement in self._tensor.placements)

    @property
    def problem(self) -> str | None:
        if hasattr(self._tensor._local_tensor, "__create_chunk_list__"):
            return "is sharded in its framework's own way, which torch cannot gather: publish it with the framework's export"
        return None

    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        # The wrapper itself is never copied or moved: its local part is read, and a wrapper of ours put around what was read.
        sharded = self._tensor
        is_sum = any(placement.is_partial() for placement in sharded.placements)
        local = read_parts(reader, sharded._local_tensor, sharded.dtype if is_sum else dtype)
        ours = type(sharded).from_local(
            local, sharded.device_mesh, sharded.placements, run_check=False, shape=sharded.shape, stride=sharded.stride()
        )
        del local
        full: torch.Tensor = ours.full_tensor()
        return full if full.dtype is dtype else full.to(dtype)

    def write(self, value: torch.Tensor) -> None:
        sharded = self._tensor
        if self.problem is not None or any(placement.is_partial() for placement in sharded.placements):
            raise ValueError(self.problem or "is a sum over ranks, of which no rank knows its part")
        distribute: Any = vars(sys.modules["torch.distributed.tensor"])["distribute_tensor"]
        # Each rank cuts its part out of the whole value, which all of them have.
        part = distribute(value, sharded.device_mesh, sharded.placements, src_data_rank=None)
        sharded._local_tensor.copy_(part._local_tensor)


def read_parts(reader: Reader, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor's value in torch's own memory; of a wrapper (quantised) the same wrapper around what was read, in its own type."""
    if type(tensor) in PLAIN_TYPES:
        return reader.read(tensor, dtype)
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    parts = {name: getattr(wrapper, name) for name in names}
    read = {name: read_parts(reader, part, part.dtype) if isinstance(part, torch.Tensor) else part for name, part in parts.items()}
    whole: torch.Tensor = type(wrapper).__tensor_unflatten__(read, context, wrapper.size(), wrapper.stride())
    return whole


def weight_of(tensor: torch.Tensor) -> Weight:
    """How a parameter or buffer becomes whole."""
    sharded = loaded_class("torch.distributed.tensor", "DTensor")
    return ShardedWeight(tensor) if sharded is not None and isinstance(tensor, sharded) else LocalWeight(tensor)
