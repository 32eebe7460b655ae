"""Does the rate hold for many small tensors: 20,000 of 4 KiB, and 20,000 of 64 KiB?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bench import _rig, link
from bench._cycle import compare
from bench._models import Weights
from bench._movers import HandWritten, MemorySaverRetained, ModuleTo, Mover, Placement, VerlModel
from bench._results import Results
from bench._rig import Rig

_SYSTEMS: Sequence[type[Mover]] = (Placement, HandWritten, VerlModel, ModuleTo)


def measure(rig: Rig, results: Results) -> None:
    raw = link.measure(rig, results)
    count = rig.pick(20, 20_000, 20_000)
    # 4 KiB first: there the walk over the tensors is all the time, and twice as long over what a process has used before.
    # torch_memory_saver last: it ends the process when another pool's memory dies after its own.
    for kib, systems in ((4, _SYSTEMS), (64, _SYSTEMS), (4, (MemorySaverRetained,)), (64, (MemorySaverRetained,))):
        make = partial(Weights, rig, [(kib * 512,)] * count)
        compare(rig, results, f"{count:,} tensors of {kib} KiB", raw, {system.name: partial(system, rig, make) for system in systems})


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("small_tensors", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
