"""The cases with a `vllm.LLM` in the trainer's process. They run in a process of `Apart`, which
builds the engine once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from placement import BrokenHandleError, DeviceMemoryError, EngineError, EngineLost, State
from placement.engines.vllm import VllmInProcess
from placement.testing import assert_nothing_resident
from tests.gpu.vllm import cases, models
from tests.gpu.vllm.job import BATCHED_TOKENS, KV_CACHE_BYTES, Job, assert_bytes, ended
from tests.group.part_worker import little_left

WAKES = ("weights", "kv_cache")
BEYOND_THE_DEVICE = 1 << 40
"""A budget with which a plan is tried although there is no memory for it, as where others take
memory that the manager does not see."""
_llms: list[Any] = []
_folders: list[str] = []


def build(folder: str, sleeps: bool = True) -> None:
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] in "01"
    from vllm import LLM

    _folders.append(folder)
    _llms.append(
        LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=models.CONTEXT,
            max_num_seqs=16,
            max_num_batched_tokens=BATCHED_TOKENS,
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            enable_sleep_mode=sleeps,
            generation_config="vllm",
        )
    )


def generate(asked: models.Tokens) -> models.Tokens:
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0.0, max_tokens=models.NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    answers = _llms[0].generate(
        [{"prompt_token_ids": prompt} for prompt in asked], greedy, use_tqdm=False
    )
    return [[*answer.outputs[0].token_ids] for answer in answers]


def _parameter_bytes(model: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def wake(engine: VllmInProcess) -> None:
    """Bring everything back without placement, weights first."""
    for tag in WAKES:
        if tag in engine.residency.offloaded_tags:
            _llms[0].wake_up([tag])


@contextmanager
def job(weights: Any, kind: str = "plain", **options: Any) -> Iterator[Job]:
    engine = VllmInProcess(_llms[0], weights=weights)
    try:
        with ended(Job(engine, generate, kind, **options)) as made:
            yield made
    finally:
        wake(engine)


def steps(weights: str, kind: str) -> None:
    (weights_bytes,) = _llms[0].apply_model(_parameter_bytes)
    with job(weights, kind) as made:
        assert made.rollout.state is State.CPU_OFFLOADED
        assert_bytes([made.step(number) for number in range(1, 5)], weights_bytes)
        made.manager.check_integrity()


def refused_until_filled() -> None:
    """Discarded weights, filled by half a sync, by a whole one, and from the disk."""
    with job("discard") as made:
        cases.refused_until_filled(made)
        with made.manager.phase("weight_sync") as step:
            _llms[0].collective_rpc("reload_weights", kwargs={"weights_path": _folders[0]})
            made.engine.weights_filled()
            step.switch("rollout")
            answered = made.roll_out()
    models.assert_generated_by(models.model(0, "cuda"), made.asked, answered)


def unfinished_requests() -> None:
    """Requests that nobody has stepped to their end keep the engine where it is."""
    from vllm import SamplingParams

    with job("keep") as made, made.manager.phase("weight_sync") as step:
        made.publish()
        step.switch("rollout")
        core = _llms[0].llm_engine
        core.add_request(
            "left behind",
            {"prompt_token_ids": made.asked[0]},
            SamplingParams(max_tokens=4, detokenize=False, ignore_eos=True),
        )
        with pytest.raises(EngineError, match="has unfinished requests"):
            step.switch("train")
        assert made.rollout.state is State.GPU_RESIDENT
        while core.has_unfinished_requests():
            core.step()
        step.switch("train")
        assert made.rollout.state is State.CPU_OFFLOADED


def after_close() -> None:
    """`close` gives the engine back as it is: asleep. Its own wake brings back what it generated
    with."""
    with job("keep") as made:
        made.step(6, is_twice=False)
        made.manager.close()
        assert _llms[0].llm_engine.is_sleeping()
        assert not made.engine.residency.resident_tags
        with pytest.raises(EngineError, match="are offloaded"):
            made.engine.update_weights([])
        wake(made.engine)
        made.engine.assume(offloaded=[])
        assert not _llms[0].llm_engine.is_sleeping()
        assert generate(made.asked) == made.answered


# --- a device without room


def _blocks(tag: str) -> list[int]:
    """The blocks that a wake maps one by one, in bytes."""
    from vllm.device_allocator.cumem import CuMemAllocator

    known = CuMemAllocator.get_instance().pointer_to_data.values()
    return [data.handle[1] for data in known if data.tag == tag]


def no_room_for_the_plan() -> None:
    """The tags have been measured: what does not fit is refused before anything is sent."""
    with job("keep") as made:
        made.step(7, is_twice=False)
        with (
            little_left(made.manager.device, sum(_blocks("weights")) // 2),
            pytest.raises(DeviceMemoryError),
        ):
            made.manager.phase("rollout").__enter__()
        assert _llms[0].llm_engine.is_sleeping()
        with made.manager.phase("rollout"):
            assert generate(made.asked) == made.answered


def no_room_for_the_weights() -> None:
    """vLLM has no memory for the first block. Placement cannot know that it was the first, so it
    asks for a sync."""
    with job("keep", budget_bytes=BEYOND_THE_DEVICE) as made:
        made.step(8, is_twice=False)
        with (
            little_left(made.manager.device, _blocks("weights")[0] // 2),
            pytest.raises(EngineError, match="out of memory") as raised,
        ):
            made.manager.phase("rollout").__enter__()
        assert not isinstance(raised.value, EngineLost)
        assert made.rollout.state is State.CPU_OFFLOADED
        with pytest.raises(EngineError, match="failed half-way, so they are not valid"):
            made.manager.phase("rollout").__enter__()
        made.step(9)


def no_room_for_the_kv_cache() -> None:
    """The weights cannot leave before the KV cache has been back once, so they stay until there is
    room for it."""
    with job("keep", budget_bytes=BEYOND_THE_DEVICE) as made:
        made.step(10, is_twice=False)
        left = sum(_blocks("weights")) + _blocks("kv_cache")[0] // 2
        with (
            little_left(made.manager.device, left),
            pytest.raises(EngineError, match="out of memory"),
        ):
            made.manager.phase("rollout").__enter__()
        assert made.engine.residency.resident_tags == {"weights"}
        assert made.manager.snapshot().unpaired_bytes > 0
        with made.manager.phase("rollout"):
            assert generate(made.asked) == made.answered
        assert_nothing_resident(made.manager)


def room_for_a_part_of_the_kv_cache() -> None:
    """What is back cannot be mapped again: the engine is lost, everything else goes on. The last
    case of its process."""
    made = Job(VllmInProcess(_llms[0]), generate, budget_bytes=BEYOND_THE_DEVICE)
    made.step(11, is_twice=False)
    left = sum(_blocks("weights")) + 3 * _blocks("kv_cache")[0] // 2
    with little_left(made.manager.device, left), pytest.raises(EngineError, match="out of memory"):
        made.manager.phase("rollout").__enter__()
    # or the way back has found it already
    with pytest.raises((EngineLost, BrokenHandleError), match="vLLM cannot bring back the rest"):
        made.manager.phase("rollout").__enter__()
    assert made.rollout.broken is not None
    made.manager.unregister("rollout")
    with made.manager.phase("train"):
        assert made.actor.state is State.TRAINING
    assert_nothing_resident(made.manager)
    made.manager.close()


def without_sleep_mode() -> None:
    """An engine that was made without sleep mode is refused, and generates on as before."""
    asked = models.prompts()
    answered = generate(asked)
    with pytest.raises(EngineError, match="made without sleep mode"):
        Job(VllmInProcess(_llms[0]), generate)
    assert not _llms[0].llm_engine.is_sleeping()
    assert generate(asked) == answered
    models.assert_generated_by(models.model(0, "cuda"), asked, answered)
