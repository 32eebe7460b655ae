"""Weights inside a flat parameter of torch's FSDP1, gathered piece by piece from the local shards.

FSDP1's unshard is not used. Each rank's shard is one span of the flat parameter, so every rank knows which rank has which piece of a
weight. These ranks broadcast their pieces, from the device or from the host copy, into a tensor of that weight's size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from placement.frameworks.weights import Reader, Weight


class FlatWeight(Weight):
    """One original parameter in the flat parameter of an FSDP1 unit."""

    def __init__(self, handle: Any, index: int, start: int) -> None:
        flat = handle.flat_param
        super().__init__(flat._shapes[index], flat.dtype)
        self._handle = handle
        self._start = start
        self._stride = None if flat._contiguities[index] else flat._strides[index]
        self._is_extended = flat._param_extensions[index] is not None

    @property
    def is_collective(self) -> bool:
        return bool(self._handle.uses_sharded_strategy) and self._handle.world_size > 1

    @property
    def problem(self) -> str | None:
        return "is a DTensor inside an FSDP1 flat parameter; use fully_shard (FSDP2) with tensor parallelism" if self._is_extended else None

    def whole(self, reader: Reader, dtype: torch.dtype) -> torch.Tensor:
        flat, handle = self._handle.flat_param, self._handle
        # `_local_shard` is created by the first forward pass. Before that, the parameter itself is the shard.
        shard = getattr(flat, "_local_shard", flat).detach()
        full = torch.empty(self.shape.numel(), dtype=dtype, device=reader.device)
        under_way = []
        for rank in range(handle.world_size) if self.is_collective else (handle.rank,):
            # In elements of the flat parameter: where the rank's shard begins, and the span of this weight that it has.
            begin = rank * shard.numel() if handle.uses_sharded_strategy else 0
            first, last = max(self._start, begin), min(self._start + full.numel(), begin + shard.numel())
            if first >= last:
                continue
            piece = full[first - self._start : last - self._start]
            if rank == handle.rank:
                reader.fill(piece, shard[first - begin : last - begin])
            if self.is_collective:  # as bytes, because a backend may not support the dtype
                under_way.append(dist.broadcast(piece.view(torch.uint8), group=handle.process_group, group_src=rank, async_op=True))
        for work in under_way:
            work.wait()
        return full.view(self.shape) if self._stride is None else full.as_strided(self.shape, self._stride)

    def writer(self, value: torch.Tensor) -> Callable[[], object]:
        if self.problem is not None:
            raise ValueError(self.problem)
        return functools.partial(self._write, value)

    def _write(self, value: torch.Tensor) -> None:
        handle, flat = self._handle, self._handle.flat_param
        shard = getattr(flat, "_local_shard", flat).detach()
        begin = handle.rank * shard.numel() if handle.uses_sharded_strategy else 0
        first, last = max(self._start, begin), min(self._start + self.shape.numel(), begin + shard.numel())
        if first < last:
            laid_out = value.reshape(-1) if self._stride is None else _as_laid_out(value, self._stride)
            shard[first - begin : last - begin].copy_(laid_out[first - self._start : last - self._start])


def _as_laid_out(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The elements of a value in the order in which they are in memory with these strides."""
    flat = torch.empty(value.numel(), dtype=value.dtype, device=value.device)
    flat.as_strided(value.shape, stride).copy_(value)
    return flat


def flat_weights(handles: Iterable[Any]) -> dict[int, dict[str, Weight | None]]:
    """The weight for each original parameter, by identity of its module and name there; None for names that show a flat parameter."""
    found: dict[int, dict[str, Weight | None]] = {}
    for handle in handles:
        flat = handle.flat_param
        for part in handle._fully_sharded_module.modules():
            for name, shown in part._parameters.items():
                if shown is flat:
                    found.setdefault(id(part), {})[name] = None
        spans = zip(handle._get_flat_param_offsets(), flat._is_padding_mask, strict=True)
        starts = [start for (start, _), is_padding in spans if not is_padding]
        for index, info in enumerate(flat._param_infos):
            found.setdefault(id(info.module), {})[info.param_name] = FlatWeight(handle, index, starts[index])
        for shared in flat._shared_param_infos:
            found.setdefault(id(shared.module), {})[shared.param_name] = found[id(shared.prim_module)][shared.prim_param_name]
    return found
