"""Is a load slower right after memory was freed? The driver clears freed memory before another
process may have it, with the engines that copy.

30 GB of page-locked memory are copied to the device: into memory that stays, into new memory a
while after as much was freed, and into memory that stays right after as much was freed. Plain
torch, without placement.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from bench import _rig
from bench._results import Results
from bench._rig import Rig

_TURNS = 2
_WAITS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6)
_SETTLED_SECONDS = 2.0


class _Loads:
    def __init__(self, rig: Rig, results: Results) -> None:
        self._rig, self._results = rig, results
        self._host = rig.pin(rig.pick(1 << 20, 5 << 30, 28 << 30))
        self._scenario = f"a load of {self._host.nbytes:,} bytes"

    def new(self) -> torch.Tensor:
        device = self._rig.torch_device
        return torch.empty(self._host.nbytes, dtype=torch.uint8, device=device)

    def free(self, wait_seconds: float = _SETTLED_SECONDS) -> None:
        """Give the driver what torch has in its cache, and wait."""
        self._rig.sync()
        self._rig.empty_cache()
        time.sleep(wait_seconds)

    def time(self, metric: str, target: Callable[[], torch.Tensor]) -> None:
        """Measure a load into the memory that `target` gives."""

        def load() -> None:
            target().copy_(self._host, non_blocking=True)

        self._results.add(self._scenario, "torch", metric, self._rig.seconds(load), "s")


def measure(rig: Rig, results: Results) -> None:
    loads = _Loads(rig, results)
    for _ in range(_TURNS):
        stays = loads.new()
        loads.free()
        loads.time("into memory that stays", lambda memory=stays: memory)
        other = loads.new()
        rig.sync()
        del other
        loads.free(0.0)
        loads.time("into memory that stays, freed just before", lambda memory=stays: memory)
        del stays
        loads.free()
        loads.time("into new memory", loads.new)
        for wait_seconds in _WAITS:
            loads.free(wait_seconds)
            loads.time(f"into new memory, freed {wait_seconds} s before", loads.new)


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("after_free", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
