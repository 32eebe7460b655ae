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
from placement.memory.host import upload
from placement.states import State, Trigger

if TYPE_CHECKING:
    from placement.handle import Handle


@dataclass(frozen=True, slots=True)
class WeightInfo:
    """One published weight."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def _published(handle: Handle) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's parameters and persistent buffers by name, one with several names once (under the first)."""
    module = handle.object
    if module is None:
        return
    inner = getattr(module, "module", None) if handle.kind == "engine" else getattr(module, "_orig_mod", module)
    if not isinstance(inner, torch.nn.Module):
        raise RegistrationError(f"{handle.name!r} is of kind {handle.kind} and publishes no weights")
    yield from inner.named_parameters()
    seen: set[int] = set()
    for prefix, part in inner.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def weights_info(handle: Handle) -> list[WeightInfo]:
    """What `weights` would publish; reads no value, moves nothing, calls no collective."""
    return [WeightInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in _published(handle)]


def weights(handle: Handle, *, bucket_bytes: int, dtype: torch.dtype | None) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """See `Handle.weights`."""
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, not {bucket_bytes}")
    _require_syncing(handle)
    return _buckets(handle, bucket_bytes, dtype, _times_begun(handle))


def _buckets(handle: Handle, bucket_bytes: int, dtype: torch.dtype | None, begun: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in _published(handle):
        _require_syncing(handle, begun)
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        nbytes = tensor.numel() * wanted.itemsize
        if bucket and size + nbytes > bucket_bytes:
            yield bucket
            bucket, size = [], 0  # the consumer is done with it: its memory serves the next one
            _require_syncing(handle, begun)
        bucket.append((name, _copy(handle, tensor, wanted)))
        size += nbytes
    if bucket:
        yield bucket


def _copy(handle: Handle, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The value in torch's own memory on the device, read where it is authoritative now."""
    with torch.no_grad():
        value = tensor.detach()
        shown = handle.holding.over_host(value) if handle.is_streaming and handle.holding is not None else None
        copy = torch.empty_like(tensor, dtype=dtype, requires_grad=False)
        # What lies in no range (empty, or on the CPU by right) is readable where it is.
        return copy.copy_(value) if shown is None else upload(copy, shown)


_BEGIN = (Trigger.BEGIN_SYNC, Trigger.BEGIN_STREAM, Trigger.TRAIN_TO_SYNC)


def _times_begun(handle: Handle) -> int:
    """How often the handle has come to SYNCING: which sync this is."""
    return sum(handle.counters.transitions[trigger] for trigger in _BEGIN)


def _require_syncing(handle: Handle, begun: int | None = None) -> None:
    if handle.state is not State.SYNCING:
        raise PhaseError(
            f"{handle.name!r} is {handle.state} in phase {handle.phase_now()!r}; weights are published while SYNCING: "
            "with manager.phase('weight_sync')"
        )
    if begun is not None and begun != _times_begun(handle):
        raise PhaseError(f"this generator of {handle.name!r} began in an earlier sync, and values may have changed; call weights() again")
