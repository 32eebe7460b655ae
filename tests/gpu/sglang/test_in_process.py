"""A real `sglang.Engine` of the trainer's process. Skipped where SGLang cannot be imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gpu.sglang import in_process
from tests.gpu.vllm.apart import Apart

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def started(folder: str, *, keeps_weights: bool, moves: bool = True) -> Iterator[Apart]:
    process = Apart()
    try:
        process.run(in_process.build, folder, keeps_weights, moves)
        yield process
        process.run(in_process.end, deadline_seconds=60)
    finally:
        process.close()


@pytest.fixture(scope="module")
def keeping(folder: str) -> Iterator[Apart]:
    yield from started(folder, keeps_weights=True)


@pytest.fixture(scope="module")
def discarding(folder: str) -> Iterator[Apart]:
    yield from started(folder, keeps_weights=False)


@pytest.mark.parametrize("kind", ["plain", "lora", "fsdp2"])
def test_steps_of_an_engine_that_keeps_its_weights(keeping: Apart, kind: str) -> None:
    keeping.run(in_process.steps, kind)


def test_the_engine_after_the_manager_was_closed(keeping: Apart) -> None:
    keeping.run(in_process.after_close)


@pytest.mark.parametrize("kind", ["plain", "lora", "fsdp2"])
def test_steps_of_an_engine_that_discards_its_weights(discarding: Apart, kind: str) -> None:
    discarding.run(in_process.steps, kind)


def test_discarded_weights_are_refused_until_they_are_filled(discarding: Apart) -> None:
    discarding.run(in_process.discarded)


def test_an_engine_without_its_memory_saver_is_refused(folder: str) -> None:
    for process in started(folder, keeps_weights=False, moves=False):
        process.run(in_process.without_memory_saver)
