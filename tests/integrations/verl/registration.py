"""What a process does in which verl's engines are registered anew."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.integrations.verl import worker as workers
from tests.integrations.verl.subject import logged


@contextmanager
def _chosen(is_chosen: bool) -> Iterator[list[str]]:
    """VERL_ENGINE_VENDOR=placement or not, and nothing registered; the lines that the integration logs meanwhile."""
    from verl.workers.engine.base import EngineRegistry

    for model_type in ("language_model", "value_model"):
        for strategy in ("fsdp", "fsdp2"):
            for device in ("cuda", "npu"):
                EngineRegistry._engines[model_type][strategy].pop((device, "placement"), None)
    os.environ.pop("VERL_ENGINE_VENDOR", None)
    if is_chosen:
        os.environ["VERL_ENGINE_VENDOR"] = "placement"
    with logged() as records:
        yield records


def activation() -> dict[str, list[str]]:
    """The lines that are logged when the engines are registered."""
    workers.import_verl()
    from placement.integrations.verl.plugin import register_engines

    told = {}
    for name, is_chosen in (("not chosen", False), ("chosen", True)):
        with _chosen(is_chosen) as records:
            register_engines()
        told[name] = records
    return told


def another_verl() -> dict[str, str]:
    """The error where verl's engine has no method of one name that is overridden."""
    workers.import_verl()
    from verl.workers.engine.base import BaseEngine
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    from placement import PlacementError
    from placement.integrations.verl.plugin import register_engines

    told = {}
    owners = (FSDPEngine, BaseEngine)
    removed = [owner.__dict__["get_per_tensor_param_shard"] for owner in owners]
    for owner in owners:
        del owner.get_per_tensor_param_shard
    try:
        for name, is_chosen in (("not chosen", False), ("chosen", True)):
            with _chosen(is_chosen):
                try:
                    register_engines()
                    told[name] = ""
                except PlacementError as error:
                    told[name] = str(error)
    finally:
        for owner, method in zip(owners, removed, strict=True):
            owner.get_per_tensor_param_shard = method
    with _chosen(True):
        register_engines()
    return told


def rollouts() -> dict[str, Any]:
    """The adapters that verl gets where placement was asked for, and the lines that are logged where verl has none of SGLang."""
    workers.import_verl()
    from verl.workers.rollout import base

    from placement.integrations.verl import rollout
    from placement.integrations.verl.plugin import place_rollouts, register_engines

    before, placed = dict(base._ROLLOUT_REGISTRY), dict(rollout._bases)
    own = {(name, "async"): f"verl.{name}.ServerAdapter" for name in ("vllm", "sglang", "trtllm")}
    found: dict[str, Any] = {}
    try:
        for verl_has in ("all", "no sglang"):
            rollout._bases.clear()
            base._ROLLOUT_REGISTRY.clear()
            base._ROLLOUT_REGISTRY.update({key: path for key, path in own.items() if verl_has == "all" or "sglang" not in key})
            with _chosen(True) as records:
                place_rollouts()
            paths = {name: path.rpartition(".")[2] for (name, _), path in base._ROLLOUT_REGISTRY.items()}
            found[verl_has] = paths, {attribute: kind.__name__ for attribute, (kind, _) in rollout._bases.items()}, records
    finally:
        rollout._bases.clear()
        rollout._bases.update(placed)
        base._ROLLOUT_REGISTRY.clear()
        base._ROLLOUT_REGISTRY.update(before)
    with _chosen(True):
        register_engines()
    return found
