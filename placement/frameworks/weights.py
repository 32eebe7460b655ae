"""Published weights: read the full value of a weight into torch's own memory, wherever its parts
are now."""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from placement.devices.host.slab import upload
from placement.tensors.plain import (
    PLAIN_TYPES,
    is_scaled,
    is_wrapper,
    loaded_class,
    parts_of,
    rewrapped,
)


def _copyable(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same tensors, seen as bytes where torch cannot copy or gather their dtype (uint4), or a
    backend may not."""
    dtype = tensors[0].dtype
    if not is_scaled(dtype):
        return tensors
    for tensor in tensors:
        if type(tensor) not in PLAIN_TYPES or tensor.dtype is not dtype:
            return tensors
    as_bytes = torch.uint8 if dtype.itemsize == 1 else torch.int16
    return tuple(tensor.view(as_bytes) for tensor in tensors)


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads the values of tensors from where they are now: from the device, or from the host
    copy."""

    device: torch.device  # the device on which weights are published
    on_host: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    """Returns a tensor over the host copy in place of a tensor, if the valid values are there.
    None: read the tensors themselves."""
    fetched: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = field(default_factory=dict)
    """The values that are on their way (see `publish.ahead`), by the identity of their tensors: the
    tensor, its value, and an event that tells whether that has arrived (None: it has)."""

    def fill(
        self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool = False
    ) -> torch.Tensor:
        """Copy a plain tensor's value into `target`, cast to its type. With `non_blocking` the host
        does not wait for the copy."""
        host_copy = None if self.on_host is None else self.on_host(source)
        if host_copy is None:
            # on the device, or outside every range (empty, or staying on the CPU)
            into, out_of = _copyable(target, source)
            into.copy_(out_of)
        else:
            into, out_of = _copyable(target, host_copy)
            upload(into, out_of, non_blocking=non_blocking)
        return target

    def read(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A plain tensor's value in torch's own memory on the device."""
        if id(source) in self.fetched:
            _, value, arrived = self.fetched.pop(id(source))
            if arrived is not None:
                arrived.wait()
            return value if value.dtype is dtype else value.to(dtype)
        return self.fill(self.target(source, dtype), source.detach())

    def target(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory on the device for a plain tensor's value."""
        return torch.empty_like(source, dtype=dtype, device=self.device, requires_grad=False)


class Part(NamedTuple):
    """This rank's part of a weight: the whole of it, or a block."""

    tensor: torch.Tensor  # a plain one, in the module's memory
    # where the block begins in the full weight, in elements of each dimension
    offset: tuple[int, ...]


class Weight(abc.ABC):
    """One weight, whose full value `whole` returns. Nothing is read or gathered before `whole` is
    called."""

    shape: torch.Size
    """The shape of the full weight."""
    dtype: torch.dtype
    keeps_dtype = False
    """Whether the weight is not cast where one dtype is given for all. Publishing sets it."""
    is_wrapper = False
    """Whether the weight's bytes are in tensors that it wraps (quantised), which are never cast."""

    @property
    def is_collective(self) -> bool:
        """Whether `whole` must be called on every rank that has a part of the weight."""
        return False

    @property
    def problem(self) -> str | None:
        """The reason why the weight cannot be published, the same on every rank, with advice; None
        if it can."""
        return None

    @abc.abstractmethod
    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        """The full weight in new memory on the reader's device. Called under `no_grad`, outside
        inference mode."""

    def targets(
        self, reader: Reader, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
        """Pairs: a plain tensor of this rank that `whole` reads, and a function that takes device
        memory for its value.

        With these `ReadAhead` brings the values first. No pair where a kind of weight does not say:
        then `whole` reads them itself.
        """
        yield from ()

    def part(self) -> Part | None:
        """This rank's part, as it lies in the module; None where that is no block of the published
        weight."""
        return None

    def writer(self, value: torch.Tensor) -> Callable[[], object]:
        """A function that writes a full value into the weight, on the device; on each rank its own
        part. Calls no collective.

        Raises:
            ValueError: such a weight cannot be written; the message says why.
        """
        raise ValueError("is made of several weights")


class LocalWeight(Weight):
    """A weight that this rank has in full: a plain tensor, or a wrapper around several
    (quantised)."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self._tensor = tensor
        self.is_wrapper = type(tensor) not in PLAIN_TYPES

    @property
    def problem(self) -> str | None:
        kind = type(self._tensor)
        if kind in PLAIN_TYPES or is_wrapper(self._tensor):
            return None
        return (
            f"is a {kind.__module__}.{kind.__qualname__}, whose values are not its bytes; for "
            "LoRA, adapters='separate' leaves it out"
        )

    def targets(
        self, reader: Reader, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
        yield from parts_read(reader, self._tensor, dtype)

    def part(self) -> Part | None:
        if self.is_wrapper or self.dtype.is_complex:
            return None
        return Part(self._tensor, (0,) * len(self.shape))

    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        value = read_parts(reader, self._tensor, dtype)
        return value if value.dtype is dtype else value.to(dtype)

    def writer(self, value: torch.Tensor) -> Callable[[], object]:
        if self.problem is not None:
            raise ValueError(self.problem)
        kind = type(self._tensor)
        if kind not in PLAIN_TYPES and type(value) is not kind:
            raise ValueError(
                f"is a {kind.__qualname__} here, but a {type(value).__qualname__} was published: "
                "publish from a module that is quantised in the same way"
            )
        into, out_of = _copyable(self._tensor, value)
        return functools.partial(into.copy_, out_of)


class ShardedWeight(Weight):
    """A weight that is a DTensor: each rank has a part, and torch gathers them."""

    def __init__(self, tensor: Any) -> None:
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self._tensor = tensor
        self._all_rows: torch.Tensor | None = None
        self.is_wrapper = type(tensor._local_tensor) not in PLAIN_TYPES

    @property
    def is_collective(self) -> bool:
        if self._tensor.device_mesh.size() == 1:
            return False
        return not all(placement.is_replicate() for placement in self._tensor.placements)

    @property
    def problem(self) -> str | None:
        if hasattr(self._tensor._local_tensor, "__create_chunk_list__"):
            return (
                "is sharded in its framework's own way, which torch cannot gather: publish it with "
                "the framework's own export"
            )
        return None

    def _read_as(self, dtype: torch.dtype) -> torch.dtype:
        is_sum = any(placement.is_partial() for placement in self._tensor.placements)
        return self.dtype if is_sum else dtype

    def targets(
        self, reader: Reader, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
        local = self._tensor._local_tensor
        if self._even_rows() is None:
            yield from parts_read(reader, local, self._read_as(dtype))
        else:
            yield local, functools.partial(self._own_rows, reader, dtype)

    def _own_rows(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        """New memory for this rank's rows, inside that for all rows, into which the other ranks'
        are gathered."""
        self._all_rows = torch.empty(self.shape, dtype=dtype, device=reader.device)
        return _own(self._all_rows, self._even_rows())

    def part(self) -> Part | None:
        if self.is_wrapper or self.dtype.is_complex:
            return None
        sharded = self._tensor
        torch_sharding = sys.modules["torch.distributed.tensor"]
        # not their subclasses: a strided shard is no block
        blocks = (torch_sharding.Shard, torch_sharding.Replicate)
        if any(type(placement) not in blocks for placement in sharded.placements):
            return None
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(
            sharded.shape, sharded.device_mesh, sharded.placements
        )
        if tuple(sharded._local_tensor.shape) != tuple(shape):
            return None
        return Part(sharded._local_tensor, tuple(offset))

    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        # The DTensor itself is not copied or moved. Its local part is read, and gathered, or
        # wrapped in a new DTensor.
        sharded = self._tensor
        group = self._even_rows()
        if group is not None:  # DTensor's own way takes several times as long for a small weight
            full = self._gathered(reader, dtype, group)
        else:
            value = read_parts(reader, sharded._local_tensor, self._read_as(dtype))
            (local,) = _copyable(value)
            gatherable = type(sharded).from_local(
                local,
                sharded.device_mesh,
                sharded.placements,
                run_check=False,
                shape=sharded.shape,
                stride=sharded.stride(),
            )
            full = gatherable.full_tensor()
        if full.dtype is torch.uint8:
            return full.view(dtype)
        return full if full.dtype is dtype else full.to(dtype)

    def _gathered(self, reader: Reader, dtype: torch.dtype, group: Any) -> torch.Tensor:
        local = self._tensor._local_tensor
        if id(local) in reader.fetched:
            read = reader.read(local, dtype)
        else:
            read = reader.fill(self._own_rows(reader, dtype), local.detach())
        full = self._all_rows
        self._all_rows = None
        if full is None or full.dtype is not dtype:  # the same rows were fetched for another weight
            full = torch.empty(self.shape, dtype=dtype, device=reader.device)
        rows = _own(full, group)
        if read.data_ptr() != rows.data_ptr():  # the same weight was fetched for another name
            rows.copy_(read)
        full, rows = _copyable(full, rows)
        torch.distributed.all_gather_into_tensor(full, rows, group)
        return full

    def _even_rows(self) -> Any:
        """The process group over which each rank has as many rows as the others; None where the
        weight is cut another way."""
        if self.is_wrapper:
            return None
        mesh = self._tensor.device_mesh
        placements = self._tensor.placements
        cut = [index for index, placement in enumerate(placements) if not placement.is_replicate()]
        if len(cut) != 1:
            return None
        (dimension,) = cut
        shard = placements[dimension]
        if type(shard) is not sys.modules["torch.distributed.tensor"].Shard or shard.dim != 0:
            return None
        ranks = mesh.size(dimension)
        if ranks == 1 or self.shape[0] % ranks:
            return None
        return mesh.get_group(dimension)

    def writer(self, value: torch.Tensor) -> Callable[[], object]:
        sharded = self._tensor
        if self.problem is not None:
            raise ValueError(self.problem)
        if any(placement.is_partial() for placement in sharded.placements):
            raise ValueError("is a sum over ranks, so that no rank knows which part to write")
        into, out_of = _copyable(sharded._local_tensor, value)
        distribute: Any = vars(sys.modules["torch.distributed.tensor"])["distribute_tensor"]

        def write() -> None:
            # Every rank has the full value, and takes its part out of it.
            part = distribute(out_of, sharded.device_mesh, sharded.placements, src_data_rank=None)
            into.copy_(part._local_tensor)

        return write


def _own(rows: torch.Tensor, group: Any) -> torch.Tensor:
    """This rank's part of rows that the ranks of a group have evenly."""
    own: torch.Tensor = rows.chunk(group.size())[group.rank()]
    return own


def read_parts(reader: Reader, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor's value in torch's own memory. For a wrapper (quantised): the same wrapper around
    the values read, not cast to `dtype`."""
    if type(tensor) in PLAIN_TYPES:
        return reader.read(tensor, dtype)
    wrapper: Any = tensor
    return rewrapped(wrapper, lambda part: reader.read(part, part.dtype))


def parts_read(
    reader: Reader, tensor: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
    """The plain tensors that `read_parts` reads, and functions that take memory for their
    values."""
    for _, part in parts_of(tensor, ""):
        part_dtype = dtype if part is tensor else part.dtype
        yield part, functools.partial(reader.target, part, part_dtype)


def weight_of(tensor: torch.Tensor) -> Weight:
    """The `Weight` for a parameter or buffer."""
    sharded = loaded_class("torch.distributed.tensor", "DTensor")
    if sharded is not None and isinstance(tensor, sharded):
        return ShardedWeight(tensor)
    return LocalWeight(tensor)


class Computation(abc.ABC):
    """Computes several results at once, when the first is asked for. A result is kept until it is
    asked for."""

    _values: dict[str, torch.Tensor] | None = None

    @abc.abstractmethod
    def inputs(self) -> Iterable[Weight]:
        """The weights that are read."""

    @abc.abstractmethod
    def results(self, reader: Reader) -> dict[str, torch.Tensor]:
        """Compute all results, by name."""

    def value(self, name: str, reader: Reader) -> torch.Tensor:
        """One result. It is not kept here, so that its memory is freed with its bucket."""
        if self._values is None or name not in self._values:
            self._values = self.results(reader)
        return self._values.pop(name)


class ComputedWeight(Weight):
    """One result of a computation. `like` has the result's shape and dtype."""

    def __init__(self, computation: Computation, name: str, like: Weight | torch.Tensor) -> None:
        self.shape = like.shape
        self.dtype = like.dtype
        self._computation = computation
        self._name = name

    @property
    def is_collective(self) -> bool:
        return any(weight.is_collective for weight in self._computation.inputs())

    @property
    def problem(self) -> str | None:
        for weight in self._computation.inputs():
            if weight.problem is not None:
                return weight.problem
        return None

    def targets(
        self, reader: Reader, dtype: torch.dtype
    ) -> Iterator[tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
        for weight in self._computation.inputs():
            yield from weight.targets(reader, weight.dtype)

    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        return self._computation.value(self._name, reader).to(dtype).contiguous()
