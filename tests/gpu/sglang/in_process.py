"""The cases with an `sglang.Engine` of the trainer's process. They run in a process of `Apart`,
which builds the engine once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from placement import EngineError, State
from placement.engines.sglang import SglangInProcess
from tests.gpu.sglang.server import options
from tests.gpu.vllm import models
from tests.gpu.vllm.cases import refused_until_filled
from tests.gpu.vllm.job import Job, assert_bytes, ended

_engines: list[Any] = []


def build(folder: str, keeps_weights: bool, moves: bool = True) -> None:
    import sglang

    _engines.append(
        sglang.Engine(
            model_path=folder,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            disable_cuda_graph=True,
            **options(),
            enable_memory_saver=moves,
            enable_weights_cpu_backup=keeps_weights and moves,
        )
    )


def end() -> None:
    _engines.pop().shutdown()


def generate(asked: models.Tokens) -> models.Tokens:
    greedy = {"temperature": 0.0, "max_new_tokens": models.NEW_TOKENS, "ignore_eos": True}
    return [
        [*answer["output_ids"]]
        for answer in _engines[0].generate(input_ids=asked, sampling_params=greedy)
    ]


def resume(engine: SglangInProcess) -> None:
    """Bring everything back without placement, weights first."""
    for tag in ("weights", "kv_cache"):
        if tag in engine.residency.offloaded_tags:
            _engines[0].resume_memory_occupation(tags=[tag])


@contextmanager
def job(kind: str = "plain") -> Iterator[Job]:
    engine = SglangInProcess(_engines[0], deadline_seconds=60)
    try:
        with ended(Job(engine, generate, kind)) as made:
            yield made
    finally:
        resume(engine)


def steps(kind: str) -> None:
    with job(kind) as made:
        assert made.rollout.state is State.CPU_OFFLOADED
        assert_bytes([made.step(number) for number in range(1, 5)], models.weights_bytes())
        made.manager.check_integrity()


def discarded() -> None:
    with job() as made:
        refused_until_filled(made)


def after_close() -> None:
    """`close` leaves the engine as it is. Its own resume brings back what it generated with, if it
    keeps its weights."""
    with job() as made:
        made.step(6, is_twice=False)
        made.manager.close()
        assert not made.engine.residency.resident_tags
        resume(made.engine)
        made.engine.assume(offloaded=[])
        models.assert_generated_by(made.module.to("cuda"), made.asked, generate(made.asked))


def without_memory_saver() -> None:
    """An engine without its memory saver is refused, and generates on as before."""
    asked = models.prompts()
    with pytest.raises(EngineError, match="memory saver"):
        Job(SglangInProcess(_engines[0]), generate)
    with torch.no_grad():
        models.assert_generated_by(models.model(0, "cuda"), asked, generate(asked))
