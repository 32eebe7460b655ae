"""NCCL communicators of this process and their device memory, which the driver counts and torch's
allocator does not know.

A process group makes its communicator at the first collective, or with
`init_process_group(device_id=...)`. It may hold hundreds of megabytes for channel buffers. torch
asks it how many from version 2.12 on, if built with NCCL 2.29.7 or later. It can also suspend and
resume it there: `suspend()` and `resume()` of the group's backend, called by all its ranks.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from placement.devices.memory import Communicator


def of_device(device: torch.device) -> list[Communicator]:
    """The NCCL communicators that process groups of torch have made on a device."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    groups = list(dist.distributed_c10d._world.pg_group_ranks.items())
    return list(_of_groups(device, groups))


def _of_groups(
    device: torch.device, groups: Iterable[tuple[Any, Mapping[int, int]]]
) -> Iterable[Communicator]:
    for group, ranks in groups:
        try:
            backend = group._get_backend(device)
            # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
            backend = getattr(backend, "wrapped_pg", backend)
            is_made = backend._get_backend_name() == "nccl" and backend._is_initialized()
        except Exception:  # noqa: S112 - no backend for this device, or a group of somebody's own that says nothing
            continue
        if is_made:
            yield _described(backend, _name(group), tuple(sorted(ranks)))


def _name(group: Any) -> str:
    """The name that torch numbers the group with, after the description that a framework gave
    it."""
    description = group.group_desc
    return (
        str(group.group_name)
        if description in ("", "undefined")
        else (f"{description} {group.group_name}")
    )


def _described(backend: Any, name: str, ranks: tuple[int, ...]) -> Communicator:
    can = "neither count nor suspend it"
    if not hasattr(backend, "memory_stats"):
        reason = (
            f"torch {torch.__version__} can {can}; torch 2.12 or later with NCCL 2.29.7 or later "
            "can"
        )
        return Communicator(name, ranks, None, 0, reason)
    if not _has_statistics():
        return Communicator(
            name, ranks, None, 0, f"the NCCL that is loaded can {can}; NCCL 2.29.7 or later can"
        )
    try:
        stats = backend.memory_stats()
    except RuntimeError as error:  # an older NCCL, or a communicator that was aborted
        return Communicator(name, ranks, None, 0, str(error).partition("\n")[0])
    suspendable = 0 if stats["suspended"] else stats["suspend"]
    return Communicator(name, ranks, stats["persist"] + suspendable, suspendable)


@functools.cache
def _has_statistics() -> bool:
    """Whether the loaded NCCL can count. It may be older than the one torch was built with, and
    then torch's call would end the process."""
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD)
    except OSError:  # NCCL is a part of torch
        return True
    return hasattr(library, "ncclCommMemStats")
