"""Give a storage its place in a range, once, and ordinary memory when it leaves.

The unit is the storage: everything that points into it (views, tied weights, saved tensors of a live graph, references held in C++)
follows. The device's `Adopter` chooses the way for each storage. The way "rebind" (a storage born on the CPU, for an accelerator)
gives each known tensor a new storage. A tensor that nobody named would stay behind with the old bytes, so it is refused.

Everything here runs outside inference mode, on one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from placement.core.errors import RegistrationError
from placement.devices import adoption
from placement.devices.adoption import Adopter, Pool, Way
from placement.devices.base import Device
from placement.devices.memory import Addresses
from placement.tensors.plain import Owned, point_to

ALIGNMENT = 512
"""The alignment of storages, in bytes from the beginning of a range."""
_SMALL_ALIGNMENT = 64
"""The alignment of storages below `_SMALL` bytes. It is enough for every vector load, and thousands of scalars take little space."""
_SMALL = 4096


@dataclass(frozen=True, slots=True)
class Claim:
    """One storage to adopt, and every tensor known to use it."""

    name: str
    storage: torch.UntypedStorage
    aliases: tuple[torch.Tensor, ...]
    owned: tuple[Owned, ...] = ()
    """Those of the aliases that have a name."""

    @property
    def bases(self) -> tuple[torch.Tensor, ...]:
        """Tensors of which the aliases are views and that nobody names. Autograd keeps them as long as the view (FSDP2's padded shard)."""
        named = {id(alias) for alias in self.aliases}
        bases = {id(base): base for alias in self.aliases if (base := alias._base) is not None and id(base) not in named}
        return tuple(bases.values())

    @property
    def nbytes(self) -> int:
        return self.storage.nbytes()


class RangeLayout:
    """Places for storages in a new range, with poison behind it. Made by `prepare`, which moves nothing yet.

    Attributes:
        addresses: the range.
        offsets: the place of each claim, in bytes from `addresses.base`.
        nbytes: used length of the range.
        ways: the way in which each claim gets to its place.
    """

    def __init__(self, device: Device, claims: Sequence[Claim], reserve: Callable[[int], Addresses]) -> None:
        self._device = device
        self._claims = tuple(claims)
        self._sizes = tuple(claim.nbytes for claim in claims)
        self.ways: tuple[Way, ...] = tuple(device.adopter.way(claim.storage) for claim in claims)
        for claim, way in zip(self._claims, self.ways, strict=True):
            if way == "rebind":
                _refuse_unknown(claim)
        device.adopter.refuse([(claim.name, claim.storage) for claim in claims])
        pooled = [i for i, way in enumerate(self.ways) if way == "pool"]
        used = device.adopter.pooled_bytes([self._sizes[i] for i in pooled])
        places, self.nbytes = packed([0 if way == "pool" else size for way, size in zip(self.ways, self._sizes, strict=True)], used)
        self.addresses: Addresses = reserve(self.nbytes)
        device.unmap(self.addresses, self.nbytes)
        self._pool: Pool | None = None
        self._pool_index = {claim: index for index, claim in enumerate(pooled)}
        if pooled:
            sizes = [self._sizes[i] for i in pooled]
            self._pool = device.adopter.pool(self.addresses, sizes, self)
            for i, index in self._pool_index.items():
                places[i] = self._pool.offsets.get(index, 0)
        self.offsets: tuple[int, ...] = tuple(places)
        self._homes: dict[int, torch.UntypedStorage] = {}

    def is_in(self, index: int) -> bool:
        """Whether claim `index` and all its tensors lie at its place. True for an empty storage."""
        nbytes, target = self._sizes[index], self.addresses.base + self.offsets[index]
        if nbytes == 0:
            return True
        if self.ways[index] == "rebind":
            return all(alias.untyped_storage().data_ptr() == target for alias in self._claims[index].aliases)
        storage = self._claims[index].storage
        return storage.data_ptr() == target and storage.nbytes() == nbytes

    def move_in(self, index: int) -> None:
        """Point claim `index` to its place and drop its old memory. Its bytes are not carried over: the caller has saved them.

        Idempotent, and safe to repeat after an interrupt anywhere inside. After an interrupt a storage of the way "pool" may be empty until
        the repetition, so nobody may read it before.
        """
        if self._sizes[index] == 0:
            return
        claim = self._claims[index]
        if self._pool is not None and self.ways[index] == "pool":
            self._pool.take(self._pool_index[index], claim.storage)
        elif self.ways[index] == "swap":
            if not self.is_in(index):
                home = self._device.view(self.addresses, self.offsets[index], self._sizes[index]).untyped_storage()
                claim.storage._swap_data_ptr_(home)  # type: ignore[attr-defined]
        elif not self.is_in(index):
            # Kept in `_homes`, so that all aliases get the same new storage even if an interrupt and a repetition come between them.
            if index not in self._homes:
                self._homes[index] = self._device.view(self.addresses, self.offsets[index], self._sizes[index]).untyped_storage()
            _rebind((*claim.bases, *claim.aliases), self._homes[index])
        self._homes.pop(index, None)

    def forget_claims(self) -> None:
        """Drop the references to storages and tensors, once all have moved in. Afterwards only the attributes can be used."""
        self._claims = ()
        self._homes.clear()


def prepare(device: Device, claims: Sequence[Claim], reserve: Callable[[int], Addresses] | None = None) -> RangeLayout:
    """Reserve a place for every storage, with poison behind it. No tensor is touched.

    Args:
        reserve: gives addresses instead of `Device.reserve`, such as those that were reserved earlier.

    Raises:
        RegistrationError: a storage must be rebound, but a tensor that no claim names uses it, or one of its tensors cannot be rebound;
            a storage lies in a private memory pool; or torch's allocator is configured in a way that does not work with a range.
        DeviceMemoryError: no addresses are left.
    """
    return RangeLayout(device, claims, reserve or device.reserve)


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
    """Sizes of the chunks that are behind a range of `nbytes` while it is loaded: full ones, and a tail in multiples of the granularity."""
    whole, rest = divmod(nbytes, device.chunk_bytes)
    tail = -(-rest // device.granularity) * device.granularity
    return (device.chunk_bytes,) * whole + ((tail,) if tail else ())


def move_out(
    device: Device,
    storage: torch.UntypedStorage,
    aliases: Sequence[torch.Tensor],
    target_device: torch.device,
    fill: Callable[[torch.Tensor], None],
    homes: dict[int, torch.UntypedStorage] | None = None,
) -> None:
    """Give a storage that lies in a range, and its tensors, ordinary torch memory again.

    If the target is the range's own device, every user of the storage follows. Otherwise `aliases` are rebound, and a tensor that is not
    among them stays in the range.

    Args:
        aliases: every tensor known to use the storage.
        fill: writes the bytes into a uint8 tensor of the storage's size on `target_device`.
        homes: the new memory of each storage, by its old address. Given the same dictionary, an interrupted call can be repeated: the
            aliases that it had not reached get the same memory as the others.

    Raises:
        torch.OutOfMemoryError: no memory on the target; nothing changed.
    """
    nbytes = storage.nbytes()
    if nbytes == 0:
        return
    follows = storage.device == target_device == device.torch_device
    if follows and device.adopter.way(storage) == "pool":
        device.adopter.reallocate(storage)
        fill(byte_view(storage))
        return
    homes = {} if homes is None else homes
    home = homes.get(storage.data_ptr())
    if home is None:
        home = torch.UntypedStorage(nbytes, device=target_device)
        fill(byte_view(home))
    if follows and adoption.can_swap():
        storage._swap_data_ptr_(home)  # type: ignore[attr-defined]
    else:
        homes[storage.data_ptr()] = home
        _rebind(aliases, home)


def exchange(storage: torch.UntypedStorage, home: torch.UntypedStorage) -> bool:
    """Give a storage, for everybody who uses it, the memory of another one of any size. False where torch cannot."""
    if storage.device != home.device or not adoption.can_swap():
        return False
    if storage.nbytes() != home.nbytes():  # torch swaps only storages of one size, or with an empty one
        storage._swap_data_ptr_(torch.UntypedStorage(0, device=home.device))  # type: ignore[attr-defined]
    storage._swap_data_ptr_(home)  # type: ignore[attr-defined]
    return True


def packed(sizes: Sequence[int], start: int = 0) -> tuple[list[int], int]:
    """Aligned offsets for these sizes, one after the other from `start`, and the end of the last."""
    offsets = []
    for size in sizes:
        alignment = _SMALL_ALIGNMENT if size < _SMALL else ALIGNMENT
        if size:
            start = -(-start // alignment) * alignment
        offsets.append(start)
        start += size
    return offsets, start


def byte_view(storage: torch.UntypedStorage) -> torch.Tensor:
    """A uint8 tensor over a whole storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _rebind(aliases: Sequence[torch.Tensor], home: torch.UntypedStorage) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        for alias in aliases:
            if alias.untyped_storage().data_ptr() != home.data_ptr():
                point_to(alias, home, alias.dtype, int(alias.storage_offset()), alias.size(), alias.stride())


def _refuse_unknown(claim: Claim) -> None:
    """Raise RegistrationError unless `claim.aliases` can be rebound and are the only users of the storage."""
    named = {id(alias): alias for alias in claim.aliases}
    for alias in named.values():
        if alias.layout is not torch.strided or alias.is_conj() or alias.is_neg() or alias.is_quantized:
            raise RegistrationError(
                f"{claim.name!r} cannot change device, because it is a sparse or quantised tensor (layout {alias.layout}), or a lazily "
                "conjugated or negated view. Move the object to the device before you register it."
            )
        if alias.untyped_storage()._cdata != claim.storage._cdata:
            raise RegistrationError(f"{claim.name!r}: a tensor that lies in another storage is named as its alias")
    # One reference from each tensor and one from the Python object of the storage.
    surplus = int(torch._C._storage_Use_Count(claim.storage._cdata)) - len(named) - len(claim.bases) - 1
    if surplus > 0:
        shapes = ", ".join(str(tuple(alias.shape)) for alias in named.values())
        raise RegistrationError(
            f"{claim.name!r}: {surplus} more user(s) of its memory than the {len(named)} known (shapes {shapes}). Its memory is on "
            f"{claim.storage.device}, and moving it to the device would leave the unknown users behind with the old values. Drop them (a "
            "state dict, a detached copy, a live graph), or move the object to the device before you register it."
        )
