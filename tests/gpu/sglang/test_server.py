"""A real SGLang server on the trainer's GPU. Weights go by CUDA IPC, to its own endpoint. Skipped
where SGLang cannot be imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.gpu.sglang import serving
from tests.gpu.sglang.server import running
from tests.gpu.vllm import cases
from tests.gpu.vllm.apart import Apart

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

ENDS = "tests.gpu.sglang.serving"


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    with running(folder, tmp_path_factory.mktemp("server") / "log") as started:
        yield started


@pytest.mark.parametrize("kind", ["plain", "lora", "fsdp2"])
def test_steps_with_an_actor_of_each_kind(
    server: tuple[str, int], trainer: Apart, kind: str
) -> None:
    trainer.run(cases.steps, ENDS, server[0], kind)


@pytest.mark.parametrize(
    "case", [cases.drained, cases.aborted, cases.held_back], ids=lambda case: case.__name__
)
def test_requests(
    server: tuple[str, int], trainer: Apart, case: Callable[[str, str], None]
) -> None:
    trainer.run(case, ENDS, server[0])


def test_a_server_that_is_killed_in_a_rollout(server: tuple[str, int], trainer: Apart) -> None:
    trainer.run(serving.killed, *server)


def test_discarded_weights(
    folder: str, tmp_path_factory: pytest.TempPathFactory, trainer: Apart
) -> None:
    with running(folder, tmp_path_factory.mktemp("discarding") / "log", keeps_weights=False) as (
        url,
        _,
    ):
        trainer.run(serving.discarded, url)
        trainer.run(cases.steps, ENDS, url, "plain")
