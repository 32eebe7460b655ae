"""Does the rate hold for many small tensors: 20,000 of 4 KiB, and 20,000 of 64 KiB?

Each size has a process of its own, because walking over so many tensors takes twice as long in
memory that others have used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bench import _rig, link
from bench._cycle import compare
from bench._models import Weights
from bench._movers import HandWritten, MemorySaverRetained, ModuleTo, Mover, Placement, VerlModel
from bench._process import measure_apart
from bench._results import Results
from bench._rig import Rig

_SYSTEMS: Sequence[type[Mover]] = (Placement, HandWritten, VerlModel, ModuleTo, MemorySaverRetained)


def measure(rig: Rig, results: Results) -> None:
    for kib in (64, 4):
        one_size = partial(_one_size, kib)
        if rig.is_cuda:
            measure_apart(rig, results, one_size)
        else:
            one_size(rig, results)


def _one_size(kib: int, rig: Rig, results: Results) -> None:
    """Measure one size, with the link's rate in the same process."""
    raw = link.measure(rig, results)
    count = rig.pick(20, 20_000, 20_000)
    make = partial(Weights, rig, [(kib * 512,)] * count)
    compare(
        rig,
        results,
        f"{count:,} tensors of {kib} KiB",
        raw,
        {system.name: partial(system, rig, make) for system in _SYSTEMS},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("small_tensors", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
