"""The room for pages aside: what leaves keeps its memory until it is saved, and then what comes sooner gets it."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from placement.planning.prefetcher import Share, Wish, divide
from placement.testing import assert_nothing_resident
from tests.support.early import Early
from tests.support.late_device import LateDevice
from tests.support.threads import until
from tests.support.worker import Worker, assert_same, learn
from tests.unit.test_prefetch import ALL, CHUNK, last_load, used_bytes

WANTED = {"ref": ALL, "actor.optimizer": ALL, "actor": ALL, "critic.optimizer": ALL}
"""The reference comes sooner than what leaves."""
LACKING = 3
"""Chunks of the reference for which there is no room at first."""


@given(st.integers(0, 100), st.lists(st.builds(Wish, st.integers(0, 60), st.integers(0, 60)), max_size=6))
def test_shares_fit_the_room_at_first_and_in_the_end(room: int, wishes: list[Wish]) -> None:
    assert divide(10, [Wish(8), Wish(7, held_bytes=7)]) == [Share(3, 8), Share(7, 2)]  # what leaves holds its room at first
    shares = divide(room, wishes)
    wanted = sum(wish.wanted_bytes for wish in wishes)
    assert sum(share.last_bytes for share in shares) == min(room, wanted)
    assert sum(share.first_bytes for share in shares) <= min(room, wanted)
    in_need = False
    for share, wish in zip(shares, wishes, strict=True):
        assert 0 <= share.first_bytes <= wish.wanted_bytes
        assert not (in_need and share.last_bytes)  # nobody gets anything behind one that lacks something
        in_need = in_need or share.last_bytes < wish.wanted_bytes


def crowded_worker() -> Worker:
    """A worker that has trained, under a budget that in `values` has no room for all of the reference beside what leaves.

    The actor's optimizer has 10 chunks, and each other handle 5.
    """
    device = LateDevice(64 << 20, chunk_bytes=CHUNK)
    worker = Worker(policy=Early({"values": WANTED}), device=device, budget_bytes=(30 - LACKING) * CHUNK)
    with worker.manager.phase("train"):
        train(worker)
    return worker


def train(worker: Worker, seed: int = 0) -> None:
    learn(worker.net, worker.adam, seed)
    learn(worker.critic_net, worker.sgd, seed)
    worker.adam.zero_grad()
    worker.sgd.zero_grad()


def wait_for_the_thread(worker: Worker) -> None:
    """Until the reference has all the memory that it wants, or the thread has stopped."""
    copies = worker.manager._stack.reconciler.prefetcher.copies
    until(lambda: not copies._bursts)
    with copies._lock:  # it has started the last burst
        pass


def trained_values(worker: Worker) -> Any:
    return copy.deepcopy((worker.net.state_dict(), worker.adam.state_dict(), worker.sgd.state_dict()))


def test_what_is_saved_gives_its_memory_to_what_comes_sooner() -> None:
    worker = crowded_worker()
    with worker.manager.phase("train") as step:
        train(worker, 1)
        wanted = trained_values(worker)
        step.switch("values")
        others = [worker.manager.handles[name] for name in ("actor.optimizer", "actor", "critic.optimizer")]
        wait_for_the_thread(worker)
        assert worker.ref.prefetched_bytes == worker.ref.num_bytes
        assert sum(each.num_bytes - each.prefetched_bytes for each in others) == LACKING * CHUNK
        worker.manager.check_integrity()
        assert_same(trained_values(worker), wanted)  # from the host copies
        step.switch("ref_log_prob")
        assert last_load(worker, "ref") == (0, used_bytes(worker, "ref"))
        assert_same(worker.ref_net.state_dict(), worker.ref_values)
        step.switch("train")
        assert_same(trained_values(worker), wanted)
    assert worker.manager.snapshot().prefetch_discarded_bytes == 0
    assert_nothing_resident(worker.manager)
