"""Gradients and graphs over an offload, and gradients that the policy calls dead."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import placement
from placement.policies import Colocated, Resident
from placement.testing import Faults, InjectedFault, SimulatedDevice, assert_nothing_resident
from tests.support.worker import CAPACITY, TRAIN, Worker, assert_same, batch, learn, net


def backward(model: torch.nn.Module, seed: int = 0) -> None:
    model(batch(seed)).square().mean().backward()


def gradients(model: torch.nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def twin_of(worker: Worker) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    twin = net()
    twin.load_state_dict(worker.values)
    return twin, torch.optim.AdamW(twin.parameters(), lr=1e-2)


def test_gradients_survive_an_offload_and_are_accumulated_over_it(worker: Worker) -> None:
    twin, adam = twin_of(worker)
    for seed in range(2):
        worker_phases = [worker.manager.phase("train"), worker.manager.phase("train")]
        with worker_phases[0]:
            worker.adam.zero_grad()
            backward(worker.net, 2 * seed)
            wanted, mine = gradients(worker.net), worker.net[0].weight.grad
        assert all(p.grad is not None and p.grad.isnan().all() for p in worker.net.parameters())
        assert_nothing_resident(worker.manager)
        with worker_phases[1]:
            assert worker.net[0].weight.grad is mine
            assert_same(gradients(worker.net), wanted)
            backward(worker.net, 2 * seed + 1)
            worker.adam.step()
        adam.zero_grad()
        backward(twin, 2 * seed)
        backward(twin, 2 * seed + 1)
        adam.step()
    assert_same(dict(worker.actor.state_dict()), dict(twin.state_dict()))
    assert worker.manager.audit().ok


def test_a_graph_that_was_retained_runs_backward_in_a_later_phase(worker: Worker) -> None:
    twin, _ = twin_of(worker)
    with worker.manager.phase("train"):
        loss = worker.net(batch()).square().mean()
        loss.backward(retain_graph=True)
    # information: the graph holds weights
    assert any(f.what == "stray_reference" for f in worker.manager.audit().findings)
    with worker.manager.phase("train"):
        loss.backward()
        found = gradients(worker.net)
    del loss
    for _ in range(2):
        backward(twin)
    assert_same(found, gradients(twin))


@pytest.mark.parametrize("is_viewed", [False, True])
def test_gradients_of_the_next_cycle_use_the_host_memory_of_the_last(
    worker: Worker, is_viewed: bool
) -> None:
    """Unless somebody still has a view of it."""
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
        assert worker.net[0].weight.grad is not None
        views += [(r.view(0, r.nbytes), bytes(r.view(0, r.nbytes).numpy()))] if is_viewed else []
    assert (len({*map(id, slabs)}) == 1) is not is_viewed
    assert len({*host_bytes}) == 1
    assert all(bytes(view.numpy()) == then for view, then in views)
    with worker.manager.phase("train"):
        assert_same(gradients(worker.net), gradients(twin))
    assert_same(dict(worker.actor.state_dict()), dict(twin.state_dict()))
    worker.adam.zero_grad()
    with worker.manager.phase("log_prob"):
        pass
    assert worker.actor.host_bytes < host_bytes[0], "what nobody needs any more is given back"


# --- gradients that the policy calls dead: not copied, None afterwards


def dropping(**keywords: Any) -> Worker:
    return Worker(policy=Colocated(drop_gradients=True), **keywords)


def test_dead_gradients_are_not_copied_and_are_none_and_training_is_the_same() -> None:
    worker, plain = dropping(), Worker()
    with plain.manager.phase("restore"):
        plain.net.load_state_dict(worker.values)
    for seed in range(4):
        for each in (worker, plain):
            with each.manager.phase("train"):
                learn(each.net, each.adam, seed)
        assert gradients(worker.net) == [None] * 4
        assert all(p.grad is not None for p in plain.net.parameters())
    assert_same(dict(worker.actor.state_dict()), dict(plain.actor.state_dict()))
    assert_same(worker.optimizer.state_dict(), plain.optimizer.state_dict())
    weights = sum(p.nbytes for p in worker.net.parameters())
    assert (
        plain.actor.counters.offloaded_bytes - worker.actor.counters.offloaded_bytes >= 4 * weights
    )
    assert worker.manager.audit().ok
    assert_nothing_resident(worker.manager)


def test_a_kept_reference_to_a_dropped_gradient_never_shows_old_bytes() -> None:
    policy = Colocated()
    worker = Worker(policy=policy)
    with worker.manager.phase("train"):
        backward(worker.net)
    policy.drop_gradients = True
    with worker.manager.phase("train"):
        held = worker.net[0].weight.grad
        backward(worker.net, 1)
    assert isinstance(held, torch.Tensor)
    with worker.manager.phase("train"):
        assert held.isnan().all()


@pytest.mark.parametrize(
    "policy", [Colocated("optimizer_step", drop_gradients=True), Resident(drop_gradients=True)]
)
def test_they_live_until_their_own_module_leaves_training_for_good(
    policy: Colocated | Resident,
) -> None:
    worker = Worker(policy=policy)
    with worker.manager.phase("train") as phase:
        backward(worker.net)
        backward(worker.critic_net)
        wanted = gradients(worker.net)
        for inner in ("eval", "checkpoint", "values"):
            with worker.manager.phase(inner):
                pass
        # leaves the others as in the enclosing plan, gradients included
        with worker.manager.phase("log_prob", only=["critic"]):
            pass
        phase.switch("optimizer_step")
        assert_same(gradients(worker.net), wanted)
        worker.adam.step()
        phase.switch("weight_sync")
        assert worker.actor.resident_bytes
        assert gradients(worker.net) == [None] * 4
    assert worker.manager.audit().ok


@pytest.mark.leaves_behind("a live graph holds storages of an offloaded module")
def test_a_tensor_of_a_live_graph_is_no_gradient() -> None:
    worker = dropping()
    with worker.manager.phase("train"):
        backward(worker.net)
        worker.net.loss = worker.net(batch(3)).square()  # type: ignore[assignment]
        wanted = worker.net.loss.detach().clone()
    with worker.manager.phase("train"):
        assert_same(worker.net.loss.detach(), wanted)
        assert worker.net[0].weight.grad is None


def test_a_storage_that_is_more_than_gradients_moves() -> None:
    """One flat buffer behind all gradients, as data parallel wrappers keep it."""
    worker = dropping()
    flat = torch.zeros(sum(p.numel() for p in worker.net.parameters()))
    with worker.manager.phase("train"):
        worker.net.flat = flat  # type: ignore[assignment]
        for p, piece in zip(
            worker.net.parameters(),
            flat.split([p.numel() for p in worker.net.parameters()]),
            strict=True,
        ):
            p.grad = piece.view_as(p)
        backward(worker.net)
        wanted = flat.clone()
    assert gradients(worker.net) == [None] * 4
    with worker.manager.phase("train"):
        assert_same(worker.net.flat, wanted)


@pytest.mark.parametrize(
    ("operation", "drops"),
    [
        *((each, True) for each in ("map", "sync")),
        *(pytest.param(each, True, marks=pytest.mark.sweep) for each in ("create", "copy")),
        pytest.param("copy", False, marks=pytest.mark.sweep),
    ],
)
def test_wherever_a_transition_fails_all_of_them_live_or_it_says_that_they_died(
    operation: str, drops: bool
) -> None:
    """Where they are not dropped, they have places, and leave for something larger."""
    for at in range(1, 100):
        device = Faults(SimulatedDevice(CAPACITY, chunk_bytes=8192))
        worker = dropping(device=device) if drops else Worker(device=device)
        worker.manager.register("reward", net(256), role="reward")
        with worker.manager.phase("train"):
            learn(worker.net, worker.adam)
        with worker.manager.phase("train") as phase:
            values = {name: value.clone() for name, value in worker.net.state_dict().items()}
            backward(worker.net)
            wanted = gradients(worker.net)
            device.fail(operation, at=at)
            with contextlib.suppress(InjectedFault, placement.DeviceMemoryError):
                phase.switch("log_prob" if drops else "reward", only=["ref"] if drops else None)
            if phase.name == "train":
                assert worker.actor.state is TRAIN
                assert_same(gradients(worker.net), wanted)
        assert_same(dict(worker.actor.state_dict()), values)
        assert_nothing_resident(worker.manager)
        if not device.fired:
            return
    pytest.fail("the faults never came to an end")


def test_a_transition_that_fails_after_they_died_says_so() -> None:
    worker = dropping(verify="always")
    with worker.manager.phase("train") as phase:
        backward(worker.net)
        assert worker.ref.holding is not None
        worker.ref.holding.ranges[0].host.view(0, 1).bitwise_xor_(1)
        with pytest.raises(placement.IntegrityError, match="'ref'") as caught:
            phase.switch("log_prob", only=["ref"])
        assert worker.actor.state is TRAIN
        assert gradients(worker.net) == [None] * 4
    assert any("the gradients of 'actor' are lost" in note for note in caught.value.__notes__)
