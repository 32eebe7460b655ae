"""State that an optimizer's steps have created, and that no offload has taken in yet, is counted as it is after each training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from placement import Handle, Manager, State
from placement.ownership.optimizer import OptimizerAdapter
from placement.testing import SimulatedDevice

WEIGHTS = 3 * 64 * 64 * 4


class Trained:
    """A model with its AdamW, whose state stays in torch's own memory because the policy offloads nothing."""

    def __init__(self) -> None:
        self.device = SimulatedDevice(64 << 20, chunk_bytes=1 << 14)
        self.manager = Manager(device=self.device, policy="resident")
        with torch.device(self.device.torch_device):
            self.net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        self.adam = torch.optim.AdamW(self.net.parameters(), foreach=False)
        self.manager.register("actor", self.net, role="actor")
        self.handle: Handle = self.manager.register("adam", self.adam)

    def train(self) -> None:
        for parameter in self.net.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.adam.step()
        self.adam.zero_grad()

    def cycle(self) -> int:
        """A training. Returns the bytes that the optimizer's handle then has on the device."""
        with self.manager.phase("train"):
            self.train()
        with self.manager.phase("log_prob"):
            assert self.handle.state is State.GPU_RESIDENT
            return self.handle.resident_bytes


@pytest.fixture
def trained() -> Iterator[Trained]:
    made = Trained()
    yield made
    made.manager.close()


def test_new_state_counts_and_is_not_walked_again(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trained.cycle() == 2 * WEIGHTS
    walks = []
    walk = OptimizerAdapter.owned
    monkeypatch.setattr(OptimizerAdapter, "owned", lambda adapter: walks.append(adapter) or walk(adapter))
    for _ in range(3):
        assert trained.cycle() == 2 * WEIGHTS
    assert not walks
    trained.adam.state[trained.net[0].weight]["more"] = torch.ones(64, device=trained.device.torch_device)
    assert trained.cycle() == 2 * WEIGHTS + 64 * 4
    assert walks


def test_state_that_comes_or_goes_counts_with_what_was_replaced_and_grown_meanwhile(trained: Trained) -> None:
    trained.cycle()
    first = trained.adam.state[trained.net[0].weight]
    with trained.manager.phase("train"):
        first["exp_avg"] = first["exp_avg"].clone()
        first["exp_avg_sq"].untyped_storage().resize_(WEIGHTS)  # three times as many bytes, in the same tensor
        del trained.adam.state[trained.net[1].weight]
    with trained.manager.phase("log_prob"):
        assert trained.handle.resident_bytes == WEIGHTS // 3 + WEIGHTS + 2 * WEIGHTS // 3
    with trained.manager.phase("train"):
        trained.adam.load_state_dict(trained.adam.state_dict())
        first = trained.adam.state[trained.net[0].weight]
        first["exp_avg_sq"].data = torch.zeros(64, 64, device=trained.device.torch_device)
        first["exp_avg"] = first["exp_avg"].clone()
    with trained.manager.phase("log_prob"):
        assert trained.handle.resident_bytes == 2 * WEIGHTS * 2 // 3


def test_state_that_two_entries_share_counts_once(trained: Trained) -> None:
    with trained.manager.phase("train"):
        trained.train()
        first, second = (trained.adam.state[trained.net[index].weight] for index in (0, 1))
        second["exp_avg"].data = first["exp_avg"].data
    for _ in range(2):
        with trained.manager.phase("log_prob"):
            assert trained.handle.resident_bytes == 2 * WEIGHTS - WEIGHTS // 3
        with trained.manager.phase("train"):
            pass
