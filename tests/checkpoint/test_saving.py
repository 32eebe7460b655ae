"""Offloads that leave chunks behind as early ones: nobody waits while they are saved, and nobody
reads what is not there yet."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

import placement
from placement import Phase, State
from placement.devices.base import Device
from placement.devices.memory import Addresses, Chunk
from placement.policies import Colocated
from placement.storage.managed import ManagedStorage
from placement.storage.owners import RANGES
from placement.storage.range import Range
from placement.testing import InjectedFault, SimulatedDevice, assert_nothing_resident
from tests.planning.test_prefetch import ALL, CHUNK, early_bytes, last_load, used_bytes
from tests.support.buckets import set_bucket_bytes
from tests.support.early import Early, wait_for_copies
from tests.support.late_device import LateDevice
from tests.support.worker import CAPACITY, Worker, assert_same, learn, trained


def late_worker(wanted: Mapping[str, Mapping[str, int]], **keywords: Any) -> Worker:
    """A worker whose actor has learnt for a step, on a device whose copies happen when somebody
    waits for them."""
    worker = trained(
        **{"policy": Early(wanted), "device": LateDevice(CAPACITY, chunk_bytes=CHUNK), **keywords}
    )
    worker.adam.zero_grad()
    worker.sgd.zero_grad()
    return worker


STAY = {"values": {"actor": ALL, "actor.optimizer": ALL}, "log_prob": {"actor.optimizer": ALL}}


@contextmanager
def trained_again(worker: Worker) -> Iterator[Phase]:
    """In a phase in which the actor has learnt once more, and keeps no gradients."""
    with worker.manager.phase("train") as step:
        learn(worker.net, worker.adam, 1)
        worker.adam.zero_grad()
        yield step


def test_an_offload_leaves_what_the_plan_wants_early_and_waits_for_nothing() -> None:
    worker = late_worker(STAY)
    device: Any = worker.manager.device
    with trained_again(worker) as step:
        held = {
            name: worker.manager.handles[name].resident_bytes
            for name in ("actor", "actor.optimizer")
        }
        device.most_waiting_bytes = 0
        step.switch("values")
        assert (
            device.most_waiting_bytes
            >= used_bytes(worker, "actor") + used_bytes(worker, "actor.optimizer") - CHUNK
        )
        assert worker.actor.state is State.CPU_OFFLOADED
        assert not torch.isfinite(worker.net[0].weight).any()
        assert early_bytes(worker) == held
        worker.manager.check_integrity()
        step.switch("train")
        assert last_load(worker, "actor") == (0, used_bytes(worker, "actor"))
        assert last_load(worker, "actor.optimizer") == (0, used_bytes(worker, "actor.optimizer"))
    assert_nothing_resident(worker.manager)


@pytest.mark.parametrize(
    "rows", [slice(0, 1), slice(2, 3), slice(None)], ids=["first chunk", "last chunk", "all"]
)
def test_bytes_that_were_written_into_a_readonly_handle_do_not_stay(rows: slice) -> None:
    worker = Worker(
        policy=Early({"values": {"reward": ALL}}), device=LateDevice(CAPACITY, chunk_bytes=CHUNK)
    )
    net = torch.nn.Linear(CHUNK // 4, 3, bias=False)
    before = net.weight.detach().clone()
    handle = worker.manager.register("reward", net, role="reward", readonly=True)
    for is_wrong in (False, True, False):
        with worker.manager.phase("reward") as step:
            assert net.weight.cpu().equal(before)
            if is_wrong:
                with torch.no_grad():
                    net.weight[rows] += 1
                with pytest.raises(
                    placement.IntegrityError,
                    match=r"is readonly, but \d of its chunks changed",
                ):
                    step.switch("values")
            else:
                step.switch("values")
                assert handle.prefetched_bytes
                step.switch("reward")
                assert net.weight.cpu().equal(before)
    assert_nothing_resident(worker.manager)


def test_a_checkpoint_of_what_is_being_saved_is_complete(tmp_path: Any) -> None:
    worker = late_worker(STAY | {"checkpoint": STAY["values"]})
    with worker.manager.phase("train") as step:
        learn(worker.net, worker.adam, 1)
        wanted = copy.deepcopy((worker.net.state_dict(), worker.adam.state_dict()))
        step.switch("values")
        placement.checkpoint.save(worker.manager, tmp_path / "checkpoint")
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam, 2)
    placement.checkpoint.load(worker.manager, tmp_path / "checkpoint")
    assert_same((worker.net.state_dict(), worker.adam.state_dict()), wanted)


@pytest.mark.parametrize("end", ["unregister", "close"])
def test_what_ends_while_it_is_being_saved_keeps_its_values(end: str) -> None:
    worker = late_worker(STAY | {"idle": STAY["values"]})
    with trained_again(worker):
        wanted = copy.deepcopy((worker.net.state_dict(), worker.adam.state_dict()))
    assert early_bytes(worker).keys() == {"actor", "actor.optimizer"}
    if end == "close":
        worker.manager.close()
    else:
        worker.manager.unregister("actor.optimizer")
        worker.manager.unregister("actor")
        assert worker.manager.device.memory().chunk_bytes == 0
    assert_same((worker.net.state_dict(), worker.adam.state_dict()), wanted)


# --- what a reader in another thread sees while bytes arrive: poison or the right bytes, and
# nothing else ever


class Reader(LateDevice):
    """Reads what has been mapped, right after each `map`. Copies come as late as they may, so
    nothing has arrived by then.

    Attributes:
        wrong: the tensors that showed anything but poison or the values of the host copy.
        num_poison: how many tensors showed poison, and nothing else.
    """

    def __init__(self) -> None:
        super().__init__(CAPACITY, chunk_bytes=CHUNK)
        self.wrong: list[str] = []
        self.num_poison = 0

    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        super().map(addresses, chunks, start)
        owner: Any = RANGES.owner_of(addresses.base)
        if isinstance(owner, ManagedStorage):  # nobody knows the addresses of pages aside
            (r,) = [r for r in owner.ranges if r.layout.addresses is addresses]
            self._look(r, start, start + sum(chunk.nbytes for chunk in chunks))

    def _look(self, r: Range, start: int, end: int) -> None:
        for entry in r.placed:
            first, last = max(entry.offset, start), min(entry.offset + entry.nbytes, end)
            if first < last:
                shown = self.view(r.layout.addresses, first, last - first).view(torch.float32)
                values = r.host.view(first, last - first).view(torch.float32)
                self.num_poison += bool(shown.isnan().all())
                if not bool(
                    (shown.isnan() | (shown.view(torch.int32) == values.view(torch.int32))).all()
                ):
                    self.wrong.append(entry.name)


def worker(**keywords: Any) -> tuple[Worker, Reader]:
    device = Reader()
    made = Worker(device=device, **keywords)
    for seed in range(2):
        with made.manager.phase("train"):
            learn(made.net, made.adam, seed)
            learn(made.critic_net, made.sgd, seed)
    return made, device


@pytest.mark.parametrize(
    "policy", [Colocated(), Colocated("streamed"), Early({"values": {"actor": 2 * CHUNK}})]
)
def test_in_loads_swaps_and_steps(policy: Any) -> None:
    """Also streamed ones, and of what arrived early with the rest."""
    set_bucket_bytes(CHUNK)
    made, device = worker(policy=policy)
    assert made.optimizer.counters.loaded_bytes
    with made.manager.phase("values") as phase:
        wait_for_copies(made.manager)
        assert bool(made.actor.prefetched_bytes) is isinstance(policy, Early)
        for name in ("log_prob", "train", "values"):
            phase.switch(name)
        phase.switch("log_prob", only=["ref"])
    assert device.num_poison
    assert not device.wrong


@pytest.mark.parametrize("operation", ["create", "map", "copy", "sync"])
def test_when_a_swap_goes_back(operation: str) -> None:
    made, device = worker()
    for at in (1, 2, 4, 7):
        with made.manager.phase("log_prob") as phase:
            device.fail(operation, at=at)
            with suppress(Exception):
                phase.switch("values")
            device.clear()
    assert not device.wrong
    with suppress(InjectedFault), made.manager.phase("train"):
        pass


def test_a_device_without_a_way_of_its_own() -> None:
    device = SimulatedDevice(CAPACITY, chunk_bytes=CHUNK)
    chunk = device.create(CHUNK)
    Device.wipe(device, (chunk,))
    addresses = device.reserve(CHUNK)
    device.map(addresses, (chunk,))
    assert device.view(addresses, 0, CHUNK).view(torch.float32).isnan().all()
    assert not device.heal_poison()
