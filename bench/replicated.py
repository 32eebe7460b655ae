"""A reference model that all ranks of a machine share: how fast do they load it together, and how
fast each rank alone?

There is one rank for each GPU (two without one), each in a process of its own. "Together": one host
copy; each rank loads 1/N of it over its own link, and an all-gather brings the rest. "Each for
itself", all at once: a host copy for each rank, so N times the bytes out of one memory. And one
rank alone while the others wait. Seconds are the slowest rank's, from the start of the phase until
the device is idle.

With `--trained BYTES` it measures a model that all ranks train alike instead: bf16 weights of so
many bytes and AdamW's fp32 moments, which take four times as much. They are loaded, every byte is
changed, and they are offloaded, by ranks that share one host copy and by ranks that have one each,
by turns, each turn in new processes. 15.2e9 is a model of 7 billion parameters, and takes 76 GB of
each GPU.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import placement
from bench import _rig
from bench._cycle import REST_MILLISECONDS
from bench._models import adam_over, blob, change, digest, module_tensors, moments
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


@dataclass
class _Trained:
    """The measurements of one rank that trains."""

    load_seconds: float
    offload_seconds: float
    to_host_bytes: int
    """Bytes over the rank's link for one offload."""
    host_bytes: int
    is_exact: bool


def _trains(
    rig: Rig, manager: placement.Manager, nbytes: int, cycles: int, *, replicated: bool
) -> _Trained:
    """Load, change every byte and offload, several times in step with the other ranks."""
    model = blob(rig, nbytes).requires_grad_(requires_grad=True)
    optimizer = adam_over(rig, model, shards=1)
    held = [
        manager.register("actor", model, role="actor", replicated=replicated),
        manager.register("adam", optimizer, replicated=replicated),
    ]
    rig.empty_cache()
    seconds: list[tuple[float, float]] = []
    wanted, is_exact = 0, True
    for cycle in range(cycles + 1):
        time.sleep(REST_MILLISECONDS / 1e3 if rig.is_cuda else 0.0)
        dist.barrier()
        began = time.perf_counter()
        with manager.phase("train"):
            rig.sync()
            loaded = time.perf_counter()
            tensors = [*module_tensors(model), *moments(optimizer)]
            is_exact &= cycle == 0 or digest(tensors) == wanted
            change(tensors)
            wanted = digest(tensors)
            rig.sync()
            dist.barrier()
            leaves = time.perf_counter()
        seconds.append((loaded - began, time.perf_counter() - leaves))
    loads, offloads = zip(*seconds[1:], strict=True)  # the first waits for pages to be pinned
    to_host = sum(each.counters.offloaded_bytes for each in held) // len(seconds)
    return _Trained(
        statistics.median(loads),
        statistics.median(offloads),
        to_host,
        sum(each.host_bytes for each in held),
        is_exact,
    )


def _joined(
    rank: int, world_size: int, port: int, device: str, size: str
) -> tuple[Rig, dist.Store]:
    """This process as a rank of the job."""
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
    return rig, store


def _training_rank(
    rank: int,
    world_size: int,
    port: int,
    device: str,
    size: str,
    nbytes: int,
    answer: Connection,
    *,
    cycles: int,
    replicated: bool,
) -> None:
    rig, store = _joined(rank, world_size, port, device, size)
    group = StoreGroup(store, rank, world_size, _START_SECONDS)
    manager = placement.Manager(device=rig.placement_device(), group=group)
    answer.send(_trains(rig, manager, nbytes, cycles, replicated=replicated))
    dist.barrier()
    dist.destroy_process_group()


def _rank(
    rank: int, world_size: int, port: int, device: str, size: str, nbytes: int, answer: Connection
) -> None:
    rig, store = _joined(rank, world_size, port, device, size)
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


def measure(
    rig: Rig,
    results: Results,
    trained_bytes: int | None = None,
    cycles: int | None = None,
    turns: int = 2,
) -> None:
    nbytes = rig.pick(1 << 20, 4 << 30, 8 << 30)
    num_gpus = torch.cuda.device_count() if rig.is_cuda else 2
    if num_gpus < 2:
        results.failed("replicated", _SYSTEM, "there is one GPU, and it takes two")
    for world_size in (2, 4, 8):
        if world_size <= num_gpus and trained_bytes is None:
            _references(rig, results, world_size, nbytes)
        elif world_size <= num_gpus:
            _replicas(rig, results, world_size, trained_bytes, cycles, turns)


def _references(rig: Rig, results: Results, world_size: int, nbytes: int) -> None:
    """Measure all ways to load, on this number of ranks."""
    scenario = f"replicated, {world_size} ranks, {nbytes / 1e9:.2f} GB"
    with results.system(scenario, _SYSTEM):
        seen = _ranks(rig, world_size, nbytes, _rank)
        at_once = _rows(
            results, scenario, nbytes, "each alone, all at once", [each[0] for each in seen]
        )
        _rows(results, scenario, nbytes, "one alone", [each[1] for each in seen[:1]])
        replicated = _rows(results, scenario, nbytes, _SYSTEM, [each[2] for each in seen])
        results.add(scenario, _SYSTEM, "as fast as each alone, times", replicated / at_once, "")


def _replicas(
    rig: Rig, results: Results, world_size: int, nbytes: int | None, cycles: int | None, turns: int
) -> None:
    """Measure a model that is trained, with a host copy for all ranks and with one for each, by
    turns."""
    assert nbytes is not None
    scenario = f"trained, {world_size} ranks, {5 * nbytes / 1e9:.2f} GB"
    found: dict[str, list[_Trained]] = {_SYSTEM: [], "a host copy each": []}
    for turn, system in itertools.product(range(turns), found):
        with results.system(scenario, system):
            usual = rig.pick(2, 4, 5)
            often = usual if turn or system != _SYSTEM else cycles or usual
            rank_of = functools.partial(_training_rank, cycles=often, replicated=system == _SYSTEM)
            found[system] += _ranks(rig, world_size, nbytes, rank_of)
    for system, seen in found.items():
        if seen:
            results.add(scenario, system, "load", max(each.load_seconds for each in seen), "s")
            results.add(
                scenario, system, "offload", max(each.offload_seconds for each in seen), "s"
            )
            results.add(
                scenario,
                system,
                "bytes over one link, to the host",
                max(each.to_host_bytes for each in seen),
                "bytes",
            )
            results.add(
                scenario,
                system,
                "host memory of all ranks",
                sum(each.host_bytes for each in seen[:world_size]),
                "bytes",
            )
            results.add(scenario, system, "bit-exact", all(each.is_exact for each in seen), "yes=1")


def _ranks(rig: Rig, world_size: int, nbytes: int, rank_of: Callable[..., None]) -> list[Any]:
    """The answers of processes that each are a rank."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    answers, ranks = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=rank_of,
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
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument(
        "--trained",
        type=float,
        metavar="BYTES",
        help="measure a trained model with weights of so many bytes instead",
    )
    own.add_argument(
        "--cycles",
        type=int,
        help="with --trained: how often the ranks that share load and offload in their first turn",
    )
    own.add_argument(
        "--turns", type=int, default=2, help="with --trained: runs of each way, by turns"
    )
    given, _ = own.parse_known_args(arguments)
    trained_bytes = None if given.trained is None else int(given.trained)
    name = "replicated" if trained_bytes is None else "replicated_trained"
    _rig.run(
        name,
        __doc__,
        functools.partial(
            measure, trained_bytes=trained_bytes, cycles=given.cycles, turns=given.turns
        ),
        arguments,
        [own],
    )


if __name__ == "__main__":
    main()
