"""Models with an optimizer and a loss, for workers in the shape of a framework's: plain modules, FSDP2, Megatron-Core."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from placement.testing import SimulatedDevice
from tests.sharded import fsdp2_worker, megatron_worker
from tests.sharded.pretend_cuda import pretend_cuda

WIDTH = 24
_generations = itertools.count()


@dataclass
class Job:
    """A model in one or several parts, what steps it, and its loss."""

    parts: list[torch.nn.Module]
    optimizer: Any
    loss: Callable[[int], torch.Tensor]
    """Forward and loss of one batch, by its number."""
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    """The context in which the job computes."""

    def learn(self, number: int) -> torch.Tensor:
        """Zero the gradients, forward, backward, step, and zero them again, as the frameworks' training loops do."""
        self.zero_grad()
        loss = self.loss(number)
        loss.backward()
        for part in self.parts:
            if hasattr(part, "finish_grad_sync"):
                part.finish_grad_sync()
        self.optimizer.step()
        self.zero_grad()
        return loss.detach()

    def zero_grad(self) -> None:
        for part in self.parts:
            if hasattr(part, "zero_grad_buffer"):
                part.zero_grad_buffer()
        self.optimizer.zero_grad()

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, part in enumerate(self.parts):
            yield from ((f"{number}.{name}", each) for name, each in part.named_parameters())

    def state(self) -> Iterator[torch.Tensor]:
        """The tensors of the optimizer's state."""
        chained = getattr(self.optimizer, "chained_optimizers", None)
        for optimizer in [self.optimizer] if chained is None else [each.optimizer for each in chained]:
            for entry in optimizer.state.values():
                yield from (value for value in entry.values() if isinstance(value, torch.Tensor))


def plain(num_parts: int = 1) -> Job:
    """Linear layers, one a part, and AdamW."""
    parts: list[torch.nn.Module] = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(num_parts)]
    optimizer = torch.optim.AdamW([each for part in parts for each in part.parameters()], lr=1e-2)

    def loss(number: int) -> torch.Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        for part in parts:
            x = part(x)
        return x.square().mean()

    return Job(parts, optimizer, loss)


def fsdp2() -> Job:
    """An FSDP2 model, sharded over the ranks of the process group."""
    model = fsdp2_worker.sharded(fsdp2_worker.Model())
    return Job([model], torch.optim.AdamW(model.parameters(), lr=1e-2), functools.partial(fsdp2_worker.loss_of, model))


def megatron() -> Job:
    """Megatron's DistributedDataParallel and its distributed optimizer, on a CPU that says it is CUDA."""
    with pretend_cuda():
        program = megatron_worker.build(megatron_worker.Kind())
    return Job([program.model], program.optimizer, program.loss, pretend_cuda)


@contextmanager
def served_by_another() -> Iterator[None]:
    """The store of the ranks is in the process that started them, as it is in torchrun's agent. Each group in it is a new generation."""
    variables = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(next(_generations))}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def device() -> SimulatedDevice:
    """A device for one rank."""
    return SimulatedDevice(64 << 20, chunk_bytes=8192)


def made(name: str, names: Mapping[str, Any]) -> ModuleType:
    """A module with these names, for `sys.modules`."""
    module = ModuleType(name)
    vars(module).update(names, __path__=[])
    return module


def as_bytes(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's values, whole where it is sharded."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
