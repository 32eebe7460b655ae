"""A step of verl's workers, with placement and with verl's own offloading: how long does it take,
how much is on the device in each phase, and how many bytes are copied?

Actor with AdamW and reference are verl's own `TrainingWorker`s (FSDP2, one rank, `param_offload`
and `optimizer_offload`). A step computes log-probabilities of both, trains the actor on one batch,
and publishes its weights.

There is no GPU in it, whatever the machine has: the device is simulated, verl computes on the CPU
by the platform of the tests, and verl's moves, which do nothing on a CPU, copy there as they do on
an accelerator. So the seconds are those of the calls around the moves, of copies in host memory,
and of fingerprints, which a GPU takes of its own memory; bytes are as on a GPU. Not counted are
what FSDP gathers, and the layers of the reference that torch's CPUOffloadPolicy brings for verl one
at a time.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import placement
from bench import _rig
from bench._results import Results
from bench._rig import Rig

_STEPS = 5


def _bytes_of(tensors: Any) -> int:
    return sum(
        each.to_local().nbytes if hasattr(each, "to_local") else each.nbytes for each in tensors
    )


class _OwnMoves:
    """verl's routines that load and offload, copying as on an accelerator and counting what is on
    the device."""

    def __init__(self) -> None:
        self._on_device: dict[int, int] = {}
        self.loaded, self.offloaded = 0, 0

    def device_bytes(self) -> int:
        return sum(self._on_device.values())

    def staged(self, nbytes: int) -> None:
        """A weight was brought to the device to be published."""
        self.loaded += nbytes

    def _moved(self, what: Any, nbytes: int, to_device: bool) -> None:
        if to_device == (id(what) in self._on_device):
            return
        if to_device:
            self._on_device[id(what)] = nbytes
            self.loaded += nbytes
        else:
            self.offloaded += self._on_device.pop(id(what))

    def _module(self, module: torch.nn.Module, to_device: bool) -> None:
        module._apply(torch.clone)
        self._moved(module, _bytes_of(module.parameters()), to_device)

    def _optimizer(self, optimizer: torch.optim.Optimizer, to_device: bool) -> None:
        entries = [entry for entry in optimizer.state.values() if entry]
        for entry in entries:
            entry.update({key: value.clone() for key, value in entry.items()})
        self._moved(optimizer, sum(_bytes_of(entry.values()) for entry in entries), to_device)

    @contextmanager
    def instead(self) -> Iterator[None]:
        from verl.workers.engine.fsdp import transformer_impl

        routines: dict[str, Callable[..., None]] = {
            "load_fsdp_model_to_gpu": lambda module: self._module(module, True),
            "offload_fsdp_model_to_cpu": lambda module: self._module(module, False),
            "load_fsdp_optimizer": lambda optimizer, _device: self._optimizer(optimizer, True),
            "offload_fsdp_optimizer": lambda optimizer: self._optimizer(optimizer, False),
        }
        kept = {name: getattr(transformer_impl, name) for name in routines}
        vars(transformer_impl).update(routines)
        try:
            yield
        finally:
            vars(transformer_impl).update(kept)


class _Job:
    """Actor and reference, and the most bytes on the device in each phase."""

    def __init__(
        self,
        model: Path,
        placed: bool,
        device_bytes: Callable[[], int],
        staged: Callable[[int], object] = int,
    ) -> None:
        from tests.integrations.verl import worker

        self._batch = worker.batch
        self._device_bytes, self._staged = device_bytes, staged
        self.peaks: dict[str, int] = {}
        self._phase = ""
        self.actor, self.ref = (
            worker.build(model, placed=placed, forward_only=forward_only)
            for forward_only in (False, True)
        )
        for each in (self.actor, self.ref):
            each.set_loss_fn(self._watched(each.loss_fn))

    def _watched(self, loss: Callable[..., Any]) -> Callable[..., Any]:
        def watching(**arguments: Any) -> Any:
            self._look()
            return loss(**arguments)

        return watching

    def _look(self, extra: int = 0) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self._device_bytes() + extra)

    def step(self, seed: int) -> None:
        self._phase = "log_prob"
        self.actor.infer_batch(self._batch(seed))
        self._phase = "ref_log_prob"
        self.ref.infer_batch(self._batch(seed))
        self._phase = "train"
        self.actor.train_batch(self._batch(seed))
        self._phase = "weight_sync"
        weights, _ = self.actor.engine.get_per_tensor_param()
        for _, weight in weights:
            self._look(weight.nbytes)
            self._staged(weight.nbytes)


def _measure(
    results: Results, scenario: str, system: str, job: _Job, moved: Callable[[], tuple[int, int]]
) -> None:
    job.step(0)  # makes the optimizer's state
    before = moved()
    seconds = []
    for seed in range(1, 1 + _STEPS):
        began = time.perf_counter()
        job.step(seed)
        seconds.append(time.perf_counter() - began)
    loaded, offloaded = (
        (after - first) / _STEPS for after, first in zip(moved(), before, strict=True)
    )
    results.add(scenario, system, "step", statistics.median(seconds), "s")
    results.add(scenario, system, "to the device, a step", loaded / 1e6, "MB")
    results.add(scenario, system, "to the host, a step", offloaded / 1e6, "MB")
    for phase, nbytes in job.peaks.items():
        results.add(scenario, system, f"{phase}, peak on the device", nbytes / 1e6, "MB")


def measure(rig: Rig, results: Results) -> None:
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    from tests.integrations.verl import worker

    torch.set_num_threads(1)  # a second one waits for the first, and on a busy machine for others
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    worker.import_verl()
    with tempfile.TemporaryDirectory() as folder:
        model = worker.write_model(
            Path(folder), width=rig.pick(32, 256, 512), layers=rig.pick(2, 8, 12)
        )
        scenario = "a step of verl"
        with results.system(scenario, "verl"):
            own = _OwnMoves()
            with own.instead():
                _measure(
                    results,
                    scenario,
                    "verl",
                    _Job(model, False, own.device_bytes, own.staged),
                    lambda: (own.loaded, own.offloaded),
                )
        for policy in ("colocated", "colocated(stream_sync=True)"):
            system = f"placement, {policy}" if "(" in policy else "placement"
            with results.system(scenario, system):
                _measure_placement(results, scenario, system, model, policy)
    dist.destroy_process_group()


def _measure_placement(
    results: Results, scenario: str, system: str, model: Path, policy: str
) -> None:
    from placement.integrations import verl as integration

    manager = placement.Manager(device="simulated:2GiB", policy=policy)
    integration.use_manager(manager)

    def moved() -> tuple[int, int]:
        counters = [handle.counters for handle in manager.handles.values()]
        return sum(each.loaded_bytes for each in counters), sum(
            each.offloaded_bytes for each in counters
        )

    try:
        _measure(
            results,
            scenario,
            system,
            _Job(model, True, lambda: manager.device.memory().chunk_bytes),
            moved,
        )
    finally:
        integration.close_manager()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run(
        "verl_step",
        __doc__,
        measure,
        ["--device", "simulated", *(arguments if arguments is not None else sys.argv[1:])],
    )


if __name__ == "__main__":
    main()
