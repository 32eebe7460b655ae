"""What does it cost to look for NaN at an offload (`nan_check`)? The same bytes leave with the look
and without it, by turns.

Every round times one offload of each, in alternating order. A ratio is that of one round's two
offloads, so that what slows both (the link, the host) falls out. The offload of an unchanged model
copies nothing, so the look has its largest share there.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

import placement
from bench import _rig
from bench._models import Weights, change
from bench._results import Results
from bench._rig import Rig

_SYSTEMS = {"placement": True, "placement, nan_check=False": False}


class _Model:
    """A model of its own manager."""

    def __init__(self, rig: Rig, sizes: Sequence[int], *, nan_check: bool) -> None:
        self.weights = Weights(rig, [(size,) for size in sizes])
        self.manager = placement.Manager(device=rig.placement_device(), nan_check=nan_check)
        self.manager.register("object", self.weights, role="critic")
        rig.empty_cache()  # else the storages' first memory stays in torch's cache

    def offload_seconds(self, rig: Rig, *, changed: bool) -> float:
        """Load the model, change every element if asked to, and time its offload."""
        self.manager.enter("values")
        if changed:
            change(list(self.weights.parameters()))
        return rig.seconds(self.manager.leave)


def _sizes(rig: Rig, num_tensors: int) -> list[int]:
    """Elements of each tensor: together 15.2 GB in bf16 (a third of it where that is quick)."""
    total = rig.pick(1 << 18, 2_538_000_000, 7_616_000_000)
    return [total // num_tensors] * num_tensors


def _compare(
    rig: Rig, results: Results, scenario: str, models: dict[str, _Model], *, changed: bool
) -> None:
    what = "offload" if changed else "offload, unchanged"
    seconds: dict[str, list[float]] = {system: [] for system in models}
    for index in range(rig.pick(2, 7, 15) + 1):
        for system in list(models)[:: 1 if index % 2 else -1]:
            taken = models[system].offload_seconds(rig, changed=changed)
            if index:  # the first round finds cold host memory
                seconds[system].append(taken)
    for system, taken_by in seconds.items():
        results.add(scenario, system, what, statistics.median(taken_by), "s")
    ratios = sorted(
        with_it / without
        for with_it, without in zip(*(seconds[system] for system in _SYSTEMS), strict=True)
    )
    for metric, value in (
        ("median", statistics.median(ratios)),
        ("least", ratios[0]),
        ("most", ratios[-1]),
    ):
        results.add(
            scenario,
            "placement",
            f"{what}, with the look over without it, {metric}",
            value,
            "ratio",
        )


def measure(rig: Rig, results: Results) -> None:
    for num_tensors in (20, 200) if rig.size == "tiny" else (300, 3_000):
        scenario = f"{num_tensors:,} tensors"
        with results.system(scenario, "placement"):
            sizes = _sizes(rig, num_tensors)
            models = {
                system: _Model(rig, sizes, nan_check=is_on) for system, is_on in _SYSTEMS.items()
            }
            for changed in (True, False):
                _compare(rig, results, scenario, models, changed=changed)
            for system, each in models.items():
                with each.manager.phase("values"):
                    whole = all(
                        bool(torch.isfinite(tensor).all()) for tensor in each.weights.parameters()
                    )
                results.add(scenario, system, "numbers stay numbers", whole, "bool")
            for each in models.values():
                each.weights = None  # type: ignore[assignment]  # dead objects need no ordinary memory at close()
                each.manager.close()
            models.clear()
        rig.clean()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("nan_check", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
