"""How fast is fresh, untouched host memory reserved as page-locked memory: by placement's slab, by
torch's pinned allocation?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from bench import _rig
from bench._results import Results
from bench._rig import Rig
from placement.devices.base import Device
from placement.devices.select import select_device

_SCENARIO = "reserving host memory"
_GIVE_UP_SECONDS = 60.0


def _slab(rig: Rig, results: Results, device: Device, nbytes: int) -> Any:
    began = time.perf_counter()
    slab = device.host(nbytes)
    usable = time.perf_counter() - began
    while rig.is_cuda and not slab.pinned and slab.pageable_reason is None:
        if time.perf_counter() - began > _GIVE_UP_SECONDS:
            raise RuntimeError("not page-locked after a minute")
        time.sleep(1e-3)
    pinned = time.perf_counter() - began
    if slab.pageable_reason is not None:
        raise RuntimeError(f"not page-locked: {slab.pageable_reason}")
    results.add(_SCENARIO, "placement", "until usable", usable, "s")
    results.add(_SCENARIO, "placement", "until page-locked", pinned, "s")
    results.add(_SCENARIO, "placement", "rate", nbytes / pinned / 1e9, "GB/s")
    return slab


def _torch(rig: Rig, results: Results, nbytes: int) -> Any:
    began = time.perf_counter()
    buffer = rig.pin(nbytes)
    seconds = time.perf_counter() - began
    results.add(_SCENARIO, "torch pinned", "until page-locked", seconds, "s")
    results.add(_SCENARIO, "torch pinned", "rate", nbytes / seconds / 1e9, "GB/s")
    return buffer


def measure(rig: Rig, results: Results) -> None:
    """Hold everything until the end, because freed memory would be warm for the next system. Each
    system goes first once."""
    nbytes = rig.pick(1 << 20, 8 << 30, 16 << 30)
    chosen = rig.placement_device()
    device = select_device(chosen) if isinstance(chosen, str) else chosen
    held: list[Any] = []
    first: dict[str, Callable[[], Any]] = {
        "torch pinned": lambda: _torch(rig, results, nbytes),
        "placement": lambda: _slab(rig, results, device, nbytes),
    }
    rounds = [(system, reserve) for system, reserve in first.items() if rig.wants(system)]
    for system, reserve in rounds if rig.size == "quick" else [*rounds, *reversed(rounds)]:
        with results.system(_SCENARIO, system):
            held.append(reserve())
    rates = {
        system: [row.value for row in results.rows if row.system == system and row.metric == "rate"]
        for system in first
    }
    if all(rates.values()):
        ratio = sum(rates["placement"]) / sum(rates["torch pinned"])
        results.add(_SCENARIO, "placement", "rate, times torch's", ratio, "x")
    held.clear()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("host_reserve", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
