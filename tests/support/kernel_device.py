"""A device on which kernels run as late as they may, as far as memory goes: it is an error to take
memory away from under one of them.

On a GPU a torch operation returns before its kernel has run. A transition that takes memory away,
or copies over it, has to wait before. The simulated device runs every operation at once, and so
hides a wait that is missing. This one notes each operation that reads or writes memory of the
device, until something is done for which a GPU waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placement.core import modes
from placement.devices.memory import Addresses, Copy, Direction, HostSlab, Mark
from placement.devices.simulated.device import SimulatedRange
from tests.support.late_device import LateDevice

_WAITING = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
"""Operations whose answer the host needs."""
_TOUCHES_NOTHING = (
    "aten::set_",
    "aten::resize_",
    "aten::empty_like",
    "aten::_has_compatible_shallow_copy_type",
)


_ALL: weakref.WeakSet[KernelDevice] = weakref.WeakSet()


class _Kernel(NamedTuple):
    number: int
    start: int
    end: int
    name: str
    is_following: bool
    """Whether it was enqueued inside `after`, and so on a stream of its own."""


class _Behind(NamedTuple):
    """What something comes behind: of each of the two streams, the last kernel that has run before
    it."""

    current: int = 0
    following: int = 0

    def has(self, kernel: _Kernel) -> bool:
        return kernel.number <= (self.following if kernel.is_following else self.current)

    def and_also(self, other: _Behind) -> _Behind:
        return _Behind(max(self.current, other.current), max(self.following, other.following))


class _Mark(Mark):
    def __init__(self, mark: Mark, behind: _Behind) -> None:
        self.mark = mark
        self.behind = behind


class KernelDevice(LateDevice):
    """A simulated device with late copies that knows which kernels may still be running.

    Attributes:
        num_kernels: the number of operations on its memory so far.
    """

    def __init__(self, capacity_bytes: int, *, chunk_bytes: int) -> None:
        super().__init__(capacity_bytes, chunk_bytes=chunk_bytes)
        self.num_kernels = 0
        self._kernels: list[_Kernel] = []
        self._is_following = False
        """Whether work is enqueued inside `after` now."""
        self._num_ordered = 0
        """The last kernel before the latest `order`. Since then neither of the two streams has
        waited for the other."""
        self._copied = _Behind()
        """What the latest copy to the host waits for."""
        self._ranges: list[SimulatedRange] = []
        self._slabs: list[HostSlab] = []
        _ALL.add(self)

    def note(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Note an operation that reads or writes these tensors."""
        for tensor in tensors:
            start, end = _span(tensor)
            if any(
                r.base + offset < end and start < r.base + offset + chunk.nbytes
                for r in self._ranges
                for offset, chunk in r.chunks.items()
            ):
                self.num_kernels += 1
                self._kernels.append(
                    _Kernel(self.num_kernels, start, end, name, self._is_following)
                )

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in a host copy. A torch copy into it waits, as it does on a GPU
        without `non_blocking`."""
        start, end = _span(tensor)
        return any(
            slab.nbytes and slab.address <= start and end <= slab.address + slab.nbytes
            for slab in self._slabs
        )

    def have_run(self, behind: _Behind | None = None) -> None:
        """The kernels that something comes behind have run; None: all."""
        self._kernels = (
            [] if behind is None else [each for each in self._kernels if not behind.has(each)]
        )

    def _now(self) -> _Behind:
        """What comes behind everything on the stream on which work is enqueued now."""
        if self._is_following:
            return _Behind(self._num_ordered, self.num_kernels)
        return _Behind(self.num_kernels, self._num_ordered)

    def reserve(self, nbytes: int) -> Addresses:
        addresses = super().reserve(nbytes)
        assert isinstance(addresses, SimulatedRange)
        self._ranges.append(addresses)
        return addresses

    def host(self, nbytes: int) -> HostSlab:
        slab = super().host(nbytes)
        self._slabs.append(slab)
        return slab

    def wipe_mapped(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        """On a GPU a stream of its own wipes, which waits for no other kernel."""
        assert isinstance(addresses, SimulatedRange)
        self._refuse("memory is wiped under", addresses.base + start, nbytes)
        before = self.num_kernels
        super().wipe_mapped(addresses, nbytes, start)
        self._kernels = [each for each in self._kernels if each.number <= before]

    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        assert isinstance(addresses, SimulatedRange)
        for offset, chunk in addresses.chunks.items():
            if start <= offset < start + nbytes:
                self._refuse(
                    "memory is taken away from under", addresses.base + offset, chunk.nbytes
                )
        super().unmap(addresses, nbytes, start)

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        if direction == "to_host":
            self._copied = self._copied.and_also(self._now())
            for each in copies:
                self._refuse(
                    "bytes are copied before they are computed by",
                    each.device_address,
                    each.nbytes,
                    self._copied,
                )
        else:
            for each in copies:
                self._refuse("bytes are copied over", each.device_address, each.nbytes)
        super().copy(copies, direction)

    def mark(self, direction: Direction) -> Mark:
        return _Mark(super().mark(direction), self._copied if direction == "to_host" else _Behind())

    def wait(self, mark: Mark) -> None:
        assert isinstance(mark, _Mark)
        super().wait(mark.mark)
        self.have_run(mark.behind)

    def order(self, direction: Direction | None = None) -> None:
        self._num_ordered = self.num_kernels
        super().order(direction)

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        assert isinstance(mark, _Mark)
        with super().after(mark.mark):
            was_following, self._is_following = self._is_following, True
            try:
                yield
            finally:
                self._is_following = was_following

    def ask(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        answer, behind = super().ask(values), self._now()

        def waiting() -> torch.Tensor:
            self.have_run(behind)
            return answer()

        return waiting

    def wait_for_work(self) -> None:
        super().wait_for_work()
        self.have_run()

    def sync(self) -> None:
        super().sync()
        self.have_run()

    def _refuse(self, what: str, start: int, nbytes: int, behind: _Behind = _Behind()) -> None:  # noqa: B008 - immutable
        running = [each for each in self._kernels if not behind.has(each)]
        found = [each.name for each in running if each.start < start + nbytes and start < each.end]
        assert not found, f"{what} {', '.join(sorted({*found}))}"


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        schema = function._schema
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
        )
        if not is_view and schema.name not in _TOUCHES_NOTHING:
            tensors = [
                each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
            ]
            for device in [*_ALL]:
                device.note(schema.name, tensors)
                if schema.name in _WAITING or (
                    schema.name == "aten::copy_" and device.is_on_host(tensors[0])
                ):
                    device.have_run()
        return function(*args, **(kwargs or {}))


@contextmanager
def kernels_noted() -> Iterator[None]:
    """Have every `KernelDevice` note the operations of this thread, also those of placement itself,
    which leaves the caller's modes."""
    with pytest.MonkeyPatch.context() as patch, _Operations():
        patch.setattr(modes, "_num_dispatch_modes", lambda: 0)
        yield


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    if not tensor.numel() or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return 0, 0
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
