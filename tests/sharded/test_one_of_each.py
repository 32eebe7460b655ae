"""One program for each way of sharding: what it publishes and saves while everything is offloaded, on two ranks with gloo.

All ways run with NCCL in tests/gpu/test_sharded.py. Here some do: test_publish and test_checkpoint have the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import placement
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.sharded import training
from tests.sharded.one_of_each import PROGRAMS, lora_whole
from tests.support.ranks import Ranks


def compare(name: str, device: str, steps: int = training.STEPS) -> training.Outcome:
    return training.compare(lambda: PROGRAMS[name](device), steps, device=device)


def check_moved(outcomes: list[training.Outcome], name: str) -> None:
    """What is ours to move was on the device and left it; what the framework places was never moved."""
    for outcome in outcomes:
        assert set(outcome.offloaded_bytes) == {"actor", "actor.optimizer"}
        for handle in outcome.offloaded_bytes:
            assert (outcome.offloaded_bytes[handle] > 0) == (name != "cpu_offload"), handle
            # Of an external model what it has on the device itself: on a GPU a buffer of one number.
            assert (outcome.resident_bytes[handle] > 4) == (name != "cpu_offload"), handle


SAVED = [name for name in PROGRAMS if not name.startswith("fsdp1")]
"""FSDP1's checkpoint is torch's to make, which the error says."""


def started(name: str, device: str) -> training.Program:
    """A program of which no phase uses the model while it is published: streamed, it is not on the device then."""
    torch.manual_seed(0)
    program = PROGRAMS[name](device)
    program.phases = tuple(each for each in program.phases if each[0] != "weight_sync")
    return program


def managed(name: str, device: str, **keywords: Any) -> tuple[training.Program, placement.Manager]:
    program = started(name, device)
    manager = placement.Manager(device=training.device_of(device), **keywords)
    program.register(manager)
    run(program, manager, range(2))
    return program, manager


def run(program: training.Program, manager: placement.Manager, steps: range) -> list[bytes]:
    losses = []
    for step in steps:
        for phase, method in program.phases:
            with manager.phase(phase):
                losses.append(training.as_bytes(getattr(program, method)(step)))
    assert_nothing_resident(manager, allow_foreign=True)
    return losses


@dataclass(frozen=True)
class Published:
    """What one rank published, and what torch itself says the whole weights are."""

    names: list[str]
    expected_names: list[str]
    different: list[str]
    forms_differ: list[str]
    """Weights of which `weights_info`, asked while everything was offloaded, said another name, shape or dtype."""
    peak_bytes: int
    """Of torch's allocator on a GPU, above what it held before; 0 elsewhere."""
    bound_bytes: int


def whole(name: str, device: str) -> dict[str, torch.Tensor]:
    """The full state dict of the same program, plain, after the same steps."""
    program = started(name, device)
    for step in range(2):
        for _, method in program.phases:
            getattr(program, method)(step)
    program.reshard()
    full = get_model_state_dict(program.model, options=StateDictOptions(full_state_dict=True))
    return lora_whole(full, device) if name == "lora" else full


def publish(name: str, device: str, streamed: bool) -> Published:
    expected = whole(name, device)
    _, manager = managed(name, device, policy=Colocated(stream_sync=True) if streamed else "colocated")
    actor = manager.handles["actor"]
    info = {each.name: (each.shape, each.dtype) for each in actor.weights_info()}
    largest = max(tensor.nbytes for tensor in expected.values())
    forms_differ, different, names, base, peak = [], [], [], 0, 0
    with manager.phase("weight_sync"):
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        for bucket in actor.weights(bucket_bytes=largest // 2):
            for key, tensor in bucket:
                names.append(key)
                if info.get(key) != (tuple(tensor.shape), tensor.dtype):
                    forms_differ.append(key)
                if key in expected and training.as_bytes(tensor) != training.as_bytes(expected[key]):
                    different.append(key)
            del bucket, tensor
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated() - base
    assert_nothing_resident(manager, allow_foreign=True)
    manager.close()
    # A tensor larger than a bucket comes alone; while it is gathered there are its parts as well. Beside it what an adapter adds to it,
    # or this rank's part of what is not cut along its first dimension.
    tensors = 3 if name in ("lora", "tensor_parallel") else 2
    return Published(names, list(expected), different, forms_differ, peak, tensors * largest + (1 << 20))


def check_published(published: Published) -> None:
    assert sorted(published.names) == sorted(published.expected_names)
    assert not published.different
    assert not published.forms_differ
    assert published.peak_bytes <= published.bound_bytes


def save_and_load(name: str, device: str, path: str) -> None:
    program, manager = managed(name, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # with what is adopted, where torch counts it as allocated in either state
    placement.checkpoint.save(manager, path)
    assert_nothing_resident(manager, allow_foreign=True)
    if device == "cuda":
        # A number to agree with the other ranks on is all that NCCL is asked for.
        assert torch.cuda.max_memory_allocated() - before < 1 << 20
    assert manager.device.memory().chunk_bytes == 0
    losses = run(program, manager, range(2, 5))
    manager.close()
    values = training.digest(program)
    del program

    program = started(name, device)
    with torch.no_grad():
        for parameter in program.model.parameters():  # nothing of what is loaded may be there already
            for _, part in training.local_parts(parameter):
                part.fill_(7)
    manager = placement.Manager(device=training.device_of(device))
    program.register(manager)
    placement.checkpoint.load(manager, path)
    assert_nothing_resident(manager, allow_foreign=True)
    assert run(program, manager, range(2, 5)) == losses
    manager.close()
    assert training.digest(program) == values


def needed(name: str) -> str:
    if name == "lora":
        pytest.importorskip("peft", reason="PEFT is not installed", exc_type=ImportError)
    return name


@pytest.mark.parametrize(("name", "streamed"), [("lora", True), ("fsdp1_original", False)])
def test_published_weights_equal_the_full_state_dict(two_ranks: Ranks, name: str, streamed: bool) -> None:
    for published in two_ranks.run(publish, needed(name), "cpu", streamed):
        check_published(published)


def test_a_checkpoint_of_what_is_offloaded_resumes_exactly(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(save_and_load, needed("lora"), "cpu", str(tmp_path))
