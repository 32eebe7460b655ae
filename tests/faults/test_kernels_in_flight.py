"""Kernels that are still running when a transition, or an end, takes memory away: none of them may
find it gone."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import placement
from placement import State
from placement.core.errors import DeviceMemoryError, HostMemoryError
from placement.policies import Colocated, Cyclic, Resident
from placement.storage.watch.state_dicts import StateDictTensors
from placement.testing import InjectedFault
from tests.support.buckets import set_bucket_bytes
from tests.support.kernel_device import KernelDevice, kernels_noted
from tests.support.late_device import LateDevice
from tests.support.sweeps import few
from tests.support.worker import Worker, assert_same, learn

pytestmark = pytest.mark.leaves_behind("each case is looked at when it ends")

CHUNK = 4096
IS_SWEEP = os.environ.get("SWEEP") == "all"


@pytest.fixture(autouse=True)
def noted() -> Iterator[None]:
    with kernels_noted():
        yield


def worker_with(policy: placement.Policy, chunks: int = 400) -> Worker:
    device = KernelDevice(chunks * CHUNK, chunk_bytes=CHUNK)
    return Worker(policy=policy, device=device, budget_bytes=chunks * CHUNK)


def test_memory_is_not_taken_away_from_under_a_kernel() -> None:
    """The device of these tests: it tells a missing wait, and knows what waits."""
    device = KernelDevice(16 * CHUNK, chunk_bytes=CHUNK)
    addresses = device.reserve(2 * CHUNK)
    device.unmap(addresses, 2 * CHUNK)
    device.map(addresses, (device.create(CHUNK), device.create(CHUNK)))
    first = device.view(addresses, 0, CHUNK)
    other = torch.zeros(CHUNK, dtype=torch.uint8)
    waits: list[Callable[[], object]] = [
        device.sync,
        device.wait_for_work,
        lambda: first.sum().item(),
        lambda: (device.copy((), "to_host"), device.wait(device.mark("to_host"))),
        lambda: device.ask(first.to(torch.int64))().tolist(),
    ]
    for wait in waits:
        for work in (lambda: first.add_(1), lambda: other.copy_(first)):
            work()
            with pytest.raises(AssertionError, match="taken away from under aten::"):
                device.unmap(addresses, CHUNK)
            device.unmap(addresses, CHUNK, CHUNK)
            device.map(addresses, (device.create(CHUNK),), CHUNK)
            wait()
            device.unmap(addresses, CHUNK)
            device.map(addresses, (device.create(CHUNK),))


@pytest.mark.sweep
@settings(
    max_examples=400 if IS_SWEEP else 8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    sizes=st.lists(st.sampled_from([16, 75, 250, 500, 1000, 2250, 5001]), min_size=3, max_size=12),
    later=st.sets(st.integers(0, 11), max_size=4),
    bucket_chunks=st.sampled_from([1, 1, 2, 3]),
    steps=st.lists(
        st.tuples(st.sets(st.integers(0, 11), max_size=4), st.sampled_from([None, 1, 2, 3, 4, 5])),
        min_size=2,
        max_size=4,
    ),
)
@example(sizes=[75, 500, 450], later={1}, bucket_chunks=1, steps=[(set(), 1)])
def test_steps_that_stream_their_state(
    sizes: list[int], later: set[int], bucket_chunks: int, steps: list[tuple[set[int], int | None]]
) -> None:
    """The state of some parameters is created later, so that it lies in another order than the step
    takes it; some take no part in a step. The device has now and then room for few buckets, and
    what one of them keeps for the next ones gives way."""
    torch.manual_seed(0)
    nets = [torch.nn.ParameterList(torch.nn.Parameter(torch.randn(size)) for size in sizes)]
    nets.append(copy.deepcopy(nets[0]))
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    device = KernelDevice(400 * CHUNK, chunk_bytes=CHUNK)
    set_bucket_bytes(bucket_chunks * CHUNK)
    manager = placement.Manager(device=device, policy=Colocated("streamed"))
    actor, adam = (
        manager.register("actor", nets[0], role="actor"),
        manager.register("adam", optimizers[0]),
    )
    for number, (left_out, room) in enumerate([(later, None), (set(), None), *steps]):
        with manager.phase("train"):
            for net in nets:
                for index, parameter in enumerate(net):
                    parameter.grad = (
                        None if index in left_out else torch.full_like(parameter, 0.5 + number)
                    )
            if room is not None:
                device.run_out_of_memory()
                device.outside_bytes = max(0, device.memory().free_bytes - room * CHUNK)
            try:
                optimizers[0].step()
            except placement.DeviceMemoryError:
                return  # a bucket alone was too much
            finally:
                device.outside_bytes = 0
            optimizers[1].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert_same(dict(actor.state_dict()), dict(nets[1].state_dict()))
    assert_same(adam.state_dict(), optimizers[1].state_dict())
    manager.close()


@pytest.mark.parametrize(
    ("operation", "forever"),
    [
        pytest.param("host", False, marks=pytest.mark.sweep),
        pytest.param("reserve", False, marks=pytest.mark.sweep),
        ("copy", False),
        ("sync", True),
    ],
)
def test_a_copy_to_new_host_memory_is_waited_for_before_that_is_given_up(
    operation: str, *, forever: bool
) -> None:
    """Two models leave with new gradients. Those of the first are on their way when the second
    fails."""
    device = LateDevice(400 * CHUNK, chunk_bytes=CHUNK)
    manager = placement.Manager(device=device, policy=Colocated())
    nets = [torch.nn.Linear(64, 64) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters()) for net in nets]
    for net, optimizer, name in zip(nets, optimizers, ("actor", "critic"), strict=True):
        manager.register(name, net, role=name)
        manager.register(f"{name}.optimizer", optimizer)
    try:
        with manager.phase("train"):
            for net in nets:
                net(torch.ones(2, 64)).sum().backward()
            wanted = [
                {name: parameter.grad.clone() for name, parameter in net.named_parameters()}
                for net in nets
            ]  # type: ignore[union-attr]
            device.fail(operation, at=2, forever=forever)
    except (DeviceMemoryError, HostMemoryError, InjectedFault):
        pass
    assert device.fired
    device.clear()
    # a device that fails every wait cannot be waited for, and makes no more copies to what is freed
    # then
    gc.collect()
    assert device.freed_bytes == 0
    with manager.phase("train"):
        for net, gradients in zip(nets, wanted, strict=True):
            assert_same(
                {name: parameter.grad for name, parameter in net.named_parameters()}, gradients
            )
            net.zero_grad()
    manager.close()


def test_what_another_thread_reads_of_a_state_dict_has_run_before_the_memory_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may begin at any moment until the tensors are pointed to the host copy."""
    worker = worker_with(Colocated())
    worker.manager.enter("log_prob")
    held = worker.net.state_dict()
    point = StateDictTensors.point_to_host

    def read_and_point(*its: Any, **keywords: Any) -> None:
        for value in held.values():
            value.sum()
        point(*its, **keywords)

    monkeypatch.setattr(StateDictTensors, "point_to_host", read_and_point)
    worker.manager.leave()
    monkeypatch.undo()
    assert worker.actor.resident_bytes == 0


def unregister(worker: Worker) -> None:
    for name in ("actor.optimizer", "actor", "critic.optimizer", "critic", "ref"):
        worker.manager.unregister(name)


def drop_the_manager(worker: Worker) -> None:
    del (
        worker.actor,
        worker.optimizer,
        worker.ref,
        worker.critic,
        worker.critic_optimizer,
        worker.manager,
    )
    gc.collect()


def register_in_their_place(worker: Worker) -> None:
    values = copy.deepcopy(worker.net.state_dict())
    other = copy.deepcopy(worker.net)
    worker.manager.register("actor", other, role="actor", replace=True)
    assert_same(worker.net.state_dict(), values)
    worker.manager.close()


ENDS: dict[str, Callable[[Worker], None]] = {
    "close": lambda worker: worker.manager.close(),
    "close on the device": lambda worker: worker.manager.close(
        on_device=("actor", "actor.optimizer")
    ),
    **{each.__name__: each for each in (unregister, drop_the_manager, register_in_their_place)},
}


@pytest.mark.parametrize("end", few(ENDS, "close on the device", unregister.__name__))
def test_values_of_handles_that_end_on_the_device_are_copied_before_its_memory_goes(
    end: str,
) -> None:
    worker = worker_with(Resident())
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
        learn(worker.critic_net, worker.sgd)
    assert set(worker.states().values()) == {State.GPU_RESIDENT}
    parts = {
        "net": worker.net,
        "critic": worker.critic_net,
        "ref": worker.ref_net,
        "adam": worker.adam,
        "sgd": worker.sgd,
    }
    wanted = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    for _ in range(3):
        worker.net(torch.ones(1, 64))  # kernels that still read the weights
    ENDS[end](worker)
    assert_same({name: part.state_dict() for name, part in parts.items()}, wanted)


PHASES = ("rollout", "log_prob", "ref_log_prob", "values", "train", "weight_sync", "checkpoint")
ACTIONS = ("compute", "compute", "learn", "learn", "state dict", "publish", "fail", "leave")


@pytest.mark.sweep
@settings(
    max_examples=400 if IS_SWEEP else 8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(PHASES), st.sampled_from(ACTIONS)), min_size=2, max_size=10
    ),
    chunks=st.sampled_from([44, 60, 400]),
    policy=st.sampled_from([Resident, lambda: Cyclic(idle="keep")]),
)
@example(  # gradients that outlive a phase are dropped in the next one, and do not fit twice
    steps=[
        ("train", "learn"),
        ("ref_log_prob", "compute"),
        ("ref_log_prob", "compute"),
        ("train", "learn"),
        ("train", "compute"),
    ],
    chunks=44,
    policy=lambda: Cyclic(idle="keep"),
)
def test_random_programs(
    steps: list[tuple[str, str]], chunks: int, policy: Callable[[], placement.Policy]
) -> None:
    """Kernels run up to every transition, and the end."""
    worker = worker_with(policy(), chunks)
    plain = copy.deepcopy(worker.values)
    for index, (name, action) in enumerate(steps):
        try:
            with worker.manager.phase(name) as phase:
                compute(worker)
                if action == "learn" and name == "train":
                    learn(worker.net, worker.adam, index)
                    learn(worker.critic_net, worker.sgd, index)
                    plain = copy.deepcopy(worker.net.state_dict())
                elif action == "state dict":
                    assert_same(worker.actor.state_dict(), plain)
                elif action == "publish" and name == "weight_sync":
                    assert_same(
                        {
                            key: value.clone()
                            for bucket in worker.actor.weights(bucket_bytes=CHUNK)
                            for key, value in bucket
                        },
                        plain,
                    )
                elif action == "fail":
                    raise ZeroDivisionError
                elif action == "leave":
                    phase.switch("values")
                compute(worker)
        except ZeroDivisionError:
            pass
    device = worker.manager.device
    assert isinstance(device, KernelDevice)
    assert device.num_kernels or all(name == "checkpoint" for name, _ in steps)
    worker.manager.close()
    assert_same(worker.net.state_dict(), plain)


def compute(worker: Worker) -> None:
    """A forward pass of each model that is on the device."""
    with torch.no_grad():
        for handle, model in (
            (worker.actor, worker.net),
            (worker.ref, worker.ref_net),
            (worker.critic, worker.critic_net),
        ):
            if handle.resident_bytes and handle.state is not State.CPU_OFFLOADED:
                model(torch.ones(2, 64))
