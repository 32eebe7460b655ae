"""Programs with every kind of model, for the tests of checkpoints and of state dicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from placement import Handle, Manager
from placement.testing import Faults, SimulatedDevice, assert_nothing_resident
from tests.sharded.training import as_bytes, bytes_of, local_parts

WIDTH = 12


class Net(torch.nn.Module):
    """Sizes that no number of ranks divides, a tied head, a buffer, and a parameter with one row,
    of which a second rank has none."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(21, WIDTH)
        self.up = torch.nn.Linear(WIDTH, inner)
        self.down = torch.nn.Linear(inner, WIDTH)
        self.row = torch.nn.Parameter(torch.randn(1, WIDTH))
        self.head = torch.nn.Linear(WIDTH, 21, bias=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.seen += 1
        hidden = self.embed(tokens)
        return self.head(hidden + self.down(torch.relu(self.up(hidden))) * self.row)


@dataclass
class Program:
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    manager: Any = None
    """A `Manager`; None where nothing is placed."""

    @property
    def actor(self) -> Handle:
        return self.manager.handles["actor"]  # type: ignore[no-any-return]

    @property
    def adam(self) -> Handle:
        return self.manager.handles["actor.optimizer"]  # type: ignore[no-any-return]

    def step(self, number: int) -> bytes:
        tokens = torch.randint(0, 21, (3, 5), generator=torch.Generator().manual_seed(number))
        loss = self.model(tokens).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return as_bytes(loss)

    def train(self, *numbers: int) -> list[bytes]:
        """Steps, each in a phase of its own where there is a manager."""
        losses = []
        for number in numbers:
            if self.manager is None:
                losses.append(self.step(number))
                continue
            with self.manager.phase("train"):
                losses.append(self.step(number))
            assert_nothing_resident(self.manager, allow_foreign=True)
        return losses

    def values(self) -> dict[str, bytes]:
        """Every value that a checkpoint has to bring back, as this rank's bytes, read as a user
        reads them."""
        model = self.model.state_dict() if self.manager is None else self.actor.state_dict()
        optimizer = self.optimizer.state_dict() if self.manager is None else self.adam.state_dict()
        found = bytes_of({"model": model, "optimizer": optimizer["state"]})
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer["param_groups"]
        ]
        return found | {"groups": repr(groups).encode()}

    def objects(self) -> list[int]:
        """What must stay: tensor objects, addresses, optimizer keys, and which names are one
        tensor."""
        named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
        parts = [part.data_ptr() for _, value in named for _, part in local_parts(value)]
        return [
            *(id(value) for _, value in named),
            *parts,
            *(id(key) for key in self.optimizer.state),
        ]


def build(kind: str, *, managed: bool = True, seed: int = 0) -> Program:
    """A program of one kind: plain, ddp, fsdp2, external (fsdp2 under CPUOffloadPolicy), tp, or
    lora, whose head is tied."""
    torch.manual_seed(seed)
    model: Any = Net(36 if kind == "tp" else 35)  # tensor parallelism computes with what it has
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model.head.weight = model.embed.weight
        model = get_peft_model(
            model, LoraConfig(target_modules=["up", "down"], r=3, init_lora_weights=False)
        )
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        model.row.requires_grad_(False)
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    if kind == "external":
        policy = CPUOffloadPolicy(pin_memory=False)
        for part in (model.up, model):
            fully_shard(part, offload_policy=policy)
    if kind in ("fsdp2", "lora"):
        inner = model.base_model.model if kind == "lora" else model
        for part in (inner.up, inner.down):
            fully_shard(part)
        fully_shard(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [{"params": trained[:2], "lr": 3e-2}, {"params": trained[2:], "weight_decay": 0.1}]
    steps = torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)
    program = Program(model, steps)
    if managed:
        program.manager = Manager(device=Faults(SimulatedDevice(64 << 20, chunk_bytes=4096)))
        program.manager.register("actor", model, role="actor")
        program.manager.register("actor.optimizer", steps)
    return program
