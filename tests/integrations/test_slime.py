"""slime's train actor under placement: the same bits as without, in the phases that its methods declare."""

from __future__ import annotations

import pickle
import sys
from functools import partial

import pytest

import placement
from placement.integrations.slime import PlacedTrainActor, train_actor_class
from tests.integrations import jobs, slime_standin, slime_worker
from tests.integrations.slime_worker import Placed, plain_and_placed
from tests.support.ranks import Ranks


@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"keep_old_actor": True},
        {"update_weight_transport": "disk"},
        {"colocate": False},
    ],
    ids=lambda options: "-".join(options) or "colocate",
)
def test_every_value_is_the_same(num_parts: int, options: dict[str, object]) -> None:
    placed = plain_and_placed(slime_standin.arguments(partial(jobs.plain, num_parts), **options), with_ref=True)
    assert placed.placement is not None
    placement.testing.assert_nothing_resident(placed.placement)
    placed.placement.check_integrity()


def test_each_method_is_in_its_phase() -> None:
    """Per rollout three log-probabilities or losses of the reference, the actor and two steps; 2 weights are published, 2 + 6 saved."""
    placed = plain_and_placed(slime_standin.arguments(jobs.plain, colocate=False), with_ref=True)
    rollout = ["train"] * 4 + ["weight_sync"] * 2
    assert placed.phases == ["weight_sync"] * 2 + rollout + ["train"] * 4 + ["restore"] * 8 + ["weight_sync"] * 2 + rollout


@pytest.mark.parametrize(("options", "phase"), [({}, "idle"), ({"keep_old_actor": True}, "weight_sync")])
def test_a_sync_from_host_copies_loads_nothing(options: dict[str, object], phase: str) -> None:
    placed = Placed(1, 0, None, None)
    placed.init(slime_standin.arguments(jobs.plain, **options), "actor")
    assert placed.placement is not None
    loads = placed.placement.handles["actor"].counters.loaded_bytes
    placed.phases.clear()
    placed.update_weights()
    assert set(placed.phases) == {phase}
    assert (placed.placement.handles["actor"].counters.loaded_bytes > loads) == (phase == "weight_sync")


@pytest.mark.parametrize("options", [{"keep_old_actor": True}, {"update_weight_transport": "disk"}, {"colocate": False}], ids="-".join)
def test_a_policy_that_publishes_from_the_host_copy(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    """slime reads the parameters themselves, which are not on the device then."""
    monkeypatch.setenv("PLACEMENT_POLICY", "colocated(stream_sync=True)")
    placed = plain_and_placed(slime_standin.arguments(jobs.plain, **options), with_ref=True)
    assert placed.placement is not None
    placement.testing.assert_nothing_resident(placed.placement)


def test_a_critic_is_one() -> None:
    placed = plain_and_placed(slime_standin.arguments(jobs.plain), "critic")
    assert placed.placement is not None
    assert {name: handle.role for name, handle in placed.placement.handles.items()} == {"critic": "critic", "critic.optimizer": "critic"}


def test_without_training_there_is_no_optimizer() -> None:
    placed = Placed(1, 0, None, None)
    placed.init(slime_standin.arguments(jobs.plain, num_rollout=0, colocate=False), "actor")
    placed.update_weights()
    assert placed.placement is not None
    assert list(placed.placement.handles) == ["actor"]
    assert set(placed.phases) == {"weight_sync"}


def test_without_a_model_there_is_no_manager() -> None:
    """slime's --debug-rollout-only builds none."""
    placed = Placed(1, 0, None, None)
    assert slime_standin.run(placed, slime_standin.arguments(jobs.plain, debug_rollout_only=True, offload_train=True)) == []
    assert placed.placement is None


def test_two_owners_of_one_placement_are_refused() -> None:
    placed = Placed(1, 0, None, None)
    with pytest.raises(placement.RegistrationError, match="--no-offload-train"):
        placed.init(slime_standin.arguments(jobs.plain, offload_train=True), "actor")
    assert not hasattr(placed, "model"), "slime's init has begun"


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("policy", ["colocated('optimizer_step')", "resident('optimizer_step')", "async_rollout('optimizer_step')"])
def test_a_policy_that_steps_in_a_phase_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch, policy: str, role: str) -> None:
    """slime has no hook around the step: it would fail after a whole rollout."""
    monkeypatch.setenv("PLACEMENT_POLICY", policy)
    placed = Placed(1, 0, None, None)
    with pytest.raises(placement.RegistrationError, match=r"slime .* write optimizer_in='train', or 'streamed'"):
        placed.init(slime_standin.arguments(jobs.plain), role)
    assert placed.placement is None


def test_a_policy_for_steps_matters_to_no_model_without_an_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_POLICY", "colocated('optimizer_step')")
    placed = Placed(1, 0, None, None)
    placed.init(slime_standin.arguments(jobs.plain, num_rollout=0, colocate=False), "actor")
    placed.update_weights()


@pytest.mark.parametrize("policy", ["colocated('streamed')", "resident('streamed')", "async_rollout('streamed')", "cyclic"])
def test_other_policies_take_their_steps(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    monkeypatch.setenv("PLACEMENT_POLICY", policy)
    placed = Placed(1, 0, None, None)
    placed.init(slime_standin.arguments(jobs.plain), "actor")
    placed.train(0, None)


def test_an_exception_in_train_leaves_nothing_behind() -> None:
    placed = Placed(1, 0, None, None)
    placed.init(slime_standin.arguments(jobs.plain), "actor")
    learn, placed.job.learn = placed.job.learn, lambda number: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        placed.train(0, None)
    placed.clear_memory()
    placed.job.learn = learn  # type: ignore[method-assign]
    placed.train(0, None)
    assert placed.placement is not None
    placed.placement.check_integrity()


def test_megatron_on_two_ranks(two_ranks: Ranks) -> None:
    """Megatron-Core's own DDP and distributed optimizer; the ranks change phase together."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed here")
    for moved in two_ranks.run(slime_worker.compare, jobs.megatron):
        assert moved["actor"] > 0
        assert moved["actor.optimizer"] > 0


def test_the_actor_class_can_be_sent_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """slime's driver makes the class, and Ray sends it to the ranks, which have no name for it."""
    cloudpickle = pytest.importorskip("ray.cloudpickle", reason="ray is not installed here")
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, jobs.made(name, {}))
    actor = jobs.made("slime.backends.megatron_utils.actor", {"MegatronTrainRayActor": slime_standin.TrainActor})
    monkeypatch.setitem(sys.modules, actor.__name__, actor)
    made = train_actor_class()
    assert made.__mro__[1:3] == (PlacedTrainActor, slime_standin.TrainActor)
    arrived = pickle.loads(cloudpickle.dumps(made))
    assert arrived.__mro__[1:3] == made.__mro__[1:3]


def test_without_slime_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mixin can be had without slime; its class cannot."""
    monkeypatch.setitem(sys.modules, "slime", None)
    with pytest.raises(ModuleNotFoundError, match="slime"):
        train_actor_class()
