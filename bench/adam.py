"""How long do 15.2 GB of fp32 Adam moments (one of four shards of a 7B model) take off the device
and back?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bench import _rig, link
from bench._cycle import compare
from bench._models import adam_over, decoder, moments
from bench._movers import OPTIMIZER_PEERS, Mover, Placement
from bench._results import Results
from bench._rig import Rig


def _maker(rig: Rig, system: type[Mover]) -> Callable[[], Mover]:
    def make() -> Mover:
        owner = decoder(rig)  # gives the moments their shapes; it is not measured
        build = partial(adam_over, rig, owner, shards=4)
        return (
            Placement(rig, build, moments, owner=owner)
            if system is Placement
            else system(rig, build, moments)
        )

    return make


def measure(rig: Rig, results: Results) -> None:
    raw = link.measure(rig, results)
    systems: Sequence[type[Mover]] = (Placement, *OPTIMIZER_PEERS)
    compare(
        rig,
        results,
        "Adam state, fp32",
        raw,
        {system.name: _maker(rig, system) for system in systems},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("adam", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
