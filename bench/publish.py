"""How long does it take to publish a model of 15.2 GB (Qwen2.5-7B in bf16) that is offloaded:
loaded first, or streamed from the host copy?

An engine stands in that copies every bucket into memory of its own. Times are from the phase's
beginning until the device has the engine's copy. "load" is what the link allows: the same model is
brought to the device and nothing else. By turns in one run.

With two GPUs (`torchrun --nproc-per-node 2 -m bench.publish`) the model is sharded by FSDP2, and
both ranks gather every weight.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

import placement
from bench import _rig
from bench._models import decoder
from bench._results import Results
from bench._rig import Rig
from placement.policies import Colocated

_BUCKET_BYTES = 512 << 20


class _Actor:
    """The model, offloaded, with a manager whose syncs are of one kind."""

    def __init__(self, rig: Rig, name: str, *, streams: bool) -> None:
        self.rig, self.name = rig, name
        self.model = decoder(rig)
        if dist.is_initialized():
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.model)
        self.manager = placement.Manager(
            device=rig.placement_device(), policy=Colocated(stream_sync=streams)
        )
        self.handle = self.manager.register("actor", self.model, role="actor")
        rig.empty_cache()
        self.bucket_bytes = rig.pick(1 << 12, _BUCKET_BYTES, _BUCKET_BYTES)
        largest = max(
            math.prod(info.shape) * info.dtype.itemsize for info in self.handle.weights_info()
        )
        self.engine = torch.empty(
            max(self.bucket_bytes, largest), dtype=torch.uint8, device=rig.torch_device
        )

    def load_seconds(self) -> float:
        """Bring the model to the device, and nothing else."""
        began = self._begin()
        with self.manager.phase("log_prob"):
            self.rig.sync()
            return time.perf_counter() - began

    def publish_seconds(self) -> tuple[float, float, int]:
        """Seconds to the engine's copy of the first bucket, seconds to that of the last one, and
        torch's peak bytes beside the engine."""
        began = self._begin()
        if self.rig.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.rig.torch_device)
        held, first = self._held(), 0.0
        with self.manager.phase("weight_sync"):
            for bucket in self.handle.weights(bucket_bytes=self.bucket_bytes):
                self._take(bucket)
                if not first:
                    self._wait_for_engine()
                    first = time.perf_counter() - began
            self.rig.sync()
            return first, time.perf_counter() - began, self._peak() - held

    def _begin(self) -> float:
        self.rig.sync()
        if self.rig.is_cuda:
            # the driver clears what was freed before, which halves the link's rate meanwhile
            time.sleep(0.2)
        if dist.is_initialized():
            dist.barrier()
        return time.perf_counter()

    def _take(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        start = 0
        for _, tensor in bucket:
            flat = tensor.view(-1).view(torch.uint8)
            self.engine[start : start + flat.numel()].copy_(flat)
            start += flat.numel()

    def _wait_for_engine(self) -> None:
        """Wait for the engine's copy, and not for what comes under it."""
        if self.rig.is_cuda:
            torch.cuda.current_stream(self.rig.torch_device).synchronize()

    def _held(self) -> int:
        return torch.cuda.memory_allocated(self.rig.torch_device) if self.rig.is_cuda else 0

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.rig.torch_device) if self.rig.is_cuda else 0


def measure(rig: Rig, results: Results) -> None:
    shards = dist.get_world_size() if dist.is_initialized() else 1
    scenario = "publish, bf16" if shards == 1 else f"publish, bf16, FSDP2 on {shards} GPUs"
    systems = [
        _Actor(rig, "placement", streams=False),
        _Actor(rig, "placement, stream_sync", streams=True),
    ]
    loads: list[float] = []
    taken: dict[str, list[tuple[float, float, int]]] = {each.name: [] for each in systems}
    for turn in range(rig.pick(2, 4, 6)):
        load = systems[0].load_seconds()
        found = [(each.name, each.publish_seconds()) for each in systems]
        if turn:  # the first turn finds cold host memory and an empty cache
            loads.append(load)
            for name, seconds in found:
                taken[name].append(seconds)
    load = statistics.median(loads)
    results.add(scenario, "placement", "load", load, "s")
    for name, seconds in taken.items():
        first, whole = (statistics.median([each[index] for each in seconds]) for index in (0, 1))
        results.add(scenario, name, "first bucket", first, "s")
        results.add(scenario, name, "all published", whole, "s")
        results.add(scenario, name, "first bucket, share of the load", 100 * first / load, "%")
        results.add(scenario, name, "all published, over the load", whole / load, "ratio")
        results.add(
            scenario,
            name,
            "torch's memory beside the engine's",
            max(each[2] for each in seconds),
            "bytes",
        )
    for each in systems:
        each.manager.close()


def main(arguments: Sequence[str] | None = None) -> None:
    if "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=device)
        arguments = [*(sys.argv[1:] if arguments is None else arguments), "--device", str(device)]
        if device.index:
            arguments += ["--out", tempfile.mkdtemp()]  # the first rank's numbers are kept
    _rig.run("publish", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
