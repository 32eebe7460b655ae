"""`placement doctor`: measure the link between host and device, and report conditions that would
slow moves down or stop them."""

from __future__ import annotations

import argparse
import functools
import shutil
import statistics
import sys
import time
from collections.abc import Callable

import torch

import placement
from placement.cli.workers import node_table
from placement.core.errors import PlacementError
from placement.core.settings import Settings, parse_bytes
from placement.core.snapshot import LinkRates, TransitionSeconds, readable
from placement.devices.base import Device
from placement.devices.host.file_slab import check_directory
from placement.devices.inspection import MEASURED_BYTES, Inspection, inspect, settled
from placement.devices.select import select_device
from placement.forecasting.description import CYCLES
from placement.observe.discovery import views_of
from placement.policies import Colocated
from placement.registration import streamed_optimizer

_SPREAD = 0.1
"""Phase transitions one after the other have settled within this share: much of them is the host's
work, which varies more than copies."""
_TENSORS = 8
_PAUSE_SECONDS = 0.1
_CACHE_BYTES = 64 << 20  # more than a core's share of the processor's caches


def add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default="auto", help='"auto", "cuda:0", "simulated:64MiB" (default auto)'
    )
    parser.add_argument(
        "--bytes",
        default=MEASURED_BYTES,
        type=_bytes,
        help="size of the buffers that are copied (default 1GiB)",
    )
    workers = (
        "workers' URLs, or discovery folders: also say what of each node's host memory they take"
    )
    parser.add_argument("--workers", nargs="+", default=[], metavar="WORKER", help=workers)
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for scripts")
    parser.set_defaults(run=run)


def _bytes(text: str) -> int:
    try:
        nbytes = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not nbytes:
        raise argparse.ArgumentTypeError(
            "no rate can be measured with 0 bytes; write some, such as 64MiB"
        )
    return nbytes


def run(arguments: argparse.Namespace) -> int:
    """Print the inspection. Returns 1 if something is not as it should be, 2 for a device's name
    that is none."""
    try:
        device = select_device(arguments.device)
    except ValueError as error:
        print(f"placement doctor: --device: {error}", file=sys.stderr)
        return 2
    except PlacementError as error:
        raise PlacementError(
            f"{error} For this command: placement doctor --device simulated:1GiB"
        ) from error
    try:
        inspection = examine(device, arguments.bytes)
    finally:
        device.close()
    print(inspection.model_dump_json(indent=1) if arguments.json else table(inspection))
    if arguments.workers and not arguments.json:
        print("\n" + node_table(views_of(arguments.workers)))
    return int(bool(inspection.findings))


def examine(device: Device, nbytes: int = MEASURED_BYTES) -> Inspection:
    """Inspect a device, and time phase transitions of a model of `nbytes`, or less where there is
    no room for it. Raises DeviceMemoryError, HostMemoryError: see `inspect`."""
    inspection = inspect(device, nbytes)
    added: dict[str, object] = {}
    try:
        directory = Settings.from_any(None).disk_directory
        if directory is not None:
            check_directory(directory)
            added["disk_free_bytes"] = shutil.disk_usage(directory).free
    except ValueError as error:
        added["findings"] = *inspection.findings, str(error)
    room = min(inspection.free_bytes, inspection.host_available_bytes)
    transitions = _transitions(device, min(nbytes, room // 4), inspection.link)
    # it has gradients and moments, too; 8 GiB of moments are 16 buckets
    streamed_byte = _streamed(device, min(4 * nbytes, room // 8), inspection.link)
    added["transitions"] = transitions.model_copy(update={"streamed_byte": streamed_byte})
    return inspection.model_copy(update=added)


def _transitions(device: Device, nbytes: int, link: LinkRates) -> TransitionSeconds:
    """Load and offload a tiny model and one of `nbytes`, changed and unchanged, and train one that
    stays on the device."""
    alone = _nothing_moves(device)
    tiny, least = _timed(device, 1)
    used_bytes, most = _timed(device, nbytes)
    more_bytes = max(1, used_bytes - tiny)
    copying = (
        more_bytes / link.to_device_bytes_per_second,
        more_bytes / link.to_host_bytes_per_second,
        0.0,
    )
    of_a_byte = []
    for large, small, copy in zip(most, least, copying, strict=True):
        of_a_byte.append(max(0.0, large - small - copy) / more_bytes)
    loaded, offloaded, skipped = of_a_byte
    moving = max(alone, statistics.median(least))  # these are timed with warm caches
    return TransitionSeconds(
        alone=alone,
        moving=moving,
        loaded_byte=loaded,
        offloaded_byte=offloaded,
        skipped_byte=skipped,
    )


def _timed(device: Device, nbytes: int) -> tuple[int, list[float]]:
    """The bytes of a model's host copy, and the median seconds of phase transitions: load, offload,
    unchanged offload."""
    model = _model(device.torch_device, nbytes)
    manager = placement.Manager(device=device, policy="colocated")
    actor = manager.register("actor", model, role="actor")

    def cycle() -> list[float]:
        loaded = _seconds(device, lambda: manager.enter("log_prob"))
        skipped = _seconds(device, manager.leave)
        manager.enter("log_prob")
        with torch.no_grad():
            for parameter in model:
                parameter.neg_()
        return [loaded, _seconds(device, manager.leave), skipped]

    try:
        return actor.host_bytes, settled(cycle, _SPREAD)
    finally:
        manager.close()


def _nothing_moves(device: Device) -> float:
    """The seconds of a phase transition in a training step where everything stays on the device,
    all transitions averaged.

    Some work lies before each of them, as in a job: without it they are twice as fast, because all
    that they need is in the caches.
    """
    model = _model(device.torch_device, 1)
    frozen = _model(device.torch_device, 1)
    manager = placement.Manager(device=device, policy="resident")
    manager.register("actor", model, role="actor")
    manager.register("ref", frozen, role="ref", readonly=True)
    adam = torch.optim.AdamW(model.parameters())
    manager.register("actor.optimizer", adam)
    work = torch.ones(_CACHE_BYTES, dtype=torch.uint8, device="cpu")

    def cycle() -> list[float]:
        seconds = []
        for index, phase in enumerate(CYCLES["grpo"]):
            work.neg_()
            change = manager.switch if index else manager.enter
            seconds.append(_seconds(device, functools.partial(change, phase)))
            if phase == "train":
                for parameter in model:
                    parameter.grad = torch.ones_like(parameter)
                adam.step()
                adam.zero_grad()
        work.neg_()
        return [*seconds, _seconds(device, manager.leave)]

    try:
        return statistics.mean(settled(cycle, _SPREAD))
    finally:
        manager.close()


def _streamed(device: Device, nbytes: int, link: LinkRates) -> float:
    """The seconds for each byte that a streamed step takes beside its copies: the driver maps
    memory more slowly while the link is busy. A step of a model of `nbytes` is compared with one of
    half the size, because the first and the last buckets of both take as long. 0.0 for a model
    whose state has too few buckets for that."""
    if nbytes < 2 * streamed_optimizer.BUCKET_BYTES:
        return 0.0
    small_bytes, small_seconds = _timed_step(device, nbytes // 2)
    large_bytes, large_seconds = _timed_step(device, nbytes)
    of_a_byte = (large_seconds - small_seconds) / (large_bytes - small_bytes)
    return max(0.0, of_a_byte - 1 / link.both_bytes_per_second)


def _timed_step(device: Device, nbytes: int) -> tuple[int, float]:
    """The bytes that a streamed step of a model of `nbytes` copies, and its median seconds."""
    model = _model(device.torch_device, nbytes).requires_grad_()
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    manager = placement.Manager(device=device, policy=Colocated("streamed"))
    manager.register("actor", model, role="actor")
    optimizer = manager.register("actor.optimizer", adam)

    def step() -> list[float]:
        manager.enter("train")
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        device.sync()
        time.sleep(_PAUSE_SECONDS)  # the first buckets come meanwhile, as in a backward pass
        seconds = _seconds(device, adam.step)
        adam.zero_grad()
        manager.leave()
        return [seconds]

    try:
        (seconds,) = settled(step, _SPREAD)
        return 2 * optimizer.host_bytes, seconds
    finally:
        manager.close()


def _model(device: torch.device, nbytes: int) -> torch.nn.ParameterList:
    with torch.no_grad():
        size = max(1, nbytes // _TENSORS // 2)
        model = torch.nn.ParameterList()
        for _ in range(_TENSORS):
            ones = torch.ones(size, dtype=torch.bfloat16, device=device)
            model.append(torch.nn.Parameter(ones, requires_grad=False))
        return model


def _seconds(device: Device, move: Callable[[], object]) -> float:
    """The seconds of a move, from an idle device to an idle device."""
    device.sync()
    began = time.perf_counter()
    move()
    device.sync()
    return time.perf_counter() - began


def table(inspection: Inspection) -> str:
    """The inspection as text: a line for each subject, then the findings."""
    link = inspection.link
    free = f"{readable(inspection.free_bytes)} of {readable(inspection.total_bytes)} free"
    pinned = "page-locked" if inspection.pageable_reason is None else "pageable"
    rows = {
        "device": f"{inspection.device}, {free} {inspection.uuid}",
        "to device": _rate(link.to_device_bytes_per_second),
        "to host": _rate(link.to_host_bytes_per_second),
        "both": f"{_rate(link.both_bytes_per_second)} with both directions at once",
    }
    if inspection.transitions is not None:
        rows["transition"] = _beside(inspection.transitions)
    rows["host memory"] = f"{readable(inspection.host_available_bytes)} available, {pinned}"
    if inspection.disk_free_bytes is not None:
        rows["disk"] = f"{readable(inspection.disk_free_bytes)} free for host copies"
    rows["NUMA"] = _nodes(inspection)
    versions = inspection.versions.items()
    rows["versions"] = ", ".join(f"{name} {version}" for name, version in versions)
    lines = [f"{name:<12}{text}".rstrip() for name, text in rows.items()]
    findings = [f"! {finding}" for finding in inspection.findings]
    return "\n".join([*lines, "", *(findings or ["nothing found"])])


def _nodes(inspection: Inspection) -> str:
    count = inspection.numa_nodes
    if count < 2:
        return "one node, so there is no choice"
    if inspection.numa_node is None:
        return f"{count} nodes, the device's is not known"
    return f"host memory is taken from node {inspection.numa_node} of {count}, the device's own"


def _beside(transitions: TransitionSeconds) -> str:
    alone = _milliseconds(transitions.alone)
    moving = _milliseconds(transitions.moving)
    gib = 1 << 30
    return (
        f"{alone} where nothing moves, {moving} if anything moves; and for each GiB, on top of its "
        f"copy: {_milliseconds(gib * transitions.loaded_byte)} loaded, "
        f"{_milliseconds(gib * transitions.offloaded_byte)} copied back, "
        f"{_milliseconds(gib * transitions.skipped_byte)} offloaded without a copy, "
        f"{_milliseconds(gib * transitions.streamed_byte)} streamed"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
