"""A real `vllm.LLM` in the trainer's process, or with its core in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu.vllm import in_process
from tests.gpu.vllm.apart import Apart

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

CORE_HERE = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
CORE_APART = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def started(folder: str, environment: dict[str, str], *, sleeps: bool = True) -> Iterator[Apart]:
    process = Apart(**environment)
    try:
        process.run(in_process.build, folder, sleeps)
        yield process
    finally:
        process.close()


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[Apart]:
    yield from started(folder, CORE_HERE)


@pytest.fixture(scope="module")
def engine_apart(folder: str) -> Iterator[Apart]:
    """An engine whose core runs in a process of its own, as it is by default."""
    yield from started(folder, CORE_APART)


@pytest.mark.parametrize("kind", ["plain", "lora", "fsdp2"])
@pytest.mark.parametrize("weights", ["keep", "discard"])
def test_steps_with_an_actor_of_each_kind(engine: Apart, weights: str, kind: str) -> None:
    engine.run(in_process.steps, weights, kind)


@pytest.mark.parametrize(
    "case",
    [
        in_process.refused_until_filled,
        in_process.unfinished_requests,
        in_process.after_close,
        in_process.no_room_for_the_plan,
        in_process.no_room_for_the_weights,
        in_process.no_room_for_the_kv_cache,
        in_process.room_for_a_part_of_the_kv_cache,
    ],
    ids=lambda case: case.__name__,
)
def test_what_may_happen_to_an_engine(engine: Apart, case: Callable[[], None]) -> None:
    engine.run(case)


@pytest.mark.parametrize("weights", ["keep", "discard"])
def test_with_the_core_in_a_process_of_its_own(engine_apart: Apart, weights: str) -> None:
    engine_apart.run(in_process.steps, weights, "plain")


def test_an_engine_without_sleep_mode_is_refused(folder: str) -> None:
    for process in started(folder, CORE_HERE, sleeps=False):
        process.run(in_process.without_sleep_mode)
