"""A rollout for verl's driver on the CPU: a replica, its server, and the adapter in the worker,
with the life of vLLM's.

The server generates no text. Its tokens follow from the prompt and from every byte of the weights
that it was given last, so that a wrong weight changes all losses after it. It refuses what vLLM
could not do: to generate, or to take weights, while they are released.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from tests.integrations.verl.worker import VOCABULARY
from tests.sharded.training import as_bytes

TAGS = {"weights", "kv_cache"}


class Server:
    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._awake = set(TAGS)
        self._weights = ""
        self._asked: Counter[tuple[int, ...]] = Counter()
        self._global_steps: int | None = None
        self.calls: list[str] = []

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(f"wake_up {' '.join(tags or TAGS)}")
        self._awake |= set(tags or TAGS)

    async def sleep(self) -> None:
        self.calls.append("sleep")
        self._awake.clear()
        self._weights = ""

    async def take(self, weights: str, global_steps: int) -> None:
        if self._awake != {"weights"}:
            raise RuntimeError(f"weights came while {sorted(self._awake)} are on the device")
        self._weights, self._global_steps = weights, global_steps
        self._asked.clear()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        if self._awake != TAGS or not self._weights:
            raise RuntimeError(
                f"a prompt came while only {sorted(self._awake)} are on the device, with weights "
                f"{self._weights!r}"
            )
        prompt = tuple(prompt_ids)
        self._asked[prompt] += 1
        choose = random.Random(f"{self._weights} {prompt} {self._asked[prompt]}")
        tokens = [choose.randrange(3, self._vocabulary) for _ in range(self._asked[prompt] + 1)]
        return TokenOutput(
            token_ids=tokens,
            stop_reason="completed",
            extra_fields={"global_steps": self._global_steps},
        )


class StandInReplica(RolloutReplica):  # type: ignore[misc, unused-ignore]
    """The driver's end: starts the server and puts it to sleep."""

    async def launch_servers(self) -> None:
        server = ray.remote(Server).options(
            name=f"standin_server_{self.replica_rank}", max_concurrency=16, num_cpus=0
        )
        self._server_handle = server.remote(VOCABULARY)
        self._server_address = f"standin:{self.replica_rank}"
        self.servers = [self._server_handle]


class StandInAdapter(BaseRollout):  # type: ignore[misc, unused-ignore]
    """The worker's end: wakes the server, and hands it a digest of all weights."""

    _found: Any = None

    @property
    def _server(self) -> Any:
        if self._found is None:
            self._found = ray.get_actor(f"standin_server_{torch.distributed.get_rank()}")
        return self._found

    async def resume(self, tags: list[str]) -> None:
        await self._server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        await self._server.sleep.remote()

    async def update_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None, **_: Any
    ) -> None:
        digest = hashlib.sha256()
        for name, weight in weights:
            digest.update(name.encode() + as_bytes(weight))
        await self._server.take.remote(digest.hexdigest(), global_steps)
