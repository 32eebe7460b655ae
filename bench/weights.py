"""How long does a model of 15.2 GB (Qwen2.5-7B in bf16, 339 tensors) take off the device and back,
changed in every cycle?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from bench import _rig, link
from bench._cycle import compare
from bench._models import decoder
from bench._movers import MODULE_PEERS, SLOW_PEERS, Mover, Placement
from bench._results import Results
from bench._rig import Rig


def measure(rig: Rig, results: Results) -> None:
    raw = link.measure(rig, results)
    systems: Sequence[type[Mover]] = (
        Placement,
        *MODULE_PEERS,
        *(() if rig.size == "full" else SLOW_PEERS),
    )
    compare(
        rig,
        results,
        "weights, bf16",
        raw,
        {system.name: partial(system, rig, partial(decoder, rig)) for system in systems},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("weights", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
