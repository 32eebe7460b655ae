"""DeepSpeed: engines that move their own states are tracked and guarded, one without ZeRO is a plain module. The real package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.sharded import deepspeed_worker
from tests.support.frameworks import needs
from tests.support.ranks import Ranks

needs("deepspeed")


@pytest.fixture(scope="module", autouse=True)
def _patched_ranks_end_here(two_ranks: Ranks) -> Iterator[None]:
    """ZeRO 3 replaces torch.nn.functional.linear for the rest of a process, also for tests of other frameworks."""
    yield
    two_ranks.close()


@pytest.mark.parametrize("stage", [2, 3])
def test_steps_of_a_zero_engine_are_not_touched(two_ranks: Ranks, stage: int) -> None:
    for outcome in two_ranks.run(deepspeed_worker.compare, stage, torch.bfloat16):
        assert outcome.offloaded_bytes == {"actor": 0, "actor.optimizer": 0}


def test_an_engine_without_zero_is_moved_like_the_module_it_is(two_ranks: Ranks) -> None:
    for outcome in two_ranks.run(deepspeed_worker.compare, 0, torch.float32):
        assert all(outcome.offloaded_bytes.values())


@pytest.mark.parametrize("stage", [2])
def test_what_deepspeed_has_offloaded_is_neither_called_nor_stepped(two_ranks: Ranks, stage: int) -> None:
    for found in two_ranks.run(deepspeed_worker.refuse_what_deepspeed_has_offloaded, stage):
        assert found["owners"] == ["actor"]
        assert all("offload_states" in reason for reason in found["external"])
        for what in ("forward", "step", "step without moments"):
            assert found[what].startswith("NotResidentError"), what
            assert "reload_states()" in found[what]
        assert "lp_params" in found["forward"]
        assert "DeepSpeed has offloaded optim_states; call" in found["step without moments"]
        assert found["step outside"].startswith("PhaseError")
        assert found["same"], "a refused call changed something"
        assert found["states"]
        assert found["guard is gone"]
