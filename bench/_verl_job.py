"""One run of verl's own driver, `python -m verl.trainer.main_ppo`, in processes of its own, and
what it wrote down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._verl_process import EVENTS
from tests.integrations.verl import recipe

_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Job:
    """The record of a run.

    Attributes:
        steps: verl's own metrics, a dictionary a step.
        events: when each phase began and ended, and the snapshots of placement's managers after
            each step.
        output: all that its processes printed.
    """

    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]
    output: str

    @property
    def computed(self) -> list[dict[str, Any]]:
        """The metrics without those that tell seconds or memory: what two runs of the same job have
        in common, bit for bit."""
        return [
            {
                name: value
                for name, value in step.items()
                if not any(part in name for part in ("timing", "perf/", "placement/"))
            }
            for step in self.steps
        ]


def _lines(file: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if file.exists()
        else []
    )


def run(
    folder: Path,
    inputs: Path,
    options: Mapping[str, Any],
    environment: Mapping[str, str],
    modules: Sequence[str],
    seconds: float,
) -> Job:
    """Run the recipe of `inputs` with these options to its end.

    Args:
        folder: where the run writes; made here.
        modules: imported by each process of the run.

    Raises:
        RuntimeError: the run failed, or took longer; with the end of its output.
    """
    folder.mkdir(parents=True)
    variables = {
        "VERL_FILE_LOGGER_PATH": str(folder / "steps.jsonl"),
        "VERL_USE_EXTERNAL_MODULES": ",".join([*modules, "bench._verl_process"]),
        EVENTS: str(folder / "events.jsonl"),
        "PLACEMENT_DISCOVERY": str(folder / "targets"),
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "HF_HUB_OFFLINE": "1",
        **environment,
    }
    output = folder / "output.txt"
    # Ray's sockets lie here, and their paths must be short.
    with (
        tempfile.TemporaryDirectory(prefix="verl", ignore_cleanup_errors=True) as sockets,
        output.open("w") as file,
    ):
        arguments = recipe.options(
            inputs,
            {
                "hydra.run.dir": folder / "hydra",
                "+ray_kwargs.ray_init._temp_dir": sockets,
                **options,
            },
        )
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **variables},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"no end after {seconds:g} s"
        finally:
            if process.poll() is None:
                # Ray's own processes end with the one that started them
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    told = output.read_text(encoding="utf-8", errors="replace")
    if status != 0:
        raise RuntimeError(f"verl's driver ended with {status}:\n{told[-6000:]}")
    return Job(
        [line["data"] for line in _lines(folder / "steps.jsonl")],
        _lines(folder / "events.jsonl"),
        told,
    )
