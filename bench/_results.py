"""The form of a result file, and the machine that it was made on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import placement

FOLDER = Path(os.environ.get("PLACEMENT_BENCH_RESULTS", Path(__file__).parent / "results"))


@dataclass(frozen=True)
class Row:
    scenario: str
    system: str
    """`placement`, `link`, or a peer's name."""
    metric: str
    value: float
    unit: str


def machine(device: str) -> dict[str, str | int]:
    """What the numbers depend on."""
    described: dict[str, str | int] = {
        "device": device,
        "cpu_cores": os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "placement": getattr(placement, "__version__", "0.1.0"),
    }
    if device.startswith("cuda"):
        described["gpu"] = torch.cuda.get_device_name(device)
    return described


def write(benchmark: str, device: str, rows: Sequence[Row]) -> None:
    """Print a table and write `results/BENCHMARK.json` (with the device's kind in the name where it is not a GPU)."""
    width = max(len(row.scenario) for row in rows)
    for row in rows:
        print(f"{row.scenario:<{width}}  {row.system:<12} {row.metric:<36} {row.value:>14,.3f} {row.unit}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = benchmark if device.startswith("cuda") else f"{benchmark}_{device}"
    content = {"benchmark": benchmark, "machine": machine(device), "rows": [asdict(row) for row in rows]}
    (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
