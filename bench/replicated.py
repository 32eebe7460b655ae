"""A reference model that all ranks of a machine share: how fast do they load it together, and how
fast each rank alone?

There is one rank for each GPU (two without one), each in a process of its own. "Together": one host
copy; each rank loads 1/N of it over its own link, and an all-gather brings the rest. "Each for
itself", all at once: a host copy for each rank, so N times the bytes out of one memory. And one
rank alone while the others wait. Seconds are the slowest rank's, from the start of the phase until
the device is idle.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import placement
from bench import _rig
from bench._cycle import REST_MILLISECONDS
from bench._models import blob, digest, module_tensors
from bench._results import Results
from bench._rig import Rig
from placement.group import StoreGroup

_START_SECONDS = 300.0
_SYSTEM = "placement"


@dataclass
class _Seen:
    """The measurements of one rank for one way to load."""

    seconds: float
    crossed_bytes: int
    """Bytes over the rank's link for one load."""
    host_bytes: int
    is_exact: bool


def _loads(
    rig: Rig,
    manager: placement.Manager,
    model: torch.nn.Module,
    *,
    only: int | None,
    **keywords: bool,
) -> _Seen:
    """Register, load several times in step with the other ranks, unregister.

    Args:
        only: the one rank that loads while the others wait; None: all of them.
    """
    model.to(rig.torch_device)  # the way before has left it off the device
    before = digest(module_tensors(model))
    handle = manager.register("ref", model, role="ref", readonly=True, **keywords)
    rig.empty_cache()
    seconds, is_exact, loads = [], True, rig.pick(2, 4, 5)
    for _ in range(loads):
        time.sleep(REST_MILLISECONDS / 1e3 if rig.is_cuda else 0.0)
        dist.barrier()
        if only is None or only == dist.get_rank():
            began = time.perf_counter()
            with manager.phase("log_prob"):
                rig.sync()
                seconds.append(time.perf_counter() - began)
                is_exact &= digest(module_tensors(model)) == before
        dist.barrier()
    seen = _Seen(
        # the first load waits for pages to be pinned
        statistics.median(seconds[1:]) if seconds else 0.0,
        handle.counters.loaded_bytes // loads,
        handle.host_bytes,
        is_exact,
    )
    manager.unregister(handle)
    return seen


def _rank(
    rank: int, world_size: int, port: int, device: str, size: str, nbytes: int, answer: Connection
) -> None:
    rig = Rig(f"cuda:{rank}" if device.startswith("cuda") else device, size)
    store = dist.TCPStore("127.0.0.1", port, None, False)
    if rig.is_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if rig.is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
    )
    torch.manual_seed(0)
    model = blob(rig, nbytes)
    alone = placement.Manager(device=rig.placement_device())
    at_once = _loads(rig, alone, model, only=None)
    one = _loads(rig, alone, model, only=0)
    alone.close()
    together = placement.Manager(
        device=rig.placement_device(), group=StoreGroup(store, rank, world_size, _START_SECONDS)
    )
    replicated = _loads(rig, together, model, only=None, replicated=True)
    together.close()
    answer.send((at_once, one, replicated))
    dist.barrier()  # no rank ends while another may still talk to it
    dist.destroy_process_group()


def _rows(
    results: Results, scenario: str, nbytes: int, system: str, seen: Sequence[_Seen]
) -> float:
    """Add the rows of one way to load, over all ranks. Returns GB/s of one rank, counting the bytes
    that it has afterwards."""
    seconds = max(each.seconds for each in seen)
    results.add(scenario, system, "load", seconds, "s")
    results.add(scenario, system, "load, rate of each rank", nbytes / seconds / 1e9, "GB/s")
    results.add(
        scenario, system, "bytes over one link", max(each.crossed_bytes for each in seen), "bytes"
    )
    results.add(
        scenario, system, "host memory of all ranks", sum(each.host_bytes for each in seen), "bytes"
    )
    results.add(scenario, system, "bit-exact", all(each.is_exact for each in seen), "yes=1")
    return nbytes / seconds / 1e9


def measure(rig: Rig, results: Results) -> None:
    nbytes = rig.pick(1 << 20, 4 << 30, 8 << 30)
    num_gpus = torch.cuda.device_count() if rig.is_cuda else 2
    if num_gpus < 2:
        results.failed("replicated", _SYSTEM, "there is one GPU, and it takes two")
    for world_size in (2, 4, 8):
        if world_size <= num_gpus:
            _references(rig, results, world_size, nbytes)


def _references(rig: Rig, results: Results, world_size: int, nbytes: int) -> None:
    """Measure all ways to load, on this number of ranks."""
    scenario = f"replicated, {world_size} ranks, {nbytes / 1e9:.2f} GB"
    with results.system(scenario, _SYSTEM):
        seen = _ranks(rig, world_size, nbytes)
        at_once = _rows(
            results, scenario, nbytes, "each alone, all at once", [each[0] for each in seen]
        )
        _rows(results, scenario, nbytes, "one alone", [each[1] for each in seen[:1]])
        replicated = _rows(results, scenario, nbytes, _SYSTEM, [each[2] for each in seen])
        results.add(scenario, _SYSTEM, "as fast as each alone, times", replicated / at_once, "")


def _ranks(rig: Rig, world_size: int, nbytes: int) -> list[Any]:
    """The answers of processes that each are a rank."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers, ranks = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_rank,
            args=(rank, world_size, store.port, rig.device, rig.size, nbytes, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        answers.append(ours)
        ranks.append(process)
    try:
        return [answer.recv() for answer in answers]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("replicated", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
