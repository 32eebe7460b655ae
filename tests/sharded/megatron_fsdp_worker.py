"""Megatron-FSDP, built small: the package of that name, and what megatron-core brings along.
Without a GPU inside `pretend_cuda()`."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.sharded import training
from tests.sharded.pretend_cuda import pretend_cuda, replaced

PACKAGES = {
    "0.6.1": "megatron_fsdp",
    "in megatron-core": "megatron.core.distributed.fsdp.src.megatron_fsdp",
}
WIDTHS = {"cpu": (65, 33), "cuda": (1031, 519)}
STRATEGIES = ("optim_grads_params", "optim_grads", "optim", "no_shard")


class Block(torch.nn.Module):
    """A unit that is gathered and released as a whole."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


def package(version: str) -> Any:
    """A version's `fully_shard`. 0.6.1 does not go with megatron-core 0.16.1, so it is loaded as
    where there is none."""
    name = PACKAGES[version]
    hidden = (
        [each for each in ("megatron.core", *sys.modules) if each.startswith("megatron.core")]
        if name == "megatron_fsdp"
        else []
    )
    with replaced(dict.fromkeys(hidden)):
        return importlib.import_module(f"{name}.fully_shard")


class Program(training.Program):
    """Sharded parameters are what lives on: the module shows them or the gathered ones by turns."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        buffer = self.model.param_and_grad_buffer
        yield from buffer.optimizer_named_parameters
        for number, group in enumerate(buffer.parameter_groups):
            for name in ("model_weight_buffer", "main_weight_buffer", "main_grad_buffer"):
                if (held := getattr(group, name)) is not None:
                    yield f"{number}.{name}", held.data

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().values():
            # between their shards lies what was there when they were allocated
            if not name.endswith("_buffer"):
                yield name, tensor

    def backward(self, step: int) -> torch.Tensor:
        self.model.set_model_auto_sync(False)
        loss = self.loss(2 * step)
        loss.backward()
        return loss.detach()

    def learn(self, step: int) -> torch.Tensor:
        self.model.set_model_auto_sync(True)
        return super().learn(step)


def loss_of(model: Any, device: str, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    loss: torch.Tensor = (
        model(torch.randn(4, 16, generator=generator).to(training.here(device))).square().mean()
    )
    return loss


def build(version: str, strategy: str, device: str = "cpu") -> Program:
    fsdp = package(version)
    wide, narrow = WIDTHS[device]
    mesh = torch.distributed.device_mesh.init_device_mesh(
        device, (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp")
    )
    model = fsdp.fully_shard_model(
        torch.nn.Sequential(Block(16, wide), Block(wide, narrow), torch.nn.Linear(narrow, 8)),
        device_mesh=mesh,
        dp_shard_dim="dp",
        tp_dim="tp",
        device=training.here(device),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        calculate_per_token_loss=True,  # gloo cannot scale in a reduction
    )
    optimizer = fsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    return Program(model, optimizer, functools.partial(loss_of, model, device))


def compare(version: str, strategy: str, **options: Any) -> training.Outcome:
    return training.compare(
        functools.partial(build, version, strategy), within=pretend_cuda, **options
    )
