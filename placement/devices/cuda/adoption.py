"""Adoption on a CUDA device: by a pool over the range where torch cannot swap storages (before 2.13)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from placement.devices import adoption
from placement.devices.adoption import AddressRange, Adopter, Pool, Way
from placement.devices.cuda import pool
from placement.devices.cuda.pool_plan import plan


class CudaAdopter(Adopter):
    """See `pool.PoolRange`."""

    def way(self, storage: torch.UntypedStorage) -> Way:
        if storage.device == self.device and not adoption.can_swap() and storage.resizable():
            return "pool"
        return super().way(storage)

    def refuse(self, storages: Sequence[tuple[str, torch.UntypedStorage]]) -> None:
        """Refuse storages in a memory pool of somebody's own: a captured graph, buffers that NCCL has registered."""
        on_device = [(name, storage) for name, storage in storages if storage.device.type == "cuda"]
        if on_device:
            pool.refuse_private(on_device)

    def pooled_bytes(self, sizes: Sequence[int]) -> int:
        return 0 if adoption.can_swap() else plan(sizes)[1]

    def pool(self, addresses: AddressRange, sizes: Sequence[int], owner: object) -> Pool:
        return pool.PoolRange(self.device, addresses, sizes, owner)

    def reallocate(self, storage: torch.UntypedStorage) -> None:
        # Lack of memory shows here, before anything is given up: the next lines get this block.
        nbytes = storage.nbytes()
        reserved = torch.UntypedStorage(nbytes, device=storage.device)
        storage.resize_(0)
        reserved.resize_(0)
        storage.resize_(nbytes)
        pool.leave(storage)
