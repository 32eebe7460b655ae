"""How long does the host wait for a load of 15 GB, even behind 320 ms of queued work, and how much
does that work lose meanwhile?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from bench import _rig
from bench._compute import Products
from bench._models import blob
from bench._movers import HandWritten, ModuleToNonBlocking, Mover, Placement
from bench._results import Results
from bench._rig import Rig

_QUEUED_SECONDS = 0.32
_TIMES = 3


def _host_blocked(rig: Rig, mover: Mover, work: Callable[[], object]) -> float:
    """Milliseconds for which `mover.load()` blocks the host, with `work` queued before it. The
    object ends up off the device."""
    rig.sync()
    work()
    began = time.perf_counter()
    mover.load()
    blocked = (time.perf_counter() - began) * 1e3
    rig.sync()
    mover.offload()
    return blocked


def _slowed(rig: Rig, mover: Mover, products: Products, count: int) -> float:
    """Percent by which products on the compute stream take longer while the object is loaded."""
    times: list[list[float]] = [[], []]
    for _ in range(_TIMES):
        for loading in (False, True):
            rig.sync()
            events = products.timed(count)
            if loading:
                mover.load()
            rig.sync()
            times[loading].append(events[0].elapsed_time(events[1]) if events is not None else 1.0)
            if loading:
                mover.offload()
    alone, beside = (statistics.median(each) for each in times)
    return 100 * (beside / alone - 1)


def measure(rig: Rig, results: Results) -> None:
    nbytes = rig.pick(1 << 20, 5 << 30, 14 << 30)
    products = Products(rig)
    count = products.count_for(_QUEUED_SECONDS)
    scenario = "load of 15 GB" if rig.size == "full" else f"load of {nbytes:,} bytes"
    results.add(scenario, "link", "queued work", count * products.seconds_each, "s")
    for system in (
        each for each in (Placement, ModuleToNonBlocking, HandWritten) if rig.wants(each.name)
    ):
        with results.system(scenario, system.name):
            mover = system(rig, partial(blob, rig, nbytes))
            mover.build()
            mover.first_offload()
            _host_blocked(rig, mover, lambda: None)  # warm up
            for what, work in (
                ("nothing queued", lambda: None),
                ("320 ms queued", partial(products.enqueue, count)),
            ):
                blocked = statistics.median(_host_blocked(rig, mover, work) for _ in range(_TIMES))
                results.add(scenario, system.name, f"host blocked, {what}", blocked, "ms")
            results.add(
                scenario,
                system.name,
                "products slowed by",
                _slowed(rig, mover, products, count),
                "%",
            )
            mover.close()
            del mover
        rig.clean()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("blocking", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
