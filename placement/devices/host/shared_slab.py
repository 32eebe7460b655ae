"""Host memory that several processes of one machine have mapped: one copy for all of them.

It is a memory file without a name: it needs no place in /dev/shm and leaves nothing behind, however its processes end. One
process makes it, the others open it through `/proc/PID/fd`; then the mappings keep it.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from placement.core.errors import HostMemoryError
from placement.devices.base import SharedSlab
from placement.devices.host.available import available_bytes
from placement.devices.host.reserve import Register, Reservation, promised_bytes
from placement.devices.host.slab import PAGE, READ_WRITE, check_span, map_for_life, populate, round_up, tensor_at


@contextmanager
def new_file(nbytes: int) -> Iterator[tuple[int, str]]:
    """A memory file of its own, and the words by which another process of this machine opens it while this context lasts.

    Raises:
        HostMemoryError: the kernel refused.
    """
    name = f"placement-{secrets.token_hex(8)}"
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        raise HostMemoryError(f"host memory: no memory file: {error.strerror}") from error
    try:
        os.ftruncate(file, nbytes)
        yield file, f"{os.getpid()}:{file}:{name}"
    finally:
        os.close(file)


def opened_file(words: str) -> AbstractContextManager[int]:
    """The memory file that another process made, open while this context lasts.

    Raises:
        OSError: there is no such process here, or it has no such file: it is on another machine, or in another container.
    """
    pid, number, name = words.split(":")
    path = f"/proc/{int(pid)}/fd/{int(number)}"
    # The name is drawn anew for each file. Looked at first: what another process has open by that number may be anything.
    if not os.readlink(path).startswith(f"/memfd:{name} "):
        raise FileNotFoundError(f"{path} is another file")
    return _closing(os.open(path, os.O_RDWR | os.O_CLOEXEC))


@contextmanager
def _closing(file: int) -> Iterator[int]:
    try:
        yield file
    finally:
        os.close(file)


class MappedSlab(SharedSlab):
    """See `Device.shared_host`.

    Args:
        register, unregister: as for `Slab`.

    Raises:
        HostMemoryError: the machine or the control group has not what this process is to take.
    """

    def __init__(
        self,
        file: int,
        nbytes: int,
        own: Sequence[tuple[int, int]],
        extra_bytes: int,
        register: Register | None = None,
        unregister: Callable[[int], None] | None = None,
    ) -> None:
        self.nbytes = nbytes
        self._size = round_up(nbytes, PAGE)
        self._own_bytes = sum(length for _, length in own)
        self._register, self._unregister = register, unregister
        self._memory = memory = Reservation(self, self._own_bytes)  # promised before it is compared, as for a `Slab`
        self.ready = memory.ready
        try:
            available = max(0, available_bytes() - promised_bytes() + self._own_bytes)
            if self._own_bytes > available:
                raise HostMemoryError(f"host memory: asked for {self._own_bytes:,} bytes of a shared copy, {available:,} available")
            self.address = map_for_life(memory, self._size + extra_bytes, READ_WRITE, mmap.MAP_SHARED, memory.undo, file=file)
            for offset, length in own:
                populate(self.address + offset, length)
        except OSError as error:
            raise HostMemoryError(f"host memory: {self._own_bytes:,} bytes of a shared copy: {error.strerror}") from error
        finally:
            memory.untouched = [0]
        self.extra = tensor_at(self.address + self._size, extra_bytes, memory)
        if register is None or not nbytes:
            self.ready.set()

    def pin(self) -> None:
        # All of it and not the own share alone: a tensor of a state dict that crosses the boundary between two ranks' shares could not
        # be copied to the device by torch, and a rank that has to load alone would do so at a quarter of the link.
        if self._register is not None and self.nbytes:
            self._memory.untouched = [self._size]  # the length; nothing more is taken from the machine
            self._memory.begin(self.address, None, self._register, self._unregister)

    @property
    def held_bytes(self) -> int:
        return self._own_bytes

    @property
    def pinned_bytes(self) -> int:
        return min(self.nbytes, self._memory.bytes_where(pinned=True))

    @property
    def pageable_bytes(self) -> int:
        return min(self._own_bytes, self._memory.bytes_where(pinned=False))

    @property
    def pageable_reason(self) -> str | None:
        return self._memory.reason

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        check_span(offset, nbytes, self.nbytes)
        return tensor_at(self.address + offset, nbytes, self)
