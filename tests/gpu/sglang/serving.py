"""The cases with an SGLang server beside the trainer, on the same GPU. They run in a process of `Apart`, the trainer's."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from placement import EngineError, EngineLost, State
from placement.engines.sglang import SglangServer
from placement.testing import assert_nothing_resident
from tests.gpu.sglang import server
from tests.gpu.vllm import models
from tests.gpu.vllm.job import Job, assert_bytes, ended
from tests.gpu.vllm.server import end

LONG = 400
"""Tokens of a request that is still in flight when the rollout ends."""
ENDLESS = models.CONTEXT - models.PROMPT_TOKENS - 1
IN_FLIGHT = 8
Answer = tuple[list[int], str]


@contextmanager
def job(url: str, kind: str = "plain", *, in_flight: Any = "wait") -> Iterator[Job]:
    """A job with the server, which is awake again at the end."""
    engine = SglangServer(url, send=server.Sender(url), in_flight=in_flight, deadline_seconds=60)
    try:
        with ended(Job(engine, functools.partial(server.generate, url), kind)) as made:
            yield made
    finally:
        server.resume(url, [tag for tag in ("weights", "kv_cache") if tag in engine.residency.offloaded_tags])


def steps(url: str, kind: str) -> None:
    """Four steps; the driver's numbers of the last three count."""
    with job(url, kind) as made:
        assert made.rollout.state is State.CPU_OFFLOADED
        assert_bytes([made.step(number) for number in range(1, 5)], models.weights_bytes())
        made.manager.check_integrity()


def _in_flight(made: Job, url: str, pool: ThreadPoolExecutor, num_tokens: int) -> list[Future[Answer]]:
    """Requests that the server has begun: of each the first tokens have come."""
    begun = [threading.Event() for _ in range(IN_FLIGHT)]
    asked = zip(made.asked, begun, strict=False)
    futures = [pool.submit(server.complete_one, url, prompt, num_tokens, event) for prompt, event in asked]
    for future, event in zip(futures, begun, strict=True):
        future.add_done_callback(lambda _, event=event: event.set())  # one that fails is not waited for
    assert all(event.wait(30) for event in begun), "the requests are not in flight"
    answers = [future.result() for future in futures if future.done()]  # raises what a request met
    assert not answers, f"answered already: {answers}"
    return futures


def drained(url: str) -> None:
    """Requests in flight finish before the memory goes, with the weights that they began with."""
    with job(url, in_flight="wait") as made, ThreadPoolExecutor(IN_FLIGHT) as pool:
        made.step(5, is_twice=False)
        with made.manager.phase("rollout") as step:
            futures = _in_flight(made, url, pool, LONG)
            step.switch("log_prob", only=["actor"])
            answers = [future.result(30) for future in futures]
            assert [(len(tokens), reason) for tokens, reason in answers] == [(LONG, "length")] * IN_FLIGHT
            models.assert_generated_by(made.module, made.asked, [tokens[: models.NEW_TOKENS] for tokens, _ in answers])
        assert_nothing_resident(made.manager)


def aborted(url: str) -> None:
    """Requests in flight are cut off, and answered with what there was."""
    with job(url, in_flight="abort") as made, ThreadPoolExecutor(IN_FLIGHT) as pool:
        made.step(6, is_twice=False)
        with made.manager.phase("rollout") as step:
            futures = _in_flight(made, url, pool, ENDLESS)
            step.switch("train")
            assert made.rollout.state is State.CPU_OFFLOADED
            answers = [future.result(30) for future in futures]
            assert {reason for _, reason in answers} == {"abort"}
            assert max(len(tokens) for tokens, _ in answers) < ENDLESS
        made.step(7)


def held_back(url: str) -> None:
    """A request that comes while the memory is away is answered later, with the weights that are there then."""
    with job(url) as made, ThreadPoolExecutor(1) as pool:
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


def refused_until_filled(url: str) -> None:
    """Discarded weights, filled by half a sync and by a whole one."""
    with job(url) as made:
        with pytest.raises(EngineError, match="mean nothing now"):
            made.manager.phase("rollout").__enter__()
        with made.manager.phase("weight_sync") as step:
            assert made.publish(buckets=1) == 1
            with pytest.raises(EngineError, match="mean nothing now"):
                step.switch("rollout")
        made.step(9)


def killed(url: str, group: int) -> None:
    """The server ends during a rollout: it is lost, and the trainer goes on without it. The last case of its server."""
    engine = SglangServer(url, send=server.Sender(url), deadline_seconds=30)
    made = Job(engine, functools.partial(server.generate, url))
    made.step(11, is_twice=False)
    with made.manager.phase("rollout") as step:
        end(group)
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
