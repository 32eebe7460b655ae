"""Ownership: the tensors that a module or an optimizer owns, and the objects that placement refuses."""

from __future__ import annotations

from typing import Any

import torch

from placement.ownership.adapter import Adapter
from placement.ownership.module import ModuleAdapter
from placement.ownership.optimizer import OptimizerAdapter


def adapter_for(obj: Any, *, name: str, compute_device: torch.device, external: bool = False) -> Adapter:
    """Make the adapter of a module or an optimizer. Only reads the object.

    Args:
        obj: A `torch.nn.Module`, a `torch.optim.Optimizer`, or an object that holds optimizers.
        name: The handle's name, for errors.
        compute_device: The device of loaded tensors: `cuda:0`, or `cpu` on a simulated device.
        external: A framework moves the bytes: track and measure the object, and never move it.

    Raises:
        RegistrationError: the object, or a tensor of it, is not supported; the message says what is, and what to do.
    """
    if isinstance(obj, torch.nn.Module):
        return ModuleAdapter(obj, name=name, compute_device=compute_device, external=external)
    return OptimizerAdapter(obj, name=name, compute_device=compute_device, external=external)
