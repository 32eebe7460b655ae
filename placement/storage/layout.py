"""Places of storages in a new range, and how tensors are pointed there and back.

The unit is the storage: all of its users (views, tied weights, saved tensors of a live graph,
references held in C++) follow. The device's `Adopter` chooses the way for each storage. The way
"rebind" (a storage born on the CPU, for an accelerator) gives each known tensor a new storage. An
unknown tensor would stay behind, so it is refused. All functions here run outside inference mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from placement.core.errors import RegistrationError
from placement.devices import base
from placement.devices.base import Adopter, Device, Way
from placement.devices.memory import Addresses
from placement.tensors.alive import storage_use_count
from placement.tensors.plain import Owned, as_lazy_as

ALIGNMENT = 512  # the alignment of storages, in bytes from the beginning of a range
# the alignment below `_SMALL` bytes: enough for every vector load, so that thousands of scalars
# take little space
_SMALL_ALIGNMENT = 64
_SMALL = 4096


class Adoptee(NamedTuple):
    """One storage to adopt, and every tensor known to use it."""

    name: str
    storage: torch.UntypedStorage
    aliases: tuple[torch.Tensor, ...]
    owned: tuple[Owned, ...] = ()  # the aliases that have a name

    @property
    def bases(self) -> tuple[torch.Tensor, ...]:
        """Tensors without a name of which the aliases are views. Autograd keeps them as long as the
        view (FSDP2's padded shard)."""
        named = {id(alias) for alias in self.aliases}
        bases = dict[int, torch.Tensor]()
        for alias in self.aliases:
            if alias._base is not None and id(alias._base) not in named:
                bases[id(alias._base)] = alias._base
        return tuple(bases.values())

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()


class RangeLayout:
    """Places for storages in a new range, with poison behind it. To make it touches no tensor.
    `reserve`: gives addresses instead of `Device.reserve`, such as those that were reserved
    earlier.
    Raises RegistrationError: a storage cannot get a place there (`_refuse_unknown`,
    `Adopter.refuse`)."""

    def __init__(
        self,
        device: Device,
        adoptees: Sequence[Adoptee],
        reserve: Callable[[int], Addresses] | None = None,
    ) -> None:
        self._device = device
        self._adoptees = tuple(adoptees)
        adopter = device.adopter
        self.sizes = tuple(adoptee.nbytes for adoptee in adoptees)
        # how each adoptee gets there
        self.ways: Sequence[Way] = [adopter.way(adoptee.storage) for adoptee in adoptees]
        for adoptee, way in zip(self._adoptees, self.ways, strict=True):
            if way == "rebind":
                _refuse_unknown(adoptee)
        adopter.refuse([(adoptee.name, adoptee.storage) for adoptee in adoptees])
        pooled = [index for index, way in enumerate(self.ways) if way == "pool"]
        pooled_sizes = [self.sizes[index] for index in pooled]
        sizes_behind_pool = [*self.sizes]
        for index in pooled:
            sizes_behind_pool[index] = 0
        offsets, self.nbytes = packed(sizes_behind_pool, adopter.pooled_bytes(pooled_sizes))
        self.addresses: Addresses = (reserve or device.reserve)(self.nbytes)
        device.unmap(self.addresses, self.nbytes)  # puts poison there
        self._pool: Any = None
        # by an adoptee's index: its number in the pool
        self._pool_numbers = {index: number for number, index in enumerate(pooled)}
        if pooled:
            self._pool = adopter.pool(self.addresses, pooled_sizes, self)
            for index, number in self._pool_numbers.items():
                offsets[index] = self._pool.offsets.get(number, 0)
        # the place of each adoptee, in bytes from `addresses.base`
        self.offsets: tuple[int, ...] = tuple(offsets)

    def move_in(self) -> None:
        """Point every adoptee to its place and drop its old memory, in the way that the adopter has
        chosen. The caller has saved the bytes. Idempotent."""
        places = zip(self._adoptees, self.ways, self.offsets, self.sizes, strict=True)
        for index, (adoptee, way, offset, nbytes) in enumerate(places):
            if not nbytes:
                continue
            storage = adoptee.storage
            if way == "pool":
                self._pool.take(self._pool_numbers[index], storage)
                continue
            home = self._device.view(self.addresses, offset, nbytes).untyped_storage()
            is_swapped = (storage.data_ptr(), storage.nbytes()) == (home.data_ptr(), nbytes)
            if way == "rebind":
                point_all((*adoptee.bases, *adoptee.aliases), home)
            elif not is_swapped:
                storage._swap_data_ptr_(home)  # type: ignore[attr-defined]

    def forget_adoptees(self) -> None:
        """Drop the references to storages and tensors, once all have moved in. `move_in` must not
        be called after that."""
        self._adoptees = ()


class Sizing(Protocol):
    """The facts about a device that decide how many bytes a range takes there."""

    @property
    def chunk_bytes(self) -> int: ...
    @property
    def granularity(self) -> int: ...
    @property
    def adopter(self) -> Adopter: ...


def expected_bytes(device: Sizing, sizes: Sequence[int]) -> int:
    """Upper bound of `RangeLayout.nbytes` for storages of these sizes on the range's device."""
    return max(packed(sizes)[1], device.adopter.pooled_bytes(sizes))


def chunk_sizes(device: Sizing, nbytes: int) -> tuple[int, ...]:
    """Sizes of the chunks that are behind a range of `nbytes` while it is loaded: full ones, and a
    tail in multiples of the granularity."""
    whole, rest = divmod(nbytes, device.chunk_bytes)
    tail = -(-rest // device.granularity) * device.granularity
    return (device.chunk_bytes,) * whole + ((tail,) if tail else ())


def packed(
    sizes: Sequence[int],
    start: int = 0,
) -> tuple[list[int], int]:
    """Aligned offsets for these sizes, one after the other from `start`, and the end of the
    last."""
    offsets = []
    for size in sizes:
        alignment = _SMALL_ALIGNMENT if size < _SMALL else ALIGNMENT
        if size:
            start = -(-start // alignment) * alignment
        offsets.append(start)
        start += size
    return offsets, start


def _refuse_unknown(adoptee: Adoptee) -> None:
    """Raise RegistrationError unless `adoptee.aliases` can be rebound and are the only users of the
    storage."""
    named = {id(alias): alias for alias in adoptee.aliases}
    for alias in named.values():
        if (
            alias.layout is not torch.strided
            or alias.is_conj()
            or alias.is_neg()
            or alias.is_quantized
        ):
            raise RegistrationError(
                f"{adoptee.name!r} cannot change device, because it is a sparse or quantised "
                f"tensor (layout {alias.layout}), or a lazily conjugated or negated view. Move the "
                "object to the device before you register it."
            )
    # one reference from each tensor, and one from the Python object of the storage
    num_known = len(named) + len(adoptee.bases) + 1
    surplus = storage_use_count(adoptee.storage._cdata) - num_known
    if surplus > 0:
        shapes = ", ".join(str(tuple(alias.shape)) for alias in named.values())
        raise RegistrationError(
            f"{adoptee.name!r}: {surplus} more user(s) of its memory than the {len(named)} known "
            f"(shapes {shapes}). Its memory is on {adoptee.storage.device}, and moving it to the "
            "device would leave the unknown users behind with the old values. Drop them (a state "
            "dict, a detached copy, a live graph), or move the object to the device before you "
            "register it."
        )


# --- pointing tensors and storages to memory


# dtype, storage offset, size and strides of a tensor
Form = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]


def form_of(tensor: torch.Tensor) -> Form:
    return tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()


def over(storage: torch.UntypedStorage, form: Form) -> torch.Tensor:
    """A tensor of this form over a storage."""
    dtype, offset, size, stride = form
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset, size, stride)


def byte_view(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's bytes: uint8, one-dimensional."""
    size = torch.Size((storage.nbytes(),))
    return over(storage, (torch.uint8, 0, size, (1,)))


def point(tensor: torch.Tensor, home: torch.UntypedStorage, form: Form) -> None:
    """Point one tensor to a part of a storage by `.data =`. It stays an inference tensor if it is
    one."""
    # an inference tensor takes only the data of another one
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.data = as_lazy_as(tensor, over(home, form))


def point_all(tensors: Iterable[torch.Tensor], home: torch.UntypedStorage) -> None:
    """Point tensors to a storage, each in its present form. Idempotent."""
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in tensors:
            if tensor.untyped_storage().data_ptr() != home.data_ptr():
                point(tensor, home, form_of(tensor))


def exchange(storage: torch.UntypedStorage, home: torch.UntypedStorage) -> bool:
    """Give a storage the memory of another one of any size, for all of its users. False where torch
    cannot."""
    if storage.device != home.device or not base.can_swap():
        return False
    # torch swaps only storages of one size, or with an empty one
    if storage.nbytes() != home.nbytes():
        storage._swap_data_ptr_(torch.UntypedStorage(0, device=home.device))  # type: ignore[attr-defined]
    storage._swap_data_ptr_(home)  # type: ignore[attr-defined]
    return True


def move_out(
    device: Device,
    storage: torch.UntypedStorage,
    aliases: Sequence[torch.Tensor],
    target: torch.device,
    content: torch.Tensor,
    homes: dict[int, torch.UntypedStorage],
) -> None:
    """Give a storage that lies in a range, and its tensors, ordinary torch memory again. If the
    target is the range's own device, and torch can exchange memory, every user of the storage
    follows. Otherwise `aliases` are pointed to the new memory, and a tensor that is not among them
    stays in the range. torch.OutOfMemoryError: everything is as before.
    `content`: the bytes, uint8, of the storage's size.
    `homes`: the new memory of each storage, by its old address, for calls that name other aliases
    of the same storage."""
    nbytes = storage.nbytes()
    if nbytes == 0:
        return
    follows = storage.device == target == device.torch_device
    if follows and device.adopter.way(storage) == "pool":
        device.adopter.reallocate(storage)
        byte_view(storage).copy_(content)
        return
    home = homes.get(storage.data_ptr())
    if home is None:
        home = torch.UntypedStorage(nbytes, device=target)
        byte_view(home).copy_(content)
    if not (follows and exchange(storage, home)):
        homes[storage.data_ptr()] = home
        point_all(aliases, home)
