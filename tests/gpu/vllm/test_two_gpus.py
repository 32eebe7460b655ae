"""vLLM on two GPUs: a server on each of them, and one that spans both. Skipped where there is one
GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from tests.gpu.vllm import two_ranks
from tests.gpu.vllm.server import running
from tests.support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

DEADLINE_SECONDS = 240.0


def test_an_engine_on_each_gpu(
    two_gpus: Ranks, folder: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    logs = tmp_path_factory.mktemp("each")
    with ExitStack() as servers, ThreadPoolExecutor(2) as both:  # each takes a minute to start
        starting = both.map(
            lambda gpu: servers.enter_context(running(folder, logs / f"log{gpu}", gpus=[gpu])),
            (0, 1),
        )
        urls = [url for url, _ in starting]
        two_gpus.run(two_ranks.an_engine_each, urls, 1, deadline_seconds=DEADLINE_SECONDS)


def test_one_engine_over_both_gpus(
    two_gpus: Ranks, folder: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    where = tmp_path_factory.mktemp("both")
    with running(folder, where / "log", gpus=[0, 1]) as (url, _):
        two_gpus.run(two_ranks.one_engine, url, str(where), 2, deadline_seconds=DEADLINE_SECONDS)
