"""PEFT: LoRA over a frozen base, adapters that come and go. The real package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from placement import Manager, NotResidentError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import training
from tests.support.frameworks import needs
from tests.support.ranks import Ranks
from tests.support.worker import make_manager

peft = needs("peft")
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


def build() -> training.Program:
    model = adapted(save_head=True)
    for layer in (model.base_model.model.up, model.base_model.model.down):
        fully_shard(layer)
    fully_shard(model)
    adam = torch.optim.AdamW(trained(model), lr=1e-2)
    return training.Program(model, adam, lambda number: (model(batch(number)) - 1).square().mean())


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


def values(model: Any, optimizer: Any) -> dict[str, bytes]:
    return training.bytes_of({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})


def test_steps_of_lora_under_fsdp2(two_ranks: Ranks) -> None:
    for outcome in two_ranks.run(training.compare, build):
        assert outcome.skipped_bytes["actor"] > outcome.offloaded_bytes["actor"]


def test_adapters_that_are_added_switched_disabled_and_deleted_between_phases() -> None:
    """The story plain and under a manager."""
    plain = [(values(model, adam), loss) for model, adam, loss in story(lambda _: nullcontext())]
    manager = Manager(device=SimulatedDevice(1 << 22, chunk_bytes=CHUNK_BYTES))
    hosts: list[int] = []
    for number, (model, adam, loss) in enumerate(story(manager.phase)):
        if not manager.handles:
            manager.register("actor", model, role="actor")
            manager.register("actor.optimizer", adam)
        assert_nothing_resident(manager)
        wanted, plain_loss = plain[number]
        assert loss == plain_loss, f"the loss of part {number} differs from the plain run's"
        training.assert_same(values(manager.handles["actor"], manager.handles["actor.optimizer"]), wanted, f"part {number}")
        hosts.append(manager.handles["actor"].host_bytes)
    assert len(hosts) == len(plain)
    manager.close()
    assert hosts[4] > hosts[3]  # the second adapter
    assert hosts[-1] == hosts[3]  # deleted: its host memory is given back


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("merged with its adapters", lambda model: model.merge_adapter()),
        ("merged with its adapters", lambda model: model.merge_and_unload()),
        # It copies the module that is to be saved.
        ("copied or pickled", lambda model: model.add_adapter("more", config(modules_to_save=["head"]))),
    ],
)
def test_what_would_compute_with_offloaded_weights_is_refused(what: str, change: Callable[[Any], Any]) -> None:
    """Merged while offloaded, NaN is added to NaN, which nobody sees; PEFT notes the merge and leaves the adapter out from then on."""
    model = adapted()
    output = training.as_bytes(model(batch(0)))
    manager = make_manager(device=SimulatedDevice(1 << 22, chunk_bytes=CHUNK_BYTES))
    manager.register("actor", model, role="actor")
    with pytest.raises(NotResidentError, match=what):
        change(model)
    with manager.phase("log_prob"):
        assert training.as_bytes(model(batch(0))) == output
    with manager.phase("log_prob"):
        model.merge_adapter()
        merged = training.as_bytes(model(batch(0)))
    assert_nothing_resident(manager)
    with pytest.raises(NotResidentError, match="merged with its adapters"):
        model.unmerge_adapter()
    with manager.phase("log_prob"):
        assert training.as_bytes(model(batch(0))) == merged
        model.unmerge_adapter()
    manager.close()
    assert not any({"merge", "unmerge"} & set(vars(module)) for module in model.modules())
