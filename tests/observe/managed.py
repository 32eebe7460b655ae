"""What most of these tests look at: a manager with one offloaded model, what a server answers, and
snapshots made by hand."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from torch import nn

import placement
from placement.core.snapshot import DurationHistogram, HandleSnapshot, Snapshot
from placement.core.states import State, Trigger
from placement.testing import SimulatedDevice


def managed(**settings: Any) -> tuple[placement.Manager, nn.Linear]:
    """The model is 4,224 bytes, two chunks of the device. It is registered as "actor"."""
    manager = placement.Manager(
        **{"device": SimulatedDevice(1 << 20, chunk_bytes=4096), **settings}
    )
    model = nn.Linear(32, 32)
    manager.register("actor", model, role="actor")
    return manager, model


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


def make_handle(name: str = "actor", **changes: Any) -> HandleSnapshot:
    """Every number in it and in `make_snapshot` is different, so that a value under a wrong name
    shows."""
    values: dict[str, Any] = {
        "name": name,
        "kind": "module",
        "role": "actor",
        "owners": (),
        "adapter": "ModuleAdapter",
        "state": State.GPU_RESIDENT,
        "readonly": False,
        "external": None,
        "broken": None,
        "built": True,
        "kept": False,
        "num_bytes": 1001,
        "resident_bytes": 1002,
        "host_bytes": 1003,
        "mirror_bytes": 1011,
        "disk_bytes": 1008,
        "host_pageable_bytes": 1004,
        "state_seconds": {
            State.CPU_OFFLOADED: 20.5,
            State.GPU_RESIDENT: 9.25,
            State.TRAINING: 0.125,
        },
        "transitions": {Trigger.LOAD: 31, Trigger.OFFLOAD: 32, Trigger.BEGIN_TRAIN: 33},
        "failures": {"device_memory": 41},
        "loaded_bytes": 7 << 40,
        "offloaded_bytes": 5 << 30,
        "skipped_bytes": 1005,
        "last_transition_timestamp_seconds": 1_700_000_000.5,
        "drift_bytes": 1006,
        "stray_references": 1007,
    }
    return HandleSnapshot(**{**values, **changes})


def make_snapshot(*handles: HandleSnapshot, **changes: Any) -> Snapshot:
    values: dict[str, Any] = {
        "taken_timestamp_seconds": 1_700_000_001.0,
        "policy": "colocated",
        "worker_role": "hybrid",
        "device": "cuda:0",
        "phases": ("train", "checkpoint"),
        "handles": handles,
        "phase_seconds": {"idle": 1.5, "train": 2.5, "my_phase": 3.5},
        "phase_stall_seconds": {"train": 0.75, "rollout": 0.875},
        "durations": tuple(
            DurationHistogram(
                operation=operation,
                upper_bounds_seconds=(0.1, 1.0, 30.0),
                counts=(n, 2, 3, 4),
                sum_seconds=n / 8,
            )
            for n, operation in enumerate(("load", "offload", "sync"))
        ),
        "policy_decisions": {"load": 51, "offload": 52},
        "pairing_violations": 61,
        "unpaired_bytes": 62,
        "unaccounted_bytes": -63,
        "communicator_bytes": 71,
        "ipc_collected_bytes": 72,
        "prefetch_discarded_bytes": 73,
        "wrong_writes": 64,
        "kept_bytes": 65,
        "expired_keeps": 66,
        "budget_bytes": 67,
        "device_used_bytes": 68,
        "device_total_bytes": 150754820096,
        "peak_bytes": 70,
        "suspended": True,
        "suspended_seconds": 74.5,
    }
    return Snapshot(**{**values, **changes})
