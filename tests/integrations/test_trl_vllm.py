"""A vLLM in this process as a handle of a placed trainer. The engine is a stand-in; TRL's own code around it is the real one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from placement import Manager
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.engines.standin import CAPACITY, CHUNK
from tests.integrations import trl_jobs as jobs
from tests.integrations.standin_llm import GeneratingLLM
from tests.integrations.trl_jobs import COMMON, LAUNCHED, Watch, assert_same, grpo_config, make, placed, trl
from tests.support import huggingface as hf
from tests.support.frameworks import needs

needs("trl")
needs("accelerate")

pytestmark = pytest.mark.filterwarnings(*jobs.QUIET)


@pytest.fixture
def engines(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], GeneratingLLM]:
    """Let TRL find vLLM installed: the next trainer's `LLM` is a stand-in, on the device of this file."""
    generation = importlib.import_module("trl.generation.vllm_generation")

    def next_on(shared: str) -> GeneratingLLM:
        for name in LAUNCHED:
            monkeypatch.setenv(name, "")  # TRL sets them for vLLM; the next trainer would take them for a launcher's
            monkeypatch.delenv(name)
        made = GeneratingLLM(tmp_path / shared, folder)
        monkeypatch.setattr(generation, "is_vllm_available", lambda: True)
        monkeypatch.setattr(generation, "LLM", lambda **_: made, raising=False)
        monkeypatch.setattr(generation, "SamplingParams", SimpleNamespace, raising=False)
        return made

    return next_on


VLLM: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True, "max_steps": 3, "num_iterations": 1}


def on_device_of(tmp_path: Path, shared: str) -> Manager:
    return Manager(device=SimulatedDevice(CAPACITY, chunk_bytes=CHUNK, shared_with=tmp_path / shared), phases=placed.PHASES)


def test_vllm_that_sleeps(folder: str, tmp_path: Path, engines: Callable[[str], GeneratingLLM]) -> None:
    manager = on_device_of(tmp_path, "ours")
    watch = Watch(manager)
    made = {}
    for whose, cls in (("own", trl.RLOOTrainer), ("ours", placed.PlacedRLOOTrainer)):
        llm = engines(whose)
        config = trl.RLOOConfig(**{**COMMON, "beta": 0.1, **VLLM}, output_dir=str(tmp_path / "out"))
        keywords = {"manager": manager} if whose == "ours" else {}
        trainer = make(cls, config, folder, eval_dataset=hf.prompts(), **keywords)
        if whose == "ours":
            watch.around(llm, "generate")
        trainer.train()
        trainer.evaluate()
        assert llm.accidents == []
        made[whose] = trainer, llm
    (own, _), (ours, llm) = made["own"], made["ours"]
    assert_same(ours, own)
    assert watch.seen["generate"] == {frozenset({"rollout"})}  # all of the engine, and nothing else
    assert llm.memory.tags == set()
    assert_nothing_resident(manager)
    order = [call[0] if call[0] != "wake_up" else call for call in llm.calls]
    begun = order.index(("wake_up", ["weights"]))
    assert order[:begun] == ["sleep"]  # TRL's own, when it made the engine
    assert order[begun : begun + 5] == [("wake_up", ["weights"]), "load_weights", ("wake_up", ["kv_cache"]), "generate", "sleep"]


def test_vllm_that_does_not_sleep(folder: str, tmp_path: Path, engines: Callable[[str], GeneratingLLM]) -> None:
    """The engine is TRL's alone. TRL merges adapters in the actor and takes the merge back, also with the rounding that this leaves."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    manager = on_device_of(tmp_path, "ours")
    trainers = []
    for whose, cls in (("own", trl.GRPOTrainer), ("ours", placed.PlacedGRPOTrainer)):
        llm = engines(whose)
        config = grpo_config(tmp_path / "out", **{**VLLM, "vllm_enable_sleep_mode": False})
        trainers.append(make(cls, config, folder, peft_config=lora, **({"manager": manager} if whose == "ours" else {})))
        trainers[-1].train()
        assert llm.accidents == []
    own, ours = trainers
    assert_same(ours, own)
    assert_nothing_resident(manager)


def test_vllm_that_fails_and_goes_on(folder: str, tmp_path: Path, engines: Callable[[str], GeneratingLLM]) -> None:
    llm, manager = engines("ours"), on_device_of(tmp_path, "ours")
    trainer = make(placed.PlacedGRPOTrainer, grpo_config(tmp_path, **VLLM), folder, manager=manager)
    generate = llm.generate

    def interrupted(*args: Any, **keywords: Any) -> Any:
        llm.generate = generate  # type: ignore[method-assign]
        raise KeyboardInterrupt

    llm.generate = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert llm.memory.tags == set()
    assert_nothing_resident(manager)
    trainer.train()
    assert trainer.state.global_step == 3
    manager.close()
    trainer.args.eval_strategy = "no"
    trainer.evaluate(hf.prompts())  # TRL sleeps and wakes the engine by itself again
    assert llm.accidents == []
    assert llm.memory.tags == set()
