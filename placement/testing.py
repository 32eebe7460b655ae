"""For tests, ours and yours: a device without hardware, faults on demand, and the assertion that everything was offloaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from placement.core.errors import DeviceMemoryError, HostMemoryError
from placement.core.states import State
from placement.devices.adoption import Adopter
from placement.devices.base import Addresses, Chunk, Copy, Device, DeviceMemory, Direction, HostSlab, Mark, SharedSlab, WrittenPoison
from placement.devices.simulated.device import SimulatedDevice

if TYPE_CHECKING:
    from placement.manager import Manager

__all__ = ["Faults", "InjectedFault", "SimulatedDevice", "assert_nothing_resident"]


_ALLOW_FOREIGN = (
    "What frameworks keep cannot be moved. Buckets of DistributedDataParallel can, if it is made with gradient_as_bucket_view=True, once a "
    "backward pass has shown them. Where it is meant to stay, allow it: allow_foreign=True"
)


class InjectedFault(RuntimeError):
    """A copy or a wait that `Faults` failed, as a driver would."""


_ERRORS: dict[str, type[Exception]] = {
    "host": HostMemoryError,
    "reserve": DeviceMemoryError,
    "create": DeviceMemoryError,
    "map": DeviceMemoryError,
    "copy": InjectedFault,
    "sync": InjectedFault,
}


class _Fault(NamedTuple):
    operation: str
    first_call: int
    forever: bool


class Faults(Device):
    """A device that does what another one does, and fails where it is told to. A failed call never reaches the other device.

        device = Faults(SimulatedDevice(capacity_bytes=1 << 30))
        device.fail("create", at=3)

    Attributes:
        device: the other one. Its attributes can be read from here too.
        calls: calls so far by operation, failed ones included: how far a sweep has to go.
        fired: how many calls were failed.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.calls = dict.fromkeys(_ERRORS, 0)
        self.fired = 0
        self._faults: list[_Fault] = []

    def fail(self, operation: str, *, at: int = 1, forever: bool = False) -> None:
        """Fail the `at`-th call of an operation from now on (1 is the next), once, or from there on for ever.

        `host` fails with `HostMemoryError`, `reserve`, `create` and `map` with `DeviceMemoryError`, `copy` and `sync` with
        `InjectedFault`. Waiting for a mark counts as a `sync`. Several faults may be set at once.

        Raises:
            ValueError: no such operation, or `at` is below 1.
        """
        if operation not in _ERRORS:
            raise ValueError(f"unknown operation {operation!r}: one of {', '.join(_ERRORS)}")
        if at < 1:
            raise ValueError(f"at is {at}; the next call is 1")
        self._faults.append(_Fault(operation, self.calls[operation] + at, forever))

    def clear(self) -> None:
        """Fail nothing any more. The counts stay."""
        self._faults.clear()

    def _count(self, operation: str) -> None:
        self.calls[operation] += 1
        call = self.calls[operation]
        for fault in self._faults:
            if fault.operation == operation and (call == fault.first_call or (fault.forever and call > fault.first_call)):
                self.fired += 1
                raise _ERRORS[operation](f"injected fault: {operation}, call {call}")

    def __getattr__(self, name: str) -> Any:
        if name == "device":  # not set yet: a copy or an unpickled object asks before there is one
            raise AttributeError(name)
        return getattr(self.device, name)

    @property
    def adopter(self) -> Adopter:
        return self.device.adopter

    @property
    def uuid(self) -> str:
        return self.device.uuid

    @property
    def pinned_limit_bytes(self) -> int | None:
        return self.device.pinned_limit_bytes

    @pinned_limit_bytes.setter
    def pinned_limit_bytes(self, nbytes: int | None) -> None:
        self.device.pinned_limit_bytes = nbytes

    def host(self, nbytes: int) -> HostSlab:
        self._count("host")
        return self.device.host(nbytes)

    def shared_host(self, file: int, nbytes: int, own: Sequence[tuple[int, int]], extra_bytes: int) -> SharedSlab:
        self._count("host")
        return self.device.shared_host(file, nbytes, own, extra_bytes)

    def reserve(self, nbytes: int) -> Addresses:
        self._count("reserve")
        return self.device.reserve(nbytes)

    def create(self, nbytes: int) -> Chunk:
        self._count("create")
        return self.device.create(nbytes)

    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        self._count("map")
        self.device.map(addresses, chunks, start)

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        self._count("copy")
        self.device.copy(copies, direction)

    def sync(self) -> None:
        self._count("sync")
        self.device.sync()

    def wait(self, mark: Mark) -> None:
        self._count("sync")
        self.device.wait(mark)

    def after(self, mark: Mark) -> AbstractContextManager[None]:
        return self.device.after(mark)

    def mark(self, direction: Direction) -> Mark:
        return self.device.mark(direction)

    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        self.device.unmap(addresses, nbytes, start)

    def release(self, *chunks: Chunk) -> None:
        self.device.release(*chunks)

    def order(self) -> None:
        self.device.order()

    def view(self, addresses: Addresses, offset: int, nbytes: int) -> torch.Tensor:
        return self.device.view(addresses, offset, nbytes)

    def memory(self) -> DeviceMemory:
        return self.device.memory()

    def torch_allocated_bytes(self) -> int:
        return self.device.torch_allocated_bytes()

    def ask(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        return self.device.ask(values)

    def compare_poison(self) -> None:
        self.device.compare_poison()

    def heal_poison(self, wait: bool = True) -> bool:
        return self.device.heal_poison(wait)

    def written_poison(self) -> Sequence[WrittenPoison]:
        return self.device.written_poison()

    def mend_poison(self, addresses: Addresses, offset: int, nbytes: int) -> None:
        self.device.mend_poison(addresses, offset, nbytes)

    def trim(self) -> None:
        self.device.trim()

    def is_capturing(self) -> bool:
        return self.device.is_capturing()

    def close(self) -> None:
        self.device.close()


def assert_nothing_resident(manager: Manager, *, except_for: Collection[str] = (), allow_foreign: bool = False) -> None:
    """Assert that what should be off the device is off it: measured, not declared.

    Outside every phase each handle must be CPU_OFFLOADED; inside one, those that are not may be on the device. An offloaded
    handle holds no byte, no framework keeps any for it there (`Handle.foreign_bytes`), no chunk of the device is without a handle that
    holds it, and `audit()` finds nothing. External handles do not count.

    Args:
        except_for: names of handles that the policy keeps on the device when idle.
        allow_foreign: frameworks may keep what they do for offloaded handles: the buckets of `DistributedDataParallel` as it is by
            default, as large as its gradients.

    Raises:
        AssertionError: naming the handles and the bytes.
    """
    in_phase = bool(manager.snapshot().phases)
    handles = {name: handle for name, handle in manager.handles.items() if not handle.external}
    problems: list[str] = []
    kept_by_framework: list[str] = []
    for name, handle in handles.items():
        if handle.state is State.CPU_OFFLOADED:
            if handle.resident_bytes:
                problems.append(f"{name} is CPU_OFFLOADED and holds {handle.resident_bytes:,} bytes")
            kept_by_framework += [
                f"{name} is CPU_OFFLOADED, and its framework keeps {n:,} bytes on the device: {what}"
                for what, n in handle.kept_by_framework
            ]
        elif not in_phase and name not in except_for:
            problems.append(f"{name} is {handle.state} outside every phase and holds {handle.resident_bytes:,} bytes")
    declared = sum(handle.resident_bytes for handle in handles.values())
    measured = manager.device.memory().chunk_bytes
    if measured > declared:  # what lies in torch's own memory (gradients) is declared, and no chunk
        holders = ", ".join(f"{name} {handle.resident_bytes:,}" for name, handle in handles.items())
        problems.append(f"the device's chunks take {measured:,} bytes, the handles hold {declared:,} ({holders})")
    audit = manager.audit()
    if not audit.ok:
        problems.append(audit.report)
    if kept_by_framework and not allow_foreign:
        problems += [*kept_by_framework, _ALLOW_FOREIGN]
    if problems:
        raise AssertionError("\n".join(problems))
