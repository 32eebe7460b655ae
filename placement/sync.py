"""Publishing weights in bounded buckets.

Buckets are torch's own memory in every state, never a range: CUDA IPC, RDMA and NCCL's user buffers all fail on, or remember,
memory that comes and goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from placement.errors import PhaseError, RegistrationError
from placement.states import State

if TYPE_CHECKING:
    from placement.handle import Handle


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """One published weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def _published(handle: Handle) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's parameters and persistent buffers by name, a tied one once (under its first name)."""
    module = handle.object
    if module is None:
        return
    inner = getattr(module, "module", None) if handle.kind == "engine" else getattr(module, "_orig_mod", module)
    if not isinstance(inner, torch.nn.Module):
        raise RegistrationError(f"{handle.name!r} is of kind {handle.kind} and publishes no weights")
    yield from inner.named_parameters()
    for prefix, part in inner.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def weights_info(handle: Handle) -> list[WeightInfo]:
    """What `weights` would publish; reads no value, moves nothing, calls no collective."""
    return [WeightInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in _published(handle)]


def weights(handle: Handle, *, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """See `Handle.weights`."""
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
    _require_syncing(handle)
    return _buckets(handle, bucket_bytes, dtype)


def _buckets(handle: Handle, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in _published(handle):
        _require_syncing(handle)
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * wanted.itemsize
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0  # the consumer is done with it: its memory serves the next one
            _require_syncing(handle)
        bucket.append((name, _copy(handle, tensor, wanted)))
        size += nbytes
    if bucket:
        yield bucket


def _copy(handle: Handle, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The value in torch's own memory on the device, read where it is authoritative now."""
    with torch.no_grad():
        value = tensor.detach()
        source = handle.holding.over_host(value) if handle.is_streaming and handle.holding is not None else value
        assert source is not None, "every published weight of a streamed handle lies in a range"
        return torch.empty_like(tensor, dtype=dtype, requires_grad=False).copy_(source)


def _require_syncing(handle: Handle) -> None:
    if handle.state is not State.SYNCING:
        raise PhaseError(
            f"{handle.name!r} is {handle.state} in phase {handle.phase_now()!r}; weights are published while SYNCING: "
            "with manager.phase('weight_sync')"
        )
