"""The very tensors of a state dict, loaded back: torch makes them the object's own, in storages at the addresses of the ones before."""

from __future__ import annotations

import copy

import pytest
import torch

from placement.devices.base import Device
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.late_device import LateDevice
from tests.support.worker import CAPACITY, Worker, assert_same, trained

CHUNK = 1 << 14
VERIFY = ["off", "sample", "always"]


def worker_on(device: str, verify: str) -> Worker:
    found: Device = SimulatedDevice(CAPACITY, chunk_bytes=CHUNK) if device == "simulated" else LateDevice(CAPACITY, chunk_bytes=CHUNK)
    return trained(device=found, verify=verify)


def check(worker: Worker) -> None:
    """Later phases end without an error, and take everything off the device."""
    for _ in range(2):
        with worker.manager.phase("train"):
            pass
    assert_nothing_resident(worker.manager)


@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("device", ["simulated", "late"])
def test_an_optimizer_takes_over_a_state_dict_that_is_held(device: str, verify: str) -> None:
    worker = worker_on(device, verify)
    wanted = copy.deepcopy(worker.adam.state_dict())
    shown = worker.adam.state_dict()
    with worker.manager.phase("restore"):
        worker.adam.load_state_dict(shown)
    assert_same(worker.optimizer.state_dict(), wanted)
    assert shown["state"][0]["exp_avg"].isnan().any(), "the page says so: these are the optimizer's own tensors now"
    check(worker)
    assert_same(worker.optimizer.state_dict(), wanted)


@pytest.mark.leaves_behind("the optimizer steps parameters that were replaced")
@pytest.mark.parametrize("verify", VERIFY)
@pytest.mark.parametrize("device", ["simulated", "late"])
def test_a_module_takes_over_a_state_dict_that_is_held(device: str, verify: str) -> None:
    worker = worker_on(device, verify)
    wanted = copy.deepcopy(worker.critic_net.state_dict())
    shown = worker.critic_net.state_dict()
    with worker.manager.phase("restore"):
        worker.critic_net.load_state_dict(shown, assign=True)
        worker.sgd.param_groups[0]["params"] = [*worker.critic_net.parameters()]
        worker.sgd.state.clear()
    assert_same(dict(worker.critic.state_dict()), dict(wanted))
    check(worker)
    assert_same(dict(worker.critic.state_dict()), dict(wanted))


def test_a_state_dict_of_which_a_copy_is_loaded_keeps_its_values() -> None:
    worker = trained()
    wanted = copy.deepcopy(worker.adam.state_dict())
    shown = worker.adam.state_dict()
    values = worker.critic_net.state_dict()
    with worker.manager.phase("restore"):
        worker.adam.load_state_dict(copy.deepcopy(shown))
        worker.critic_net.load_state_dict(copy.deepcopy(values))
    for found in (shown, worker.adam.state_dict()):
        assert_same(found["state"], wanted["state"])
    assert not any(torch.isnan(value).any() for value in values.values())
    check(worker)
