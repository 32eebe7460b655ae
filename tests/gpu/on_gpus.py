"""Ranks that have a GPU each, and what the driver says about what they hold there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import placement
from placement.testing import assert_nothing_resident
from tests.sharded.training import Program, device_of
from tests.support.ranks import Ranks

BACKEND = "cpu:gloo,cuda:nccl"
"""What CPUOffloadPolicy reduces on the CPU (the norm of gradients) needs gloo."""


def gpus(count: int) -> Iterator[Ranks]:
    """For a fixture: that many ranks, or a skip where there are fewer GPUs."""
    if not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs, and there is {torch.cuda.device_count()}")
    started = Ranks(count, BACKEND, context="spawn")
    yield started
    started.close()


def measure(build: Callable[[], Program]) -> list[tuple[str, int, int]]:
    """By phase, what the handles declared and what the driver lost to them while they were there,
    in bytes. For `Ranks.run`."""
    program = build()
    manager = placement.Manager(device=device_of("cuda"))
    program.register(manager)
    for step in range(2):  # cuBLAS and NCCL take their workspaces, the optimizer its state
        for phase, method in program.phases:
            with manager.phase(phase):
                getattr(program, method)(step)

    def free_bytes() -> int:
        """What the driver has free, with what torch's allocator keeps."""
        torch.cuda.synchronize()
        memory = manager.device.memory()
        return memory.free_bytes + memory.torch_reserved_bytes

    seen = []
    empty = free_bytes()
    for step in range(2, 5):
        for phase, method in program.phases:
            with manager.phase(phase):
                getattr(program, method)(step)
                declared = sum(
                    handle.holding.chunk_bytes
                    for handle in manager.handles.values()
                    if handle.holding is not None
                )
                seen.append((phase, declared, empty - free_bytes()))
            assert free_bytes() == empty, f"after {phase} of step {step}"
            assert_nothing_resident(manager, allow_foreign=True)
    manager.close()
    return seen
