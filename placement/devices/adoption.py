"""How torch's storages get a place in the ranges of a device. A device with a way of its own has an `Adopter` of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from placement.devices.memory import Addresses

Way = Literal["swap", "pool", "rebind"]
"""How one storage gets to its place:

* swap: the storage exchanges its pointer with one that lies in the range (torch 2.13 on). Everybody who uses it follows.
* pool: the storage is resized to nothing and back inside a memory pool over the range. Everybody who uses it follows.
* rebind: every tensor that is known to use the storage is given a new one by `.data =`. A tensor that is not known stays behind.
"""


def can_swap() -> bool:
    """Whether this torch can exchange the memory of two storages."""
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


class Adopter:
    """Adoption as any torch device allows it: by swapping, else by rebinding."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def way(self, storage: torch.UntypedStorage) -> Way:
        """How a storage gets into a range of this device."""
        return "swap" if storage.device == self.device and can_swap() else "rebind"

    def refuse(self, storages: Sequence[tuple[str, torch.UntypedStorage]]) -> None:
        """Raise RegistrationError for a storage, given with its name, whose memory somebody relies on who would not follow."""

    def pooled_bytes(self, sizes: Sequence[int]) -> int:
        """The length of a range for storages of these sizes that come by a pool; 0 where none do."""
        return 0

    def pool(self, addresses: Addresses, sizes: Sequence[int], owner: object) -> Any:
        """A pool over a range of `pooled_bytes(sizes)`: see `PoolRange`."""
        raise NotImplementedError(f"storages of {self.device} are adopted without a pool")

    def reallocate(self, storage: torch.UntypedStorage) -> None:
        """Give a storage that came by a pool ordinary memory of the same size, with whatever bytes. torch.OutOfMemoryError: everything
        is as before."""
        raise NotImplementedError(f"storages of {self.device} are adopted without a pool")
