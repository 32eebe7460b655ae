"""Round trips of one object: the cost of each move for the host, the memory and the first kernel,
and whether it came back whole."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch

from bench._models import Consumer, change, digest, nbytes_of
from bench._movers import END_THEIR_PROCESS, Mover
from bench._process import measure_apart
from bench._results import Results
from bench._rig import Rig, used_host_bytes
from bench.link import Link

REST_MILLISECONDS = 300
"""The pause between an offload and the next load, for every system; it stands for a phase of other
models. Without it the driver is still clearing the freed memory (about 50 ms for 15 GB on an H200),
and a system that takes fresh memory then loads up to a tenth slower."""
_GIVE_UP_SECONDS = 5.0
_SLOW_SECONDS = 2.0
"""A slower cycle is not repeated for the second comparison. Such a system copies everything every
time, so the first one suffices."""


@dataclass(frozen=True)
class _Move:
    returned: float
    """Seconds until the host may go on."""
    visible: float
    """For an offload: until the driver reports the bytes as free for other processes. For a load:
    until the first kernel has run."""
    done: float
    """Until the device is idle and, for an offload, the bytes are free."""


class RoundTrips:
    """Measures cycles of one mover.

    Args:
        changing: whether to write every element on the device before each offload.
        budget_seconds: the limit after the cold cycle. Slow systems get fewer than the 2 and 5
            cycles, but at least one measured cycle.
    """

    def __init__(
        self,
        rig: Rig,
        results: Results,
        scenario: str,
        mover: Mover,
        link: Link,
        *,
        changing: bool = True,
    ) -> None:
        self.rig, self.results, self.scenario, self.mover, self.link = (
            rig,
            results,
            scenario,
            mover,
            link,
        )
        self.changing = changing
        self.budget_seconds = float(rig.pick(1, 5, 10))
        self._consumer = Consumer()
        # makes torch's segment for small tensors before memory is counted
        self._small = torch.empty(1, device=rig.torch_device)

    def _row(self, metric: str, value: float, unit: str) -> None:
        self.results.add(self.scenario, self.mover.name, metric, value, unit)

    def _offload(self, first: bool = False) -> _Move:
        self.rig.sync()
        free, nbytes = self.rig.free_bytes(), nbytes_of(self.mover.tensors)
        began = time.perf_counter()
        (self.mover.first_offload if first else self.mover.offload)()
        returned = time.perf_counter() - began
        # Where torch's pool lies behind the addresses, the driver counts in chunks, so nearly all
        # bytes count as all. In the first cycle a system may also take memory for the whole process
        # (its poison), which can exceed a small object.
        while self.rig.is_cuda and not first and self.rig.free_bytes() - free < 0.95 * nbytes:
            if time.perf_counter() - began > returned + _GIVE_UP_SECONDS:
                raise RuntimeError(
                    f"only {self.rig.free_bytes() - free:,} of {nbytes:,} bytes became free"
                )
        visible = time.perf_counter() - began
        self.rig.sync()
        return _Move(returned, visible, time.perf_counter() - began)

    def _load(self) -> _Move:
        self.rig.sync()
        began = time.perf_counter()
        self.mover.load()
        returned = time.perf_counter() - began
        self._consumer.read(self.mover.last_tensor)
        self.rig.sync()
        ready = time.perf_counter() - began
        return _Move(returned, ready, ready)

    def run(self, *, check_changed: bool = True) -> None:
        """Build, measure, record the rows, and close the mover.

        Args:
            check_changed: whether to compare the bytes of one more round trip, after a write.
        """
        mover, rig = self.mover, self.rig
        host_before, free_before = used_host_bytes(), rig.free_bytes()
        try:
            mover.build()
            self._consumer.read(mover.last_tensor)
            before = digest(mover.tensors)
            rig.empty_cache()
            nbytes = nbytes_of(mover.tensors)
            self._row("bytes of the object", nbytes, "bytes")
            self._row("first offload", self._offload(first=True).done, "s")
            residual = free_before - rig.free_bytes() if rig.is_cuda else 0
            mover.settle()
            self._row("first load", self._load().done, "s")
            after, addresses = (
                digest(mover.tensors),
                [tensor.data_ptr() for tensor in mover.tensors],
            )
            rig.empty_cache()
            offloads, loads, crossed = self._warm()
            self._rows(nbytes, offloads, loads, crossed)
            self._offload()
            self._row(
                "load right after an offload, until the first kernel ran", self._load().done, "s"
            )
            self._row("bytes left on the device", residual, "bytes")
            self._row("host memory taken", max(0, used_host_bytes() - host_before), "bytes")
            self._row(
                "addresses stay",
                addresses == [tensor.data_ptr() for tensor in mover.tensors],
                "yes=1",
            )
            is_quick = offloads[-1].done + loads[-1].done < _SLOW_SECONDS
            exact = before == after and (self._is_exact() if check_changed and is_quick else True)
            self._row("bit-exact", exact, "yes=1")
        finally:
            self.results.write()  # written now, because closing a system may end the process
            mover.close()

    def _warm(self) -> tuple[list[_Move], list[_Move], tuple[float, float]]:
        offloads: list[_Move] = []
        loads: list[_Move] = []
        began = time.perf_counter()
        warm_ups = 0
        while warm_ups < 2 and (
            warm_ups == 0 or time.perf_counter() - began < self.budget_seconds / 2
        ):
            self._cycle()
            warm_ups += 1
        to_host, to_device = self.mover.moved_to_host, self.mover.moved_to_device
        while len(offloads) < 5 and (
            not offloads or time.perf_counter() - began < self.budget_seconds
        ):
            offload, load = self._cycle()
            offloads.append(offload)
            loads.append(load)
        cycles = len(offloads)
        return (
            offloads,
            loads,
            (
                (self.mover.moved_to_host - to_host) / cycles,
                (self.mover.moved_to_device - to_device) / cycles,
            ),
        )

    def _cycle(self) -> tuple[_Move, _Move]:
        if self.changing:
            change(self.mover.tensors)
        offload = self._offload()
        time.sleep(self.rig.pick(0, REST_MILLISECONDS, REST_MILLISECONDS) / 1e3)
        return offload, self._load()

    def _is_exact(self) -> bool:
        """Make one more round trip with changed bytes. Returns whether they came back."""
        change(self.mover.tensors)
        before = digest(self.mover.tensors)
        self.rig.empty_cache()
        self.mover.offload()
        self.mover.load()
        return digest(self.mover.tensors) == before

    def _rows(
        self, nbytes: int, offloads: list[_Move], loads: list[_Move], crossed: tuple[float, float]
    ) -> None:
        self._row("cycles measured", len(offloads), "cycles")
        offloaded, loaded = (
            statistics.median(move.done for move in moves) for moves in (offloads, loads)
        )
        self._row(
            "offload, until the host goes on",
            statistics.median(move.returned for move in offloads),
            "s",
        )
        self._row(
            "offload, until the bytes are free",
            statistics.median(move.visible for move in offloads),
            "s",
        )
        self._row("offload", offloaded, "s")
        self._row(
            "load, until the host goes on", statistics.median(move.returned for move in loads), "s"
        )
        self._row("load, until the first kernel ran", loaded, "s")
        self._row("offload, bytes copied", crossed[0], "bytes")
        self._row("load, bytes copied", crossed[1], "bytes")
        if self.changing:
            self.results.rate(
                self.scenario, self.mover.name, "offload", nbytes, offloaded, self.link.to_host
            )
            self.results.rate(
                self.scenario, self.mover.name, "load", nbytes, loaded, self.link.to_device
            )
        else:
            copying = nbytes / self.link.to_host / 1e9
            self._row("offload, share of the time to copy it", 100 * offloaded / copying, "%")


def compare(
    rig: Rig,
    results: Results,
    scenario: str,
    link: Link,
    makers: Mapping[str, Callable[[], Mover]],
    *,
    changing: bool = True,
) -> None:
    """Measure the round trips of several systems, one after the other, each on a clean device. A
    failure becomes an error row."""
    for name in filter(rig.wants, makers):
        one = partial(_round_trips, scenario, name, makers[name], link, changing)
        if rig.is_cuda and name in END_THEIR_PROCESS:
            with results.system(scenario, name):
                measure_apart(rig, results, one)
        else:
            one(rig, results)
        rig.clean()


def _round_trips(
    scenario: str,
    name: str,
    make: Callable[[], Mover],
    link: Link,
    changing: bool,
    rig: Rig,
    results: Results,
) -> None:
    with results.system(scenario, name):
        RoundTrips(rig, results, scenario, make(), link, changing=changing).run()
