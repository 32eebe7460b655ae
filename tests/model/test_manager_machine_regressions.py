"""What the state machine has found, each as the smallest program that shows it."""

from __future__ import annotations

import copy
import gc
import traceback
from typing import Any

import pytest
import torch

from placement import DeviceMemoryError, Lazy, Manager, NotResidentError, State, testing
from placement.policies import Cyclic
from placement.testing import Faults, InjectedFault, SimulatedDevice
from tests.model.architectures import Plain, backward
from tests.support.early import Early, wait_for_copies
from tests.support.worker import Turns, assert_same


def everybody(_: str) -> bool:
    return True


def manager_on(policy: Any = "colocated", **settings: Any) -> tuple[Manager, Faults]:
    device = Faults(SimulatedDevice(capacity_bytes=1 << 20, chunk_bytes=8192))
    return Manager(device=device, policy=policy, **settings), device


def test_an_optimizer_finds_the_owner_of_a_parameter_that_was_added_after_registration() -> None:
    manager, _ = manager_on()
    net = Plain()
    actor = manager.register("actor", net, role="actor")
    with manager.phase("log_prob"):
        net.lora = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([net.lora], lr=1.0)
    assert manager.register("optimizer", optimizer).owners == (actor,)
    with manager.phase("train"):
        net.lora.grad = torch.ones(3)
        optimizer.step()
    assert actor.state_dict()["lora"].tolist() == [0.0] * 3


def test_a_collected_object_is_swept_out_after_the_sweep_has_failed() -> None:
    manager, device = manager_on(Turns(idle=everybody))
    net = Plain()
    manager.register("actor", net)
    device.fail("sync")
    del net
    with pytest.raises(InjectedFault):
        manager.check_integrity()
    manager.check_integrity()
    assert manager.snapshot().handles == ()
    assert device.memory().chunk_bytes == 0


def test_a_handle_keeps_its_guards_when_it_could_not_be_unregistered() -> None:
    manager, device = manager_on(Turns(idle=everybody))
    net = Plain()
    actor = manager.register("actor", net)
    device.fail("sync")
    with pytest.raises(InjectedFault):
        manager.unregister(actor)
    assert manager.handles["actor"] is actor
    with manager.phase("train"), pytest.raises(NotResidentError):
        net(torch.zeros(4, 32))


def test_an_exit_that_wants_an_unbuilt_lazy_on_the_device_leaves_it_to_the_next_entry() -> None:
    manager, _ = manager_on(Turns(idle=everybody, eval=everybody))
    with manager.phase("train"):
        late = manager.register("critic", Lazy(Plain))
    assert late.state is State.CPU_OFFLOADED
    assert not late.is_built
    with manager.phase("eval"):
        assert late.is_built
        assert late.state is State.GPU_RESIDENT
        late.object(torch.zeros(4, 32))
    manager.check_integrity()


def test_a_log_that_keeps_its_records_keeps_no_phase_open(caplog: pytest.LogCaptureFixture) -> None:
    manager, device = manager_on()
    net = Plain()
    manager.register("actor", net, role="actor")
    phase = manager.phase("checkpoint")
    phase.__enter__()
    device.fail("create")
    with pytest.raises(DeviceMemoryError):
        phase.switch("log_prob")
    assert "create" in caplog.text
    del phase
    gc.collect()
    assert manager.phase_name == "idle"


def test_a_manager_that_is_dropped_with_phases_open_inside_entered_ones_says_nothing() -> None:
    manager, _ = manager_on()
    manager.enter("rollout")
    phase = manager.phase("train")
    phase.__enter__()
    del manager
    gc.collect()
    # what is raised in a finaliser is a warning, and a warning fails the test
    phase.__exit__(None, None, None)


ON_IN_EVAL = {"eval": everybody, "log_prob": everybody}
"""For `Turns`: all are on the device in these phases, and off it in all others."""


def _kept(manager: Manager) -> list[str]:
    return [handle.name for handle in manager.snapshot().handles if handle.kept]


@pytest.mark.parametrize("inner_ends", ["before", "after"])
def test_a_keep_expires_when_the_phase_around_it_is_abandoned(inner_ends: str) -> None:
    manager, device = manager_on(Turns(**ON_IN_EVAL))
    net = Plain()
    actor = manager.register("actor", net)
    outer = manager.phase("rollout")
    outer.__enter__()
    with manager.phase("eval") as inner:
        inner.keep(actor)
        if inner_ends == "after":
            del outer
            gc.collect()
    if inner_ends == "before":
        assert _kept(manager) == ["actor"]
        del outer
        gc.collect()
    assert manager.phase_name == "idle"
    assert _kept(manager) == []
    assert manager.snapshot().expired_keeps == 1
    device.fail("create")
    with pytest.raises(DeviceMemoryError):
        manager.enter("eval")
    assert actor.state is State.CPU_OFFLOADED


def test_a_switch_that_fails_leaves_what_was_kept_on_the_device() -> None:
    manager, device = manager_on(Turns(**ON_IN_EVAL))
    net, other = Plain(), Plain()
    actor = manager.register("actor", net)
    with manager.phase("rollout") as outer:
        with manager.phase("eval") as inner:
            inner.keep(actor)
        ref = manager.register("ref", other)
        device.fail("create")
        with pytest.raises(DeviceMemoryError):
            outer.switch("log_prob")
        assert _kept(manager) == ["actor"]
        assert actor.state is State.GPU_RESIDENT
        assert ref.state is State.CPU_OFFLOADED
        outer.switch("log_prob")
        assert manager.snapshot().expired_keeps == 0


def test_a_keep_expires_when_the_exit_that_would_carry_it_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager, device = manager_on(Turns(**ON_IN_EVAL))
    net, other = Plain(), Plain()
    actor = manager.register("actor", net)
    manager.register("ref", other)
    monkeypatch.setitem(testing._ERRORS, "sync", KeyboardInterrupt)
    phase = manager.phase("eval")
    phase.__enter__().keep(actor)
    device.fail("sync")
    with pytest.raises(KeyboardInterrupt):
        phase.__exit__(None, None, None)
    assert device.fired == 1
    assert actor.state is State.CPU_OFFLOADED
    assert _kept(manager) == []
    assert manager.snapshot().expired_keeps == 1


def test_an_exit_that_loads_handles_which_were_written_loads_all_of_them() -> None:
    """It is told of every write, and no handle stays behind for it."""
    nets = {name: Plain() for name in ("a", "b", "c")}
    before = copy.deepcopy({name: dict(net.state_dict()) for name, net in nets.items()})
    manager, _ = manager_on(policy=Turns(idle=everybody))
    for name, net in nets.items():
        manager.register(name, net)
    phase = manager.phase("log_prob")
    phase.__enter__()
    with torch.no_grad():
        for name in ("a", "b"):
            nets[name].head.weight.mul_(2)
    with pytest.raises(Exception, match="written while it was offloaded") as raised:
        phase.__exit__(None, None, None)
    told = "".join(traceback.format_exception(raised.value))
    assert all(f"'{name}'" in told for name in ("a", "b"))
    assert {handle.state for handle in manager.handles.values()} == {State.GPU_RESIDENT}
    assert_same({name: dict(net.state_dict()) for name, net in nets.items()}, before)
    manager.close()


def test_a_handle_may_join_in_a_restore_inside_a_training_that_streams_its_state() -> None:
    """`restore` would need the whole optimizer. The plan of `train` is made anew for what joins,
    and asks for none of its state early."""
    manager, _ = manager_on(policy=Cyclic(optimizer_in="streamed"), budget_bytes=40_000)
    net, reference = Plain(), Plain()
    optimizer = torch.optim.Adagrad(net.head.parameters())
    manager.register("actor", net, role="actor")
    adagrad = manager.register("optimizer", optimizer)
    with manager.phase("train"), manager.phase("restore", only=[]):
        late = manager.register("ref", reference, role="ref")
        assert adagrad.is_streaming
        assert adagrad.resident_bytes == adagrad.prefetched_bytes  # the first buckets of its step
    assert late.state is State.CPU_OFFLOADED
    manager.close()


def test_gradients_of_a_readonly_module_may_change() -> None:
    manager, _ = manager_on(Turns(train=everybody))
    net = Plain()
    backward(net, 0)
    ref = manager.register("ref", net, role="ref", readonly=True)
    with manager.phase("train"):
        backward(net, 0)
        doubled = net.head.weight.grad.clone()
    with manager.phase("train"):
        assert torch.equal(net.head.weight.grad, doubled)
    assert ref.state is State.CPU_OFFLOADED


def test_a_handle_with_early_chunks_stays_registered_where_the_device_fails() -> None:
    net = Plain()
    before = copy.deepcopy(dict(net.state_dict()))
    manager, device = manager_on(policy=Early({"values": {"actor": 1 << 40}}))
    actor = manager.register("actor", net, role="actor")
    with manager.phase("values"):
        wait_for_copies(manager)
        device.fail("sync", at=1)
        with pytest.raises(InjectedFault):
            manager.unregister(actor)
        device.clear()
        manager.check_integrity()
        assert [*manager.handles] == ["actor"]
        assert actor.prefetched_bytes
        manager.unregister(actor)
        assert device.memory().chunk_bytes == 0
    assert_same(dict(net.state_dict()), before)
    manager.close()
