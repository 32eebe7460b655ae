"""How long does the first load of a fresh process take, beside later ones, and how many bytes are
left on the device when all is offloaded?

Each system has a process of its own, in which nothing has moved yet. "placement, kernels compiled"
begins with an empty kernel cache, and "placement" with what the former has compiled.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial

import torch

from bench import _rig
from bench._models import Consumer, Weights, decoder, nbytes_of
from bench._movers import HandWritten, MemorySaverRetained, ModuleTo, Mover, Placement
from bench._process import measure_apart
from bench._results import Results
from bench._rig import Rig

_SCENARIO = "weights, bf16, in a fresh process"
_LATER_LOADS = 3
_LEFT = "left on the device when offloaded, seen by the driver"
_CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
"""The variables with the folders of compiled kernels: triton's and the driver's."""


class _Compiling(Placement):
    name = "placement, kernels compiled"


# The order matters: the second one finds what the first has compiled.
_SYSTEMS: Sequence[type[Mover]] = (
    _Compiling,
    Placement,
    HandWritten,
    ModuleTo,
    MemorySaverRetained,
)


def measure(rig: Rig, results: Results) -> None:
    with tempfile.TemporaryDirectory() as cache:
        for system in _SYSTEMS:
            if rig.wants(system.name.partition(",")[0]):
                with results.system(_SCENARIO, system.name):
                    measure_apart(rig, results, partial(_measure_one, system, cache))


def _measure_one(system: type[Mover], cache: str, rig: Rig, results: Results) -> None:
    """Measure one system. Nothing in this process may have used the device before."""
    os.environ |= dict.fromkeys(_CACHES, cache)
    if rig.is_cuda:
        torch.cuda.set_device(rig.torch_device)
    with results.system(_SCENARIO, system.name):
        consumer = Consumer()
        consumer.read(Weights(rig, [(64,)]).weights[0])  # torch's own first kernels do not count
        rig.empty_cache()
        free_bytes = rig.free_bytes()
        mover = system(rig, partial(decoder, rig))
        try:
            _loads(rig, results, mover, consumer)
            if rig.is_cuda:
                left_bytes = free_bytes - rig.free_bytes()
                results.add(_SCENARIO, system.name, _LEFT, left_bytes, "bytes")
        finally:
            results.write()  # written now, because closing a system may end the process
            mover.close()


def _loads(rig: Rig, results: Results, mover: Mover, consumer: Consumer) -> None:
    """Measure the first load and later ones. Afterwards all is offloaded."""

    def row(metric: str, value: float, unit: str) -> None:
        results.add(_SCENARIO, mover.name, metric, value, unit)

    def load() -> None:
        """Load, until the first kernel has run."""
        mover.load()
        consumer.read(mover.last_tensor)

    mover.build()
    row("bytes of the object", nbytes_of(mover.tensors), "bytes")
    row("first offload", rig.seconds(mover.first_offload), "s")
    mover.settle()
    row("first load", rig.seconds(load), "s")
    later = []
    for _ in range(_LATER_LOADS):
        mover.offload()
        later.append(rig.seconds(load))
    row("later load", statistics.median(later), "s")
    mover.offload()
    rig.sync()
    rig.empty_cache()  # memory in torch's cache is no system's


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("first_load", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
