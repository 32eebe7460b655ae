"""verl#6188 and #5995: FSDP2 under `CPUOffloadPolicy` was moved by hand, and everything after that
failed.

"Attempted to set the storage of a tensor on device cpu to a storage on different device cuda:0":
torch itself brings such parameters to the device and back. They are found for what they are,
tracked, guarded, measured, and never moved.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from placement import PhaseError, RegistrationError, State
from placement.testing import assert_nothing_resident
from tests.sharded import training
from tests.sharded.fsdp2_worker import Model, loss_of, sharded, worker
from tests.support.ranks import Ranks, on_ranks

_REASON = "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU"


class Untouched(training.Program):
    """Nobody reshards what torch places: its root stays unsharded after a forward, also between
    phases."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.reshard()
        return super().tensors()


def offloaded() -> training.Program:
    model = sharded(Model(blocks=1), offload_policy=CPUOffloadPolicy(pin_memory=False))
    phases = (
        ("log_prob", "evaluate"),
        ("weight_sync", "evaluate"),
        ("train", "backward"),
        ("train", "learn"),
    )
    return Untouched(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        functools.partial(loss_of, model),
        phases=phases,
    )


def test_steps(two_ranks: Ranks, one_rank: Ranks) -> None:
    for outcome in (
        *two_ranks.run(training.compare, offloaded),
        *one_rank.run(training.compare, offloaded),
    ):
        assert not any(outcome.resident_bytes.values())
        assert not any(outcome.offloaded_bytes.values())


@on_ranks("two_ranks")
def test_nothing_of_it_is_ever_moved() -> None:
    program = offloaded()
    model: Any = program.model
    manager, actor, adam = worker(model, program.optimizer)
    assert (actor.external_reason, adam.external_reason) == (_REASON, _REASON)
    assert adam.owners == (actor,)
    with pytest.raises(PhaseError, match=r"step\(\) of 'actor.optimizer' in phase 'idle'"):
        program.optimizer.step()
    with manager.phase("log_prob"):
        program.evaluate(0)
        assert actor.state is State.GPU_RESIDENT
        with pytest.raises(PhaseError, match="call step"):
            program.optimizer.step()
    for step in range(2):
        with manager.phase("train"):
            program.learn(step)
        assert (actor.resident_bytes, actor.host_bytes, actor.num_bytes, adam.resident_bytes) == (
            0,
            0,
            0,
            0,
        )
    assert float(model.blocks[0].calls) == 3  # the buffer, which torch moves with no policy
    assert training.bytes_of(actor.state_dict()) == training.bytes_of(model.state_dict())
    assert manager.device.memory().chunk_bytes == 0
    assert_nothing_resident(manager)
    manager.close()


@on_ranks("two_ranks")
def test_an_optimizer_of_both_kinds_is_refused() -> None:
    """Half of its state is torch's to place and half is ours: neither moving it nor leaving it
    would be right."""
    kept, moved = (
        sharded(Model(blocks=1), offload_policy=CPUOffloadPolicy(pin_memory=False)),
        sharded(Model(blocks=1)),
    )
    optimizer, own = (
        torch.optim.AdamW([*kept.parameters(), *moved.parameters()]),
        torch.optim.SGD(kept.parameters()),
    )
    manager, _, _ = worker(kept, own)
    manager.register("critic", moved, role="critic")
    with pytest.raises(RegistrationError, match="parameters whose state a framework moves itself"):
        manager.register("both", optimizer)
    assert set(manager.handles) == {"actor", "actor.optimizer", "critic"}
    manager.close()
