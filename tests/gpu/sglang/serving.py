"""The cases with an SGLang server beside the trainer, on the same GPU. They run in a process of
`Apart`, the trainer's."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from placement.engines.sglang import SglangServer
from tests.gpu.sglang import server
from tests.gpu.vllm.cases import IN_FLIGHT, refused_until_filled, trains_on_without
from tests.gpu.vllm.job import Job, ended
from tests.gpu.vllm.server import end

Answer = tuple[list[int], str]


@contextmanager
def job(
    url: str, kind: str = "plain", *, weights: Any = None, in_flight: Any = "wait"
) -> Iterator[Job]:
    """A job with the server, which is awake again at the end. Whether it keeps its weights was said
    when it was started."""
    engine = SglangServer(url, send=server.Sender(url), in_flight=in_flight, deadline_seconds=60)
    try:
        with ended(Job(engine, functools.partial(server.generate, url), kind)) as made:
            yield made
    finally:
        server.resume(
            url, [tag for tag in ("weights", "kv_cache") if tag in engine.residency.offloaded_tags]
        )


def begun(made: Job, url: str, pool: ThreadPoolExecutor, num_tokens: int) -> list[Future[Answer]]:
    answering = [threading.Event() for _ in range(IN_FLIGHT)]
    asked = zip(made.asked, answering, strict=False)
    futures = [
        pool.submit(server.complete_one, url, prompt, num_tokens, event) for prompt, event in asked
    ]
    for future, event in zip(futures, answering, strict=True):
        # one that fails is not waited for
        future.add_done_callback(lambda _, event=event: event.set())
    assert all(event.wait(30) for event in answering), "the requests are not in flight"
    answers = [future.result() for future in futures if future.done()]  # raises what a request met
    assert not answers, f"answered already: {answers}"
    return futures


def discarded(url: str) -> None:
    with job(url) as made:
        refused_until_filled(made)


def killed(url: str, group: int) -> None:
    engine = SglangServer(url, send=server.Sender(url), deadline_seconds=30)
    made = Job(engine, functools.partial(server.generate, url))
    trains_on_without(made, lambda: end(group))
