"""VeOmni's shape of expert parallelism: experts and the rest sharded by FSDP2 over two meshes, each
stepped by an optimizer of its own.

The optimizer that holds both is VeOmni's own class. Its package needs more than is installed here,
so only the parts are imported that the class itself needs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from tests.sharded import training

WIDTH, EXPERTS = 12, 4


def is_installed(package: str = "veomni") -> bool:
    """Whether a package is there, without importing it, and also where another test put a stub in
    its place."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def veomni(module: str) -> Any:
    """A module of VeOmni, without running the `__init__` of its packages, which need more than is
    installed."""
    root = importlib.metadata.distribution("veomni").locate_file("veomni")
    for name in ("", "distributed", "optim", "utils"):
        if (full := f"veomni.{name}".rstrip(".")) not in sys.modules:
            package = ModuleType(full)
            package.__path__ = [str(root / name)]
            sys.modules[full] = package
    return importlib.import_module(f"veomni.{module}")


class Experts(nn.Module):
    """The experts of this rank, in one tensor, as VeOmni keeps them."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / WIDTH)
        self.down = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("bw,ewh->ebh", inputs, self.up).relu()
        return torch.einsum("ebh,ehw->bw", hidden, self.down)


class Model(nn.Module):
    """A dense layer, experts, and a part that no batch reaches: its parameters never get a
    gradient."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(count)
        self.spare = nn.Linear(WIDTH, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.experts(self.dense(inputs))
        return result


@functools.cache
def _meshes(expert_parallel: int, device: str) -> tuple[DeviceMesh, DeviceMesh]:
    world = dist.get_world_size()
    experts = init_device_mesh(
        device, (expert_parallel, world // expert_parallel), mesh_dim_names=("ep", "ep_fsdp")
    )
    return init_device_mesh(device, (world,), mesh_dim_names=("fsdp",)), experts["ep_fsdp"]


class Program(training.Program):
    def optimizers(self) -> list[Any]:
        return list(self.optimizer.optimizers_dict.values())


def build(expert_parallel: int, device: str = "cpu") -> Program:
    """Experts cut by expert parallelism on dimension 0 and then sharded on dimension 1, the rest on
    dimension 0 of another mesh."""
    everyone, among_experts = _meshes(expert_parallel, device)
    model = Model(EXPERTS // expert_parallel).to(training.here(device))
    fully_shard(model.experts, mesh=among_experts, shard_placement_fn=lambda _: Shard(1))
    fully_shard(model, mesh=everyone)
    experts = list(model.experts.parameters())
    rest = [each for name, each in model.named_parameters() if not name.startswith("experts.")]
    inner = {
        "ep": torch.optim.AdamW(experts, lr=1e-2),
        "non_extra_parallel": torch.optim.AdamW(rest, lr=1e-3),
    }
    return Program(
        model,
        veomni("optim.optimizer").MultiOptimizer(model, inner, list(inner)),
        lambda number: (model(batch(number, device)) - 1).square().mean(),
    )


def batch(number: int, device: str) -> torch.Tensor:
    return torch.randn(
        6, WIDTH, generator=torch.Generator().manual_seed(100 * dist.get_rank() + number)
    ).to(training.here(device))
