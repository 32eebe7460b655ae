"""The cases with a vLLM server beside the trainer, on the same GPU. They run in a process of `Apart`, the trainer's."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from placement import EngineError, EngineLost, State
from placement.engines.vllm import VllmServer
from placement.testing import assert_nothing_resident
from tests.gpu.vllm import models, server
from tests.gpu.vllm.job import KV_CACHE_BYTES, Job, assert_bytes, ended

LONG = 400
"""Tokens of a request that is still in flight when the rollout ends."""
ENDLESS = models.CONTEXT - models.PROMPT_TOKENS - 1
IN_FLIGHT = 8
Answer = tuple[list[int], str]


@contextmanager
def job(url: str, weights: Any, kind: str = "plain", *, in_flight: Any = "wait", **options: Any) -> Iterator[Job]:
    """A job with the server, which is awake again at the end."""
    engine = VllmServer(url, send=server.Sender(url), weights=weights, in_flight=in_flight, deadline_seconds=120)
    try:
        with ended(Job(engine, functools.partial(server.generate, url), kind, **options)) as made:
            yield made
    finally:
        server.wake(url, [tag for tag in ("weights", "kv_cache") if tag in engine.residency.offloaded_tags])


def steps(url: str, weights: str, kind: str) -> None:
    """Four steps; the driver's numbers of the last three count."""
    with job(url, weights, kind) as made:
        assert made.rollout.state is State.CPU_OFFLOADED
        assert_bytes([made.step(number) for number in range(1, 5)], models.weights_bytes())
        made.manager.check_integrity()


def _running(url: str) -> float:
    lines = [line for line in server.ask(url, "/metrics").splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _in_flight(made: Job, url: str, pool: ThreadPoolExecutor, num_tokens: int) -> list[Future[list[Answer]]]:
    """Requests that the server has begun."""
    futures = [pool.submit(server.complete, url, [prompt], num_tokens) for prompt in made.asked[:IN_FLIGHT]]
    until = time.monotonic() + 30
    while _running(url) < IN_FLIGHT:
        assert time.monotonic() < until, "the requests are not in flight"
        time.sleep(0.01)
    assert not any(future.done() for future in futures)
    return futures


def drained(url: str) -> None:
    """Requests in flight finish before the memory goes, with the weights that they began with."""
    with job(url, "keep", in_flight="wait") as made, ThreadPoolExecutor(IN_FLIGHT) as pool:
        made.step(5, is_twice=False)
        with made.manager.phase("rollout") as step:
            futures = _in_flight(made, url, pool, LONG)
            step.switch("log_prob", only=["actor"])
            answers = [future.result(30)[0] for future in futures]
            assert [(len(tokens), reason) for tokens, reason in answers] == [(LONG, "length")] * IN_FLIGHT
            models.assert_generated_by(made.module, made.asked, [tokens[: models.NEW_TOKENS] for tokens, _ in answers])
        assert_nothing_resident(made.manager)


def aborted(url: str) -> None:
    """Requests in flight are cut off, and answered with what there was."""
    with job(url, "keep", in_flight="abort") as made, ThreadPoolExecutor(IN_FLIGHT) as pool:
        made.step(6, is_twice=False)
        with made.manager.phase("rollout") as step:
            futures = _in_flight(made, url, pool, ENDLESS)
            step.switch("train")
            assert made.rollout.state is State.CPU_OFFLOADED
            answers = [future.result(30)[0] for future in futures]
            assert {reason for _, reason in answers} == {"abort"}
            assert max(len(tokens) for tokens, _ in answers) < ENDLESS
        made.step(7)


def held_back(url: str) -> None:
    """A request that comes while the memory is away is answered later, with the weights that are there then."""
    with job(url, "discard") as made, ThreadPoolExecutor(1) as pool:
        made.step(8, is_twice=False)
        with made.manager.phase("train") as step:
            models.change(made.module, 9)
            future = pool.submit(server.complete, url, made.asked)
            time.sleep(1)  # an answer that did not wait would be here by then; on a slow machine this cannot fail wrongly
            assert not future.done()
            step.switch("weight_sync")
            made.publish()
            assert not future.done()
            step.switch("rollout")
            answered = [tokens for tokens, _ in future.result(60)]
            step.switch("log_prob", only=["actor"])
            models.assert_generated_by(made.module, made.asked, answered)


def after_close(url: str) -> None:
    """`close` leaves the server asleep. Its own wake brings back what it generated with."""
    with job(url, "keep") as made:
        made.step(10, is_twice=False)
        made.manager.close()
        assert server.ask(url, "/is_sleeping") == {"is_sleeping": True}
        server.wake(url, ["weights", "kv_cache"])
        made.engine.assume(offloaded=[])
        assert server.ask(url, "/is_sleeping") == {"is_sleeping": False}
        models.assert_generated_by(made.module.to("cuda"), made.asked, server.generate(url, made.asked))


def killed(url: str, group: int) -> None:
    """The server ends during a rollout: it is lost, and the trainer goes on without it. The last case of its server."""
    free = torch.cuda.mem_get_info()[0]
    engine = VllmServer(url, send=server.Sender(url), deadline_seconds=30)
    made = Job(engine, functools.partial(server.generate, url))
    made.step(11, is_twice=False)
    with made.manager.phase("rollout") as step:
        server.end(group)
        with pytest.raises(EngineLost):
            step.switch("train")
        assert made.rollout.broken is not None
        engine.assume(offloaded=["weights", "kv_cache"])  # the driver took it back when the process ended
        step.switch("train")
        assert made.actor.state is State.TRAINING
    with pytest.raises(EngineError):
        made.manager.phase("rollout").__enter__()
    assert_nothing_resident(made.manager)
    made.manager.unregister("rollout")
    with made.manager.phase("log_prob"):
        assert made.actor.state is State.GPU_RESIDENT
    made.manager.close()
    until = time.monotonic() + 30
    torch.cuda.empty_cache()
    while torch.cuda.mem_get_info()[0] < free + models.weights_bytes():  # the server was awake when that was measured
        assert time.monotonic() < until, "the memory of the server is not back"
        time.sleep(0.2)


def without_sleep_mode(url: str) -> None:
    """The server says that it sleeps, and the driver does not see it. It generates as before once it is woken."""
    asked = models.prompts()
    answered = server.generate(url, asked)
    sizes = {"weights": models.weights_bytes(), "kv_cache": KV_CACHE_BYTES}
    with pytest.raises(EngineError, match="--enable-sleep-mode"):
        Job(VllmServer(url, send=server.Sender(url), tag_bytes=sizes), functools.partial(server.generate, url))
    server.wake(url, ["weights", "kv_cache"])
    for each in (answered, server.generate(url, asked)):
        models.assert_generated_by(models.model(0, "cuda"), asked, each)
