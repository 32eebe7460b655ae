"""LoRA on a plain model and under FSDP2, trained with adapters that come and go between phases. PEFT's own classes."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from placement import Manager
from placement.group import StoreGroup
from placement.storage.shared.ranges import SharedRange
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import training
from tests.support.frameworks import Later

peft = Later("peft")
WIDTH = 64
CHUNK_BYTES = 4096


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(inputs + self.down(self.up(inputs).relu()))
        return result


def config(**more: Any) -> Any:
    return peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights="gaussian", **more)


def adapted(*, save_head: bool = False) -> Any:
    return peft.get_peft_model(Model(), config(modules_to_save=["head"] if save_head else None))


def batch(number: int) -> torch.Tensor:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * rank + number))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [each for each in model.parameters() if each.requires_grad]


def build(sharded: bool, save_head: bool) -> training.Program:
    model = adapted(save_head=save_head)
    if sharded:
        for layer in (model.base_model.model.up, model.base_model.model.down):
            fully_shard(layer)
        fully_shard(model)
    adam = torch.optim.AdamW(trained(model), lr=1e-2)
    return training.Program(model, adam, lambda number: (model(batch(number)) - 1).square().mean())


def compare(sharded: bool, save_head: bool) -> training.Outcome:
    """Steps, plain and under a manager."""
    return training.compare(functools.partial(build, sharded, save_head))


# --- ranks that share the base


def shares_its_base(generation: int) -> list[tuple[bool, int, int]]:
    """DDP over LoRA, trained and merged on every rank, as its twin is that is not placed.

    Returns before and after the first merge: whether the ranks share a host copy of the base, host bytes of this rank, and the base's.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    group = StoreGroup(dist.distributed_c10d._get_default_store(), rank, world_size, 20.0, generation=generation)
    manager = Manager(device=SimulatedDevice(1 << 22, chunk_bytes=CHUNK_BYTES), group=group)
    (ours, adam), (plain, plains_adam) = [_seeded() for _ in range(2)]
    handle = manager.register("actor", ours, role="actor", replicated=True)
    manager.register("actor.optimizer", adam)
    assert handle.holding is not None
    (base,) = (r for r in handle.holding.ranges if isinstance(r, SharedRange) and r.is_frozen)

    def check() -> None:
        values = [dict(each.module.named_parameters()) for each in (ours, plain)]
        for name, wanted in values[1].items():
            assert training.as_bytes(handle.state_dict()[f"module.{name}"]) == training.as_bytes(wanted), name

    def seen() -> tuple[bool, int, int]:
        assert_nothing_resident(manager)
        manager.check_integrity()
        return base.is_shared, handle.host_bytes, base.nbytes

    found = []
    for step in range(6):
        with manager.phase("train"):
            _learn(ours, adam, step)
        _learn(plain, plains_adam, step)
        check()
        if step == 2:
            found.append(seen())
        if step in (2, 4):
            with manager.phase("weight_sync"):
                ours.module.merge_adapter()
            plain.module.merge_adapter()
            check()
            with manager.phase("weight_sync"):
                ours.module.unmerge_adapter()
            plain.module.unmerge_adapter()
            check()
    found.append(seen())
    manager.close()
    return found


def _seeded() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = adapted(save_head=True)
    return DistributedDataParallel(model, gradient_as_bucket_view=True), torch.optim.AdamW(trained(model), lr=1e-2)


def _learn(model: nn.Module, adam: torch.optim.Optimizer, number: int) -> None:
    (model(batch(number)) - 1).square().mean().backward()
    adam.step()
    adam.zero_grad()


# --- adapters that come and go


def story(phase: Callable[[str], AbstractContextManager[Any]]) -> Iterator[tuple[Any, Any, bytes | None]]:
    """A program whose adapters are added, switched, disabled and deleted between phases. Yields model, optimizer and last loss."""
    torch.manual_seed(0)
    model = adapted(save_head=True)
    adam = torch.optim.AdamW(trained(model), lr=1e-2)
    yield model, adam, None

    def learn(number: int) -> bytes:
        torch.manual_seed(number)
        loss = (model(batch(number)) - 1).square().mean()
        loss.backward()
        adam.step()
        adam.zero_grad()
        return training.as_bytes(loss)

    def look(number: int) -> bytes:
        with torch.no_grad():
            return training.as_bytes(model(batch(number)))

    def run(name: str, work: Callable[[int], bytes], number: int) -> tuple[Any, Any, bytes]:
        with phase(name):
            return model, adam, work(number)

    for number in range(3):
        yield run("train", learn, number)
    model.add_adapter("second", config())
    yield run("log_prob", look, 3)
    model.set_adapter("second")
    adam.add_param_group({"params": trained(model), "lr": 3e-2})
    for number in range(4, 7):
        yield run("train", learn, number)
    with model.disable_adapter():
        yield run("log_prob", look, 7)
    model.set_adapter("default")
    yield run("train", learn, 8)
    yield run("log_prob", look, 9)
    del adam.param_groups[1]
    kept = {id(each) for each in adam.param_groups[0]["params"]}
    adam.state = defaultdict(dict, {each: entry for each, entry in adam.state.items() if id(each) in kept})
    model.delete_adapter("second")
    for number in range(10, 13):
        yield run("train", learn, number)
    yield run("log_prob", look, 13)


def tell() -> dict[str, Any]:
    """The story plain and under a manager. Returns what a test asserts."""
    plain = [(values(model, adam), loss) for model, adam, loss in story(lambda _: nullcontext())]
    manager = Manager(device=SimulatedDevice(1 << 22, chunk_bytes=CHUNK_BYTES))
    seen: list[Any] = []
    hosts: list[int] = []
    for model, adam, loss in story(manager.phase):
        if not manager.handles:
            manager.register("actor", model, role="actor")
            manager.register("actor.optimizer", adam)
        assert_nothing_resident(manager)
        seen.append((values(manager.handles["actor"], manager.handles["actor.optimizer"]), loss))
        hosts.append(manager.handles["actor"].host_bytes)
    manager.close()
    return {"plain": plain, "seen": seen, "hosts": hosts}


def values(model: Any, optimizer: Any) -> dict[str, bytes]:
    """The bytes of the state dicts of a model and its optimizer, or of their handles."""
    found = {f"model.{name}": training.as_bytes(value) for name, value in model.state_dict().items()}
    for index, entry in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{index}.{key}": training.as_bytes(value) for key, value in entry.items()}
    return found
