"""DeepSpeed: engines that move their own states are tracked and guarded, one without ZeRO is a
plain module. The real package."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from placement import NotResidentError, PhaseError, State
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import deepspeed_worker as worker
from tests.sharded import training
from tests.support.frameworks import needs
from tests.support.ranks import Ranks, on_ranks
from tests.support.worker import make_manager

needs("deepspeed")


@pytest.fixture(scope="module", autouse=True)
def _patched_ranks_end_here(two_ranks: Ranks) -> Iterator[None]:
    """ZeRO 3 replaces torch.nn.functional.linear for the rest of a process, also for tests of other
    frameworks."""
    yield
    two_ranks.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_steps_of_a_zero_engine_are_not_touched(two_ranks: Ranks, stage: int) -> None:
    for outcome in two_ranks.run(
        training.compare, functools.partial(worker.build, stage, torch.bfloat16)
    ):
        assert outcome.offloaded_bytes == {"actor": 0, "actor.optimizer": 0}


def test_an_engine_without_zero_is_moved_like_the_module_it_is(two_ranks: Ranks) -> None:
    for outcome in two_ranks.run(
        training.compare, functools.partial(worker.build, 0, torch.float32)
    ):
        assert all(outcome.offloaded_bytes.values())


def _values(made: Any) -> list[bytes]:
    return [training.as_bytes(each) for each in made.module.parameters()]


@on_ranks("two_ranks")
def test_what_deepspeed_has_offloaded_is_neither_called_nor_stepped() -> None:
    """And then after it has brought its states back."""
    kinds = importlib.import_module("deepspeed.runtime.zero.offload_config").OffloadStateTypeEnum
    plain = worker.engine(2)
    losses = []
    for number in range(2):
        loss = plain(worker.batch(number)).float().square().mean()
        plain.backward(loss)
        plain.step()
        losses.append(training.as_bytes(loss))

    made = worker.engine(2)
    manager = make_manager(device=SimulatedDevice(1 << 20))
    actor = manager.register("actor", made, role="actor")
    adam = manager.register("actor.optimizer", made.optimizer)
    assert adam.owners == (actor,)
    assert all("offload_states" in str(handle.external_reason) for handle in (actor, adam))
    seen = []
    with manager.phase("train"):
        loss = made(worker.batch(0)).float().square().mean()
        made.backward(loss)
        made.step()
        seen.append(training.as_bytes(loss))
    made.offload_states()
    assert_nothing_resident(manager)
    with (
        manager.phase("log_prob"),
        pytest.raises(NotResidentError, match=r"(?s)(?=.*lp_params).*reload_states\(\)"),
    ):
        made(worker.batch(1))
    with manager.phase("train"):
        with pytest.raises(NotResidentError, match=r"reload_states\(\)"):
            made.step()
        made.reload_states()
        loss = made(worker.batch(1)).float().square().mean()
        made.backward(loss)
        seen.append(training.as_bytes(loss))
    with pytest.raises(PhaseError):
        made.step()
    with manager.phase("train"):
        made.offload_states(include=[kinds.optim_states])
        made(worker.batch(2))  # what forward needs is there
        with pytest.raises(
            NotResidentError,
            match=r"(?s)DeepSpeed has offloaded optim_states; call.*reload_states\(\)",
        ):
            made.optimizer.step()
        made.reload_states()
        made.step()  # with the gradients of before: a refused step lets go of none
    assert (seen, _values(made)) == (losses, _values(plain)), "a refused call changed something"
    assert (actor.state, adam.state) == (State.CPU_OFFLOADED, State.CPU_OFFLOADED)
    manager.close()
    assert "step" not in vars(made.optimizer)
