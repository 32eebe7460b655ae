"""A real vLLM server on the trainer's GPU. Weights go by CUDA IPC."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from tests.gpu.vllm import cases, serving
from tests.gpu.vllm.apart import Apart
from tests.gpu.vllm.server import running

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ENDS = "tests.gpu.vllm.serving"


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with running(folder, tmp_path_factory.mktemp("server") / "log") as started:
        yield started


@pytest.mark.parametrize("kind", ["plain", "lora", "fsdp2"])
@pytest.mark.parametrize("weights", ["keep", "discard"])
def test_steps_with_an_actor_of_each_kind(
    server: tuple[str, int], trainer: Apart, weights: str, kind: str
) -> None:
    trainer.run(functools.partial(cases.steps, ENDS, server[0], kind, weights=weights))


@pytest.mark.parametrize(
    "case", [cases.drained, cases.aborted, cases.held_back], ids=lambda case: case.__name__
)
def test_requests(
    server: tuple[str, int], trainer: Apart, case: Callable[[str, str], None]
) -> None:
    trainer.run(case, ENDS, server[0])


def test_the_server_after_the_manager_was_closed(server: tuple[str, int], trainer: Apart) -> None:
    trainer.run(serving.after_close, server[0])


def test_a_server_that_is_killed_in_a_rollout(server: tuple[str, int], trainer: Apart) -> None:
    trainer.run(serving.killed, *server)


def test_a_server_without_sleep_mode_is_refused(
    folder: str, tmp_path_factory: pytest.TempPathFactory, trainer: Apart
) -> None:
    with running(folder, tmp_path_factory.mktemp("awake") / "log", sleeps=False) as (url, _):
        trainer.run(serving.without_sleep_mode, url)
