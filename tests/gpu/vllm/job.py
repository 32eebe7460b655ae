"""A trainer beside an engine on one GPU: the actor, its optimizer, the manager, and what the driver
says at each phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from placement import Manager
from placement.engines import TaggedEngine
from placement.testing import assert_nothing_resident
from tests.gpu.vllm import models

BUCKET_BYTES = 48 << 20
"""Several buckets a sync."""
KV_CACHE_BYTES = 512 << 20
BATCHED_TOKENS = 2048
"""Few, so that what torch's allocator keeps of activations is small beside the tags."""
SLACK_BYTES = 64 << 20
"""The allocator of vLLM's weights takes whole segments."""
LEAK_BYTES = 8 << 20

Generate = Callable[[models.Tokens], models.Tokens]


def _mesh() -> Any:
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    return dist.init_device_mesh("cuda", (dist.get_world_size(),))


def _on_any_rank(flag: bool) -> bool:
    """Whether it is so on some rank. A follower does not know about the weights, and all ranks
    publish together."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return flag
    flags = [False] * dist.get_world_size()
    dist.all_gather_object(flags, flag)
    return any(flags)


def plain(device: str) -> Any:
    return models.model(1, device)


def fsdp2(device: str) -> Any:
    """Each layer sharded over the ranks of the process group."""
    made, mesh = models.model(1, device), _mesh()
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def lora(device: str) -> Any:
    from peft import LoraConfig, get_peft_model

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj"]
    # A large alpha: the adapters alone have to change what is generated.
    return get_peft_model(
        models.model(1, device), LoraConfig(r=16, lora_alpha=256, target_modules=names)
    ).eval()


ACTORS: dict[str, Callable[[str], Any]] = {each.__name__: each for each in (plain, fsdp2, lora)}


class Job:
    """The actor and the engine of one kind each, registered.

    Args:
        engine: the engine, awake.
        generate: greedy decoding with it, without placement.
        kind: how the actor is wrapped.
        options: options of the manager.
    """

    def __init__(
        self,
        engine: TaggedEngine,
        generate: Generate,
        kind: str = "plain",
        *,
        device: str = "cuda:0",
        **options: Any,
    ) -> None:
        self.engine, self.generate, self.kind = engine, generate, kind
        self.manager = Manager(device=device, **options)
        self.rollout = self.manager.register("rollout", engine, role="rollout")
        self.module = ACTORS[kind](device)
        self.optimizer = torch.optim.SGD(
            [p for p in self.module.parameters() if p.requires_grad], lr=1e-3
        )
        self.actor = self.manager.register("actor", self.module, role="actor")
        self.manager.register("actor.optimizer", self.optimizer)
        self.asked = models.prompts()
        self.answered: models.Tokens = []

    def used_bytes(self) -> int:
        """Device bytes in use as the driver counts them, without the actor's and without what
        torch's allocator keeps."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        holding = self.actor.holding
        return int(total - free - (0 if holding is None else holding.chunk_bytes))

    def publish(self, *, buckets: int | None = None) -> int:
        """Publish the actor's weights, or only the first few buckets of them. Returns the number of
        buckets sent."""
        publishing = self.actor.weights(bucket_bytes=BUCKET_BYTES, dtype=torch.bfloat16)
        sent = 0
        for bucket in publishing:
            self.engine.update_weights(bucket)
            sent += 1
            if sent == buckets:
                break
        del publishing
        return sent

    def roll_out(self) -> models.Tokens:
        self.answered = self.generate(self.asked)
        return self.answered

    def step(self, number: int, *, is_twice: bool = True) -> dict[str, int]:
        """One step: train, publish, roll out, look at the answers. Returns the bytes in use at each
        of its places.

        Args:
            number: of the step; the actor's values follow from it.
            is_twice: with a second sync in the middle of the rollout, for which the KV cache alone
                gives way.
        """
        seen: dict[str, int] = {}
        with self.manager.phase("train") as step:
            seen["train"] = self.used_bytes()
            models.change(self.module, number)
            if self.answered:
                models.assert_not_generated_by(self.module, self.asked, self.answered)
            step.switch("weight_sync")
            seen["weight_sync"] = self.used_bytes()
            assert self.publish() > 1
            step.switch("rollout")
            seen["rollout"] = self.used_bytes()
            answers = [self.roll_out()]
            if is_twice:
                step.switch("weight_sync")
                seen["second weight_sync"] = self.used_bytes()
                # this vLLM cannot keep the weights then
                if _on_any_rank(self.engine.residency.stale is not None):
                    self.publish()
                step.switch("rollout")
                answers.append(self.roll_out())
            step.switch("log_prob", only=["actor"])
            seen["log_prob"] = self.used_bytes()
            for answered in answers:
                models.assert_generated_by(self.module, self.asked, answered)
        seen["idle"] = self.used_bytes()
        assert_nothing_resident(self.manager, allow_foreign=self.kind == "fsdp2")
        return seen


def assert_bytes(steps: list[dict[str, int]], weights_bytes: int) -> None:
    """Assert that the driver sees the engine's parts where the plan wants them, and nothing of them
    elsewhere, in every step.

    The first step is left out: libraries load their kernels in it.
    """
    base = steps[0]["idle"]
    for seen in steps[1:]:
        for place in ("train", "log_prob", "idle"):
            assert seen[place] - base < SLACK_BYTES, (place, seen)
        for place in ("weight_sync", "second weight_sync"):
            held = seen.get(place, base + weights_bytes) - base
            assert weights_bytes - SLACK_BYTES < held < weights_bytes + SLACK_BYTES, (place, seen)
        both = weights_bytes + KV_CACHE_BYTES
        assert both - SLACK_BYTES < seen["rollout"] - base < both + SLACK_BYTES, seen
    assert abs(steps[-1]["idle"] - steps[-2]["idle"]) < LEAK_BYTES, (
        "each step leaves something on the device"
    )


@contextmanager
def ended(job: Job) -> Iterator[Job]:
    try:
        yield job
    finally:
        job.manager.close()
