"""VeOmni: FSDP2 with experts over a mesh of their own, and its `MultiOptimizer` (the real class)."""

from __future__ import annotations

import pytest

from tests.sharded import veomni_worker
from tests.support.ranks import Ranks

pytestmark = pytest.mark.skipif(not veomni_worker.is_installed(), reason="VeOmni is not installed here")


@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_steps_with_experts_on_a_mesh_of_their_own(two_ranks: Ranks, expert_parallel: int) -> None:
    for outcome in two_ranks.run(veomni_worker.compare, expert_parallel):
        assert all(outcome.offloaded_bytes.values())
        # Two moments of each trained parameter: local experts, and half of the dense layer.
        experts = 2 * 4 * veomni_worker.WIDTH * 2 * veomni_worker.WIDTH // 2
        assert outcome.resident_bytes["actor.optimizer"] >= 2 * 4 * experts
