"""Prefetch: what a plan brings while a phase computes, how a load uses it, and what becomes of it
when nobody needs it."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import placement
from placement import State
from placement.planning.prefetcher import Share, Wish, divide
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.early import Early, wait_for_copies
from tests.support.late_device import LateDevice
from tests.support.threads import until
from tests.support.worker import CAPACITY, Worker, assert_same, learn

ALL = 1 << 40
CHUNK = 4096


def early_worker(wanted: Mapping[str, Mapping[str, int]], **keywords: Any) -> Worker:
    return Worker(
        **{
            "policy": Early(wanted),
            "device": SimulatedDevice(CAPACITY, chunk_bytes=CHUNK),
            **keywords,
        }
    )


def early_bytes(worker: Worker) -> dict[str, int]:
    """Device bytes that have arrived early, by handle, once the copies of all of them have been
    started."""
    wait_for_copies(worker.manager)
    return {
        each.name: each.prefetched_bytes
        for each in worker.manager.snapshot().handles
        if each.prefetched_bytes
    }


def last_load(worker: Worker, name: str) -> tuple[int, int]:
    """Bytes that the handle's last load copied, and bytes that had arrived before."""
    record = [
        each for each in worker.manager.journal if each.handle == name and each.trigger == "load"
    ][-1]
    return record.nbytes, record.prefetched_bytes


def used_bytes(worker: Worker, name: str) -> int:
    holding = worker.manager.handles[name].holding
    assert holding is not None
    return sum(r.nbytes for r in holding.ranges)


def test_a_load_copies_nothing_that_arrived_early() -> None:
    worker = early_worker({"log_prob": {"critic": ALL}})
    assert "placement/prefetch_used_gb" not in worker.manager.metrics()
    with worker.manager.phase("log_prob") as step:
        assert early_bytes(worker) == {"critic": worker.critic.num_bytes}
        assert worker.critic.state is State.CPU_OFFLOADED
        # not loaded yet, and yet it is counted
        assert worker.critic.resident_bytes == worker.critic.num_bytes
        assert not torch.isfinite(worker.critic_net[0].weight).any()
        with pytest.raises(placement.NotResidentError):
            worker.critic_net(torch.ones(1, 64))
        worker.manager.check_integrity()
        assert worker.manager.audit().ok
        step.switch("values")
        assert early_bytes(worker) == {}
        assert last_load(worker, "critic") == (0, used_bytes(worker, "critic"))
        worker.critic_net(torch.ones(1, 64))
    assert_nothing_resident(worker.manager)
    assert worker.manager.snapshot().prefetch_discarded_bytes == 0
    used_gb = used_bytes(worker, "critic") / 1e9
    assert worker.manager.metrics()["placement/prefetch_used_gb"] == used_gb
    assert worker.manager.metrics()["placement/prefetch_used_gb"] == 0


def test_bytes_that_come_early_where_nothing_moves_are_in_the_budget_once() -> None:
    worker = early_worker({"reward": {"critic": ALL}})
    with worker.manager.phase("reward"):  # the first time its budget lacks the headroom
        pass
    with worker.manager.phase("reward"):
        assert early_bytes(worker) == {"critic": worker.critic.num_bytes}
        snapshot = worker.manager.snapshot()
        assert snapshot.budget_bytes <= snapshot.device_total_bytes


def test_prefetch_takes_the_room_that_the_budget_leaves_and_no_more() -> None:
    plain = Worker()
    with plain.manager.phase("log_prob"):
        needed = sum(handle.resident_bytes for handle in plain.manager.handles.values())
    budget = needed + 3 * CHUNK
    worker = early_worker({"log_prob": {"critic": ALL}}, budget_bytes=budget)
    with worker.manager.phase("log_prob") as step:
        assert early_bytes(worker) == {"critic": 3 * CHUNK}
        assert sum(handle.resident_bytes for handle in worker.manager.handles.values()) <= budget
        step.switch("values")
        assert last_load(worker, "critic")[1] == 3 * CHUNK


def test_what_arrived_early_makes_room_for_what_is_needed_now() -> None:
    """The device holds the critic early and then the actor and the reference: together they would
    not fit."""
    sizes = Worker(device=SimulatedDevice(CAPACITY, chunk_bytes=CHUNK))
    budget = sizes.actor.num_bytes + sizes.ref.num_bytes
    worker = early_worker(
        {"reward": {"critic": ALL}},
        budget_bytes=budget,
        device=SimulatedDevice(budget, chunk_bytes=CHUNK),
    )
    with worker.manager.phase("reward") as step:
        assert early_bytes(worker) == {"critic": worker.critic.num_bytes}
        step.switch("log_prob")
        assert worker.on_device() == {"actor", "ref"}
    assert worker.manager.snapshot().prefetch_discarded_bytes == worker.critic.num_bytes
    assert worker.manager.snapshot().peak_bytes <= budget


@pytest.mark.leaves_behind("the optimizer steps parameters that were replaced")
def test_what_a_module_took_over_from_a_state_dict_is_saved_before_its_memory_is_aside() -> None:
    device = LateDevice(CAPACITY, chunk_bytes=CHUNK)
    worker = early_worker({"log_prob": {"critic": ALL}}, device=device)
    wanted = copy.deepcopy(worker.critic_net.state_dict())
    shown = worker.critic_net.state_dict()
    with worker.manager.phase("values") as step:
        worker.critic_net.load_state_dict(shown, assign=True)
        shown.clear()
        step.switch("log_prob")
        assert_same(dict(worker.critic.state_dict()), dict(wanted))


def test_a_manager_dropped_during_an_early_load_ends_and_the_values_stay() -> None:
    worker = early_worker({"idle": {"critic": ALL}, "log_prob": {"critic": ALL}})
    values = {name: each.clone() for name, each in worker.critic.state_dict().items()}
    with worker.manager.phase("log_prob"):
        pass
    assert early_bytes(worker)
    device, net, gone = worker.manager.device, worker.critic_net, weakref.ref(worker.manager)
    del worker
    gc.collect()
    assert gone() is None
    assert_same(net.state_dict(), values)
    assert device.memory().chunk_bytes == 0


def test_host_memory_of_a_handle_that_stayed_aside_goes_with_the_handle() -> None:
    worker = early_worker({"reward": {"ref": ALL}})
    with worker.manager.phase("log_prob") as step:
        step.switch("reward")
        storage = weakref.ref(worker.ref.storage)
        worker.manager.unregister("ref")
        assert storage() is None


def test_early_chunks_are_given_up_when_torch_finds_no_memory() -> None:
    worker = early_worker({"log_prob": {"critic": ALL, "critic.optimizer": ALL}})
    device = worker.manager.device
    assert isinstance(device, SimulatedDevice)
    with worker.manager.phase("log_prob") as step:
        first = sum(early_bytes(worker).values())
        device.run_out_of_memory()
        assert early_bytes(worker) == {}
        assert (
            device.memory().chunk_bytes == worker.actor.resident_bytes + worker.ref.resident_bytes
        )
        step.switch("reward")
        step.switch("log_prob")
        assert 0 < sum(early_bytes(worker).values()) <= first // 2
        step.switch("values")
        worker.critic_net(torch.ones(1, 64))
    assert worker.manager.snapshot().prefetch_discarded_bytes >= first
    assert_nothing_resident(worker.manager)


def test_done_with_offloads_at_once_and_its_memory_is_used_for_what_comes_next() -> None:
    sizes = Worker(device=SimulatedDevice(CAPACITY, chunk_bytes=CHUNK))
    budget = sizes.actor.num_bytes + sizes.ref.num_bytes
    worker = early_worker({"log_prob": {"critic": ALL}}, budget_bytes=budget)
    with worker.manager.phase("log_prob") as step:
        assert early_bytes(worker) == {}
        step.done_with(worker.ref)
        assert worker.ref.state is State.CPU_OFFLOADED
        assert early_bytes(worker) == {"critic": worker.critic.num_bytes}
        with pytest.raises(placement.NotResidentError):
            worker.ref_net(torch.ones(1, 64))
        worker.net(torch.ones(1, 64))
        step.done_with("ref")  # a second time: nothing to do
        with worker.manager.phase("checkpoint"):
            pass
        # the phase around an inner one stays without it
        assert worker.ref.state is State.CPU_OFFLOADED
        step.switch("log_prob")
        assert worker.ref.state is State.GPU_RESIDENT
    assert_nothing_resident(worker.manager)


@given(
    st.integers(0, 100),
    st.lists(st.builds(Wish, st.integers(0, 60), st.integers(0, 60)), max_size=6),
)
def test_shares_fit_the_room_at_first_and_in_the_end(room: int, wishes: list[Wish]) -> None:
    # what leaves holds its room at first
    assert divide(10, [Wish(8), Wish(7, held_bytes=7)]) == [Share(3, 8), Share(7, 2)]
    shares = divide(room, wishes)
    wanted = sum(wish.wanted_bytes for wish in wishes)
    assert sum(share.last_bytes for share in shares) == min(room, wanted)
    assert sum(share.first_bytes for share in shares) <= min(room, wanted)
    in_need = False
    for share, wish in zip(shares, wishes, strict=True):
        assert 0 <= share.first_bytes <= wish.wanted_bytes
        # nobody gets anything behind one that lacks something
        assert not (in_need and share.last_bytes)
        in_need = in_need or share.last_bytes < wish.wanted_bytes


def train(worker: Worker, seed: int = 0) -> None:
    learn(worker.net, worker.adam, seed)
    learn(worker.critic_net, worker.sgd, seed)
    worker.adam.zero_grad()
    worker.sgd.zero_grad()


def trained_values(worker: Worker) -> Any:
    return copy.deepcopy(
        (worker.net.state_dict(), worker.adam.state_dict(), worker.sgd.state_dict())
    )


def test_what_is_saved_gives_its_memory_to_what_comes_sooner() -> None:
    """The reference comes sooner than what leaves. At first there is no room for three of its five
    chunks."""
    lacking, wanted_early = (
        3,
        {"ref": ALL, "actor.optimizer": ALL, "actor": ALL, "critic.optimizer": ALL},
    )
    device = LateDevice(64 << 20, chunk_bytes=CHUNK)
    worker = Worker(
        policy=Early({"values": wanted_early}), device=device, budget_bytes=(30 - lacking) * CHUNK
    )
    with worker.manager.phase("train"):
        train(worker)
    with worker.manager.phase("train") as step:
        train(worker, 1)
        wanted = trained_values(worker)
        step.switch("values")
        others = [
            worker.manager.handles[name]
            for name in ("actor.optimizer", "actor", "critic.optimizer")
        ]
        copies = worker.manager._stack.reconciler.prefetcher.copies
        until(lambda: not copies._bursts)
        with copies._lock:  # the thread has started the last burst
            pass
        assert worker.ref.prefetched_bytes == worker.ref.num_bytes
        assert sum(each.num_bytes - each.prefetched_bytes for each in others) == lacking * CHUNK
        worker.manager.check_integrity()
        assert_same(trained_values(worker), wanted)  # from the host copies
        step.switch("ref_log_prob")
        assert last_load(worker, "ref") == (0, used_bytes(worker, "ref"))
        assert_same(worker.ref_net.state_dict(), worker.ref_values)
        step.switch("train")
        assert_same(trained_values(worker), wanted)
    assert worker.manager.snapshot().prefetch_discarded_bytes == 0
    assert_nothing_resident(worker.manager)
