"""The cases with a vLLM server beside the trainer, on the same GPU. They run in a process of
`Apart`, the trainer's."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from placement import EngineError
from placement.engines.vllm import VllmServer
from tests.gpu.vllm import models, server
from tests.gpu.vllm.cases import IN_FLIGHT, trains_on_without
from tests.gpu.vllm.job import KV_CACHE_BYTES, Job, ended

Answer = tuple[list[int], str]


@contextmanager
def job(
    url: str, kind: str = "plain", *, weights: Any = "keep", in_flight: Any = "wait"
) -> Iterator[Job]:
    engine = VllmServer(
        url, send=server.Sender(url), weights=weights, in_flight=in_flight, deadline_seconds=120
    )
    try:
        with ended(Job(engine, functools.partial(server.generate, url), kind)) as made:
            yield made
    finally:
        server.wake(
            url, [tag for tag in ("weights", "kv_cache") if tag in engine.residency.offloaded_tags]
        )


def _running(url: str) -> float:
    lines = [
        line
        for line in server.ask(url, "/metrics").splitlines()
        if line.startswith("vllm:num_requests_running")
    ]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _complete_one(url: str, prompt: list[int], num_tokens: int) -> Answer:
    return server.complete(url, [prompt], num_tokens)[0]


def begun(made: Job, url: str, pool: ThreadPoolExecutor, num_tokens: int) -> list[Future[Answer]]:
    futures = [
        pool.submit(_complete_one, url, prompt, num_tokens) for prompt in made.asked[:IN_FLIGHT]
    ]
    until = time.monotonic() + 30
    while _running(url) < IN_FLIGHT:
        assert time.monotonic() < until, "the requests are not in flight"
        time.sleep(0.01)
    assert not any(future.done() for future in futures)
    return futures


def after_close(url: str) -> None:
    """`close` leaves the server asleep. Its own wake brings back what it generated with."""
    with job(url) as made:
        made.step(10, is_twice=False)
        made.manager.close()
        assert server.ask(url, "/is_sleeping") == {"is_sleeping": True}
        server.wake(url, ["weights", "kv_cache"])
        made.engine.assume(offloaded=[])
        assert server.ask(url, "/is_sleeping") == {"is_sleeping": False}
        models.assert_generated_by(
            made.module.to("cuda"), made.asked, server.generate(url, made.asked)
        )


def killed(url: str, group: int) -> None:
    free = torch.cuda.mem_get_info()[0]
    engine = VllmServer(url, send=server.Sender(url), deadline_seconds=30)
    made = Job(engine, functools.partial(server.generate, url))
    trains_on_without(made, lambda: server.end(group))
    until = time.monotonic() + 30
    torch.cuda.empty_cache()
    # the server was awake when that was measured
    while torch.cuda.mem_get_info()[0] < free + models.weights_bytes():
        assert time.monotonic() < until, "the memory of the server is not back"
        time.sleep(0.2)


def without_sleep_mode(url: str) -> None:
    """The server says that it sleeps, and the driver does not see it. It generates as before once
    it is woken."""
    asked = models.prompts()
    answered = server.generate(url, asked)
    sizes = {"weights": models.weights_bytes(), "kv_cache": KV_CACHE_BYTES}
    with pytest.raises(EngineError, match="--enable-sleep-mode"):
        Job(
            VllmServer(url, send=server.Sender(url), tag_bytes=sizes),
            functools.partial(server.generate, url),
        )
    server.wake(url, ["weights", "kv_cache"])
    for each in (answered, server.generate(url, asked)):
        models.assert_generated_by(models.model(0, "cuda"), asked, each)
