"""The frameworks that are known, one file each."""

from __future__ import annotations

import torch

from placement.adapters.framework import Framework

FRAMEWORKS: tuple[type[Framework], ...] = ()


def frameworks_of(root: torch.nn.Module) -> list[Framework]:
    """The frameworks that had a hand in a module tree."""
    return [found for found in (cls.find(root) for cls in FRAMEWORKS) if found is not None]
