"""Which tensors an object owns, and which objects we refuse."""

from __future__ import annotations

from typing import Any

import torch

from placement.ownership.module import ModuleAdapter
from placement.ownership.optimizer import OptimizerAdapter
from placement.tensors.owned import Adapter


def adapter_for(obj: Any, *, name: str, compute_device: torch.device, external: bool = False) -> Adapter:
    """The adapter of a module or an optimizer. It reads the object and changes nothing.

    Args:
        obj: A `torch.nn.Module`, a `torch.optim.Optimizer`, or an object that holds optimizers.
        name: How errors name the registration.
        compute_device: Where tensors over a range say they are: `cuda:0`, or `cpu` on a simulated device.
        external: A framework places the bytes: track and measure the object, never move it.

    Raises:
        RegistrationError: the object, or a tensor of it, is not supported; says what is, and what to do.
    """
    if isinstance(obj, torch.nn.Module):
        return ModuleAdapter(obj, name=name, compute_device=compute_device, external=external)
    return OptimizerAdapter(obj, name=name, compute_device=compute_device, external=external)
