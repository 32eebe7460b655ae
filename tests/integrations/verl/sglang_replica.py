"""verl's own ends of an SGLang rollout, the worker's and the driver's, with a stand-in for SGLang's
server between them."""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from placement.integrations.verl.rollout import PlacedSglang, place
from tests.engines.standin import Memory, Reply, Routes, Sglang0523
from tests.integrations.verl import sglang_package
from tests.integrations.verl.worker import CAPACITY

BYTES = {"weights": 3 << 20, "kv_cache": 5 << 20}


class _Memory(Memory):
    capacity_bytes = CAPACITY
    chunk_bytes = 1 << 20
    tag_bytes: ClassVar = BYTES


class Server(Sglang0523):
    """SGLang as verl starts it: with its memory saver, a copy of the weights on the host, and
    graphs that stay on the device."""

    memory_type: ClassVar = _Memory
    tags: ClassVar = tuple(BYTES)

    def __init__(self, shared: Path) -> None:
        super().__init__(shared, keeps_weights=True)

    def release(self, query: dict[str, list[str]], body: Any) -> Reply:
        """torch_memory_saver ends the process at what is paused already; of a tag that does not
        exist SGLang says nothing."""
        for tag in self.tags_of(body):
            if tag not in BYTES:
                return self.die(f"{tag} is no tag")
            if tag in self.offload_tags:
                return self.die(f"{tag} was released twice")
        return super().release(query, body)

    def flush(self, query: dict[str, list[str]], body: Any) -> Reply:
        """verl flushes while the KV cache is released, as SGLang itself does in a release; that
        kills only some kinds of models."""
        return (400, "Flush cache failed.\n") if self.in_flight else (200, "Cache flushed.\n")

    def update(self, query: dict[str, list[str]], body: Any) -> Reply:
        if "weights" in self.offload_tags:
            return self.die("weights were written to memory that was given away")
        return 200, {"success": True, "message": "Success"}

    # which takes both methods; verl takes GET
    reading: ClassVar = Sglang0523.reading | {"/flush_cache"}
    routes: ClassVar[Routes] = Sglang0523.routes | {
        "/release_memory_occupation": release,
        "/flush_cache": flush,
        "/update_weights_from_tensor": update,
    }


class _Method:
    def __init__(self, answer: Any = None) -> None:
        self._answer = answer

    async def remote(self, *_: Any, **__: Any) -> Any:
        return self._answer


class SglangReplica:
    """A server, and verl's `SGLangHttpServer` before it, through which the driver puts it to sleep.

    Args:
        shared: the file of the capacity that the server shares with the worker.
        leads: whether a rank of this process leads the server. Else nothing is started.
        lora_rank: the rank of an adapter that SGLang serves beside its base weights; 0: none.
        options: fields of `RolloutConfig`.
    """

    def __init__(
        self, shared: Path, model: Path, *, leads: bool = True, lora_rank: int = 0, **options: Any
    ) -> None:
        from verl.workers.config import HFModelConfig, RolloutConfig
        from verl.workers.rollout.replica import RolloutMode

        with sglang_package.importable():
            from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangHttpServer

        self.config = RolloutConfig(
            name="sglang", tensor_model_parallel_size=dist.get_world_size(), **options
        )
        self.model_config = HFModelConfig(
            path=str(model), load_tokenizer=False, lora_rank=lora_rank
        )
        self.server = Server(shared) if leads else None
        self._driver = object.__new__(SGLangHttpServer)  # without the start of a server
        self._driver.config, self._driver.model_config = self.config, self.model_config
        self._driver.rollout_mode, self._driver.node_rank = RolloutMode.HYBRID, 0
        self._driver.tokenizer_manager = SimpleNamespace(release_memory_occupation=self._release)
        asyncio.run(self.sleep())  # as the driver does once it has started
        if self.server is not None:
            self.server.sent.clear()
            weakref.finalize(self, self.server.close)

    async def _release(self, request: Any, _: None) -> None:
        assert self.server is not None
        status, _answer = self.server.answer(
            "POST", "/release_memory_occupation", {"tags": request.tags}
        )
        assert status == 200, self.server.accidents

    async def sleep(self) -> None:
        if self.server is not None:
            await self._driver.sleep()

    def adapter(self) -> Any:
        """The class that verl's worker gets and makes."""
        from verl.workers.rollout.base import get_rollout_class

        place("sglang", PlacedSglang)
        with sglang_package.importable():
            placed = get_rollout_class("sglang")
            from verl.workers.rollout.sglang_rollout import sglang_rollout
        sglang_rollout.ray = SimpleNamespace(get_actor=self._actor)
        os.environ["RAY_LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
        mesh = init_device_mesh(
            "cpu", (1, dist.get_world_size(), 1), mesh_dim_names=("dp", "infer_tp", "infer_pp")
        )
        return placed(self.config, self.model_config, mesh)

    def _actor(self, name: str) -> Any:
        assert name == "sglang_server_0_0"
        assert self.server is not None, "this rank leads no server"
        host, _, port = self.server.url.removeprefix("http://").partition(":")
        return SimpleNamespace(
            get_server_address=_Method((host, int(port))), set_global_steps=_Method()
        )

    def refuse(self, is_refusing: bool) -> None:
        assert self.server is not None
        self.server.failing = (
            {"/resume_memory_occupation": (400, {"error": {"message": "not now"}})}
            if is_refusing
            else {}
        )

    def die(self, adapter: Any) -> None:
        assert self.server is not None
        adapter._engine.retry_delay = 0.01  # verl waits 2 seconds and then 4 before it asks again
        self.server.close()
        for tag in self.server.memory.tags:
            self.server.memory.give(tag)

    @property
    def calls(self) -> list[str]:
        """The calls that woke it and put it to sleep, in the order in which they came."""
        words = {"/resume_memory_occupation": "wake_up", "/release_memory_occupation": "sleep"}
        sent = [
            each.split(" ", 2) for each in (self.server.sent if self.server is not None else [])
        ]
        return [
            (f"{words[path]} {' '.join(json.loads(body)['tags'])}")
            for _, path, body in sent
            if path in words
        ]
