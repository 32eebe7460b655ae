"""The commands about workers that run: `status`, `suspend`, `resume`, `trace`, and the `dashboards`
that show them."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from placement.core.errors import PlacementError
from placement.core.settings import Settings, control_token
from placement.core.snapshot import SuspensionRequest, SuspensionStatus, readable
from placement.observe.dashboards import DISCOVERY, export
from placement.observe.discovery import Target, ask, find_targets, view_of, views_of
from placement.observe.trace import Event, encoded, replacing

View = dict[str, Any]

WORKER_COLUMNS = (
    "worker",
    "phase",
    "on device",
    "of",
    "used",
    "stall",
    "handles on the device",
    "trouble",
)
HANDLE_COLUMNS = (
    "handle",
    "state",
    "since",
    "on device",
    "needs",
    "host copy",
    "loaded",
    "offloaded",
    "skipped",
    "remarks",
)
# the fields of a handle for the columns from "on device" to "skipped"
_SIZES = (
    "resident_bytes",
    "num_bytes",
    "host_bytes",
    "loaded_bytes",
    "offloaded_bytes",
    "skipped_bytes",
)
NODE_COLUMNS = ("node", "page-locked", "pageable", "engines' mirrors", "on disk")
_NUMBER = re.compile(r"-?[\d.]+( [KMGT]iB| m?s|%)?")


def trouble_of(view: View) -> str:
    """The problems of a worker as text; empty if there are none."""
    if "snapshot" not in view:
        return str(view["error"])
    snapshot = view["snapshot"]
    handles = snapshot["handles"]
    problems = [f"{handle['name']} broken" for handle in handles if handle["broken"]]
    if snapshot["unpaired_bytes"]:
        problems.append(f"{readable(snapshot['unpaired_bytes'])} left on the device")
    if snapshot["wrong_writes"]:
        problems.append(f"{snapshot['wrong_writes']} wrong writes")
    problems += [f"{handle['name']} drifted" for handle in handles if handle["drift_bytes"]]
    return ", ".join(problems)


def _worker_row(view: View) -> tuple[str, ...]:
    if "snapshot" not in view:
        unknown = ["?"] * len(WORKER_COLUMNS[1:-1])
        return view["name"], *unknown, trouble_of(view)
    snapshot = view["snapshot"]
    held = [handle for handle in snapshot["handles"] if handle["resident_bytes"]]
    used = snapshot["device_used_bytes"] / max(snapshot["device_total_bytes"], 1)
    stall_seconds = sum(snapshot["phase_stall_seconds"].values())
    stall = stall_seconds / max(sum(snapshot["phase_seconds"].values()), 1e-9)
    return (
        view["name"],
        " > ".join(snapshot["phases"]) or ("suspended" if snapshot.get("suspended") else "idle"),
        readable(sum(handle["resident_bytes"] for handle in held)),
        readable(snapshot["device_total_bytes"]),
        f"{used:.0%}",
        f"{stall:.1%}",
        ", ".join(handle["name"] for handle in held),
        trouble_of(view),
    )


def _handle_rows(view: View) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    snapshot = view["snapshot"]
    for handle in snapshot["handles"]:
        since = snapshot["taken_timestamp_seconds"] - handle["last_transition_timestamp_seconds"]
        sizes = [readable(handle[name]) for name in _SIZES]
        remarks = ", ".join(_remarks(handle))
        rows.append((handle["name"], handle["state"], f"{since:.0f} s", *sizes, remarks))
    return rows


def _remarks(handle: dict[str, Any]) -> list[str]:
    remarks = [word for word in ("readonly", "kept") if handle[word]]
    if not handle["built"]:
        remarks.append("not built")
    if handle["external"]:
        remarks.append("external")
    if handle["broken"]:
        remarks.append(f"broken: {handle['broken']}")
    return remarks


def node_table(views: Iterable[View]) -> str:
    """A table of the host memory and the disk that the workers of each node take; see
    `NODE_COLUMNS`. "?" stands for workers that do not answer."""
    nodes: dict[str, list[View]] = {}
    for view in views:
        node = view["labels"].get("node", view["name"])
        nodes.setdefault(node, []).append(view)
    rows = [(node, *_node_cells(of_node)) for node, of_node in nodes.items()]
    return plain_table(NODE_COLUMNS, rows)


def _node_cells(views: Sequence[View]) -> list[str]:
    snapshots = [view["snapshot"] for view in views if "snapshot" in view]
    if not snapshots:
        return ["?"] * len(NODE_COLUMNS[1:])
    handles = [handle for snapshot in snapshots for handle in snapshot["handles"]]
    mirrors = sum(handle.get("mirror_bytes", 0) for handle in handles)
    pageable = sum(handle["host_pageable_bytes"] for handle in handles)
    page_locked = sum(handle["host_bytes"] for handle in handles) - mirrors - pageable
    on_disk = sum(handle["disk_bytes"] for handle in handles)
    unknown = " + ?" if len(snapshots) < len(views) else ""
    return [readable(nbytes) + unknown for nbytes in (page_locked, pageable, mirrors, on_disk)]


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table as text, without trailing blanks. A column is aligned to the right if most of its
    cells that are not empty are numbers."""
    lines = [tuple(columns), *(tuple(row) for row in rows)]
    aligned = []
    for column in zip(*lines, strict=True):
        cells = [cell for cell in column[1:] if cell]
        numbers = [cell for cell in cells if _NUMBER.fullmatch(cell)]
        align = str.rjust if 2 * len(numbers) > len(cells) else str.ljust
        width = max(map(len, column))
        aligned.append([align(cell, width) for cell in column])
    lines_of_cells = zip(*aligned, strict=True)
    return "\n".join(["  ".join(cells).rstrip() for cells in lines_of_cells])


def _report(views: Sequence[View]) -> str:
    parts = [plain_table(WORKER_COLUMNS, (_worker_row(view) for view in views)), node_table(views)]
    for view in views:
        if "snapshot" in view and view["snapshot"]["handles"]:
            parts.append(f"{view['name']}\n{plain_table(HANDLE_COLUMNS, _handle_rows(view))}")
    return "\n\n".join(parts)


def _sorted_views(places: Sequence[str]) -> list[View]:
    """The workers' views by name, node2 before node10."""

    def natural_order(view: View) -> list[tuple[int, str]]:
        parts = re.split(r"(\d+)", view["name"])
        return [(int(part) if part.isdecimal() else 0, part) for part in parts]

    return sorted(views_of(places), key=natural_order)


_CLEAR = "\x1b[H\x1b[2J"  # the sequence that empties a terminal and goes to its first line


def add_status(parser: argparse.ArgumentParser) -> None:
    _add_workers(parser)
    parser.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=1.0,
        metavar="SECONDS",
        help="print it again and again, until Ctrl-C",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the complete views of the workers as JSON"
    )
    parser.add_argument("--incident", type=Path, metavar="DIR", help="print an incident's folder")
    parser.set_defaults(run=run_status)


def _add_workers(parser: argparse.ArgumentParser) -> None:
    text = "a worker's URL, or a discovery folder (default: PLACEMENT_DISCOVERY)"
    parser.add_argument("workers", nargs="*", metavar="WORKER", help=text)


def _places(arguments: argparse.Namespace) -> list[str]:
    """Where the workers are. Raises PlacementError: neither the command line nor the environment
    says it."""
    if arguments.workers:
        return list(arguments.workers)
    try:
        discovery = Settings.from_any(None).discovery
    except ValueError as error:
        raise PlacementError(str(error)) from error
    if discovery is None:
        raise PlacementError(
            "no workers named: give a worker's URL or a discovery folder, or set "
            "PLACEMENT_DISCOVERY"
        )
    return [discovery]


def _targets(arguments: argparse.Namespace) -> list[Target]:
    """The workers that were named. Raises PlacementError: there is none."""
    places = _places(arguments)
    workers = find_targets(places)
    if not workers:
        raise PlacementError(f"no worker has announced itself in {', '.join(places)}")
    return workers


def run_status(arguments: argparse.Namespace) -> int:
    """Print the status. Returns 1 when a worker does not answer or has a problem, so that scripts
    need not parse the output."""
    if arguments.watch is not None and arguments.json:
        raise PlacementError("--watch shows tables: leave --json out, or run it again and again")
    if arguments.incident is not None:
        print(incident_report(arguments.incident))
        return 0
    places = _places(arguments)
    views = _sorted_views(places)
    while arguments.watch is not None:
        print(f"{_CLEAR}{_screen(views)}", end="", flush=True)
        time.sleep(arguments.watch)
        views = _sorted_views(places)
    print(json.dumps(views, indent=1) if arguments.json else _report(views))
    return int(any(trouble_of(view) for view in views))


def incident_report(folder: Path) -> str:
    """The report of an incident: who held what, and why. Raises PlacementError: there is none."""
    try:
        incident = json.loads((folder / "incident.json").read_text())
        snapshot = json.loads((folder / "snapshot.json").read_text())
    except (OSError, ValueError) as error:
        raise PlacementError(f"{folder} is not the folder of an incident: {error!r}") from error
    snapshot["handles"].sort(key=lambda handle: -handle["resident_bytes"])
    planned = ", ".join(f"{name} {state}" for name, state in incident["plan"]["targets"].items())
    lines = [
        incident["error"],
        f"\nphase {incident['phase']!r}, planned: {planned}\n",
        _report([{"name": folder.name, "labels": {}, "snapshot": snapshot}]),
    ]
    # the device may have failed, or the disk was full
    with suppress(OSError):
        lines.append((folder / "processes.txt").read_text())
    with suppress(OSError, ValueError):
        lines.append(json.loads((folder / "audit.json").read_text())["report"])
    return "\n".join(lines)


def _screen(views: Sequence[View]) -> str:
    """The report as far as the terminal has room for it."""
    lines = _report(views).splitlines()
    if not sys.stdout.isatty():
        return "\n".join([*lines, ""])
    size = shutil.get_terminal_size()
    return "\n".join(line[: size.columns] for line in lines[: size.lines])


# --- placement suspend and resume

_SPARE_SECONDS = 60.0  # beyond the deadline, for moves, and for ranks that agree


def add_suspend(parser: argparse.ArgumentParser) -> None:
    add_resume(parser)
    text = "how long a worker may go on with its phase (default: %(default)s)"
    parser.add_argument("--deadline", type=_seconds, metavar="SECONDS", help=text)
    parser.add_argument("--resume-after", type=_seconds, metavar="SECONDS", help="how long at most")


def add_resume(parser: argparse.ArgumentParser) -> None:
    _add_workers(parser)
    parser.set_defaults(run=run_control, deadline=60.0, resume_after=None)


def run_control(arguments: argparse.Namespace) -> int:
    """Ask all workers at once, and print a line for each. Returns 1 when one is not as asked."""
    token = control_token()
    if token is None:
        raise PlacementError("set PLACEMENT_CONTROL_TOKEN to the workers' token")
    deadline, resume_after = arguments.deadline, arguments.resume_after
    request = SuspensionRequest(deadline_seconds=deadline, resume_after_seconds=resume_after)
    post = request.model_dump_json().encode()
    seconds = deadline + _SPARE_SECONDS

    def answer_of(worker: Target) -> tuple[bool, str]:
        url = f"{worker.url}/{arguments.command}"
        try:
            view_of(worker, seconds)  # which worker it is, before it is sent the token
            answer = ask(url, timeout_seconds=seconds, post=post, token=token)
            status = SuspensionStatus.model_validate_json(answer)
        except (PlacementError, ValueError) as error:
            return False, f"{worker.name}: {error}"
        word = "suspended" if status.suspended else "not suspended"
        held = f"{readable(status.resident_bytes)} on the device"
        is_as_asked = status.suspended is (arguments.command == "suspend")
        return is_as_asked, f"{worker.name}: {word}, epoch {status.epoch}, {held}"

    workers = _targets(arguments)
    with ThreadPoolExecutor(len(workers)) as pool:
        answers = list(pool.map(answer_of, workers))
    print("\n".join(text for _, text in answers))
    return int(not all(is_done for is_done, _ in answers))


# --- placement trace


def add_trace(parser: argparse.ArgumentParser) -> None:
    _add_workers(parser)
    parser.add_argument(
        "-o",
        "--output",
        default="placement-trace.json",
        help="the file to write (default: %(default)s)",
    )
    parser.add_argument("--seconds", type=_seconds, help="write only the last SECONDS")
    parser.set_defaults(run=run_trace)


_MOST_SECONDS = 1e6


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= _MOST_SECONDS:  # the system waits for so long
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds above 0, and at most {_MOST_SECONDS:g}"
        )
    return seconds


def run_trace(arguments: argparse.Namespace) -> int:
    """Write the journals of running workers as one Chrome trace, and print how many events it has.
    Returns 1 when a worker does not answer: the file has the others."""
    workers = _targets(arguments)
    query = "" if arguments.seconds is None else f"?seconds={arguments.seconds}"
    target = Path(arguments.output)
    count = 0
    silent: list[str] = []  # workers without a trace, each with the reason

    def events() -> Iterator[Event]:
        nonlocal count
        # one after the other, so that only one worker's are in memory
        for number, worker in enumerate(workers, start=1):
            try:
                events_of_worker = _trace_of(worker, query)
            except PlacementError as error:
                silent.append(f"{worker.name}: {error}")
                if len(silent) == len(workers):
                    raise
                continue
            for event in events_of_worker:
                event["pid"] = number  # processes of two nodes may have the same id
                if event.get("name") == "process_name":
                    event["args"]["name"] = worker.name
                count += 1
                yield event

    try:
        with replacing(target) as file:
            file.writelines(encoded(events()))
    except OSError as error:
        raise PlacementError(f"cannot write {target}: {error.strerror}") from error
    for text in silent:
        print(text, file=sys.stderr)
    num_workers = len(workers) - len(silent)
    print(
        f"{target}: {count:,} events of {num_workers} worker{'s' * (num_workers != 1)}; open it in "
        "https://ui.perfetto.dev"
    )
    return int(bool(silent))


def _trace_of(worker: Target, query: str) -> list[Event]:
    """The events of a worker. Raises PlacementError: it does not answer, or with something else."""
    try:
        events: list[Event] = json.loads(ask(f"{worker.url}/trace{query}", timeout_seconds=60))[
            "traceEvents"
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise PlacementError(
            f"{worker.url}/trace did not return a trace; check that this is a placement worker"
        ) from error
    return events


# --- placement dashboards


def add_dashboards(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    summary = "write a Grafana provisioning tree, rules and an example prometheus.yml"
    add = commands.add_parser("export", help=summary, description=summary).add_argument
    place = (
        "the workers' discovery folder, or the URL of a list of targets (default: "
        "DIR/prometheus/discovery)"
    )
    add("directory", metavar="DIR", type=Path, help="the directory to write to; created if missing")
    add(
        "--prometheus-url",
        default="http://localhost:9090",
        metavar="URL",
        help="Prometheus for Grafana (%(default)s)",
    )
    add("--discovery", default=DISCOVERY, metavar="PLACE", help=place)
    add("--scrape-interval", default="15s", metavar="TIME", help="like 15s or 1m (%(default)s)")
    add(
        "--grafana-path",
        metavar="PATH",
        help="the folder of dashboards as Grafana sees it, if it runs in a container",
    )
    add("--force", action="store_true", dest="overwrite", help="replace existing files that differ")
    parser.set_defaults(run=export_dashboards)


def export_dashboards(arguments: argparse.Namespace) -> int:
    paths = export(
        arguments.directory,
        prometheus_url=arguments.prometheus_url,
        discovery=arguments.discovery,
        scrape_interval=arguments.scrape_interval,
        grafana_path=arguments.grafana_path,
        overwrite=arguments.overwrite,
    )
    for path in paths:
        print(path)
    root = arguments.directory.absolute()
    workers = ""
    if arguments.discovery == DISCOVERY:
        workers = f'\n  workers:     manager.serve(discovery="{root}/prometheus/{DISCOVERY}")'
    print(f"""
Next:{workers}
  Prometheus:  prometheus --config.file={root}/prometheus/prometheus.yml
  Grafana:     GF_PATHS_PROVISIONING={root}/grafana/provisioning, then open /d/placement-fleet""")
    return 0
