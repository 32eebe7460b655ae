"""NeMo-RL's policy workers under placement: the same bits as without, in the phases that NeMo-RL's hooks declare."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import placement
from placement.integrations import nemo_rl
from tests.integrations import jobs, nemo_rl_standin, nemo_rl_worker
from tests.integrations.nemo_rl_worker import PLACED, PlacedDTensorWorker, plain_and_placed
from tests.support.ranks import Ranks
from tests.support.seeds import seed

KINDS = list(PLACED)
CALLS = [nemo_rl_standin.grpo, nemo_rl_standin.ppo, nemo_rl_standin.single_controller]


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_value_is_the_same(kind: type[Any], calls: Any) -> None:
    placed = plain_and_placed(kind, calls, jobs.plain)
    placed.offload_after_refit()
    placement.testing.assert_nothing_resident(placed.placement)
    placed.placement.check_integrity()


def test_each_hook_begins_its_phase() -> None:
    """2 weights are published; then the log-probabilities of policy and reference, and two steps; 2 weights and 6 states are saved."""
    placed = plain_and_placed(KINDS[0], nemo_rl_standin.grpo, jobs.plain)
    step = ["weight_sync"] * 2 + ["log_prob"] * 2 + ["train"] * 2
    assert placed.phases == ["weight_sync"] * 2 + step + step + ["restore"] * 8 + step + ["weight_sync"] * 2


def test_a_train_step_stays_open_while_its_buffers_are_kept() -> None:
    placed = plain_and_placed(KINDS[1], nemo_rl_standin.single_controller, jobs.plain)
    step = ["log_prob", "train", "train", "train"] + ["train"] * 2
    assert placed.phases == ["weight_sync"] * 2 + step * 2 + ["restore"] * 8


def test_hooks_without_a_prepared_model_do_nothing() -> None:
    placed = PlacedDTensorWorker({"build": jobs.plain})
    for end in (placed.offload_after_refit, placed.finish_inference, placed.finish_training, placed.offload_after_refit):
        end()
    assert placed.placement is not None
    assert placed.placement.phase_name == "idle"


def test_a_checkpoint_between_hooks_has_a_phase_of_its_own() -> None:
    placed = PlacedDTensorWorker({"build": jobs.plain})
    placed.prepare_for_training()
    placed.train(0)
    placed.offload_after_refit()
    placed.phases.clear()
    placed.save_checkpoint("weights", "optimizer")
    assert set(placed.phases) == {"restore"}
    assert placed.placement is not None
    placement.testing.assert_nothing_resident(placed.placement)
    placed.prepare_for_lp_inference()
    before = [each.clone() for each in placed.model.parameters()]
    placed.load_checkpoint("weights")
    assert placed.placement.phase_name == "log_prob"
    assert all(torch.equal(now, 0.5 * was) for now, was in zip(placed.model.parameters(), before, strict=True))


def test_a_failed_refit_is_over_with_the_next_hook() -> None:
    """The driver calls neither the end of a refit that failed nor a clean-up."""
    placed = PlacedDTensorWorker({"build": jobs.plain})
    placed.offload_before_refit()
    placed.prepare_for_training()
    placed.train(0)
    assert placed.phases == ["train"]
    placed.offload_after_refit()


def test_a_hook_that_cannot_have_its_memory_raises_before_nemo_rls_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_BUDGET_BYTES", "1")
    placed = PlacedDTensorWorker({"build": jobs.plain})
    placed.model.eval()
    for _ in range(2):
        with pytest.raises(placement.DeviceMemoryError):
            placed.prepare_for_training()
    assert not placed.model.training
    placed.offload_after_refit()
    assert placed.placement is not None
    placed.placement.check_integrity()


class _Bridged(nemo_rl_standin.MegatronWorker):
    """Megatron-Bridge reads the parameters themselves in a sync."""

    def prepare_refit_info(self) -> dict[str, torch.Size]:
        for weight in self.model.parameters():
            self._see(weight)
        return {}


class _PlacedBridged(nemo_rl_worker.Watched, _Bridged):
    """The same with placement."""


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.__name__)
def test_a_policy_that_publishes_from_the_host_copy(monkeypatch: pytest.MonkeyPatch, calls: Any) -> None:
    """The parameters are read on the device all the same; a state dict needs nothing there."""
    monkeypatch.setenv("PLACEMENT_POLICY", "colocated(stream_sync=True)")
    config = {"build": jobs.plain, "megatron_cfg": {"enabled": True}}
    seed(0)
    expected = calls(_Bridged(config))
    seed(0)
    placed = _PlacedBridged(config)
    assert calls(placed) == expected
    placed.offload_after_refit()
    assert "log_prob" in placed.phases[:2]
    assert plain_and_placed(KINDS[0], calls, jobs.plain).phases[:2] == ["weight_sync"] * 2


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.__name__)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_policy_that_streams_the_steps(monkeypatch: pytest.MonkeyPatch, kind: type[Any], calls: Any) -> None:
    """The optimizer comes to the device for a checkpoint, although the train phase that is open does without it."""
    monkeypatch.setenv("PLACEMENT_POLICY", "colocated('streamed')")
    placed = plain_and_placed(kind, calls, jobs.plain)
    placed.offload_after_refit()
    placed.placement.check_integrity()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_policy_that_steps_in_a_phase_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> None:
    """NeMo-RL has no hook around the step: it would fail after a whole rollout. A worker that only infers takes no step."""
    monkeypatch.setenv("PLACEMENT_POLICY", "colocated('optimizer_step')")
    with pytest.raises(placement.RegistrationError, match=r"NeMo-RL .* write optimizer_in='train', or 'streamed'"):
        PLACED[kind]({"build": jobs.plain})
    assert PLACED[kind]({"build": jobs.plain}, init_optimizer=False).placement is not None


def test_fsdp2_on_two_ranks(two_ranks: Ranks) -> None:
    for moved in two_ranks.run(nemo_rl_worker.compare, nemo_rl_standin.DTensorWorker, nemo_rl_standin.grpo, jobs.fsdp2):
        assert moved["actor"] > 0
        assert moved["actor.optimizer"] > 0


def test_megatron_on_two_ranks(two_ranks: Ranks) -> None:
    """Megatron-Core's own DDP and distributed optimizer; the ranks change phase together."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed here")
    for moved in two_ranks.run(nemo_rl_worker.compare, nemo_rl_standin.MegatronWorker, nemo_rl_standin.grpo, jobs.megatron):
        assert moved["actor"] > 0
        assert moved["actor.optimizer"] > 0


def test_an_external_model_stays_nemo_rls() -> None:
    """FSDP2 under CPUOffloadPolicy: NeMo-RL moves its buffers, and its optimizer state is on the host."""

    class External(PlacedDTensorWorker):
        def make_manager(self) -> placement.Manager:
            manager = super().make_manager()
            register = manager.register
            manager.register = lambda *arguments, **keywords: register(*arguments, **keywords, external=True)  # type: ignore[method-assign]
            return manager

    placed = External({"build": jobs.plain, "cpu_offload": True})
    nemo_rl_standin.grpo(placed)
    assert ("buffers", "cuda") in placed.moves
    assert ("optimizer", "cpu") in placed.moves


def test_other_models_are_moved_as_before() -> None:
    """A model for generation in another layout, for example."""
    model = torch.nn.Linear(2, 2)
    placed = PLACED[KINDS[1]]({"build": jobs.plain})
    built = len(placed.moves)
    placed.move_model(model, "cpu", move_grads=False)
    assert placed.moves[built:] == [("params=True grads=False", "cpu")]


def test_a_worker_without_optimizer() -> None:
    placed = PlacedDTensorWorker({"build": jobs.plain}, init_optimizer=False)
    placed.prepare_for_lp_inference()
    placed.get_logprobs(0)
    placed.offload_after_refit()
    assert placed.placement is not None
    assert list(placed.placement.handles) == ["actor"]


def test_generation_with_the_policys_own_model_is_refused() -> None:
    generation = {"backend": "megatron", "colocated": {"enabled": True}}
    with pytest.raises(placement.RegistrationError, match="Megatron generation"):
        PlacedDTensorWorker({"build": lambda: 1 // 0, "generation": generation})


# --- the driver's part


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """NeMo-RL's registry of interpreters."""
    modules = nemo_rl_standin.modules()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    known: dict[str, str] = modules["nemo_rl.distributed.ray_actor_environment_registry"].ACTOR_ENVIRONMENT_REGISTRY
    return known


@pytest.mark.parametrize(
    ("config", "name", "executable"),
    [
        ({"megatron_cfg": {"enabled": True}, "dtensor_cfg": {"enabled": False}}, "MegatronPolicyWorker", "uv mcore"),
        ({"dtensor_cfg": {"enabled": True, "_v2": True}}, "DTensorPolicyWorkerV2", "uv automodel"),
        ({"dtensor_cfg": {"enabled": True}}, "DTensorPolicyWorker", "uv fsdp"),
    ],
)
def test_the_worker_for_a_configuration(registry: dict[str, str], config: dict[str, Any], name: str, executable: str) -> None:
    placed = f"placement.integrations.nemo_rl.{name}"
    assert nemo_rl.worker_for(config) == placed
    assert registry[placed] == executable
    assert nemo_rl.worker_for(config, py_executable="/opt/python") == placed
    assert registry[placed] == "/opt/python"


def test_the_policy_factory_makes_nemo_rls_policy(registry: dict[str, str]) -> None:
    config = {"dtensor_cfg": {"enabled": True, "_v2": True}}
    policy = nemo_rl.policy_factory(config=config, cluster="cluster", init_optimizer=True)
    assert vars(policy) == {
        "config": config,
        "cluster": "cluster",
        "init_optimizer": True,
        "worker_extension_cls_fqn": "placement.integrations.nemo_rl.DTensorPolicyWorkerV2",
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [({}, "enable policy.megatron_cfg"), ({"megatron_cfg": {"enabled": True}, "quant_cfg": "fp8"}, "quant_cfg")],
)
def test_a_configuration_without_a_worker_is_refused(registry: dict[str, str], config: dict[str, Any], message: str) -> None:
    before = dict(registry)
    with pytest.raises(ValueError, match=message):
        nemo_rl.worker_for(config)
    assert registry == before


def test_the_actor_class_is_found_by_its_name(registry: dict[str, str]) -> None:
    """NeMo-RL imports the module and asks for the last part of the name, in the driver and again in each worker."""
    pytest.importorskip("ray", reason="ray is not installed here")
    try:
        actor = nemo_rl.DTensorPolicyWorkerV2
        assert nemo_rl.DTensorPolicyWorkerV2 is actor
        made = actor.__ray_metadata__.modified_class
        assert issubclass(made, nemo_rl.PlacedPolicyWorker)
        assert issubclass(made, nemo_rl_standin.DTensorWorker)
        assert actor._default_options["runtime_env"]["env_vars"] == {"FOR": "dtensor_policy_worker_v2"}
    finally:
        vars(nemo_rl).pop("DTensorPolicyWorkerV2", None)
    with pytest.raises(AttributeError, match="RolloutWorker"):
        _ = nemo_rl.RolloutWorker
