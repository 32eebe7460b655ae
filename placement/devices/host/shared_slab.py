"""Host memory that several processes of one machine map: one copy for all of them.

It is a memory file without a name. It needs no place in /dev/shm, and leaves nothing behind,
however its processes end. One process makes the file, and the others open it through
`/proc/PID/fd`. Afterwards their mappings keep it alive.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch

from placement.core.errors import HostMemoryError
from placement.devices.base import check_span, tensor_at
from placement.devices.host.slab import (
    READ_WRITE,
    Pin,
    Place,
    ReservedSlab,
    check_available,
    map_for_life,
    populate,
)
from placement.devices.memory import SharedHostSlab


@contextmanager
def new_file(nbytes: int) -> Iterator[tuple[int, str]]:
    """Make a memory file. Yields its descriptor, and a text with which another process of this
    machine can open it during the context.
    Raises HostMemoryError: the kernel refused."""
    name = f"placement-{secrets.token_hex(8)}"
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC)
    except OSError as error:
        raise HostMemoryError(
            f"host memory: cannot make a memory file: {error.strerror}"
        ) from error
    with _closing(file):
        os.ftruncate(file, nbytes)
        yield file, f"{os.getpid()}:{file}:{name}"


def opened_file(words: str) -> AbstractContextManager[int]:
    """The descriptor of a memory file that another process made, open during the context.
    Raises OSError: there is no such process or file: the process is on another machine, or in
    another container."""
    pid, number, name = words.split(":")
    path = f"/proc/{int(pid)}/fd/{int(number)}"
    # Checked first, because the number may belong to any other file by now. Each file has a random
    # name.
    if not os.readlink(path).startswith(f"/memfd:{name} "):
        raise FileNotFoundError(f"{path} is another file")
    return _closing(os.open(path, os.O_RDWR | os.O_CLOEXEC))


@contextmanager
def _closing(file: int) -> Iterator[int]:
    try:
        yield file
    finally:
        os.close(file)


class MappedSlab(ReservedSlab, SharedHostSlab):
    """The `SharedHostSlab` of a memory file. Each process places its own share (`place`) and pins
    all of it: with its own share alone torch could not copy a state dict's tensor that crosses two
    ranks' shares. A rank that loads alone would be four times slower.

    Raises HostMemoryError where the machine or the control group does not have that share.
    """

    def __init__(
        self,
        file: int,
        nbytes: int,
        own: Sequence[tuple[int, int]],
        extra_bytes: int,
        pin: Pin | None = None,
        unpin: Callable[[int], None] | None = None,
        place: Place | None = None,
    ) -> None:
        self._own_bytes = sum(length for _, length in own)
        super().__init__(nbytes, self._own_bytes, pin, unpin)
        memory = self._memory
        try:
            check_available(self._own_bytes, " of a shared copy", promised_to_it=self._own_bytes)
            self.address = map_for_life(
                memory,
                self._size + extra_bytes,
                READ_WRITE,
                mmap.MAP_SHARED,
                memory.undo,
                file=file,
            )
            for offset, length in own:
                if place is not None:
                    place(self.address + offset, length)
                populate(self.address + offset, length)
        except OSError as error:
            raise HostMemoryError(
                f"host memory: cannot allocate {self._own_bytes:,} bytes of a shared copy: "
                f"{error.strerror}"
            ) from error
        finally:
            memory.untouched = [0]
        self.extra = tensor_at(self.address + self._size, extra_bytes, memory)
        if pin is None or not nbytes:
            self.ready.set()

    @property
    def held_bytes(self) -> int:
        return self._own_bytes

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        check_span(offset, nbytes, self.nbytes)
        return tensor_at(self.address + offset, nbytes, self)
