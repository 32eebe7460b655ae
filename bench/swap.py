"""Two models of 15 GB take turns under a budget of one model plus 256 MiB: at what rate, and with
how much memory at the peak?"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import placement
from bench import _rig, link
from bench._models import Consumer, Weights, blob, change, digest, module_tensors
from bench._movers import HandWritten
from bench._results import Results
from bench._rig import Rig
from bench._sampler import Peak
from bench.link import Link

_SCENARIO = "swap of two models"
_SLACK_BYTES = 256 << 20


class _Turns:
    """Two models that swap places: `swap(i)` puts model i on the device. Model 0 is there at first.

    Args:
        crossed: returns the bytes over the link so far, both ways.
    """

    def __init__(
        self,
        rig: Rig,
        models: Sequence[Weights],
        swap: Callable[[int], None],
        crossed: Callable[[], int],
    ) -> None:
        self.rig, self.models, self.swap, self.crossed = rig, models, swap, crossed
        self._consumer = Consumer()

    def _turn(self, into: int) -> tuple[float, int]:
        """Swap once. Returns the seconds until a kernel has read the arriving model, and the bytes.
        The leaving model is changed before."""
        change(module_tensors(self.models[1 - into]))
        before = self.crossed()
        seconds = self.rig.seconds(partial(self._step, into))
        return seconds, self.crossed() - before

    def _step(self, into: int) -> None:
        self.swap(into)
        self._consumer.read(module_tensors(self.models[into])[-1])

    def verify(self) -> bool:
        """Swap back and forth twice. Returns whether both models come back unchanged. Not sampled,
        because comparing takes memory."""
        exact = True
        for _ in range(2):
            first = digest(module_tensors(self.models[0]))
            self._turn(1)  # changes model 0 once more
            second = digest(module_tensors(self.models[1]))
            self._turn(0)
            change(module_tensors(self.models[0]))
            exact &= digest(module_tensors(self.models[0])) == first
            change(module_tensors(self.models[0]))
            self._turn(1)
            change(module_tensors(self.models[1]))
            exact &= digest(module_tensors(self.models[1])) == second
            self._turn(0)
        self.rig.empty_cache()
        return exact

    def time(self) -> tuple[float, int]:
        """Median seconds of a swap, and its bytes."""
        turns = [self._turn(turn % 2) for turn in range(1, self.rig.pick(4, 6, 10) + 1)]
        return statistics.median(seconds for seconds, _ in turns), turns[-1][1]


def _rows(
    results: Results, system: str, raw: Link, exact: bool, timed: tuple[float, int], peak: Peak
) -> None:
    seconds, nbytes = timed
    results.add(_SCENARIO, system, "swap", seconds, "s")
    results.add(_SCENARIO, system, "swap, bytes copied", nbytes, "bytes")
    results.rate(_SCENARIO, system, "both ways", nbytes, seconds, raw.both)
    results.add(_SCENARIO, system, "bit-exact", exact, "yes=1")
    if peak.samples:
        results.add(_SCENARIO, system, "peak, seen by the driver", peak.rise_bytes, "bytes")
        results.add(_SCENARIO, system, "samples of the driver", peak.samples / peak.seconds, "1/s")


def _placement(rig: Rig, results: Results, raw: Link, nbytes: int) -> None:
    budget = nbytes + (_SLACK_BYTES if rig.is_cuda else 1 << 18)
    manager = placement.Manager(device=rig.placement_device(), budget_bytes=budget)
    models = []
    for role in ("critic", "reward"):
        models.append(blob(rig, nbytes))
        manager.register(role, models[-1], role=role)
        rig.empty_cache()

    def crossed() -> int:
        return sum(
            handle.counters.loaded_bytes + handle.counters.offloaded_bytes
            for handle in manager.handles.values()
        )

    def swap(into: int) -> None:
        manager.switch(("values", "reward")[into])

    turns = _Turns(rig, models, swap, crossed)
    manager.enter("values")
    exact = turns.verify()
    manager.leave()
    with rig.sampled_peak() as peak:
        manager.enter("values")
        timed = turns.time()
        manager.leave()
    results.add(_SCENARIO, "placement", "budget", budget, "bytes")
    _rows(results, "placement", raw, exact, timed, peak)
    results.add(
        _SCENARIO, "placement", "peak, in the ledger", manager.snapshot().peak_bytes, "bytes"
    )
    models.clear()
    del turns
    gc.collect()  # dead objects need no ordinary memory at close()
    manager.close()


def _serial(rig: Rig, results: Results, raw: Link, nbytes: int) -> None:
    movers = [HandWritten(rig, partial(blob, rig, nbytes)) for _ in range(2)]
    for mover in movers:
        mover.build()
        mover.first_offload()

    def swap(into: int) -> None:
        movers[1 - into].offload()
        movers[into].load()

    models = [mover.object for mover in movers]
    turns = _Turns(
        rig,
        models,
        swap,
        lambda: sum(mover.moved_to_host + mover.moved_to_device for mover in movers),
    )
    movers[0].load()
    exact = turns.verify()
    movers[0].offload()
    with rig.sampled_peak() as peak:
        movers[0].load()
        timed = turns.time()
    _rows(results, "hand-written", raw, exact, timed, peak)
    for mover in movers:
        mover.close()


def measure(rig: Rig, results: Results) -> None:
    raw = link.measure(rig, results)
    nbytes = rig.pick(1 << 20, 5 << 30, 14 << 30)
    bodies = {"placement": _placement, "hand-written": _serial}
    for system in filter(rig.wants, bodies):
        with results.system(_SCENARIO, system):
            bodies[system](rig, results, raw, nbytes)
        rig.clean()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("swap", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
