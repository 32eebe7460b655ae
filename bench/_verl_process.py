"""Importing this module makes verl's driver write down when each phase began and ended, and what
placement then says of its handles.

`VERL_USE_EXTERNAL_MODULES` names it. The times go to the file that `EVENTS` names, one line of JSON
a phase. The phase that has begun last is in the file `PART` beside it: the run may be killed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench._rig import used_host_bytes
from placement.integrations.verl.plugin import after_import

EVENTS = "VERL_BENCH_EVENTS"
PART = "part.txt"
SHARED_MEMORY = "VERL_BENCH_SHARED_MEMORY"
"""Set where the machine has no CUDA IPC: verl then sends weights through the host, as it does on
devices without it."""
PHASES = {
    "_compute_old_log_prob": "log_prob",
    "_compute_ref_log_prob": "ref_log_prob",
    "_update_actor": "train",
    "on_sample_end": "sleep",
    "on_step_end": "weight_sync",
    "_step_once": "rollout to train",
}


def _states() -> list[dict[str, Any]]:
    """The snapshot of each worker's manager, as its page /state gives it."""
    folder = os.environ.get("PLACEMENT_DISCOVERY")
    found = []
    for file in sorted(Path(folder).glob("*.json")) if folder else ():
        for group in json.loads(file.read_text(encoding="utf-8")):
            for address in group["targets"]:
                # A page that does not answer costs its figures, and not the run.
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(f"http://{address}/state", timeout=10) as answer,
                ):
                    found.append(json.load(answer))
    return found


def _watched(phase: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def watching(trainer: Any, *arguments: Any, **keywords: Any) -> Any:
        began = time.monotonic()
        part = Path(os.environ[EVENTS]).with_name(PART)
        part.write_text(f"{phase} of step {trainer.global_steps}", encoding="utf-8")
        try:
            return method(trainer, *arguments, **keywords)
        finally:
            event = {
                "phase": phase,
                "step": trainer.global_steps,
                "began": began,
                "ended": time.monotonic(),
                "used_host_bytes": used_host_bytes(),
            }
            event["states"] = _states() if phase == "weight_sync" else []
            with open(os.environ[EVENTS], "a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    return watching


def _watch() -> None:
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    for name, phase in PHASES.items():
        setattr(PPOTrainerSync, name, _watched(phase, getattr(PPOTrainerSync, name)))


def _send_through_the_host() -> None:
    from verl.workers.rollout.vllm_rollout import vllm_rollout

    vllm_rollout.is_support_ipc = lambda: False


if EVENTS in os.environ:
    after_import("verl.trainer.ppo.v1.trainer_sync", _watch)
    # by name: placement need not be installed
    importlib.import_module("placement.integrations.verl.plugin")
if SHARED_MEMORY in os.environ:
    after_import("verl.workers.rollout.vllm_rollout.vllm_rollout", _send_through_the_host)
