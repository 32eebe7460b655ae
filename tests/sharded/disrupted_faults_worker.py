"""Faults, interrupts, several managers, and ends that nobody planned, with sharded models. Bodies for ranks."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist

import placement
from placement.core.errors import DeviceMemoryError, HostMemoryError
from placement.testing import Faults, InjectedFault, SimulatedDevice, assert_nothing_resident
from tests.sharded import training
from tests.sharded.disrupted_worker import check_off, simulated
from tests.sharded.one_of_each import PROGRAMS


class Interrupts(Faults):
    """A device during whose calls the user presses Ctrl-C."""

    def _count(self, operation: str) -> None:
        try:
            super()._count(operation)
        except (DeviceMemoryError, HostMemoryError, InjectedFault):
            raise KeyboardInterrupt(operation) from None


def _any_rank(value: bool) -> bool:
    answer = torch.tensor(float(value))
    dist.all_reduce(answer)
    return bool(answer)


def fail_at_every_call(name: str, is_interrupt: bool) -> dict[str, int]:
    """A switch from training one model to using another, failed at each device call in turn; nothing is lost. Returns how many of each."""
    torch.manual_seed(0)
    actor, critic = PROGRAMS[name]("cpu"), PROGRAMS[name]("cpu")
    actor.model.eval()  # in training it counts its forward passes
    critic.model.eval()
    measuring = placement.Manager(device=simulated())
    needed_bytes = _train_once(actor, critic, measuring)
    measuring.close()
    # Little room beside what is there, so that one goes as the other comes.
    simulation = SimulatedDevice(needed_bytes + 6 * training.CHUNK_BYTES, chunk_bytes=training.CHUNK_BYTES)
    device = (Interrupts if is_interrupt else Faults)(simulation)
    manager = placement.Manager(device=device, headroom=0.0)
    _train_once(actor, critic, manager)
    expected = _look(actor, critic, manager)
    failed: dict[str, int] = {}
    for operation in ("host", "reserve", "create", "map", "copy", "sync"):
        for call in range(1, 100):
            fired = device.fired
            with (
                contextlib.suppress(KeyboardInterrupt, DeviceMemoryError, HostMemoryError, InjectedFault),
                manager.phase("train", only=["actor"]) as phase,
            ):
                actor.optimizer.zero_grad()
                actor.backward(1)  # gradients that have no place yet
                actor.evaluate(4)  # leaves a root unsharded
                device.fail(operation, at=call)
                phase.switch("values")
            device.clear()
            if not _any_rank(device.fired > fired):  # shards differ in size, so one rank may make more calls
                break
            failed[operation] = call
            check_off(manager)
            assert _look(actor, critic, manager) == expected, f"{operation} {call}"
    manager.close()
    return failed


def _train_once(actor: training.Program, critic: training.Program, manager: placement.Manager) -> int:
    """Register both, step the first one; gradients of another pass are left. Returns the most bytes that were on the device."""
    manager.register("actor", actor.model, role="actor")
    manager.register("actor.optimizer", actor.optimizer)
    manager.register("critic", critic.model, role="critic")
    for _ in range(2):
        with manager.phase("train", only=["actor"]):
            actor.learn(0)
    with manager.phase("train", only=["actor"]):
        actor.backward(1)
    with manager.phase("train", only=["actor"]):
        return sum(handle.resident_bytes for handle in manager.handles.values())


def _look(actor: training.Program, critic: training.Program, manager: placement.Manager) -> tuple[bytes, bytes, dict[str, str]]:
    """What both compute, and every value of the first."""
    with manager.phase("log_prob"):
        actor_loss = training.as_bytes(actor.evaluate(3))
    with manager.phase("values"):
        critic_loss = training.as_bytes(critic.evaluate(3))
    with manager.phase("train", only=["actor"]):
        actor.reshard()
        return actor_loss, critic_loss, training.digest(actor)


def collected(name: str) -> None:
    """Nobody holds the model any more: its handle goes, and with it every byte."""
    device = simulated()
    manager = placement.Manager(device=device)
    program: Any = PROGRAMS[name]("cpu")
    program.register(manager)
    with manager.phase("train"):
        program.learn(0)
    with manager.phase("train"):
        program.backward(0)
        del program
        gc.collect()
    gc.collect()
    assert not manager.handles, [*manager.handles]
    assert device.memory().chunk_bytes == 0
    assert_nothing_resident(manager)
    manager.close()


def readonly(name: str) -> None:
    """A reference is never copied back, and a write to it is found and undone."""
    torch.manual_seed(0)
    program = PROGRAMS[name]("cpu")
    program.model.eval()  # in training it counts its forward passes
    manager = placement.Manager(device=simulated())
    handle = manager.register("ref", program.model, role="ref", readonly=True)
    for _ in range(3):
        with manager.phase("log_prob"):
            loss = training.as_bytes(program.evaluate(0))
    assert handle.counters.skipped_bytes > 0
    copied = handle.counters.offloaded_bytes

    def write() -> None:
        with manager.phase("log_prob"), torch.no_grad():
            program.reshard()
            for parameter in program.model.parameters():
                for _, part in training.local_parts(parameter):
                    part.add_(1)

    with pytest.raises(placement.IntegrityError, match="readonly"):
        write()
    with manager.phase("log_prob"):
        assert training.as_bytes(program.evaluate(0)) == loss
    assert handle.counters.offloaded_bytes == copied
    assert_nothing_resident(manager)
    manager.close()


def lazy(name: str) -> None:
    """A model that is sharded only when its phase comes: building calls collectives, so on all ranks in the same place."""
    built = []

    def factory() -> torch.nn.Module:
        torch.manual_seed(0)
        built.append(PROGRAMS[name]("cpu"))
        model = built[0].model
        assert isinstance(model, torch.nn.Module)
        return model

    manager = placement.Manager(device=simulated())
    late = manager.register("critic", placement.Lazy(factory), role="critic")
    with manager.phase("log_prob"):
        assert not built
    with manager.phase("values"):
        loss = training.as_bytes(built[0].evaluate(0))
    assert late.object is built[0].model
    assert_nothing_resident(manager)
    torch.manual_seed(0)
    assert training.as_bytes(PROGRAMS[name]("cpu").evaluate(0)) == loss
    manager.close()
