"""The cases of two ranks with a GPU each: what `Ranks` runs on both of them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from placement.engines import Follower, TaggedEngine
from placement.engines.vllm import VllmServer
from placement.group import StoreGroup
from placement.testing import assert_nothing_resident
from tests.gpu.vllm import models, server
from tests.gpu.vllm.job import KV_CACHE_BYTES, Job

DEADLINE_SECONDS = 120.0


def group(generation: int) -> StoreGroup:
    store = dist.distributed_c10d._get_default_store()
    return StoreGroup(
        store, dist.get_rank(), dist.get_world_size(), DEADLINE_SECONDS, generation=generation
    )


class Saving:
    """The `send` of a server of several ranks: the weights go to a folder, from which each worker
    reads its part."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self._weights: dict[str, torch.Tensor] = {}

    def __call__(self, bucket: Any) -> None:
        from safetensors.torch import save_file

        self._weights |= {name: tensor.cpu() for name, tensor in bucket}
        if bucket.is_last:
            models.config().save_pretrained(self._folder)
            save_file(self._weights, self._folder / "model.safetensors")
            self._weights.clear()
            wanted = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
            server.ask(self._url, "/collective_rpc", wanted)


def _steps(engine: TaggedEngine, urls: list[str], generation: int) -> None:
    """Three steps of an FSDP2 actor on both ranks. Every server is asked by every rank, since all
    ranks have the same weights."""
    made = Job(
        engine,
        functools.partial(_ask_all, urls),
        "fsdp2",
        device=f"cuda:{dist.get_rank()}",
        group=group(generation),
    )
    dist.barrier()  # the engine is off both devices
    idle = [made.step(number)["idle"] for number in range(1, 4)]
    assert abs(idle[2] - idle[1]) < 8 << 20
    assert_nothing_resident(made.manager)
    dist.barrier()
    made.manager.close()


def _ask_all(urls: list[str], asked: models.Tokens) -> models.Tokens:
    dist.barrier()
    answers = [server.generate(url, asked) for url in urls]
    dist.barrier()  # nobody ends the rollout while the other rank's requests are in flight
    return answers[dist.get_rank() % len(urls)]


def an_engine_each(urls: list[str], generation: int) -> None:
    """Each rank has a server on its own GPU, and sends it the gathered weights."""
    url = urls[dist.get_rank()]
    _steps(
        VllmServer(
            url, send=server.Sender(url), weights="discard", deadline_seconds=DEADLINE_SECONDS
        ),
        urls,
        generation,
    )


def one_engine(url: str, folder: str, generation: int) -> None:
    sizes = {"weights": models.weights_bytes() // 2, "kv_cache": KV_CACHE_BYTES}
    if dist.get_rank() == 0:
        send = Saving(url, Path(folder))
        leader = VllmServer(
            url, send=send, weights="discard", tag_bytes=sizes, deadline_seconds=DEADLINE_SECONDS
        )
        _steps(leader, [url], generation)
    else:
        _steps(Follower(tag_bytes=sizes), [url], generation)
