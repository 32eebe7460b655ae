"""Tools for tests: a simulated device, faults that are injected on demand, and the assertion that
everything was offloaded."""

from __future__ import annotations

from collections.abc import Collection
from types import FunctionType
from typing import TYPE_CHECKING, Any

from placement.core.errors import DeviceMemoryError, HostMemoryError
from placement.core.states import State
from placement.devices.base import Device
from placement.devices.simulated.device import SimulatedDevice

if TYPE_CHECKING:
    from placement.manager import Manager

__all__ = ["Faults", "InjectedFault", "SimulatedDevice", "assert_nothing_resident"]


_ALLOW_FOREIGN = (
    "placement cannot move memory that a framework keeps. Buckets of DistributedDataParallel it "
    "can move if the model is wrapped with gradient_as_bucket_view=True, after the first backward "
    "pass. If the memory may stay, pass allow_foreign=True"
)


class InjectedFault(RuntimeError):
    """Raised by `Faults` in place of a driver's error when a copy or a wait is to fail."""


_ERRORS: dict[str, type[Exception]] = {
    "host": HostMemoryError,
    "reserve": DeviceMemoryError,
    "create": DeviceMemoryError,
    "map": DeviceMemoryError,
    "copy": InjectedFault,
    "sync": InjectedFault,
}
_OPERATIONS = {**{name: name for name in _ERRORS}, "shared_host": "host", "wait": "sync"}
"""The operation that each method of a device counts as."""


def _pass_on(name: str, member: object) -> Any:
    """A method that counts the call and asks the other device, or an attribute that is the other
    device's."""
    if not isinstance(member, FunctionType):
        return property(
            lambda self: getattr(self.device, name),
            lambda self, value: setattr(self.device, name, value),
        )

    def call(self: Faults, *arguments: Any, **keywords: Any) -> Any:
        if name in _OPERATIONS:
            self._count(_OPERATIONS[name])
        return getattr(self.device, name)(*arguments, **keywords)

    return call


_PassingOn: Any = type(
    "_PassingOn",
    (Device,),
    {
        name: _pass_on(name, member)
        for name, member in vars(Device).items()
        if not name.startswith("_")
    },
)


class Faults(_PassingOn):  # type: ignore[misc]  # a Device, of which every method is made by the lines above
    """A device that passes every call on to another device, except for the calls that it was told
    to fail.

        device = Faults(SimulatedDevice(capacity_bytes=1 << 30))
        device.fail("create", at=3)   # the third chunk that is created from now on
        manager = placement.Manager(device=device)

    A failed call does not reach the other device.

    Attributes:
        device: the other device. Its attributes can also be read from the `Faults` object.
        calls: the number of calls so far by operation, including failed ones. A sweep over all
            calls goes from 1 to this number.
        fired: the number of calls that were failed.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.calls = dict.fromkeys(_ERRORS, 0)
        self.fired = 0
        # the operation, the first call that fails, and whether all later ones do
        self._faults: list[tuple[str, int, bool]] = []

    def fail(
        self,
        operation: str,
        *,
        at: int = 1,
        forever: bool = False,
    ) -> None:
        """Let a later call of an operation fail. Several faults may be set at the same time.

        Args:
            operation: `host` (reserve host memory) raises `HostMemoryError`; `reserve` (addresses),
                `create` (a chunk) and `map` (chunks behind addresses) raise `DeviceMemoryError`;
                `copy` and `sync` raise `InjectedFault`. Waiting for a mark counts as `sync`.
            at: which call fails, counted from now on; 1 is the next.
            forever: let all calls after it fail, too.

        Raises:
            ValueError: the operation is unknown, or `at` is below 1.
        """
        if operation not in _ERRORS:
            raise ValueError(f"unknown operation {operation!r}: one of {', '.join(_ERRORS)}")
        if at < 1:
            raise ValueError(f"at={at}, but it must be at least 1, which is the next call")
        self._faults.append((operation, self.calls[operation] + at, forever))

    def clear(self) -> None:
        """Remove all faults, so that no further call fails. `calls` and `fired` stay as they
        are."""
        self._faults.clear()

    def _count(self, operation: str) -> None:
        self.calls[operation] += 1
        call = self.calls[operation]
        for failing, first, forever in self._faults:
            if failing == operation and (call == first or (forever and call > first)):
                self.fired += 1
                raise _ERRORS[operation](f"injected fault: {operation}, call {call}")

    def __getattr__(self, name: str) -> Any:
        # not set yet: copying and unpickling ask for attributes before __init__, and would recurse
        if name == "device":
            raise AttributeError(name)
        return getattr(self.device, name)


def assert_nothing_resident(
    manager: Manager, *, except_for: Collection[str] = (), allow_foreign: bool = False
) -> None:
    """Assert that offloaded handles hold no device memory. The memory is measured; the handles' own
    statements are not trusted.

    All of this must hold, for all handles but external ones:

    - Outside every phase, each handle is CPU_OFFLOADED. (Inside a phase, handles may be in any
      state.)
    - A handle that is CPU_OFFLOADED holds no byte on the device, and no framework keeps device
      memory for it (`Handle.foreign_bytes`). Inside a phase, bytes that arrived early for a later
      one (`Plan.prefetch`) are allowed.
    - The device has no chunks of memory beyond those that the handles hold.
    - `manager.audit()` finds nothing but engines that need weights.

    Args:
        except_for: names of handles that the policy keeps on the device when idle.
        allow_foreign: frameworks may keep device memory for offloaded handles.
            `DistributedDataParallel` does by default: its buckets are as large as the gradients.

    Raises:
        AssertionError: something is still on the device; the message names the handles and the
            bytes.
    """
    audit = manager.audit()  # first: it also looks for tensors beside those that move
    in_phase = bool(manager.snapshot().phases)
    handles = {name: handle for name, handle in manager.handles.items() if not handle.external}
    problems: list[str] = []
    kept_by_framework: list[str] = []
    for name, handle in handles.items():
        if handle.state is State.CPU_OFFLOADED:
            left_bytes = handle.resident_bytes
            if in_phase:
                left_bytes -= handle.prefetched_bytes
            if left_bytes:
                problems.append(f"{name} is CPU_OFFLOADED and holds {left_bytes:,} bytes")
            for kept, nbytes in handle.storage.kept_by_framework:
                kept_by_framework.append(
                    f"{name} is CPU_OFFLOADED, and its framework keeps {nbytes:,} bytes on the "
                    f"device: {kept}"
                )
        elif not in_phase and name not in except_for:
            problems.append(
                f"{name} is {handle.state} outside every phase and holds {handle.resident_bytes:,} "
                "bytes"
            )
    declared = sum(handle.resident_bytes for handle in handles.values())
    measured = manager.device.memory().chunk_bytes
    # less is normal: tensors in torch's own memory (gradients) are declared, but are not chunks
    if measured > declared:
        holders = ", ".join(f"{name} {handle.resident_bytes:,}" for name, handle in handles.items())
        problems.append(
            f"the device's chunks take {measured:,} bytes, the handles hold {declared:,} "
            f"({holders})"
        )
    if any(finding.what != "needs_weights" for finding in audit.findings):
        problems.append(audit.report)
    if kept_by_framework and not allow_foreign:
        problems += [*kept_by_framework, _ALLOW_FOREIGN]
    if problems:
        raise AssertionError("\n".join(problems))
