"""One run of verl's own driver, `python -m verl.trainer.main_ppo`, in processes of its own, and
what it wrote down."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._verl_process import EVENTS, PART
from tests.integrations.verl import recipe

_ROOT = Path(__file__).parents[1]
_CODE = re.compile(r'File "[^"]*?([^/"]+)", line (\d+), in (\S+)')
_ERROR = re.compile(r"(?:^|\s)(?:\w+\.)*(\w*(?:Error|Exception): .*)")


@dataclass(frozen=True)
class Job:
    """The record of a run.

    Attributes:
        steps: verl's own metrics, a dictionary a step.
        events: when each phase began and ended, the host memory that was available then, and the
            snapshots of placement's managers after each step.
        output: all that its processes printed.
        failure: the run failed, or took too long: the phase and the line. The end of the output is
            a note on it. Steps and events are those until then.
    """

    steps: list[dict[str, Any]]
    events: list[dict[str, Any]]
    output: str
    failure: RuntimeError | None = None

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
    """The whole lines of a file. A run that is stopped may leave a part of one."""
    if not file.exists():
        return []
    whole = file.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in whole]


def failures(output: str) -> str:
    """The first and the last error of an output, each with the innermost line of its traceback. The
    first is often the cause, and the last is what ended the run."""
    errors = []
    code = None
    for line in output.splitlines():
        code = _CODE.search(line) or code
        error = _ERROR.search(line)
        if code and error:
            errors.append(f"{code[1]}:{code[2]}, in {code[3]}: {error[1][:300]}")
            code = None
    if not errors:
        return "no error in its output"
    return "; at the end ".join(dict.fromkeys([errors[0], errors[-1]]))


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
        # Ray kills the worker at 95 % of the host's memory, which host copies may well take.
        "RAY_memory_monitor_refresh_ms": "0",
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
            code = process.wait(seconds)
            status = "" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:g} s"
        finally:
            if process.poll() is None:
                # Ray's own processes end with the one that started them
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    told = output.read_text(encoding="utf-8", errors="replace")
    steps = [line["data"] for line in _lines(folder / "steps.jsonl")]
    events = [event for event in _lines(folder / "events.jsonl") if event["step"] <= len(steps)]
    if not status:
        return Job(steps, events, told)
    part = folder / PART
    where = part.read_text(encoding="utf-8") if part.exists() else "its start"
    failure = RuntimeError(f"verl's driver: {status} in {where}: {failures(told)}")
    failure.add_note(told[-6000:])
    return Job(steps, events, told, failure)
