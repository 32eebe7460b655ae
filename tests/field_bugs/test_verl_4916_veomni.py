"""volcengine/verl#4916: offloading VeOmni's `MultiOptimizer`.

The draft asked the wrapper for `.state`, which it does not have; the merged code looks into each optimizer and, with
`optimizer.state[parameter]`, makes an empty entry for every parameter that has no state. Here on VeOmni's own class, over FSDP2 with
experts on a mesh of their own.
"""

from __future__ import annotations

import pytest

from tests.sharded import veomni_worker
from tests.support.ranks import Ranks

pytestmark = pytest.mark.skipif(not veomni_worker.is_installed(), reason="VeOmni is not installed here")


@pytest.mark.parametrize("expert_parallel", [1, 2])
def test_no_state_is_made_up_for_parameters_or_optimizers_without_any(two_ranks: Ranks, expert_parallel: int) -> None:
    for found in two_ranks.run(veomni_worker.state_is_never_made_up, expert_parallel):
        assert found["owners"] == ["actor"]
        assert found["before"] == ["param_groups"]
        # Asking the object itself would step it: refused, and nothing of what torch prepared for that step stays.
        assert "state_dict() of handle 'actor.optimizer'" in found["refused"]
        assert found["rates"] == [1e-2, 1e-3]
        assert found["gradients"] == []
        assert found["born before"] == [0, 0]
        assert found["born"] == found["still born"] == [2, 2]
        assert found["host"] <= found["reserved"]
        assert found["same"] == [True, True, True]
        assert found["step"].startswith("NotResidentError")
        assert found["load"].startswith("NotResidentError")
        assert found["loaded"]
        assert found["guards left"] == 0
