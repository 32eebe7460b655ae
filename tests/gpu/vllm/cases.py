"""The cases with a server of either kind beside the trainer, on the same GPU. They run in a process
of `Apart`, the trainer's.

`ends` is the name of the module that knows the kind of server: it makes a job, and asks for tokens.
"""

from __future__ import annotations

import importlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from placement import EngineError, EngineLost, State
from placement.testing import assert_nothing_resident
from tests.gpu.vllm import models
from tests.gpu.vllm.job import Job, assert_bytes

LONG = 400
"""Tokens of a request that is still in flight when the rollout ends."""
ENDLESS = models.CONTEXT - models.PROMPT_TOKENS - 1
IN_FLIGHT = 8


def _module(ends: str) -> Any:
    return importlib.import_module(ends)


def steps(ends: str, url: str, kind: str, **options: Any) -> None:
    with _module(ends).job(url, kind, **options) as made:
        assert made.rollout.state is State.CPU_OFFLOADED
        assert_bytes([made.step(number) for number in range(1, 5)], models.weights_bytes())
        made.manager.check_integrity()


def drained(ends: str, url: str) -> None:
    """Requests in flight finish before the memory goes, with the weights that they began with."""
    with _module(ends).job(url, in_flight="wait") as made, ThreadPoolExecutor(IN_FLIGHT) as pool:
        made.step(5, is_twice=False)
        with made.manager.phase("rollout") as step:
            futures = _module(ends).begun(made, url, pool, LONG)
            step.switch("log_prob", only=["actor"])
            answers = [future.result(30) for future in futures]
            assert [(len(tokens), reason) for tokens, reason in answers] == [
                (LONG, "length")
            ] * IN_FLIGHT
            models.assert_generated_by(
                made.module, made.asked, [tokens[: models.NEW_TOKENS] for tokens, _ in answers]
            )
        assert_nothing_resident(made.manager)


def aborted(ends: str, url: str) -> None:
    """Requests in flight are cut off, and answered with what there was."""
    with _module(ends).job(url, in_flight="abort") as made, ThreadPoolExecutor(IN_FLIGHT) as pool:
        made.step(6, is_twice=False)
        with made.manager.phase("rollout") as step:
            futures = _module(ends).begun(made, url, pool, ENDLESS)
            step.switch("train")
            assert made.rollout.state is State.CPU_OFFLOADED
            answers = [future.result(30) for future in futures]
            assert {reason for _, reason in answers} == {"abort"}
            assert max(len(tokens) for tokens, _ in answers) < ENDLESS
        made.step(7)


def held_back(ends: str, url: str) -> None:
    """A request that comes while the memory is away is answered later, with the weights that are
    there then."""
    with _module(ends).job(url, weights="discard") as made, ThreadPoolExecutor(1) as pool:
        made.step(8, is_twice=False)
        with made.manager.phase("train") as step:
            models.change(made.module, 9)
            future = pool.submit(_module(ends).server.complete, url, made.asked)
            # an answer that did not wait would be here by then; on a slow machine this cannot fail
            # wrongly
            time.sleep(1)
            assert not future.done()
            step.switch("weight_sync")
            made.publish()
            assert not future.done()
            step.switch("rollout")
            answered = [tokens for tokens, _ in future.result(60)]
            step.switch("log_prob", only=["actor"])
            models.assert_generated_by(made.module, made.asked, answered)


def refused_until_filled(made: Job) -> None:
    with pytest.raises(EngineError, match="mean nothing now"):
        made.manager.phase("rollout").__enter__()
    with made.manager.phase("weight_sync") as step:
        assert made.publish(buckets=1) == 1
        with pytest.raises(EngineError, match="mean nothing now"):
            step.switch("rollout")
        assert step.name == "weight_sync"
    with pytest.raises(EngineError, match="mean nothing now"):
        made.manager.phase("eval").__enter__()
    made.step(5, is_twice=False)


def trains_on_without(made: Job, end: Any) -> None:
    """The server ends during a rollout: it is lost, and the trainer goes on without it."""
    made.step(11, is_twice=False)
    with made.manager.phase("rollout") as step:
        end()
        with pytest.raises(EngineLost):
            step.switch("train")
        assert made.rollout.broken is not None
        # the driver took it back when the process ended
        made.engine.assume(offloaded=["weights", "kv_cache"])
        step.switch("train")
        assert made.actor.state is State.TRAINING
    with pytest.raises(EngineError):
        made.manager.phase("rollout").__enter__()
    assert_nothing_resident(made.manager)
    made.manager.unregister("rollout")
    with made.manager.phase("log_prob"):
        assert made.actor.state is State.GPU_RESIDENT
    made.manager.close()
