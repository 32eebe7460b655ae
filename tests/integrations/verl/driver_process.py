"""Importing this module makes a process one of verl's driver on the CPU.
`VERL_USE_EXTERNAL_MODULES` names it, so that all of them are."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from verl.utils import device

from placement.integrations.verl.plugin import after_import
from tests.integrations.verl.cpu_platform import use_cpu
from tests.integrations.verl.recipe import STANDIN


def _replica() -> Any:
    return importlib.import_module("tests.integrations.verl.driver_rollout").StandInReplica


def _register_replica() -> None:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register(STANDIN, _replica)


def _register_adapter() -> None:
    from verl.workers.rollout import base

    base._ROLLOUT_REGISTRY[STANDIN, "async"] = (
        "tests.integrations.verl.driver_rollout.StandInAdapter"
    )
    if plugin.is_chosen():
        importlib.import_module("placement.integrations.verl.rollout").place(STANDIN)


def _leave_out_what_needs_a_gpu() -> None:
    """Meshes and process groups of the CPU, by the names that torch knows."""
    from verl.workers import engine_workers

    from tests.integrations.verl import worker

    worker.leave_out_what_needs_a_gpu()
    engine_workers.get_device_name = lambda: "cpu"
    begin = engine_workers.initialize_global_process_group_ray
    engine_workers.initialize_global_process_group_ray = functools.partial(begin, backend="gloo")


use_cpu()
# it would write a name into the recipe that is no plain text
device.auto_set_device = lambda config: None
plugin = importlib.import_module("placement.integrations.verl.plugin")
after_import("verl.workers.rollout.replica", _register_replica)
after_import("verl.workers.rollout.base", _register_adapter)
after_import("verl.workers.engine_workers", _leave_out_what_needs_a_gpu)
