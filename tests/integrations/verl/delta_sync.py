"""verl's sharded delta sync on CPU ranks: its engine, encoder, sparse gather and SGLang loader. Only NCCL, ZeroMQ and cupy are left out."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tests.integrations.verl.subject import Subject, pair
from tests.sharded.training import as_bytes


class Rollout(torch.nn.Module):
    """What SGLang's model does with a weight in `load_weights`: it copies it over its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, pairs: Any) -> None:
        for name, tensor in pairs:
            self.weights.setdefault(name, torch.zeros_like(tensor)).copy_(tensor)

    def values(self) -> dict[str, bytes]:
        return {name: as_bytes(value) for name, value in self.weights.items()}


@functools.cache
def module_of_verl() -> Any:
    cupy = ModuleType("cupy")
    cupy.ndarray = torch.Tensor  # type: ignore[attr-defined] # in an annotation
    with mock.patch.dict(sys.modules, cupy=cupy):
        return importlib.import_module("verl.checkpoint_engine.delta_checkpoint_engine")


def delta_engine(rollout: Rollout) -> Any:
    """verl's `DeltaShardedCheckpointEngine`, whose flushes go to verl's loader for SGLang instead of a NCCL group."""
    apply = importlib.import_module("verl.workers.rollout.sglang_rollout.delta_loader").apply_delta
    encode: Any = importlib.import_module("verl.checkpoint_engine.delta_sync.encode")

    class Engine(module_of_verl().DeltaShardedCheckpointEngine):  # type: ignore[misc, name-defined] # verl has no types
        def _send(self, encoding: str, params: Any, checksum: int, positions: Any, values: torch.Tensor) -> None:
            spec = json.dumps({"encoding": encoding, "params": [vars(each) for each in params], "checksum": checksum}).encode()
            content = {"__delta_spec__": torch.frombuffer(bytearray(spec), dtype=torch.uint8), "__values__": values}
            apply(rollout, (content | ({} if positions is None else {"__positions__": positions})).items())

        def _publish_flush(self, flush: Any, first: bool, is_last: bool) -> None:
            self._send(flush.encoding, flush.params, flush.checksum, flush.positions_cpu, flush.values_gpu)

        def _publish_values_flush(self, params: Any, values: torch.Tensor, is_last: bool, verify: bool = False) -> None:
            empty = torch.empty(0, dtype=torch.uint8)
            self._send("dense", params, encode.checksum(empty, values), None, values)

        def _publish_terminal(self, first: bool) -> None: ...
        def _release_staging_pool(self, phase: str) -> None: ...

    engine = Engine(bucket_size=4096, rollout_dtype=torch.bfloat16)
    engine.is_master, engine.rank = dist.get_rank() == 0, 0 if dist.get_rank() == 0 else -1
    return engine


def syncs(model: Path, lr: float) -> dict[str, Any]:
    """A seed and five delta syncs of both; the third has two steps, and before the fourth somebody else has read half of one from ours.

    Returns what placement loaded for the delta syncs, the shares that changed, and the host memory by which each knows that.
    """
    subjects: tuple[Subject, Subject] = pair(model, lr=lr)
    rollouts = Rollout(), Rollout()
    engines = [delta_engine(rollout) for rollout in rollouts]
    handle = subjects[1].manager.handles["actor"]  # type: ignore[union-attr]
    found: dict[str, Any] = {"loaded": 0, "own": [], "ours": [], "recorded": [], "kept": []}
    for step in range(6):
        for subject in subjects:
            for seed in range(step and 1 + (step == 3)):
                subject.train(seed + step)
        if step == 4:
            entries, _ = subjects[1].engine.get_per_tensor_param_delta_shard()
            next(entries)
            entries.close()
        found["recorded"].append(sum(r.record_bytes for r in handle.storage.ranges))
        before = handle.counters.loaded_bytes
        told = [asyncio.run(engine.send_weights(subject.engine, step)) for engine, subject in zip(engines, subjects, strict=True)]
        found["loaded"] += handle.counters.loaded_bytes - before if step else 0
        assert rollouts[0].values() == rollouts[1].values()
        for kind, each in zip(("own", "ours"), told, strict=True):
            found[kind].append(each and each["checkpoint_engine/changed_ratio"])
        for subject in subjects:
            subject.check()
    for subject in subjects:
        found["kept"].append(sum(snapshot.nbytes for snapshot in getattr(subject.engine, "_delta_shard_snap", {}).values()))
    if dist.get_rank() == 0:
        assert len(rollouts[0].weights) == 27
    return found
