"""The form of a result file, and the machine that it was made on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import placement

FOLDER = Path(os.environ.get("BENCH_RESULTS", Path(__file__).parent / "results"))
_PEERS = ("accelerate", "deepspeed", "megatron-core", "torch_memory_saver", "verl")


@dataclass(frozen=True)
class Row:
    scenario: str
    system: str
    """The system: `placement`, `link`, or a peer's name."""
    metric: str
    value: float
    unit: str


def machine(device: str) -> dict[str, Any]:
    """The facts about the machine on which the numbers depend."""
    described: dict[str, Any] = {
        "device": device,
        "cpu_cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "placement": placement.__version__,
        "peers": {name: version for name in _PEERS if (version := _version(name)) is not None},
    }
    if device.startswith("cuda"):
        described["gpu"] = torch.cuda.get_device_name(device)
        described["cuda"] = torch.version.cuda
    return described


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class Results:
    """The rows of one benchmark. The file is rewritten after each system, so that a later crash
    loses nothing.

    Args:
        benchmark: the file's name.
        device: "cuda:0" or "simulated". The file's name says if the numbers are not from a GPU.
        size: "full", "quick" or "tiny".
    """

    def __init__(
        self, benchmark: str, device: str, size: str = "full", folder: Path | None = None
    ) -> None:
        self.benchmark = benchmark
        self.device = device
        self.size = size
        self.path = (
            FOLDER if folder is None else folder
        ) / f"{benchmark}{'' if device.startswith('cuda') else '_' + device}.json"
        self.rows: list[Row] = []
        self.errors: list[dict[str, str]] = []

    def add(self, scenario: str, system: str, metric: str, value: float, unit: str) -> None:
        """Add a row and print it."""
        row = Row(scenario, system, metric, float(value), unit)
        self.rows.append(row)
        print(f"{scenario:<34}  {system:<28} {metric:<34} {row.value:>18,.4f} {unit}", flush=True)

    def rate(
        self, scenario: str, system: str, what: str, nbytes: float, seconds: float, link: float
    ) -> None:
        """Add a rate in GB/s (1e9 bytes), and its share of `link`, the raw rate measured in the
        same run."""
        achieved = nbytes / seconds / 1e9
        self.add(scenario, system, f"{what}, rate", achieved, "GB/s")
        self.add(scenario, system, f"{what}, share of the link", 100 * achieved / link, "%")

    @contextmanager
    def system(self, scenario: str, system: str) -> Iterator[None]:
        """Measure one system. An exception becomes a row `error` with its message in the file, and
        the other systems go on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.failed(scenario, system, f"{type(error).__name__}: {error}")
        self.write()

    def failed(self, scenario: str, system: str, message: str) -> None:
        """Record that a system has no numbers, and why."""
        self.add(scenario, system, "error", 1, "failures")
        self.errors.append({"scenario": scenario, "system": system, "message": message})

    def read(self) -> None:
        """Read the rows that another process has written into the file."""
        content = json.loads(self.path.read_text(encoding="utf-8"))
        self.rows, self.errors = [Row(**row) for row in content["rows"]], content.get("errors", [])

    def write(self) -> None:
        content: dict[str, Any] = {
            "benchmark": self.benchmark,
            "machine": machine(self.device),
            "rows": [asdict(row) for row in self.rows],
        }
        content["machine"]["size"] = self.size
        if self.errors:
            content["errors"] = self.errors
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(self.path)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Every result file of a folder, by the benchmark's name: that of a GPU, where there is one of
    the simulated device, too."""
    files: Sequence[Path] = sorted(folder.glob("*.json"), reverse=True)
    return {
        content["benchmark"]: content
        for content in (json.loads(file.read_text(encoding="utf-8")) for file in files)
    }
