"""One training program for each way of sharding, on whatever device: the same bodies run with gloo
and with NCCL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import placement
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.sharded import training
from tests.sharded.training import Program, here

WIDTH = {"cpu": 17, "cuda": 515}
"""Odd, so that no shard has the size of another; several chunks, whatever a chunk is."""
ROWS = 6


class Block(nn.Module):
    """A residual MLP whose hidden width two ranks can share."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width + 2)
        self.down = nn.Linear(4 * width + 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Two blocks between layers that belong to the root, and a buffer that a forward pass
    writes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.last = nn.Linear(width, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        out: torch.Tensor = self.last(hidden)
        return out


def mesh(device: str) -> DeviceMesh:
    return init_device_mesh(device, (dist.get_world_size(),))


def net(device: str, where: torch.device | None = None) -> Net:
    torch.manual_seed(3)
    return Net(WIDTH[device]).to(where or here(device))


def rows(number: int, device: str, *, same_data: bool) -> torch.Tensor:
    """A batch, the rank's own unless every rank needs the same."""
    rank = 0 if same_data else dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return torch.randn(ROWS, WIDTH[device], generator=generator).to(here(device))


def program(model: Any, device: str, *, same_data: bool = False, **options: Any) -> Program:
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, **options
    )

    def loss(number: int) -> torch.Tensor:
        out: torch.Tensor = model(rows(number, device, same_data=same_data)).float().square().mean()
        return out

    return Program(model, optimizer, loss)


def fsdp2(device: str) -> Program:
    """Uneven shards in bfloat16, and a root that stays unsharded after its forward pass."""
    model = net(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh(device), mp_policy=policy)
    fully_shard(model, mesh=mesh(device), mp_policy=policy, reshard_after_forward=False)
    return program(model, device)


def cpu_offload(device: str) -> Program:
    """FSDP2 that keeps its shards on the CPU itself."""
    model = net(device, torch.device("cpu"))
    policy = CPUOffloadPolicy(pin_memory=device == "cuda")
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh(device), offload_policy=policy, reshard_after_forward=True)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(here(device))
    return program(model, device)


def fsdp1(device: str, use_orig_params: bool) -> Program:
    dtype = torch.bfloat16
    model = FullyShardedDataParallel(
        net(device),
        device_id=here(device),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)
        if use_orig_params
        else None,
    )
    return program(model, device)


def fsdp1_original(device: str) -> Program:
    return fsdp1(device, True)


def fsdp1_flat(device: str) -> Program:
    return fsdp1(device, False)


def ddp(device: str) -> Program:
    """DDP whose gradients are views of its buckets."""
    model = net(device)
    ids = None if device == "cpu" else [here(device).index]
    return program(
        nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True),
        device,
    )


def tensor_parallel(device: str) -> Program:
    """Each block's layers cut over the ranks, the rest whole on each."""
    model = net(device)
    for block in model.blocks:
        parallelize_module(
            block, mesh(device), {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    # Plain tensors and DTensors do not go into one fused call.
    return program(model, device, same_data=True, foreach=False)


def with_adapters(base: Net) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    return get_peft_model(base, LoraConfig(r=3, target_modules=["up", "down"]))  # type: ignore[arg-type]


def lora_whole(full: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """From a full state dict with adapters, that of the base as PEFT itself merges it."""
    model = with_adapters(net(device))
    model.load_state_dict(full)
    merged: dict[str, torch.Tensor] = model.merge_and_unload().state_dict()
    return merged


def lora(device: str) -> Program:
    """PEFT adapters, added before FSDP2 shards the model; the base is frozen."""
    base = net(device)
    model = with_adapters(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # zero as PEFT makes it: then nothing but it would learn in the first step
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    for block in base.blocks:
        fully_shard(block, mesh=mesh(device))
    fully_shard(model, mesh=mesh(device))
    return program(model, device)


PROGRAMS: dict[str, Callable[[str], Program]] = {
    each.__name__: each
    for each in (fsdp2, cpu_offload, fsdp1_original, fsdp1_flat, ddp, tensor_parallel, lora)
}


# --- what is asked of each


def compare(name: str, device: str, steps: int = training.STEPS) -> training.Outcome:
    return training.compare(lambda: PROGRAMS[name](device), steps, device=device)


def check_moved(outcomes: list[training.Outcome], name: str) -> None:
    """What is ours to move was on the device and left it; what the framework places was never
    moved."""
    for outcome in outcomes:
        assert set(outcome.offloaded_bytes) == {"actor", "actor.optimizer"}
        for handle in outcome.offloaded_bytes:
            assert (outcome.offloaded_bytes[handle] > 0) == (name != "cpu_offload"), handle
            # Of an external model what it has on the device itself: on a GPU a buffer of one
            # number.
            assert (outcome.resident_bytes[handle] > 4) == (name != "cpu_offload"), handle


SAVED = [name for name in PROGRAMS if not name.startswith("fsdp1")]
"""FSDP1's checkpoint is torch's to make, which the error says."""


def started(name: str, device: str) -> training.Program:
    """A program of which no phase uses the model while it is published: streamed, it is not on the
    device then."""
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
    """Weights of which `weights_info`, asked while everything was offloaded, said another name,
    shape or dtype."""
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
    _, manager = managed(
        name, device, policy=Colocated(stream_sync=True) if streamed else "colocated"
    )
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
                if key in expected and training.as_bytes(tensor) != training.as_bytes(
                    expected[key]
                ):
                    different.append(key)
            del bucket, tensor
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated() - base
    assert_nothing_resident(manager, allow_foreign=True)
    manager.close()
    # A tensor larger than a bucket comes alone; while it is gathered there are its parts as well.
    # Beside it what an adapter adds to it, or this rank's part of what is not cut along its first
    # dimension.
    tensors = 3 if name in ("lora", "tensor_parallel") else 2
    return Published(
        names, list(expected), different, forms_differ, peak, tensors * largest + (1 << 20)
    )


def check_published(published: Published) -> None:
    assert sorted(published.names) == sorted(published.expected_names)
    assert not published.different
    assert not published.forms_differ
    assert published.peak_bytes <= published.bound_bytes


def save_and_load(name: str, device: str, path: str) -> None:
    program, manager = managed(name, device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        # with what is adopted, where torch counts it as allocated in either state
        before = torch.cuda.memory_allocated()
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
        # nothing of what is loaded may be there already
        for parameter in program.model.parameters():
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
