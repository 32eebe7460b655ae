"""What does being watched cost: a snapshot, a scrape, a trace, and the phases of a worker that is
scraped all the time?"""

from __future__ import annotations

import statistics
import threading
import time
import tracemalloc
import urllib.request
from collections.abc import Callable, Sequence

import torch

import placement
from bench import _rig
from bench._results import Results
from bench._rig import Rig
from placement.core.journal import HandleCounters, Journal, Record
from placement.core.states import State, Trigger
from placement.observe.trace import encoded_trace

SCENARIO = "6 handles"
SCRAPES_A_SECOND = 20
"""For comparison: Prometheus usually scrapes once in 15 seconds."""


def _microseconds(call: Callable[[], object], repetitions: int) -> float:
    times = []
    for _ in range(repetitions):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def _phases(manager: placement.Manager, seconds: float) -> tuple[float, float]:
    """Median and 99th percentile of a phase that moves nothing, in microseconds."""
    times = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        with manager.phase("checkpoint"):
            pass
        times.append(time.perf_counter() - began)
        time.sleep(0.001)
    times.sort()
    return times[len(times) // 2] * 1e6, times[int(len(times) * 0.99)] * 1e6


def _long_journal(length: int) -> Journal:
    journal, counters = Journal(), HandleCounters()
    for index in range(length):
        trigger, source, target = (
            (Trigger.LOAD, State.CPU_OFFLOADED, State.GPU_RESIDENT),
            (Trigger.OFFLOAD, State.GPU_RESIDENT, State.CPU_OFFLOADED),
        )[index % 2]
        at = index * 0.01
        journal.record(
            counters,
            Record(at, at, "actor", "module", trigger, source, target, "train", 1 << 30, 0, 0.005),
        )
    return journal


def measure(rig: Rig, results: Results) -> None:
    tiny = rig.size == "tiny"
    manager = placement.Manager(device=rig.placement_device(), budget_bytes=1 << 40)
    modules = [torch.nn.Linear(16, 16) for _ in range(6)]
    for index, module in enumerate(modules):
        manager.register(f"handle{index}", module, role="actor")
    with (
        results.system(SCENARIO, "placement"),
        manager.phase("log_prob"),
        manager.serve() as server,
    ):
        url = f"{server.url}/metrics"

        def scrape() -> bytes:
            with urllib.request.urlopen(url) as answer:
                page: bytes = answer.read()
                return page

        repetitions = 3 if tiny else 500
        results.add(
            SCENARIO, "placement", "snapshot", _microseconds(manager.snapshot, repetitions), "us"
        )
        results.add(
            SCENARIO,
            "placement",
            "scrape, request and answer included",
            _microseconds(scrape, repetitions),
            "us",
        )
        results.add(SCENARIO, "placement", "page", len(scrape()), "B")
        seconds = 0.1 if tiny else 10.0
        for what, watched in (
            ("unwatched", False),
            ((f"scraped {SCRAPES_A_SECOND} times a second"), True),
        ):
            ended = threading.Event()

            def keep_scraping(ended: threading.Event = ended) -> None:
                while not ended.wait(1 / SCRAPES_A_SECOND):
                    scrape()

            scraper = threading.Thread(target=keep_scraping)
            if watched:
                scraper.start()
            median, high = _phases(manager, seconds)
            ended.set()
            if watched:
                scraper.join()
            results.add(SCENARIO, "placement", f"phase that moves nothing, {what}", median, "us")
            results.add(SCENARIO, "placement", f"the same, 99th percentile, {what}", high, "us")
    count = 100 if tiny else 100_000
    scenario = f"{count:,} transitions"
    with results.system(scenario, "placement"):
        journal = _long_journal(count)
        began = time.perf_counter()
        nbytes = sum(len(piece) for piece in encoded_trace(journal))
        results.add(scenario, "placement", "trace, time to write", time.perf_counter() - began, "s")
        results.add(scenario, "placement", "trace, size", nbytes, "B")
        tracemalloc.start()
        for _ in encoded_trace(journal):
            pass
        results.add(
            scenario,
            "placement",
            "trace, most memory while writing",
            tracemalloc.get_traced_memory()[1],
            "B",
        )
        tracemalloc.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("observe", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
