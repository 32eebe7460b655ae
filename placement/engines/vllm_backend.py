"""A sleep-mode backend of vLLM (`--sleep-mode-backend placement`). See `vllm_plugin`, which has
vLLM find it.

The memory stays vLLM's: `CuMemAllocator` records of each block whether it is asleep and where its
bytes are on the host. Here are only other copies, another way to map what wakes, and one `Mirror`
in place of a page-locked tensor for each block. So vLLM's own calls of its allocator stay right at
any time: they find the mirror's places where they look for theirs.

Read from vllm/device_allocator/sleep_mode_backend.py and cumem.py of vLLM 0.25 to 0.33.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from vllm import device_allocator
from vllm.device_allocator import cumem
from vllm.device_allocator.sleep_mode_backend import CuMemBackend

from placement.core.errors import IntegrityError, PlacementError
from placement.core.interrupts import deferred
from placement.core.journal import logger
from placement.core.snapshot import mib
from placement.core.states import WEIGHTS
from placement.devices.select import select_device
from placement.engines.mirror import WEIGHTS_DIFFER, Block, Mirror, log_move

_WHAT_TO_DO = (
    "Wake the weights alone (tags=['weights']), fill them anew (a weight sync, reload_weights), "
    "and wake the rest"
)


class PlacementBackend(CuMemBackend):  # type: ignore[misc]  # vLLM's class is not known here
    """Moves the blocks of vLLM's allocator at the speed of the link. It is made by vLLM, once a
    worker. Ctrl-C is deferred: it must not come between a call of the driver and its record."""

    copied_bytes = 0  # by the last suspend or resume
    _properties: Any = None  # of the memory of vLLM's blocks: `CUmemAllocationProp`

    @classmethod
    def is_supported(cls) -> bool:
        """Whether torch is built for CUDA and the driver can be called (`cuda.bindings`)."""
        return bool(torch.version.cuda and find_spec("cuda") and find_spec("cuda.bindings"))

    def reserve(self) -> None:
        """Reserve the host memory of a sleep at level 1, so that the first one does not wait for
        page-locking. If there is not enough now, it is only logged: the first sleep asks again."""
        kept = _kept_tags(1)
        try:
            self.mirror.reserve([_block(data) for data in _all_data() if data.tag in kept])
        except PlacementError as error:
            logger.warning("no host memory was reserved for vLLM's sleep at level 1: %s", error)

    def suspend(self, level: int = 1) -> None:
        """Unmap every block. Level 1 copies the weights to the host before. Tags that vLLM's own
        backend keeps at every level are copied at both.

        Raises:
            HostMemoryError: there is not enough host memory. Nothing is asleep.
            RuntimeError: the device failed. Nothing is asleep if it refused to copy.
        """
        began = time.monotonic()
        kept = _kept_tags(level)
        awake = [data for data in _all_data() if not data.is_asleep]
        leaving = [data for data in awake if data.tag in kept]
        if awake and self._properties is None:
            driver = self.mirror.device.driver  # type: ignore[attr-defined]  # of a GPU
            memory = ctypes.c_uint64.from_address(awake[0].handle[3]).value
            self._properties = driver.call("cuMemGetAllocationPropertiesFromHandle", memory)
        weights = [_block(data) for data in awake if data.tag == WEIGHTS]
        if WEIGHTS not in kept and any(self.mirror.has(block) for block in weights):
            self.mirror.release()  # they are discarded, so they need no place
        with deferred():
            self.copied_bytes = self.mirror.begin_save([_block(data) for data in leaving])
            self._state = "SUSPENDED"
            if self.copied_bytes:
                gc.collect()  # as in vLLM's own sleep, but while the link works
            for data in awake:  # likewise: 40 GiB take 20 ms (H200)
                if data.tag not in kept:
                    _unmap(data)
            for data in leaving:  # likewise: 115 blocks take 12 to 30 ms (H200)
                self.mirror.end_save(_block(data))
                data.cpu_backup_tensor = self.mirror.host(_block(data))
                _unmap(data)
        torch.cuda.empty_cache()
        event = f"vLLM sleeps at level {level}: {_size_of(awake)} were freed"
        log_move(event, self.copied_bytes, began)

    def resume(self, tags: list[str] | None = None) -> None:
        """Map the blocks that vLLM's own backend would map for these tags (None: all), and bring
        back the bytes of those that have some on the host.

        After an error the blocks that this call has mapped are unmapped again, and every byte is
        still on the host: the engine can be woken again.

        Raises:
            IntegrityError: bytes that came back are not those that left. It is only logged if
                something else of the engine is still asleep: weights that were woken alone can be
                filled anew, and the next call raises unless they were.
            DeviceMemoryError: the device has not enough memory.
            RuntimeError: the device failed, or had no memory for vLLM's own call (see `_map`).
        """
        began = time.monotonic()
        torch.cuda.empty_cache()
        asleep = [data for data in _all_data() if data.is_asleep]
        # From 0.32 on, each wake also brings back every tag that may not stay behind.
        may_stay = getattr(device_allocator, "DEFERRABLE_TAGS", [data.tag for data in asleep])
        staying = set() if tags is None else {*may_stay} - {*tags}
        coming = [data for data in asleep if data.tag not in staying]
        is_last = len(coming) == len(asleep)
        awake = [_block(data) for data in _all_data() if not data.is_asleep]
        if is_last and self.mirror.still_spoilt(awake):
            raise IntegrityError(f"{WEIGHTS_DIFFER}, and were not written since. {_WHAT_TO_DO}")
        mapped: list[Any] = []
        with deferred():
            try:
                self._bring_back(coming, mapped)
                self._compare(mapped, is_last=is_last)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # nothing is unmapped under a copy
                    torch.cuda.synchronize(self.mirror.device.torch_device)
                for data in mapped:
                    _unmap(data)
                raise
            backups = [data.cpu_backup_tensor for data in mapped]
            self.copied_bytes = sum(backup.nbytes for backup in backups if backup is not None)
            for data in mapped:
                data.is_asleep, data.cpu_backup_tensor = False, None
            self._state = "RUNNING"
        event = f"vLLM wakes {', '.join(tags or ['everything'])}: {_size_of(mapped)} are back"
        log_move(event, self.copied_bytes, began)

    def _bring_back(self, coming: Sequence[Any], mapped: list[Any]) -> None:
        """Map these blocks, with the bytes of those that have some on the host. A block is in
        `mapped` as soon as it is."""
        for data in coming:
            if data.cpu_backup_tensor is not None:
                self._map(data)
                mapped.append(data)
                self.mirror.fetch(_block(data), data.cpu_backup_tensor)
        self.mirror.end_fetch()
        # Not while bytes are copied: the driver clears new memory with the same engines. Beside
        # 47 GB of new memory, 15.3 GB took 0.36 s instead of 0.29 (H200).
        for data in coming:
            if data.cpu_backup_tensor is None:
                self._map(data)
                mapped.append(data)

    def _map(self, data: Any) -> None:
        """Map a block with new memory, of the properties that its memory had.

        vLLM's own `create_and_map` asks for memory with a fabric handle first, and again where the
        driver refuses that: 0.37 s in place of 0.30 for 15.3 GB in 115 blocks (H200).
        """
        if self._properties is None:  # vLLM itself has discarded it, before any sleep
            cumem.create_and_map(data.handle)
            return
        _, nbytes, address, word = data.handle
        driver = self.mirror.device.driver  # type: ignore[attr-defined]  # of a GPU
        with driver:
            memory = driver.call("cuMemCreate", nbytes, self._properties, 0)
            try:
                driver.call("cuMemMap", address, nbytes, 0, memory, 0)
                driver.call("cuMemSetAccess", address, nbytes, driver.access[:1], 1)
            except BaseException:
                driver.failed("cuMemUnmap", address, nbytes)
                driver.failed("cuMemRelease", memory)
                raise
            ctypes.c_uint64.from_address(word).value = int(memory)

    def _compare(self, mapped: Sequence[Any], *, is_last: bool) -> None:
        """Compare the blocks that came back with the bytes that left. While a part is asleep vLLM
        takes no requests, so that wrong weights may stay, to be filled anew."""
        wrong = self.mirror.differing({_block(data): data.cpu_backup_tensor for data in mapped})
        if not wrong:
            return
        spoilt = [data for data in mapped if data.handle[2] in wrong]
        message = f"{WEIGHTS_DIFFER} ({len(spoilt)} blocks, {_size_of(spoilt)}). {_WHAT_TO_DO}"
        if is_last or any(data.tag != WEIGHTS for data in spoilt):
            raise IntegrityError(message)
        self.mirror.spoilt = wrong
        logger.error("%s", message)

    @functools.cached_property
    def mirror(self) -> Mirror:
        index = next((data.handle[0] for data in _all_data()), 0)
        return Mirror(select_device(f"cuda:{index}"))


def _kept_tags(level: int) -> tuple[str, ...]:
    """The tags whose bytes vLLM's own backend of this version keeps. It would pass them to the
    allocator (`sleep(offload_tags=...)`), whose method is replaced for the length of the call."""
    passed: dict[str, tuple[str, ...]] = {}
    allocator = cumem.CuMemAllocator.get_instance()
    allocator.sleep = passed.update
    try:
        CuMemBackend().suspend(level)
    finally:
        del allocator.sleep
    return passed["offload_tags"]


def _all_data() -> list[Any]:
    """vLLM's records of its blocks (`AllocationData`). A handle is (device, bytes, address, address
    of the word with the driver's handle of the memory)."""
    return list(cumem.CuMemAllocator.get_instance().pointer_to_data.values())


def _block(data: Any) -> Block:
    return Block(data.handle[2], data.handle[1])


def _size_of(all_data: Sequence[Any]) -> str:
    return mib(sum(data.handle[1] for data in all_data))


def _unmap(data: Any) -> None:
    """Unmap a block, unless it was garbage and vLLM has given it back meanwhile."""
    living = cumem.CuMemAllocator.get_instance().pointer_to_data
    if living.get(data.handle[2]) is data:
        try:
            cumem.unmap_and_release(data.handle)
        finally:
            data.is_asleep = True
