"""Hugging Face accelerate: modules whose weights its hooks move at every forward pass cannot be moved by anybody else."""

from __future__ import annotations

from typing import Any

import torch

from placement.core.loaded_classes import is_a
from placement.frameworks.base import Framework


class Accelerate(Framework):
    """Its hooks on modules, and the device maps that transformers hands to it."""

    @classmethod
    def refuse_part(cls, part: torch.nn.Module) -> tuple[str, str] | None:
        if (hook := part.__dict__.get("_hf_hook")) is not None and _moves_weights(hook):
            found = f"a module that accelerate moves at every forward ({type(hook).__name__})"
            return found, "remove_hook_from_submodules(model), or load without device_map"
        device_map = part.__dict__.get("hf_device_map")
        if isinstance(device_map, dict) and len({str(device) for device in device_map.values()}) > 1:
            return f"a device map over {len(device_map)} places", "load without device_map"
        return None


def _moves_weights(hook: Any) -> bool:
    """Whether a hook of accelerate may move weights at a forward. Where a device map has one place it only moves inputs there."""
    if is_a(hook, "accelerate.hooks", "SequentialHook"):
        return any(_moves_weights(each) for each in hook.hooks)
    return not is_a(hook, "accelerate.hooks", "AlignDevicesHook") or bool(hook.offload)
