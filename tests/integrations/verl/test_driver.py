"""verl's own driver trains by GRPO, with Ray, its agent loop, and a rollout that sleeps and wakes:
the same with and without placement.

With SWEEP=all: two Ray clusters with ten processes each take two minutes of an idle machine, and
time out on a busy one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import _verl_job
from bench._verl_job import Job
from tests.integrations.verl import recipe, worker
from tests.support.frameworks import needs

needs("ray")
needs("verl")
needs("transfer_queue")
needs("torchdata")
pytestmark = pytest.mark.sweep

SECONDS = 400.0
"""Ten processes import verl, one after the other, on a busy machine."""


def _run(folder: Path, inputs: Path, environment: dict[str, str]) -> Job:
    environment = {"OMP_NUM_THREADS": "1", "VERL_ENGINE_DEVICE": "cuda", **environment}
    job = _verl_job.run(
        folder,
        inputs,
        recipe.tiny(),
        environment,
        ["tests.integrations.verl.driver_process"],
        SECONDS,
    )
    if job.failure is not None:
        raise job.failure
    return job


@pytest.mark.skipif(
    os.environ.get("SWEEP") != "all", reason="takes minutes of an idle machine: SWEEP=all"
)
@pytest.mark.timeout(2.5 * SECONDS)
def test_three_steps_are_those_of_verl(tmp_path: Path) -> None:
    inputs = worker.write_model(tmp_path / "inputs")
    recipe.write_inputs(inputs, worker.VOCABULARY, prompts=4)
    own = _run(tmp_path / "own", inputs, {})
    placed = _run(
        tmp_path / "placed",
        inputs,
        {"VERL_ENGINE_VENDOR": "placement", "PLACEMENT_DEVICE": f"simulated:{worker.CAPACITY}"},
    )
    assert len(own.steps) == 3
    assert all(step["actor/grad_norm"] > 0 for step in own.steps)
    assert placed.computed == own.computed
    assert "placement places the parameters and the optimizer of 'actor'" in placed.output
    assert "placement places the parameters of 'ref'" in placed.output
    phases = ["sleep", "log_prob", "ref_log_prob", "train", "rollout to train", "weight_sync"]
    assert [event["phase"] for event in placed.events] == 3 * phases
    (snapshot,) = placed.events[-1]["states"]
    assert [handle["name"] for handle in snapshot["handles"]] == [
        "ref",
        "actor",
        "actor.optimizer",
        "rollout",
    ]
    *models, rollout = snapshot["handles"]
    assert {handle["state"] for handle in models} == {"CPU_OFFLOADED"}
    assert all(handle["loaded_bytes"] > 0 for handle in models)
    assert (rollout["state"], rollout["resident_tags"], rollout["stale"]) == (
        "GPU_RESIDENT",
        ["kv_cache", "weights"],
        None,
    )
    assert set(snapshot["phase_seconds"]) >= {"log_prob", "ref_log_prob", "train", "weight_sync"}
    assert (
        snapshot["pairing_violations"],
        snapshot["unpaired_bytes"],
        snapshot["wrong_writes"],
    ) == (0, 0, 0)
