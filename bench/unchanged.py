"""What does it cost to offload unchanged models: one proved clean by fingerprints, and a readonly
one?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bench import _rig, link
from bench._cycle import RoundTrips, compare
from bench._models import decoder
from bench._movers import HandWritten, Placement
from bench._results import Results
from bench._rig import Rig


def measure(rig: Rig, results: Results) -> None:
    raw = link.measure(rig, results)
    make = partial(decoder, rig)
    compare(
        rig,
        results,
        "unchanged weights",
        raw,
        {"placement": partial(Placement, rig, make)},
        changing=False,
    )
    if rig.wants("placement"):
        with results.system("unchanged weights, readonly", "placement"):
            trips = RoundTrips(
                rig,
                results,
                "unchanged weights, readonly",
                Placement(rig, make, readonly=True),
                raw,
                changing=False,
            )
            trips.run(check_changed=False)  # writing a readonly model is an error
        rig.clean()
    compare(
        rig,
        results,
        "unchanged weights",
        raw,
        {"hand-written": partial(HandWritten, rig, make)},
        changing=False,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("unchanged", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
