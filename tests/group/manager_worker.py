"""Ranks with a manager each, in processes of their own, over a store: what the tests of a group call."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from placement import Manager
from placement.core.errors import DeviceMemoryError, GroupError, IntegrityError
from placement.group import StoreGroup
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.trainer import CHUNK, Trainer


class StoreRank(Trainer):
    """A rank of a group over the store of its process group."""

    def __init__(self, generation: int, chunks: int = 64) -> None:
        store = dist.distributed_c10d._get_default_store()
        self.group = StoreGroup(store, dist.get_rank(), dist.get_world_size(), 10.0, generation=generation)
        super().__init__(lambda device: Manager(device=device, group=self.group), chunks)

    def step(self) -> float:
        with self.manager.phase("log_prob") as step:
            target = self.judge()
            step.switch("train")
            return self.learn(target)


def steps_together(generation: int) -> Any:
    worker = StoreRank(generation)
    losses = [worker.step() for _ in range(3)]
    assert_nothing_resident(worker.manager)
    return losses, worker.group.epoch


def out_of_memory_on(generation: int, failing: int, switched: bool) -> Any:
    """One rank's driver refuses memory in the middle of a phase transition; then a step that succeeds."""
    worker = StoreRank(generation)
    worker.step()
    if dist.get_rank() == failing:
        worker.faults.fail("create", at=2 if not switched else 4)
    told: dict[int, str] = {}
    cause = ""
    try:
        with worker.manager.phase("log_prob") as step:
            step.switch("train")
    except GroupError as error:
        told, cause = dict(error.failures), type(error.__cause__).__name__
    assert worker.faults.fired == (dist.get_rank() == failing)
    assert_nothing_resident(worker.manager)
    loss = worker.step()
    is_its_own = cause == DeviceMemoryError.__name__ or dist.get_rank() != failing
    return told, is_its_own, loss


def user_error_on(generation: int, failing: int) -> Any:
    """An exception in the body of a phase on one rank: its own there, a GroupError at the next phase transition of the others."""
    worker = StoreRank(generation)
    caught = ""
    try:
        with worker.manager.phase("log_prob"), worker.manager.phase("checkpoint"):
            if dist.get_rank() == failing:
                raise ZeroDivisionError("in the user's code")

    except (ZeroDivisionError, GroupError) as error:
        caught = f"{type(error).__name__}: {error}"
    assert_nothing_resident(worker.manager)
    epoch = worker.group.epoch
    losses = worker.step()
    return caught, epoch, losses


def budgets_differ(generation: int) -> Any:
    """Rank 1 has room for the reference only: no rank loads more."""
    worker = StoreRank(generation, chunks=64 if dist.get_rank() == 0 else 4)
    try:
        with worker.manager.phase("log_prob"):
            pass
        told = ""
    except GroupError as error:
        told = str(error)
    except DeviceMemoryError as error:
        told = f"alone: {error}"
    assert_nothing_resident(worker.manager)
    return told


def other_action(generation: int) -> Any:
    worker = StoreRank(generation)
    try:
        with worker.manager.phase("log_prob" if dist.get_rank() == 0 else "train"):
            pass
        told = {}
    except GroupError as error:
        told = dict(error.failures)
    assert_nothing_resident(worker.manager)
    worker.step()
    return told


def one_error_in_two_steps(generation: int, failing: int) -> Any:
    """One exception object that is raised anew in each step, as by a future that is asked again."""
    worker = StoreRank(generation)
    broken: Future[None] = Future()
    broken.set_exception(ZeroDivisionError("in a thread of the user's"))
    caught = []
    for _ in range(2):
        try:
            with worker.manager.phase("log_prob"):
                if dist.get_rank() == failing:
                    broken.result()
        except (ZeroDivisionError, GroupError) as error:
            caught.append(str(error).partition(":")[0])
        assert_nothing_resident(worker.manager)
    return caught, worker.group.epoch, worker.step()


def error_through_two_groups(generation: int, failing: int) -> Any:
    """An exception, or the inner group's failure, passes through the phases of two managers: each has a group of its own."""
    worker = StoreRank(generation)
    alone = StoreGroup(dist.HashStore(), 0, 1, 10.0)
    inner = Manager(device=SimulatedDevice(64 * CHUNK, chunk_bytes=CHUNK), group=alone)
    refused = GroupError("of some other group", {0: "x"})
    caught = []
    for error in (ZeroDivisionError("in the user's code"), refused):
        try:
            with worker.manager.phase("log_prob"):
                if dist.get_rank() == failing:
                    with inner.phase("log_prob"):
                        raise error
        except (ZeroDivisionError, GroupError) as told:
            caught.append(str(told))
    return caught, worker.group.epoch, worker.step()


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """Takes no attribute, and no note."""

    code: int


def frozen_error_on(generation: int, failing: int) -> Any:
    worker = StoreRank(generation)
    caught = ""
    try:
        with worker.manager.phase("log_prob"):
            if dist.get_rank() == failing:
                raise Frozen(7)
    except (Frozen, GroupError) as error:
        caught = repr(error)
    return caught, worker.group.epoch, worker.step()


def interrupted_while_leaving(generation: int, failing: int) -> Any:
    """Ctrl-C on one rank while its bytes move off the device: the others wait for it no longer than that."""
    worker = StoreRank(generation)
    offload = worker.faults.copy
    caught = ""

    def interrupted(*_: Any) -> None:
        worker.faults.copy = offload  # type: ignore[method-assign]
        raise KeyboardInterrupt

    try:
        with worker.manager.phase("train"):
            with torch.no_grad():
                worker.actor.weight.add_(1)  # so that there is something to copy
            if dist.get_rank() == failing:
                worker.faults.copy = interrupted  # type: ignore[method-assign]
    except (KeyboardInterrupt, GroupError) as error:
        caught = f"{type(error).__name__} {error}"
    assert_nothing_resident(worker.manager)
    return caught, worker.group.epoch, worker.step()


def nan_on(generation: int, failing: int, switched: bool) -> Any:
    """The actor's weights become NaN on one rank. Returns the error of that phase's end, if any, what it left, and a step that succeeds."""
    worker = StoreRank(generation)
    worker.step()
    before = {name: value.clone() for name, value in worker.manager.handles["actor"].state_dict().items()}
    caught = ""
    try:
        with worker.manager.phase("log_prob") as step:
            if dist.get_rank() == failing:
                for parameter in worker.actor.parameters():
                    parameter.data.fill_(float("nan"))
            if switched:
                step.switch("values")
    except (IntegrityError, GroupError) as error:
        caught = f"{type(error).__name__}: {error}"
    after = worker.manager.handles["actor"].state_dict()
    assert all(value.equal(after[name]) for name, value in before.items())
    assert_nothing_resident(worker.manager)
    return caught, worker.group.epoch, worker.step()
