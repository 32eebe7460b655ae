"""A device of sizes alone (addresses without bytes, a link of known rates, a clock that waiting and
working move on), and objects for it.

A real manager runs on it as on any other device, and registers the objects as any others. No byte
exists: behind the addresses of tensors and of host copies is nothing.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from placement.core.errors import HostMemoryError
from placement.core.interrupts import BackgroundThread, is_background
from placement.core.states import WEIGHTS
from placement.devices.base import Device, check_slots, round_up
from placement.devices.cuda.device import CHUNK_BYTES
from placement.devices.host.slab import Slab
from placement.devices.memory import (
    Addresses,
    Chunk,
    Copy,
    DeviceMemory,
    Direction,
    HostSlab,
    Mark,
    SharedHostSlab,
)
from placement.engines.tagged import TaggedEngine
from placement.forecasting.description import Link
from placement.registration.streamable import allow
from placement.storage.layout import Sizing

GRANULARITY = 2 << 20  # the granularity of the CUDA driver on every GPU so far
_CAPACITY_BYTES = 1 << 62
_SLOW = 1e-3  # the rate, in bytes a second, of a link that is not known
_NEAR_BYTES = 0.5  # a copy that lacks less is complete: rates and seconds are rounded
# the longest real time that a thread of the manager's is given to reach its next wait
_SETTLES_SECONDS = 0.25

StateOf = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]
"""The state that an optimizer creates for a parameter, on the meta device. Tensors without a
dimension are counters, on the host."""

# the end of all addresses so far, in GiB. They are the process's: no two objects ever have the
# same.
_end = itertools.count(1 << 18)


def _take(nbytes: int, alignment: int = 1) -> int:
    """Addresses for so many bytes, which no other object gets."""
    first = next(_end)
    for _ in range((nbytes + alignment) >> 30):
        next(_end)
    return -(-(first << 30) // alignment) * alignment


def sized(
    shape: Sequence[int], dtype: torch.dtype = torch.uint8, address: int | None = None
) -> torch.Tensor:
    """A tensor without bytes: it has a shape, and an address with nothing behind it. A read or a
    write of it ends the process."""
    nbytes = math.prod(shape) * dtype.itemsize
    address = _take(nbytes) if address is None else address
    cpu = torch.device("cpu")
    storage = torch._C._construct_storage_from_data_pointer(address, cpu, nbytes)
    return within(storage, shape, dtype)


def within(storage: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    strides = torch.empty(shape, device="meta").stride()
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    return tensor.set_(storage, 0, shape, strides)


class _Addresses(Addresses):
    def __init__(self, nbytes: int, alignment: int) -> None:
        self.base = _take(nbytes, alignment)
        self.nbytes = nbytes


class _Chunk(Chunk):
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class SizedSlab(Slab):
    """Host memory without bytes."""

    has_views = False

    def __init__(self, nbytes: int) -> None:
        super().__init__(0)
        self.address = _take(nbytes)
        self.nbytes = nbytes

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        return sized((nbytes,), address=self.address + offset)


class _Mark(Mark):
    def __init__(self, direction: Direction, nbytes: float) -> None:
        self.direction = direction
        self.nbytes = nbytes


class _Copies:
    """The copies under way: both directions at once, each in order."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.seconds = 0.0
        # the bytes that were ever queued
        self.queued: dict[Direction, float] = {"to_device": 0.0, "to_host": 0.0}
        self._done = dict(self.queued)

    def has_done(self, mark: _Mark) -> bool:
        return self._done[mark.direction] >= mark.nbytes

    def go_on(self, marks: Iterable[_Mark], until_seconds: float) -> None:
        """Let time pass until one of these marks is reached, or until a point in time."""
        marks = list(marks)
        while self.seconds < until_seconds and not any(map(self.has_done, marks)):
            rates = self._rates()
            goals = dict(self.queued)
            for mark in marks:
                goals[mark.direction] = min(goals[mark.direction], mark.nbytes)
            seconds = until_seconds - self.seconds
            for direction, rate in rates.items():
                missing = goals[direction] - self._done[direction]
                seconds = min(seconds, missing / rate)
            if seconds == math.inf:
                return
            self.seconds += seconds
            for direction, rate in rates.items():
                done = self._done[direction] + seconds * rate
                is_complete = abs(done - goals[direction]) < _NEAR_BYTES
                self._done[direction] = goals[direction] if is_complete else done

    def _rates(self) -> dict[Direction, float]:
        """The rates of the directions that have bytes to copy."""
        rates: dict[Direction, float] = {}
        if self.queued["to_device"] > self._done["to_device"]:
            rates["to_device"] = self._link.to_device_bytes_per_second
        if self.queued["to_host"] > self._done["to_host"]:
            rates["to_host"] = self._link.to_host_bytes_per_second
        limit = self._link.both_bytes_per_second
        if len(rates) < 2 or limit is None:
            return rates
        share = min(1.0, limit / sum(rates.values()))
        return {direction: rate * share for direction, rate in rates.items()}


class SizesDevice(Device):
    """A device on which only sizes exist. It has more memory than any job needs: a budget limits
    the bytes on it.

    `link`: the rates of copies; None: they are not known, and no copy is ready before it is waited
    for. `like`: the device in whose chunks it counts; None: the CUDA device on which the link was
    measured.
    """

    name = "sizes"
    torch_device = torch.device("cpu")

    def __init__(self, link: Link | None = None, like: Sizing | None = None) -> None:
        if like:
            self.granularity = like.granularity
            self.chunk_bytes = like.chunk_bytes
        else:
            measured = None if link is None else link.chunk_bytes
            self.chunk_bytes = measured or CHUNK_BYTES
            # the chunks of a small simulated device are smaller
            self.granularity = min(GRANULARITY, self.chunk_bytes)
        self.link = link
        self._copies = _Copies(link or Link.of(_SLOW))
        self._chunks: weakref.WeakSet[_Chunk] = weakref.WeakSet()
        # how often the bytes of a slot were changed, by the slot's number
        self._writes: dict[int, int] = {}
        self._moved = threading.Condition()
        # the marks that threads of the manager's wait for, by the thread
        self._awaited: dict[int, _Mark] = {}
        self._others = weakref.WeakSet(threading.enumerate())
        self._is_closed = False

    # --- the worker's side

    @property
    def seconds(self) -> float:
        return self._copies.seconds

    def work(self, seconds: float) -> None:
        """Let the worker compute for so long, while copies go on and the manager's threads start
        more."""
        end = self.seconds + seconds
        self._settle()
        while self.seconds < end:
            with self._moved:
                self._copies.go_on(self._awaited.values(), end)
                self._moved.notify_all()
            self._settle()

    def change(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            for slot in self._slots(tensor):
                self._writes[slot] = self._writes.get(slot, 0) + 1

    def _slots(self, tensor: torch.Tensor) -> range:
        """The slots that hold anything of a tensor's storage. Each is of one range alone."""
        storage = tensor.untyped_storage()
        first = storage.data_ptr()
        end = first + storage.nbytes()
        return range(first // self.chunk_bytes, -(-end // self.chunk_bytes))

    def transfer(self, nbytes: int, direction: Direction) -> None:
        """Copy so many bytes of another owner, and wait for them."""
        with self._moved:
            self._copies.queued[direction] += nbytes
        self.order(direction)

    def _settle(self) -> None:
        """Return when every thread of the manager's waits for a copy, or has ended."""
        for _ in range(int(_SETTLES_SECONDS * 1000)):
            with self._moved:
                if all(map(self._is_waiting, threading.enumerate())):
                    return
                self._moved.wait(0.001)

    def _is_waiting(self, thread: threading.Thread) -> bool:
        """Whether a thread waits for a copy; True for a thread that is not the manager's."""
        if not isinstance(thread, BackgroundThread) or thread in self._others:
            return True
        mark = self._awaited.get(thread.ident or 0)
        return mark is not None and not self._copies.has_done(mark)

    # --- the contract of `Device`

    def host(self, nbytes: int) -> HostSlab:
        return SizedSlab(nbytes)

    def shared_host(
        self, file: int, nbytes: int, own: Sequence[tuple[int, int]], extra_bytes: int
    ) -> SharedHostSlab:
        raise HostMemoryError("a device of sizes has no memory that processes could share")

    def reserve(self, nbytes: int) -> Addresses:
        return _Addresses(round_up(nbytes, self.granularity), self.chunk_bytes)

    def create(self, nbytes: int) -> Chunk:
        chunk = _Chunk(nbytes)
        self._chunks.add(chunk)
        return chunk

    def wipe(self, chunks: Sequence[Chunk]) -> None:
        """Nothing: no chunk has content."""

    def wipe_mapped(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        """Nothing: see `wipe`."""

    def map(self, addresses: Addresses, chunks: Sequence[Chunk], start: int = 0) -> None:
        check_slots(chunks, start, self.chunk_bytes)

    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        check_slots((), start, self.chunk_bytes)

    def release(self, *chunks: Chunk) -> None:
        for chunk in chunks:
            self._chunks.discard(chunk)  # type: ignore[arg-type]  # another device's is not in it

    def copy(self, copies: Sequence[Copy], direction: Direction) -> None:
        with self._moved:
            self._copies.queued[direction] += sum(copy.nbytes for copy in copies)

    def order(self, direction: Direction | None = None) -> None:
        if direction in ("to_device", None):
            self.wait(self.mark("to_device"))
        if direction in ("to_host", None):
            self.wait(self.mark("to_host"))

    def sync(self) -> None:
        self.order()

    def mark(self, direction: Direction) -> Mark:
        return _Mark(direction, self._copies.queued[direction])

    def wait(self, mark: Mark) -> None:
        """Wait: a thread of the manager's really does, and the worker's own moves the clock on."""
        assert isinstance(mark, _Mark)
        with self._moved:
            if not is_background():
                self._copies.go_on([mark], float("inf"))
                self._moved.notify_all()
                return
            self._awaited[threading.get_ident()] = mark
            self._moved.notify_all()
            self._moved.wait_for(lambda: self._is_closed or self._copies.has_done(mark))
            del self._awaited[threading.get_ident()]

    def view(self, addresses: Addresses, offset: int, nbytes: int) -> torch.Tensor:
        return sized((nbytes,), address=addresses.base + offset)

    def known_fingerprints(
        self, addresses: Addresses, start: int, sizes: Sequence[int]
    ) -> torch.Tensor:
        first = (addresses.base + start) // self.chunk_bytes
        slots = range(first, first + len(sizes))
        writes = [self._writes.get(slot, 0) for slot in slots]
        return torch.tensor(writes, dtype=torch.int64, device="cpu")

    def memory(self) -> DeviceMemory:
        held = sum(chunk.nbytes for chunk in [*self._chunks])
        return DeviceMemory(_CAPACITY_BYTES, _CAPACITY_BYTES - held, 0, held, 0)

    def heal_poison(self, wait: bool = True) -> bool:
        return False

    def close(self) -> None:
        with self._moved:
            self._is_closed = True
            self._moved.notify_all()


# --- objects of a worker


class SizedModule(torch.nn.Module):
    """A module of storages. `storages`: the bytes of each, and the parameters that lie in it, on
    the meta device; none: it is a buffer."""

    def __init__(
        self,
        storages: Iterable[tuple[int, Sequence[torch.nn.Parameter]]],
    ) -> None:
        super().__init__()
        for index, (nbytes, parameters) in enumerate(storages):
            # in one module, all parameters would come before the buffers
            part = torch.nn.Module()
            self.add_module(f"part{index}", part)
            whole = sized((nbytes,))
            if not parameters:
                part.register_buffer("buffer", whole)
            for number, source in enumerate(parameters):
                tensor = within(whole.untyped_storage(), source.shape, source.dtype)
                parameter = torch.nn.Parameter(tensor, requires_grad=source.requires_grad)
                part.register_parameter(f"parameter{number}", parameter)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [*self.parameters(), *self.buffers()]

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def empty(self) -> None:
        """Take every tensor out, so that no value is handed back that does not exist."""
        for tensor in self.tensors:
            tensor.grad = None
            tensor.data = torch.empty(0, dtype=tensor.dtype, device="cpu")
        self._modules.clear()


@allow
class SizedOptimizer(torch.optim.Optimizer):
    """An optimizer whose steps create state, and compute nothing."""

    def __init__(self, parameters: Iterable[Any], state_of: StateOf = lambda _: {}) -> None:
        # The default is for the twin that a manager makes: its groups bring their own.
        super().__init__(parameters, {"state_of": state_of})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Create the state of every parameter that has a gradient and no state yet."""
        for group in self.param_groups:
            self._init_group(group)

    def _init_group(self, group: Mapping[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is None or parameter in self.state:
                continue
            state = dict(group["state_of"](parameter))
            for name, tensor in state.items():
                if parameter.is_meta or not tensor.dim():
                    state[name] = torch.empty_like(tensor)
                else:
                    state[name] = sized(tensor.shape, tensor.dtype)
            self.state[parameter] = state

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The state that exists, without counters."""
        tensors = []
        for state in self.state.values():
            tensors += [tensor for tensor in state.values() if tensor.dim()]
        return tensors

    def empty(self) -> None:
        """Take state and parameters out, so that no value is handed back that does not exist."""
        self.state.clear()
        self.param_groups.clear()


class SizedEngine(TaggedEngine):
    """A rollout engine that places its own memory. Its copies of the weights take the time of the
    link."""

    def __init__(
        self, device: SizesDevice, tag_bytes: Mapping[str, int], *, keeps_weights: bool
    ) -> None:
        super().__init__(
            tags=tuple(tag_bytes),
            tag_bytes=tag_bytes,
            offloaded=tuple(tag_bytes),
            weights="keep" if keeps_weights else "discard",
            verify="answer",
        )
        self._device = device
        self._copied_bytes = tag_bytes.get(WEIGHTS, 0) if keeps_weights else 0

    def offload(self, tags: Collection[str]) -> None:
        """Copy the weights to the host, if they leave and are kept."""
        self._device.transfer(self._copied_bytes * (WEIGHTS in tags), "to_host")

    def load(self, tags: Collection[str]) -> None:
        """Copy the weights to the device, if they come and were kept."""
        self._device.transfer(self._copied_bytes * (WEIGHTS in tags), "to_device")

    def drain(self) -> None:
        """Nothing is in flight."""

    def admit(self) -> None:
        """No request ever comes."""

    def receive(self, bucket: Sequence[tuple[str, torch.Tensor]]) -> None:
        """No bucket is ever sent."""
