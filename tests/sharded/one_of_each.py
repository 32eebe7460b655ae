"""One training program for each way of sharding, on whatever device: the same bodies run with gloo and with NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

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
    """Two blocks between layers that belong to the root, and a buffer that a forward pass writes."""

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
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, **options)

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
        mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if use_orig_params else None,
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
    return program(nn.parallel.DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True), device)


def tensor_parallel(device: str) -> Program:
    """Each block's layers cut over the ranks, the rest whole on each."""
    model = net(device)
    for block in model.blocks:
        parallelize_module(block, mesh(device), {"up": ColwiseParallel(), "down": RowwiseParallel()})
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
            if "lora_B" in name:  # zero as PEFT makes it: then nothing but it would learn in the first step
                parameter.normal_(std=0.02)
    for block in base.blocks:
        fully_shard(block, mesh=mesh(device))
    fully_shard(model, mesh=mesh(device))
    return program(model, device)


PROGRAMS: dict[str, Callable[[str], Program]] = {
    each.__name__: each for each in (fsdp2, cpu_offload, fsdp1_original, fsdp1_flat, ddp, tensor_parallel, lora)
}
