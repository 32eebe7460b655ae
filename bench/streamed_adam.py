"""What does a step of AdamW cost whose state stays on the host: streamed through a window, loaded
as a whole, or made by the CPU?

One of four shards of a 7B model in fp32: 7.6 GB of parameters and as many of gradients stay on the
device, 15.2 GB of moments do not. Peers step on the CPU and copy gradients and parameters instead
of moments; their results differ from the device's in the last bits.

A step is timed alone, after matrix products of a fixed duration that stand for the forward and
backward pass. In "placement" the first buckets of the state come under these.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence

import torch

import placement
from bench import _peers, _rig, link
from bench._compute import Products
from bench._models import Weights, decoder_config, decoder_shapes, digest, module_tensors, nbytes_of
from bench._results import Results
from bench._rig import Rig
from bench.link import Link
from placement import Plan, State, View
from placement.core.states import IDLE
from placement.registration import streamed_optimizer

_SCENARIO = "AdamW, fp32, state on the host"
_WARM_UPS = 2
_STEPS = 5
_PIECE_BYTES = 256 << 20
_WORK_SECONDS = 0.2
"""The work before each step."""


def _shard(rig: Rig) -> Weights:
    """One rank's flat shard of each parameter, the same values in each call, with gradients."""
    torch.manual_seed(0)
    shards = rig.pick(1, 4, 4)
    sizes = [
        (-(-torch.Size(shape).numel() // shards),) for shape in decoder_shapes(decoder_config(rig))
    ]
    model = Weights(rig, sizes, torch.float32)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        parameter.grad = torch.full_like(parameter, 1e-3)
    return model


def _adamw(parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


class System:
    """One way to step. `prepare` builds it, and a step is `step`."""

    name: str
    is_exact = True
    """Whether the parameters must come out as those of the ordinary step."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig

    def prepare(self) -> None:
        self.model = _shard(self.rig)
        self.optimizer = _adamw(module_tensors(self.model))  # type: ignore[arg-type]

    def begin(self) -> None:
        """Begin the phase of a step, before the work in it."""

    def step(self) -> None:
        self.optimizer.step()

    def peak_bytes(self) -> int | None:
        """The most device bytes of the state, as the system itself counts them; None where it does
        not."""
        return None

    def link_bytes(self) -> tuple[int, int]:
        """Bytes to the device and to the host so far, in steps."""
        return 0, 0

    def close(self) -> None:
        self.model = self.optimizer = None  # type: ignore[assignment]


class OnDevice(System):
    """The ordinary step with all state on the device: what the others are compared with."""

    name = "on the device"


class _Staying(placement.policies.Colocated):
    """`colocated`, but the actor stays on the device outside the phases: only the optimizer is
    measured."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        is_there = "actor" in view.handles and not plan.on_device("actor")
        return plan.without("actor").also("actor", State.GPU_RESIDENT) if is_there else plan


class Streamed(System):
    """placement with `optimizer_in="streamed"`."""

    name = "placement"
    policy = _Staying("streamed")

    def prepare(self) -> None:
        super().prepare()
        streamed_optimizer.BUCKET_BYTES = self.rig.pick(1 << 16, 512 << 20, 512 << 20)
        device = self.rig.placement_device()
        self.manager = placement.Manager(device=device, policy=self.policy)
        self.manager.register("actor", self.model, role="actor")
        self.handle = self.manager.register("adam", self.optimizer)
        self.manager.enter("train")
        # registering has offloaded them; the phase has brought them back
        for parameter in self.model.parameters():
            assert parameter.grad is not None

    def begin(self) -> None:
        self.manager.leave()
        self.manager.enter("train")

    def peak_bytes(self) -> int | None:
        return max(
            0, self.manager.snapshot().peak_bytes - self.manager.handles["actor"].resident_bytes
        )

    def link_bytes(self) -> tuple[int, int]:
        counters = self.handle.counters
        return counters.loaded_bytes, counters.offloaded_bytes

    def close(self) -> None:
        while self.manager.phase_name != IDLE:
            self.manager.leave()
        super().close()
        del self.handle
        gc.collect()
        self.manager.close()


class Whole(Streamed):
    """placement with `optimizer_in="optimizer_step"`: the whole state comes, is stepped, and
    leaves."""

    name = "placement, whole state"
    policy = _Staying("optimizer_step")

    def begin(self) -> None:
        """The phase goes on."""

    def step(self) -> None:
        with self.manager.phase("optimizer_step"):
            super().step()


class DeepSpeedCpu(System):
    """ZeRO-Offload's step: gradients to the host, DeepSpeed's AVX AdamW on a host copy of the
    parameters, parameters back."""

    name = "deepspeed"
    is_exact = False

    def prepare(self) -> None:
        adam = _peers.deepspeed_cpu_adam()
        self.model = _shard(self.rig)
        self._host = [
            torch.nn.Parameter(self._pinned(parameter)) for parameter in self.model.parameters()
        ]
        for host, parameter in zip(self._host, self.model.parameters(), strict=True):
            host.grad = self._pinned(parameter)
        self.optimizer = adam(self._host, lr=1e-3, adamw_mode=True)
        self._moved = 0

    def _pinned(self, like: torch.Tensor) -> torch.Tensor:
        return self.rig.pin(like.nbytes).view(like.dtype).view(like.shape).copy_(like.detach())

    @torch.no_grad()
    def step(self) -> None:
        for host, parameter in zip(self._host, self.model.parameters(), strict=True):
            assert host.grad is not None
            host.grad.copy_(parameter.grad, non_blocking=True)  # type: ignore[arg-type]
        self.rig.sync()
        self.optimizer.step()
        for host, parameter in zip(self._host, self.model.parameters(), strict=True):
            parameter.copy_(host, non_blocking=True)
        self._moved += nbytes_of(self._host)

    def link_bytes(self) -> tuple[int, int]:
        return self._moved, self._moved

    def close(self) -> None:
        super().close()
        self._host = []


class MegatronHybrid(System):
    """Megatron's `HybridDeviceOptimizer` with everything on the CPU and overlapped copies."""

    name = "megatron"
    is_exact = False

    def prepare(self) -> None:
        hybrid = _peers.megatron_hybrid()
        self.model = _shard(self.rig)
        self.optimizer = hybrid(
            list(self.model.parameters()),
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            overlap_cpu_optimizer_d2h_h2d=True,
            pin_cpu_grads=True,
            pin_cpu_params=True,
            lr=1e-3,
        )


SYSTEMS: Sequence[type[System]] = (OnDevice, Streamed, Whole, DeepSpeedCpu, MegatronHybrid)


def copies_alone(rig: Rig, nbytes: int) -> float:
    """The seconds of copying so many page-locked host bytes to the device and back, both ways at
    once: what no streamed step undercuts.

    Copies of gigabytes of host memory can be slower than those of the buffers that `link` copies
    again and again.
    """
    host = [rig.pin(_PIECE_BYTES) for _ in range(-(-nbytes // _PIECE_BYTES))]
    here, there = (
        torch.empty(_PIECE_BYTES, dtype=torch.uint8, device=rig.torch_device) for _ in range(2)
    )

    def both() -> None:
        streams = [torch.cuda.Stream() for _ in range(2)]
        for index in range(len(host)):
            with torch.cuda.stream(streams[0]):
                here.copy_(host[index], non_blocking=True)
            with torch.cuda.stream(streams[1]):
                host[index - 1].copy_(there, non_blocking=True)

    both()
    return (
        statistics.median(rig.seconds(both) for _ in range(_STEPS))
        * nbytes
        / (len(host) * _PIECE_BYTES)
    )


def measure(rig: Rig, results: Results) -> None:
    raw = link.measure(rig, results)
    if rig.is_cuda and not rig.only:
        nbytes = 2 * nbytes_of(module_tensors(_shard(rig)))
        rig.clean()
        results.add(
            _SCENARIO,
            "copies alone",
            "as many bytes, both ways at once",
            copies_alone(rig, nbytes),
            "s",
        )
        rig.clean()
    exact: int | None = None
    for make in SYSTEMS:
        # the values of all are compared with those on the device
        if make is not OnDevice and not rig.wants(make.name):
            continue
        # it compiles for minutes, and its time without a GPU says nothing
        if make is DeepSpeedCpu and not rig.is_cuda:
            continue
        rig.clean()
        with results.system(_SCENARIO, make.name):
            exact = _measure(rig, results, make(rig), raw, exact)


def _measure(
    rig: Rig, results: Results, system: System, raw: Link, exact: int | None
) -> int | None:
    """Measure one system. Returns the digest of the parameters of an ordinary optimizer after the
    same steps."""

    def row(metric: str, value: float, unit: str) -> None:
        results.add(_SCENARIO, system.name, metric, value, unit)

    system.prepare()
    try:
        row("bytes of the parameters", nbytes_of(module_tensors(system.model)), "bytes")
        row("first step", rig.seconds(system.step), "s")
        for _ in range(_WARM_UPS - 1):
            system.begin()
            system.step()
        rig.empty_cache()
        products = Products(rig)
        to_device, to_host = system.link_bytes()
        with rig.sampled_peak() as peak:
            seconds = statistics.median(_step(rig, system, products) for _ in range(_STEPS))
        row("step", seconds, "s")
        to_device, to_host = (
            (after - before) / _STEPS
            for after, before in zip(system.link_bytes(), (to_device, to_host), strict=True)
        )
        if to_device + to_host:
            row("step, bytes to the device", to_device, "bytes")
            row("step, bytes to the host", to_host, "bytes")
            rate = (to_device + to_host) / seconds / 1e9
            row("step, rate both ways", rate, "GB/s")
            row("step, share of the link both ways", 100 * rate / raw.both, "%")
        if peak.samples:
            row("step, rise of device memory, seen by the driver", peak.rise_bytes, "bytes")
        if (declared := system.peak_bytes()) is not None:
            row("peak of the state on the device", declared, "bytes")
        found = digest(module_tensors(system.model))
        exact = found if exact is None else exact
        if system.is_exact:
            row("bit-exact", found == exact, "yes=1")
    finally:
        system.close()
    return exact


def _step(rig: Rig, system: System, products: Products) -> float:
    """Make one step behind other work. Returns its seconds."""
    system.begin()
    products.enqueue(products.count_for(_WORK_SECONDS))
    return rig.seconds(system.step)


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("streamed_adam", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
