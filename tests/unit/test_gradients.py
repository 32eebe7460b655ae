"""Gradients and graphs over an offload."""

from __future__ import annotations

import pytest
import torch

from placement.testing import assert_nothing_resident
from tests.support.worker import Worker, assert_same, batch, learn, net


def backward(model: torch.nn.Module, seed: int = 0) -> None:
    model(batch(seed)).square().mean().backward()


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def twin_of(worker: Worker) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    twin = net()
    twin.load_state_dict(worker.values)
    return twin, torch.optim.AdamW(twin.parameters(), lr=1e-2)


def test_gradients_survive_an_offload_and_are_accumulated_over_it() -> None:
    worker = Worker()
    twin, adam = twin_of(worker)
    for seed in range(2):
        worker_phases = [worker.manager.phase("train"), worker.manager.phase("train")]
        with worker_phases[0]:
            worker.adam.zero_grad()
            backward(worker.net, 2 * seed)
            wanted = gradients(worker.net)
        assert all(p.grad is not None and p.grad.isnan().all() for p in worker.net.parameters())
        assert_nothing_resident(worker.manager)
        with worker_phases[1]:
            assert_same(gradients(worker.net), wanted)
            backward(worker.net, 2 * seed + 1)
            worker.adam.step()
        adam.zero_grad()
        backward(twin, 2 * seed)
        backward(twin, 2 * seed + 1)
        adam.step()
    assert_same(dict(worker.actor.state_dict()), dict(twin.state_dict()))
    assert worker.manager.audit().ok


def test_a_graph_that_was_retained_runs_backward_in_a_later_phase() -> None:
    worker = Worker()
    twin, _ = twin_of(worker)
    with worker.manager.phase("train"):
        loss = worker.net(batch()).square().mean()
        loss.backward(retain_graph=True)
    assert any(f.what == "stray_reference" for f in worker.manager.audit().findings)  # information: the graph holds weights
    with worker.manager.phase("train"):
        loss.backward()
        found = gradients(worker.net)
    del loss
    other = twin(batch()).square().mean()
    other.backward(retain_graph=True)
    other.backward()
    assert_same(found, gradients(twin))
    with worker.manager.phase("train"):
        pass
    assert worker.manager.audit().ok


def test_gradients_held_by_the_user_follow() -> None:
    worker = Worker()
    with worker.manager.phase("train"):
        backward(worker.net)
        mine = worker.net[0].weight.grad
        assert mine is not None
        wanted = mine.clone()
    with worker.manager.phase("train"):
        assert worker.net[0].weight.grad is mine
        assert_same(mine, wanted)


def test_hooks_of_gradients_and_accumulators_survive() -> None:
    worker = Worker()
    seen: list[str] = []
    worker.net[0].weight.register_hook(lambda grad: seen.append("tensor"))
    worker.net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    for _ in range(2):
        with worker.manager.phase("train"):
            learn(worker.net, worker.adam)
    assert seen == ["tensor", "accumulated"] * 2


def test_host_memory_of_gradients_is_given_back() -> None:
    worker = Worker()
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
    worker.adam.zero_grad()
    sizes = []
    for seed in range(4):
        with worker.manager.phase("train"):
            backward(worker.net, seed)
        sizes.append(worker.actor.host_bytes)
        worker.adam.zero_grad()
    assert sizes == [sizes[0]] * 4
    with worker.manager.phase("log_prob"):
        pass
    assert worker.actor.host_bytes < sizes[0]


@pytest.mark.parametrize("is_viewed", [False, True])
def test_gradients_of_the_next_cycle_use_the_host_memory_of_the_last(is_viewed: bool) -> None:
    """Unless somebody still has a view of it."""
    worker = Worker()
    twin, adam = twin_of(worker)
    slabs, views, host_bytes = [], [], []
    for seed in range(4):
        with worker.manager.phase("train"):
            worker.adam.zero_grad()
            adam.zero_grad()
            backward(worker.net, seed)
            backward(twin, seed)
            worker.adam.step()
            adam.step()
        assert worker.actor.holding is not None
        (r,) = [r for r in worker.actor.holding.ranges if r.transient]
        slabs.append(r.host)
        host_bytes.append(worker.actor.host_bytes)
        views += [(r.view(0, r.nbytes), bytes(r.view(0, r.nbytes).numpy()))] if is_viewed else []
    assert (len({*map(id, slabs)}) == 1) is not is_viewed
    assert len({*host_bytes}) == 1
    assert all(bytes(view.numpy()) == then for view, then in views)
    with worker.manager.phase("train"):
        assert_same(gradients(worker.net), gradients(twin))
    assert_same(dict(worker.actor.state_dict()), dict(twin.state_dict()))
