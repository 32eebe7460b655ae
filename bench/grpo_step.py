"""A step in the shape of GRPO: how many bytes cross the link, how long does the computation stall,
and how much memory is used at the peak?

The models are a 7B actor in bf16 with one of eight shards of its Adam state, and a 7B reference.
Between steps a rollout engine, which is not part of the benchmark, has the GPU, so the trainer is
off it. The computation is matrix products, the same for every system. The stall is the time that a
step takes beyond the computation alone.

placement runs it in three ways. "placement": `log_prob` for actor and reference together; the actor
is loaded once and stays for the training. "ref_log_prob last": the actor, then the reference alone,
as verl does; the actor is loaded again for the training. "ref_log_prob first": the reference alone,
then the actor, which stays; neither model's values depend on the other's.

verl: the helpers of its FSDP engine, called as the engine calls them. Each phase loads what it
needs and offloads it afterwards, and the weights for the engine are brought tensor by tensor.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

import placement
from bench import _peers, _rig
from bench._compute import Products
from bench._models import (
    Consumer,
    adam_over,
    change,
    decoder,
    digest,
    module_tensors,
    moments,
    nbytes_of,
)
from bench._results import Results
from bench._rig import Rig

_SCENARIO = "GRPO-shaped step"
_PHASE_SECONDS = 0.5
_BUCKET_BYTES = 512 << 20


class Job:
    """The models, and the computation of each phase."""

    def __init__(self, rig: Rig, products: Products) -> None:
        self.rig, self._products = rig, products
        self._count = products.count_for(_PHASE_SECONDS)
        self._consumer = Consumer()
        self.actor, self.ref = decoder(rig), decoder(rig)
        self.adam = adam_over(rig, self.actor, shards=8)
        largest = max(parameter.nbytes for parameter in self.actor.parameters())
        self._bucket = torch.empty(
            max(largest, _BUCKET_BYTES if rig.is_cuda else 0),
            dtype=torch.uint8,
            device=rig.torch_device,
        )

    def compute(self, module: torch.nn.Module, times: int = 1) -> None:
        """A forward (or `times` as much work) that reads the module. Returns while the work
        runs."""
        self._consumer.read(module_tensors(module)[-1])
        self._products.enqueue(times * self._count)

    def step(self) -> None:
        """The optimizer's step: writes every weight and every moment."""
        change([*module_tensors(self.actor), *moments(self.adam)])

    def publish(self, tensors: Sequence[torch.Tensor]) -> None:
        """The cost of a bucket of weights on the way to an engine: one copy of each tensor."""
        offset = 0
        for tensor in tensors:
            offset = 0 if offset + tensor.nbytes > self._bucket.numel() else offset
            self._bucket[offset : offset + tensor.nbytes].copy_(
                tensor.detach().reshape(-1).view(torch.uint8)
            )
            offset += tensor.nbytes

    def alone(self) -> None:
        """The whole step with everything on the device."""
        self.compute(self.actor)
        self.compute(self.ref)
        self.compute(self.actor, 2)
        self.step()
        self.publish(module_tensors(self.actor))

    def print(self) -> int:
        return digest([*module_tensors(self.actor), *moments(self.adam)])


class _Placement:
    """One open phase a step that switches. Each phase's models load during the computation of the
    phase before."""

    name = "placement"

    def __init__(self, job: Job) -> None:
        self.job = job
        self.manager = placement.Manager(
            device=job.rig.placement_device(), policy=placement.policies.Colocated("optimizer_step")
        )
        self.actor = self.manager.register("actor", job.actor, role="actor")
        self.manager.register("ref", job.ref, role="ref", readonly=True)
        self.manager.register("actor.optimizer", job.adam)

    @contextmanager
    def log_probs(self) -> Iterator[placement.Phase]:
        """The open phase, once both models have computed."""
        job = self.job
        with self.manager.phase("log_prob", only=["actor"]) as phase:
            job.compute(job.actor)
            phase.switch("log_prob")
            job.compute(job.ref)
            yield phase

    def step(self) -> None:
        job = self.job
        with self.log_probs() as phase:
            phase.switch("train")
            job.compute(job.actor, 2)
            phase.switch("optimizer_step")
            job.step()
            phase.switch("weight_sync")
            for bucket in self.actor.weights(bucket_bytes=_BUCKET_BYTES):
                job.publish([tensor for _, tensor in bucket])

    def crossed(self) -> tuple[int, int]:
        counters = [handle.counters for handle in self.manager.handles.values()]
        return sum(each.loaded_bytes for each in counters), sum(
            each.offloaded_bytes for each in counters
        )

    def peak_bytes(self) -> int:
        """The most bytes that the handles had on the device together."""
        return self.manager.snapshot().peak_bytes

    def load_all(self) -> None:
        self.manager.enter("optimizer_step")

    def close(self) -> None:
        if self.manager.phase_name != "idle":
            self.manager.leave()
        del self.job
        gc.collect()
        self.manager.close()


class _ReferenceLast(_Placement):
    """The actor, the reference, and the actor again, so that the two models are never on the device
    together."""

    name = "placement, ref_log_prob last"

    @contextmanager
    def log_probs(self) -> Iterator[placement.Phase]:
        job = self.job
        with self.manager.phase("log_prob", only=["actor"]) as phase:
            job.compute(job.actor)
            phase.switch("ref_log_prob")
            job.compute(job.ref)
            yield phase


class _ReferenceFirst(_Placement):
    """The reference, then the actor, which stays. They are never on the device together, and each
    is loaded once."""

    name = "placement, ref_log_prob first"

    @contextmanager
    def log_probs(self) -> Iterator[placement.Phase]:
        job = self.job
        with self.manager.phase("ref_log_prob") as phase:
            job.compute(job.ref)
            phase.switch("log_prob", only=["actor"])
            job.compute(job.actor)
            yield phase


class _Verl:
    """Each phase loads and offloads for itself, like `train_mode` and `eval_mode` of verl's
    engine."""

    name = "verl"

    def __init__(self, job: Job) -> None:
        self.job = job
        self._verl: Any = _peers.verl()
        self._to_device = self._to_host = 0
        for module in (job.actor, job.ref):
            self._offload(module)
        self._offload_optimizer()

    def _load(self, module: torch.nn.Module) -> None:
        self._verl.load_fsdp_model_to_gpu(module)
        self._to_device += nbytes_of(module_tensors(module))

    def _offload(self, module: torch.nn.Module) -> None:
        self._verl.offload_fsdp_model_to_cpu(module)
        self._to_host += nbytes_of(module_tensors(module))

    def _load_optimizer(self) -> None:
        self._verl.load_fsdp_optimizer(self.job.adam, self.job.rig.torch_device)
        self._to_device += nbytes_of(moments(self.job.adam))

    def _offload_optimizer(self) -> None:
        self._verl.offload_fsdp_optimizer(self.job.adam)
        self.job.rig.empty_cache()
        self._to_host += nbytes_of(moments(self.job.adam))

    def step(self) -> None:
        job = self.job
        for module in (job.actor, job.ref):
            self._load(module)
            job.compute(module)
            self._offload(module)
        self._load(job.actor)
        self._load_optimizer()
        job.compute(job.actor, 2)
        job.step()
        self._offload(job.actor)
        self._offload_optimizer()
        for parameter in job.actor.parameters():
            job.publish([parameter.to(job.rig.torch_device, non_blocking=True)])
            self._to_device += parameter.nbytes

    def crossed(self) -> tuple[int, int]:
        return self._to_device, self._to_host

    def peak_bytes(self) -> None:
        """None: verl does not count these bytes."""

    def load_all(self) -> None:
        self._load(self.job.actor)
        self._load_optimizer()

    def close(self) -> None:
        del self.job


def _run(
    rig: Rig, results: Results, products: Products, make: Callable[[Job], Any]
) -> dict[str, float]:
    """Measure one system. Returns bytes and stalled seconds of a step."""
    job = Job(rig, products)
    # with the two steps before them an even number, which restores the values
    times = rig.pick(2, 2, 4)
    rig.seconds(job.alone)
    alone = statistics.median(rig.seconds(job.alone) for _ in range(times))
    before = job.print()
    rig.empty_cache()
    system = make(job)
    name: str = system.name
    rig.empty_cache()
    for _ in range(2):
        system.step()
    steps: list[float] = []
    crossed = system.crossed()
    rig.empty_cache()  # memory in torch's cache from the last step would be missing from the peak
    rig.sync()
    with rig.sampled_peak() as peak:
        for _ in range(times):
            steps.append(rig.seconds(system.step))
    to_device, to_host = (
        (now - then) / times for now, then in zip(system.crossed(), crossed, strict=True)
    )
    handles_peak = system.peak_bytes()
    system.load_all()
    exact = job.print() == before
    stalled = statistics.median(steps) - alone
    add = partial(results.add, _SCENARIO, name)
    add("computation alone", alone, "s")
    add("step", statistics.median(steps), "s")
    add("stalled", stalled, "s")
    add("bytes to the device", to_device, "bytes")
    add("bytes to the host", to_host, "bytes")
    add("bytes both ways", to_device + to_host, "bytes")
    if peak.samples:
        add("peak, seen by the driver", peak.rise_bytes, "bytes")
    if handles_peak is not None:
        add("peak of what is registered", handles_peak, "bytes")
    add("bit-exact", exact, "yes=1")
    del job  # dead objects need no ordinary memory when the manager closes
    system.close()
    return {"bytes": to_device + to_host, "stalled": stalled}


def measure(rig: Rig, results: Results) -> None:
    products = Products(rig)
    measured: dict[str, dict[str, float]] = {}
    for make in (
        each
        for each in (_Placement, _ReferenceLast, _ReferenceFirst, _Verl)
        if rig.wants(each.name)
    ):
        with results.system(_SCENARIO, make.name):
            measured[make.name] = _run(rig, results, products, make)
        rig.clean()
    peer = measured.pop(_Verl.name, {})
    for name, ours in measured.items():
        for what in peer:
            results.add(
                _SCENARIO, name, f"{what}, share of verl's", 100 * ours[what] / peer[what], "%"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("grpo_step", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
