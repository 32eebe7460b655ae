"""Hugging Face accelerate. Its hooks may move weights at every forward pass; placement refuses to move such modules, too."""

from __future__ import annotations

from typing import Any

import torch

from placement.core.lazy_names import is_a
from placement.frameworks.base import Framework


class Accelerate(Framework):
    """accelerate's hooks on modules, and the device maps that transformers passes to it."""

    packages = ("accelerate",)

    @classmethod
    def refuse_part(cls, part: torch.nn.Module) -> tuple[str, str] | None:
        if (hook := part.__dict__.get("_hf_hook")) is not None and _moves_weights(hook):
            found = f"a module that accelerate moves at every forward ({type(hook).__name__})"
            return found, "call remove_hook_from_submodules(model), or load without device_map"
        device_map = part.__dict__.get("hf_device_map")
        if isinstance(device_map, dict) and len({str(device) for device in device_map.values()}) > 1:
            return f"a device map with {len(device_map)} entries on several devices", "load without device_map"
        return None


def _moves_weights(hook: Any) -> bool:
    """Whether a hook of accelerate may move weights at a forward pass. With a device map of one device it moves only the inputs."""
    if is_a(hook, "accelerate.hooks", "SequentialHook"):
        return any(_moves_weights(each) for each in hook.hooks)
    return not is_a(hook, "accelerate.hooks", "AlignDevicesHook") or bool(hook.offload)
