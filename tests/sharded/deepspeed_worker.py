"""What the DeepSpeed tests run on ranks: engines of every ZeRO stage, on its accelerator of CUDA or
on that of the CPU."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.sharded import training

WIDTH = {"cpu": 32, "cuda": 512}
"""Even: what DeepSpeed pads a rank's part with is never written, and reads as it comes."""


def engine(stage: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Any:
    os.environ["DS_ACCELERATOR"] = device
    import deepspeed

    backend: Any = importlib.import_module("deepspeed.comm.torch")
    # an extension that is compiled where it is first used, for reductions that gloo does as well
    backend.build_shm_op = lambda: None
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(
            dist_backend="gloo" if device == "cpu" else "nccl", auto_mpi_discovery=False
        )
    torch.manual_seed(0)
    width = WIDTH[device]
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype is torch.bfloat16},
        "zero_allow_untested_optimizer": True,
    }
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return deepspeed.initialize(
        model=model, optimizer=adam, config=config, dist_init_required=False
    )[0]


def batch(number: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    seed = 100 * dist.get_rank() + number
    return torch.randn(4, WIDTH[device], generator=torch.Generator().manual_seed(seed)).to(
        training.here(device), dtype
    )


class Program(training.Program):
    phases = (("log_prob", "evaluate"), ("weight_sync", "evaluate"), ("train", "learn"))

    def learn(self, step: int) -> torch.Tensor:
        loss = self.loss(step)
        self.model.backward(loss)
        self.model.step()
        return loss.detach()

    def optimizers(self) -> list[Any]:
        return [getattr(self.optimizer, "optimizer", self.optimizer)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # under ZeRO 3 this rank's part: the parameter itself is empty now and then
        for name, parameter in self.model.named_parameters():
            yield name, getattr(parameter, "ds_tensor", parameter)


def build(stage: int, dtype: torch.dtype, device: str = "cpu") -> Program:
    made = engine(stage, dtype, device)

    def loss(number: int) -> torch.Tensor:
        rows = batch(number, dtype, device)
        found: torch.Tensor = (made(rows) - rows).float().square().mean()
        return found

    return Program(made, made.optimizer, loss, phases=Program.phases)
