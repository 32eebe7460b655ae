"""Measure in a process of its own what a process pays once, and what may end it."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench._results import Results
from bench._rig import Rig


def measure_apart(rig: Rig, results: Results, measure: Callable[[Rig, Results], None]) -> None:
    """Run `measure` in a fresh process, and add what it has written to the results. The exit status
    does not count: torch_memory_saver may end its process when its memory dies.

    Raises:
        RuntimeError: the process has written nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = Results(results.benchmark, rig.device, rig.size, Path(folder))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        process = context.Process(target=measure, args=(rig, own))
        process.start()
        process.join()
        if not own.path.exists():
            raise RuntimeError(f"its process has measured nothing; exit status {process.exitcode}")
        own.read()
    results.rows += own.rows
    results.errors += own.errors
