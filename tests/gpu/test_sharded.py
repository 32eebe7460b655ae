"""Sharded models with NCCL, on one and on two GPUs: the programs of tests/sharded/one_of_each.py, which run with gloo on a CPU too.

Each rank is a process of its own that this test starts. Where there is one GPU the cases of two are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import placement
from placement.testing import assert_nothing_resident
from tests.ranks import Ranks
from tests.sharded.one_of_each import PROGRAMS
from tests.sharded.test_one_of_each import SAVED, check_moved, check_published, compare, needed, publish, save_and_load
from tests.sharded.training import device_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

BACKEND = "cpu:gloo,cuda:nccl"
"""What CPUOffloadPolicy reduces on the CPU (the norm of gradients) needs gloo."""
DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module", params=[1, 2], ids=["one_gpu", "two_gpus"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if not dist.is_nccl_available():
        pytest.skip("this build of torch has no NCCL")
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, and there is {torch.cuda.device_count()}")
    started = Ranks(request.param, BACKEND)
    yield started
    started.close()


@pytest.mark.parametrize("name", PROGRAMS)
def test_20_steps_are_bit_identical_with_everything_offloaded_between_any_two_phases(ranks: Ranks, name: str) -> None:
    check_moved(ranks.run(compare, needed(name), "cuda", deadline_seconds=DEADLINE_SECONDS), name)


def _measure(name: str) -> list[tuple[str, int, int]]:
    """By phase, what the handles declared and what the driver lost to them while they were there, in bytes."""
    program = PROGRAMS[name]("cuda")
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
                declared = sum(handle.holding.chunk_bytes for handle in manager.handles.values() if handle.holding is not None)
                seen.append((phase, declared, empty - free_bytes()))
            assert free_bytes() == empty, f"after {phase} of step {step}"
            assert_nothing_resident(manager)
    manager.close()
    return seen


@pytest.mark.parametrize("name", PROGRAMS)
def test_offloads_give_the_driver_its_bytes_back_exactly(ranks: Ranks, name: str) -> None:
    for seen in ranks.run(_measure, needed(name), deadline_seconds=DEADLINE_SECONDS):
        assert all(declared == measured for _, declared, measured in seen), seen
        assert all((declared > 0) == (name != "cpu_offload") for _, declared, _ in seen), seen


@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_published_weights_equal_the_full_state_dict(ranks: Ranks, name: str, streamed: bool) -> None:
    for published in ranks.run(publish, needed(name), "cuda", streamed, deadline_seconds=DEADLINE_SECONDS):
        check_published(published)


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_what_is_offloaded_takes_no_device_memory_and_resumes_exactly(ranks: Ranks, name: str, tmp_path: Path) -> None:
    ranks.run(save_and_load, needed(name), "cuda", str(tmp_path), deadline_seconds=DEADLINE_SECONDS)
