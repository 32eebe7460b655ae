"""`placement doctor`: measure the link between host and device, and say what would slow moves down or stop them."""

from __future__ import annotations

import argparse

from placement.core.settings import parse_bytes
from placement.core.summary import readable
from placement.devices.inspection import MEASURED_BYTES, Inspection, inspect
from placement.devices.select import select_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help='"auto", "cuda:0", "simulated:64MiB" (default auto)')
    parser.add_argument(
        "--bytes", default=MEASURED_BYTES, type=_bytes, metavar="BYTES", help="size of the buffers that are copied (default 1GiB)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON, for scripts")


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    """Print the inspection. Returns 1 if something is not as it should be.

    Raises:
        PlacementError: the device does not exist, or has no room for the copies.
    """
    device = select_device(arguments.device)
    try:
        found = inspect(device, arguments.bytes)
    finally:
        device.close()
    print(found.model_dump_json(indent=1) if arguments.json else table(found))
    return int(bool(found.findings))


def table(found: Inspection) -> str:
    """The inspection as text: a line for each subject, then the findings."""
    link = found.link
    node = "one node, so there is no choice" if found.numa_nodes < 2 else f"{found.numa_nodes} nodes, the device's is not known"
    if found.numa_node is not None and found.numa_nodes > 1:
        node = f"host memory is taken from node {found.numa_node} of {found.numa_nodes}, the device's own"
    rows = {
        "device": f"{found.device}, {readable(found.free_bytes)} of {readable(found.total_bytes)} free {found.uuid}",
        "to device": _rate(link.to_device_bytes_per_second),
        "to host": _rate(link.to_host_bytes_per_second),
        "both": f"{_rate(link.both_bytes_per_second)} with both directions at once",
        "host memory": f"{readable(found.host_available_bytes)} available",
        "NUMA": node,
        "versions": ", ".join(f"{name} {version}" for name, version in found.versions.items()),
    }
    lines = [f"{name:<12}{text}".rstrip() for name, text in rows.items()]
    return "\n".join([*lines, "", *([f"! {finding}" for finding in found.findings] or ["nothing found"])])


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.1f} GB/s"
