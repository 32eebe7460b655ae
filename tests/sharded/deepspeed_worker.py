"""What the DeepSpeed tests run on ranks: engines of every ZeRO stage, on its accelerator of CUDA or on that of the CPU."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from placement import NotResidentError, PhaseError, State
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import training
from tests.support.worker import make_manager

WIDTH = {"cpu": 32, "cuda": 512}
"""Even: what DeepSpeed pads a rank's part with is never written, and reads as it comes."""


def engine(stage: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Any:
    os.environ["DS_ACCELERATOR"] = device
    import deepspeed

    backend: Any = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # an extension that is compiled where it is first used, for reductions that gloo does as well
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend="gloo" if device == "cpu" else "nccl", auto_mpi_discovery=False)
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
    return deepspeed.initialize(model=model, optimizer=adam, config=config, dist_init_required=False)[0]


def batch(number: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    seed = 100 * dist.get_rank() + number
    return torch.randn(4, WIDTH[device], generator=torch.Generator().manual_seed(seed)).to(training.here(device), dtype)


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
        for name, parameter in self.model.named_parameters():  # under ZeRO 3 this rank's part: the parameter itself is empty now and then
            yield name, getattr(parameter, "ds_tensor", parameter)


def build(stage: int, dtype: torch.dtype, device: str = "cpu") -> Program:
    made = engine(stage, dtype, device)

    def loss(number: int) -> torch.Tensor:
        rows = batch(number, dtype, device)
        found: torch.Tensor = (made(rows) - rows).float().square().mean()
        return found

    return Program(made, made.optimizer, loss, phases=Program.phases)


def compare(stage: int, dtype: torch.dtype) -> training.Outcome:
    return training.compare(functools.partial(build, stage, dtype))


def refuse_what_deepspeed_has_offloaded(stage: int) -> dict[str, Any]:
    """Forward and step while DeepSpeed's states are away, then after it has brought them back. Returns what a test asserts."""
    found: dict[str, Any] = {}

    def refused(what: str, call: Any) -> None:
        try:
            call()
        except (NotResidentError, PhaseError) as error:
            found[what] = f"{type(error).__name__}: {error}"

    plain = engine(stage)
    losses = []
    for number in range(2):
        loss = plain(batch(number)).float().square().mean()
        plain.backward(loss)
        plain.step()
        losses.append(training.as_bytes(loss))

    made = engine(stage)
    manager = make_manager(device=SimulatedDevice(1 << 20))
    actor = manager.register("actor", made, role="actor")
    adam = manager.register("actor.optimizer", made.optimizer)
    found["owners"], found["external"] = [owner.name for owner in adam.owners], (actor.external_reason, adam.external_reason)
    seen = []
    with manager.phase("train"):
        loss = made(batch(0)).float().square().mean()
        made.backward(loss)
        made.step()
        seen.append(training.as_bytes(loss))
    made.offload_states()
    assert_nothing_resident(manager)
    with manager.phase("log_prob"):
        refused("forward", lambda: made(batch(1)))
    with manager.phase("train"):
        refused("step", made.step)
        made.reload_states()
        loss = made(batch(1)).float().square().mean()
        made.backward(loss)
        seen.append(training.as_bytes(loss))
    refused("step outside", made.step)
    with manager.phase("train"):
        made.offload_states(include=[_kinds().optim_states])
        made(batch(2))  # what forward needs is there
        refused("step without moments", made.optimizer.step)
        made.reload_states()
        made.step()  # with the gradients of before: a refused step lets go of none
    found["same"] = seen == losses and _values(made) == _values(plain)
    found["states"] = (actor.state, adam.state) == (State.CPU_OFFLOADED, State.CPU_OFFLOADED)
    manager.close()
    found["guard is gone"] = "step" not in vars(made.optimizer)
    return found


def _kinds() -> Any:
    return importlib.import_module("deepspeed.runtime.zero.offload_config").OffloadStateTypeEnum


def _values(made: Any) -> list[bytes]:
    return [training.as_bytes(each) for each in made.module.parameters()]
