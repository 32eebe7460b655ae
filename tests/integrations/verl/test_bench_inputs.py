"""The benchmark of verl's driver: the models that it writes, and the row of a run that died."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import _verl_job
from bench._decoder import Shape
from bench._qwen import write_model


@pytest.mark.parametrize("tied", [True, False])
def test_a_written_model_has_all_weights_in_bf16(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    shape = Shape(32, 64, 2, 4, 2, 8, 256, tied=tied)
    folder = write_model(tmp_path / "model", shape, torch.device("cpu"))
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    assert not any(loading.values()), loading
    weights = dict(model.named_parameters())
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert weights["model.layers.1.mlp.up_proj.weight"].float().std().item() > 0.01
    assert torch.equal(weights["model.norm.weight"], torch.ones(32, dtype=torch.bfloat16))
    assert not weights["model.layers.0.self_attn.q_proj.bias"].any()
    assert len(list(folder.glob("model.layers.*.safetensors"))) == 2


_OUTPUT = """\
WARNING: an engine is not available: ModuleNotFoundError("No module named 'x'")
\x1b[36m(EngineCore pid=7)\x1b[0m   File "/site/vllm/utils.py", line 433, in request_memory
\x1b[36m(EngineCore pid=7)\x1b[0m ValueError: Free memory on device is less than desired
Traceback (most recent call last):
  File "/site/verl/trainer/main_ppo.py", line 42, in main
    run_ppo(config)
  File "/site/ray/_private/worker.py", line 900, in get
ray.exceptions.RayTaskError(RuntimeError): ray::TaskRunner.run()
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_the_cause_and_the_end_of_a_run_are_named_with_their_lines() -> None:
    assert _verl_job.failures(_OUTPUT) == (
        "utils.py:433, in request_memory: ValueError: Free memory on device is less than desired; "
        "at the end worker.py:900, in get: RuntimeError: Engine core initialization failed. See "
        "root cause above."
    )
    assert _verl_job.failures("all is well") == "no error in its output"


_DIES_IN_STEP_2 = """
import json, os, sys
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    print(json.dumps({"step": 1, "data": {"timing_s/step": 0.5}}), file=file)
with open(os.environ["VERL_BENCH_EVENTS"], "w") as file:
    for step in (1, 2):
        print(json.dumps({"step": step, "phase": "sleep"}), file=file)
    file.write('{"step": 2, "pha')
raise ValueError(str(sys.argv))
"""


def test_a_run_that_dies_has_its_whole_steps_and_says_in_which_part(tmp_path: Path) -> None:
    """In verl's place there is a package that refuses every recipe."""
    trainer = tmp_path / "site" / "verl" / "trainer"
    trainer.mkdir(parents=True)
    for package in (trainer.parent, trainer):
        (package / "__init__.py").touch()
    (trainer / "main_ppo.py").write_text(_DIES_IN_STEP_2)
    site = {"PYTHONPATH": str(tmp_path / "site")}
    job = _verl_job.run(tmp_path / "job", tmp_path, {"no.such.option": 1}, site, [], 200.0)
    assert job.steps == [{"timing_s/step": 0.5}]
    assert [event["step"] for event in job.events] == [1]
    assert job.failure is not None
    assert str(job.failure).startswith(
        "verl's driver: ended with 1 in its start: main_ppo.py:9, in <module>: ValueError"
    )
    assert "no.such.option=1" in job.failure.__notes__[0]
