"""One interface to everything that moves a module or an optimizer's state: placement and its peers.

A mover builds its object on the device. A user pays `first_offload` once, and `offload` and `load`
in every cycle.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

import placement
from bench import _peers
from bench._models import module_tensors, nbytes_of
from bench._rig import Rig
from placement.core.states import IDLE

Make = Callable[[], Any]
Tensors = Callable[[Any], list[torch.Tensor]]


class Mover:
    """The base of movers: the object, its place, and the bytes that crossed the link for it.

    Attributes:
        object: the module or optimizer, None before `build`.
        moved_to_host, moved_to_device: bytes so far. A peer always copies everything; placement
            reports what it copied.
    """

    name: str

    def __init__(self, rig: Rig, make: Make, tensors: Tensors = module_tensors) -> None:
        self.rig = rig
        self.object: Any = None
        self.moved_to_host = 0
        self.moved_to_device = 0
        self._make = make
        self._tensors = tensors
        self._nbytes = 0
        self._last: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self._tensors(self.object)

    def build(self) -> None:
        """Make the object on the device."""
        self.object = self._make()
        tensors = self.tensors
        self._nbytes, self._last = nbytes_of(tensors), tensors[-1]

    @property
    def last_tensor(self) -> torch.Tensor:
        """The tensor that the first kernel reads. A module's parameters stay the same objects, and
        walking over them is not the mover's time, so they are kept. An optimizer's state may be new
        objects after each move."""
        return (
            self._last
            if self._last is not None and isinstance(self.object, torch.nn.Module)
            else self.tensors[-1]
        )

    def first_offload(self) -> None:
        self.offload()

    def offload(self) -> None:
        """Offload as a user does, until the host may go on."""
        self._offload()
        self.moved_to_host += self._nbytes

    def load(self) -> None:
        self._load()
        self.moved_to_device += self._nbytes

    def _offload(self) -> None:
        raise NotImplementedError

    def _load(self) -> None:
        raise NotImplementedError

    def settle(self) -> None:
        """Called once after the first offload, outside the measured time."""

    def close(self) -> None:
        """Drop the object and everything held for it."""
        self._drop()

    def _drop(self) -> None:
        self.object = self._last = None
        del self._make  # it may hold a reference to the object's source


class Placement(Mover):
    """placement: `register`, then phases. For an optimizer, phases inside one that keeps its module
    on the device.

    Args:
        owner: the module whose parameters the optimizer steps; None where the object is a module.
    """

    name = "placement"

    def __init__(
        self,
        rig: Rig,
        make: Make,
        tensors: Tensors = module_tensors,
        *,
        owner: torch.nn.Module | None = None,
        readonly: bool = False,
    ) -> None:
        super().__init__(rig, make, tensors)
        self.manager = placement.Manager(
            device=rig.placement_device(), policy=placement.policies.Colocated("optimizer_step")
        )
        self._readonly = readonly
        self._owner = owner
        if owner is not None:
            self.manager.register("actor", owner, role="actor")

    def first_offload(self) -> None:
        """Register: reserve host memory, copy to it, release the device memory."""
        role = None if self._owner is not None else "critic"
        self.handle = self.manager.register(
            "object", self.object, role=role, readonly=self._readonly
        )
        self.rig.empty_cache()  # else the storages' first memory stays in torch's cache

    def settle(self) -> None:
        if self._owner is not None:
            self.manager.enter("train")

    def offload(self) -> None:
        self.manager.leave()
        self._count()

    def load(self) -> None:
        self.manager.enter("values" if self._owner is None else "optimizer_step")
        self._count()

    def _count(self) -> None:
        counters = self.handle.counters
        self.moved_to_host, self.moved_to_device = counters.offloaded_bytes, counters.loaded_bytes

    def close(self) -> None:
        while self.manager.phase_name != IDLE:
            self.manager.leave()
        self._drop()
        self._owner = None
        gc.collect()  # dead objects need no ordinary memory at close()
        self.manager.close()


class ModuleTo(Mover):
    """`module.to`, blocking, then `empty_cache()`: the usual code."""

    name = "module.to"
    non_blocking = False

    def _offload(self) -> None:
        self.object.to("cpu", non_blocking=self.non_blocking)
        self.rig.empty_cache()

    def _load(self) -> None:
        self.object.to(self.rig.torch_device, non_blocking=self.non_blocking)


class ModuleToNonBlocking(ModuleTo):
    """`module.to(non_blocking=True)`: torch gives the host copy page-locked memory from its
    cache."""

    name = "module.to(non_blocking)"
    non_blocking = True


class VerlModel(Mover):
    """verl's helpers, called like its FSDP engine does."""

    name = "verl"

    def build(self) -> None:
        self._verl = _peers.verl()
        super().build()

    def _offload(self) -> None:
        self._verl.offload_fsdp_model_to_cpu(self.object)

    def _load(self) -> None:
        self._verl.load_fsdp_model_to_gpu(self.object)


class VerlOptimizer(VerlModel):
    """verl's helpers for optimizer state; its engine empties the cache once a context ends."""

    def _offload(self) -> None:
        self._verl.offload_fsdp_optimizer(self.object)
        self.rig.empty_cache()

    def _load(self) -> None:
        self._verl.load_fsdp_optimizer(self.object, self.rig.torch_device)


class AccelerateHook(Mover):
    """accelerate's `cpu_offload_with_hook`: loads before the forward; the hook offloads like the
    next model's forward would."""

    name = "accelerate"

    def build(self) -> None:
        accelerate = _peers.accelerate()
        super().build()
        self.object, self._hook = accelerate.cpu_offload_with_hook(
            self.object, self.rig.torch_device
        )
        self._load()  # attaching the hook offloads at once

    def _offload(self) -> None:
        self._hook.offload()
        self.rig.empty_cache()

    def _load(self) -> None:
        self._hook.hook.pre_forward(self.object)

    def close(self) -> None:
        if self.object is not None:
            self._hook.remove()
        super().close()


class MemorySaver(Mover):
    """torch_memory_saver: memory behind fixed addresses is released and taken again, with a copy on
    the host."""

    name = "torch_memory_saver"
    retain = False

    def build(self) -> None:
        self._saver = _peers.torch_memory_saver()
        self._saver.retain_cpu_backup = self.retain
        self._is_paused = False
        with self._saver.region(tag=self.name, enable_cpu_backup=True):
            super().build()

    def _offload(self) -> None:
        self._saver.pause(self.name)
        self._is_paused = True

    def _load(self) -> None:
        self._saver.resume(self.name)
        self._is_paused = False

    def close(self) -> None:
        if self.object is not None and self._is_paused:
            self._saver.resume(self.name)
        super().close()
        gc.collect()
        if getattr(self, "_saver", None) is not None:
            self._saver._impl._mem_pools.clear()


class MemorySaverRetained(MemorySaver):
    name = "torch_memory_saver(retain)"
    retain = True


class HandWritten(Mover):
    """The best hand-written loop: page-locked copies made once, one non-blocking copy for each
    tensor, storages resized to nothing."""

    name = "hand-written"

    def first_offload(self) -> None:
        # the tensor objects stay the same, wherever their bytes are
        self._moved = tensors = self.tensors
        flat = self.rig.pin(sum(-(-tensor.nbytes // 64) * 64 for tensor in tensors))
        self._copies = []
        offset = 0
        for tensor in tensors:
            self._copies.append(
                flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            )
            offset += -(-tensor.nbytes // 64) * 64
        self.offload()

    @torch.no_grad()
    def _offload(self) -> None:
        for tensor, copy in zip(self._moved, self._copies, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self.rig.sync()
        for tensor, copy in zip(self._moved, self._copies, strict=True):
            tensor.data = copy
        self.rig.empty_cache()

    @torch.no_grad()
    def _load(self) -> None:
        for tensor, copy in zip(self._moved, self._copies, strict=True):
            fresh = torch.empty_like(copy, device=self.rig.torch_device)
            fresh.copy_(copy, non_blocking=True)
            tensor.data = fresh

    def close(self) -> None:
        super().close()
        self._copies, self._moved = [], []


class DeepSpeedStates(Mover):
    """DeepSpeed's `offload_adam_states` and `reload_adam_states`, page-locked and non-blocking, as
    OpenRLHF calls them."""

    name = "deepspeed"

    def build(self) -> None:
        self._states = _peers.deepspeed()
        super().build()

    def _offload(self) -> None:
        self._states.offload_adam_states(
            self.object, "cpu", pin_memory=self.rig.is_cuda, non_blocking=True
        )
        self.rig.empty_cache()
        self.rig.sync()

    def _load(self) -> None:
        self._states.reload_adam_states(self.object, self.rig.torch_device, non_blocking=True)


MODULE_PEERS: Sequence[type[Mover]] = (
    HandWritten,
    VerlModel,
    ModuleToNonBlocking,
    MemorySaverRetained,
)
SLOW_PEERS: Sequence[type[Mover]] = (ModuleTo, AccelerateHook, MemorySaver)
"""Each cycle of these takes host memory anew: a minute a system at full size."""
END_THEIR_PROCESS = (MemorySaver.name, MemorySaverRetained.name)
"""They may end the process when their memory dies, and with it what would come after."""
OPTIMIZER_PEERS: Sequence[type[Mover]] = (HandWritten, VerlOptimizer, DeepSpeedStates)
