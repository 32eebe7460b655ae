"""VeOmni: FSDP2 with experts over a mesh of their own, and its `MultiOptimizer` (the real
class)."""

from __future__ import annotations

import functools

import pytest

from placement import NotResidentError, PhaseError
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded import training, veomni_worker
from tests.support.ranks import Ranks, on_ranks
from tests.support.sweeps import few
from tests.support.worker import make_manager

pytestmark = pytest.mark.skipif(
    not veomni_worker.is_installed(), reason="VeOmni is not installed here"
)


@pytest.mark.parametrize("expert_parallel", few([1, 2], 2))
def test_steps_with_experts_on_a_mesh_of_their_own(two_ranks: Ranks, expert_parallel: int) -> None:
    for outcome in two_ranks.run(
        training.compare, functools.partial(veomni_worker.build, expert_parallel)
    ):
        assert all(outcome.offloaded_bytes.values())
        # Two moments of each trained parameter: local experts, and half of the dense layer.
        experts = 2 * 4 * veomni_worker.WIDTH * 2 * veomni_worker.WIDTH // 2
        assert outcome.resident_bytes["actor.optimizer"] >= 2 * 4 * experts


@pytest.mark.parametrize("expert_parallel", few([1, 2], 2))
@on_ranks("two_ranks")
def test_no_state_is_made_up_for_parameters_or_optimizers_without_any(expert_parallel: int) -> None:
    """volcengine/verl#4916, offloading a `MultiOptimizer`: the draft asked the wrapper for
    `.state`, which it does not have; the merged code looks into each optimizer and makes an empty
    entry for every parameter that has no state."""
    program = veomni_worker.build(expert_parallel)
    manager = make_manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    program.register(manager)
    handle, optimizer = manager.handles["actor.optimizer"], program.optimizer
    inner = program.optimizers()
    reserved = handle.host_bytes
    assert handle.owners == (manager.handles["actor"],)
    assert {name.split(".")[0] for name in handle.state_dict()} == {"param_groups"}
    # Asking the object itself would step it: refused, and nothing of what torch prepared for that
    # step stays.
    with pytest.raises((NotResidentError, PhaseError)) as refused:
        optimizer.state_dict()
    assert ("state_dict() of handle 'actor.optimizer'") in (
        f"{refused.value} {refused.value.__notes__}"
    )
    assert [group["lr"] for each in inner for group in each.param_groups] == [1e-2, 1e-3]
    assert not any(each.grad is not None for each in program.model.parameters())
    assert not any(each.state for each in inner)
    assert_nothing_resident(manager)
    with manager.phase("train"):
        program.learn(0)
        inside = training.bytes_of(optimizer.state_dict())
        held = optimizer.state_dict()
    assert_nothing_resident(manager)
    for shown in (optimizer.state_dict(), handle.state_dict(), held):
        assert training.bytes_of(shown) == inside
    # The two parameters of `spare` have no gradient, so no state: looking for it must not make any
    # (`state` is a defaultdict).
    assert [len(each.state) for each in inner] == [2, 2]
    assert handle.host_bytes <= reserved
    for call in (optimizer.step, lambda: optimizer.load_state_dict(held)):
        with pytest.raises(NotResidentError):
            call()
    with manager.phase("restore"):
        optimizer.load_state_dict(held)
    assert_nothing_resident(manager)
    assert training.bytes_of(optimizer.state_dict()) == inside
    manager.close()
    assert not any(each._optimizer_step_pre_hooks for each in inner)
    assert not {"step", "load_state_dict"} & set(vars(optimizer))
