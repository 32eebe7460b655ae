"""verl's own driver on a GPU, with SGLang as the rollout that sleeps and wakes. Skipped where verl
or SGLang cannot be imported."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import _verl_job, verl_grpo
from bench._qwen import SHAPES, write_model
from tests.support.frameworks import needs

needs("verl")
needs("sglang")
needs("ray")
needs("transfer_queue")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]
_VOCABULARY = 151_936
_PROMPTS = 16


def test_sglang_sleeps_and_wakes_as_a_handle(tmp_path: Path) -> None:
    """SGLang lives through three steps, which a release or a resume that came twice would end, and
    what it holds is measured."""
    from tests.integrations.verl import recipe

    inputs = write_model(tmp_path / "inputs", SHAPES["0.5B"], torch.device("cuda:0"))
    recipe.write_inputs(inputs, _VOCABULARY, _PROMPTS)
    options = {
        **verl_grpo.gpu_options(1, "sglang"),
        "trainer.total_training_steps": 3,
        "trainer.total_epochs": 3,
    }
    options |= {"data.train_batch_size": _PROMPTS, "data.max_response_length": 64}
    options["actor_rollout_ref.actor.ppo_mini_batch_size"] = _PROMPTS
    job = _verl_job.run(
        tmp_path / "job", inputs, options, {"VERL_ENGINE_VENDOR": "placement"}, [], 1000.0
    )
    assert job.failure is None, job.failure
    assert len(job.steps) == 3
    assert "placement knows the rollout as 'rollout' (PlacedServerAdapter)" in job.output
    (snapshot,) = job.events[-1]["states"]
    *_, rollout = snapshot["handles"]
    assert (rollout["name"], rollout["state"], rollout["resident_tags"]) == (
        "rollout",
        "GPU_RESIDENT",
        ["kv_cache", "weights"],
    )
    assert rollout["resident_bytes"] > 1 << 30, "the KV cache alone has more"
    assert rollout["transitions"]["load"] == rollout["transitions"]["offload"] + 1 >= 3
    assert (snapshot["pairing_violations"], snapshot["unpaired_bytes"]) == (0, 0)
