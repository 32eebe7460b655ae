"""Tensors of state dicts that we handed out: they follow the handle.

A state dict's tensors alias the live ones. Over a range they would read poison after the next offload, so the living ones are
pointed to the host copy when the bytes go there, and back to the device when they return: whoever holds a state dict reads
what the object holds, wherever it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch

Finder = Callable[[torch.Tensor], torch.Tensor | None]


class Handed:
    """The living tensors of the state dicts of one object."""

    def __init__(self) -> None:
        self._tensors: list[weakref.ref[torch.Tensor]] = []

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """Remember a tensor that is about to be handed out; it must be nobody else's object."""
        self._tensors = [ref for ref in self._tensors if ref() is not None] if len(self._tensors) % 256 == 255 else self._tensors
        self._tensors.append(weakref.ref(tensor))
        return tensor

    def __iter__(self) -> Iterator[torch.Tensor]:
        for ref in self._tensors:
            tensor = ref()
            if tensor is not None:
                yield tensor

    def point_to(self, find: Finder) -> None:
        """Point every living tensor to what `find` gives for it; None leaves it where it is. Idempotent."""
        for tensor in self:
            there = find(tensor)
            if there is not None:
                with torch.no_grad():
                    tensor.data = there
        self._tensors = [ref for ref in self._tensors if ref() is not None]
