"""Does the rate hold for many small tensors: 20,000 of 4 KiB, and 20,000 of 64 KiB?

Each size has a process of its own, because walking over so many tensors takes twice as long in
memory that others have used.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from bench import _rig, link
from bench._cycle import compare
from bench._models import Weights
from bench._movers import HandWritten, MemorySaverRetained, ModuleTo, Mover, Placement, VerlModel
from bench._results import Results
from bench._rig import Rig

_SYSTEMS: Sequence[type[Mover]] = (Placement, HandWritten, VerlModel, ModuleTo, MemorySaverRetained)


def measure(rig: Rig, results: Results) -> None:
    for kib in (64, 4):
        found = (_in_own_process if rig.is_cuda else _one_size)(rig, results.path.parent, kib)
        results.rows += found.rows
        results.errors += found.errors
        results.write()


def _in_own_process(rig: Rig, folder: Path, kib: int) -> Results:
    results = Results("small_tensors", rig.device, rig.size, folder)
    results.path.unlink(missing_ok=True)
    context = multiprocessing.get_context("forkserver")  # torch is imported once for both
    context.set_forkserver_preload(["torch"])
    own = context.Process(target=_one_size, args=(rig, folder, kib))
    own.start()
    own.join()
    # whatever the exit status: torch_memory_saver ends the process when another pool's memory dies
    # after its own
    results.read()
    return results


def _one_size(rig: Rig, folder: Path, kib: int) -> Results:
    """Measure one size, with the link's rate in the same process."""
    results = Results("small_tensors", rig.device, rig.size, folder)
    scenario = f"{rig.pick(20, 20_000, 20_000):,} tensors of {kib} KiB"
    raw = link.measure(rig, results)
    make = partial(Weights, rig, [(kib * 512,)] * rig.pick(20, 20_000, 20_000))
    compare(
        rig,
        results,
        scenario,
        raw,
        {system.name: partial(system, rig, make) for system in _SYSTEMS},
    )
    return results


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("small_tensors", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
