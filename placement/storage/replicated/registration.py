"""Register an object of which every rank of one machine has the same bytes. Each rank writes its share of the one host copy.

The object does not change before every rank has proved that it has the same bytes at the same places, and has written its share. The
proofs are fingerprints of the object's own storages, which each rank leaves in the shared memory.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import itertools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack

import torch

from placement.core.errors import RegistrationError
from placement.devices.base import Device
from placement.devices.host.mapping import PAGE, round_up
from placement.devices.host.shared_slab import new_file, opened_file
from placement.devices.memory import Copy, SharedSlab
from placement.ownership.adapter import Adapter
from placement.storage.layout import Adoptee, Owner, RangeLayout, prepare
from placement.storage.point import byte_view
from placement.storage.range import Range, used_bytes
from placement.storage.replicated.range import SharedRange, own_spans
from placement.storage.replicated.ranks import Ranks
from placement.storage.scan import StorageScanner
from placement.storage.transfer.fingerprint import fingerprints

_PIECE_BYTES = 64 << 20
"""Bytes of a storage for one fingerprint. Computing one takes temporary memory of a few times as much."""


def words_of(slab: SharedSlab, world_size: int) -> torch.Tensor:
    """One word of each rank: int64, shape (world_size,), in the shared memory right behind the host copy."""
    return slab.extra[: 8 * world_size].view(torch.int64)


def _prints_of(slab: SharedSlab, world_size: int) -> torch.Tensor:
    """The fingerprints of each rank: int64, one row a rank, in the shared memory behind `words_of`."""
    return slab.extra[8 * world_size :].view(torch.int64).view(world_size, -1)


class SharedScanner(StorageScanner):
    """A scanner whose first range is shared by all ranks. It has the storages that exist at registration and that training does not
    change: all of a readonly object, the frozen parameters of another one. Every other range is this rank's own.
    """

    def __init__(self, device: Device, adapter: Adapter, name: str, owner: Owner, ranks: Ranks, *, readonly: bool) -> None:
        super().__init__(device, adapter, name, owner)
        self._ranks = ranks
        self._readonly = readonly

    def adopt_first(self, adoptees: list[Adoptee]) -> tuple[Range, ...]:
        shared, own = self._divide(adoptees)
        if not shared:
            raise RegistrationError(
                f"{self._name!r} has no frozen parameters, so there is nothing to share; add readonly=True if it never changes on any "
                "rank, or register it without replicated=True"
                if own
                else f"{self._name!r} has no tensors, so there is nothing to share; register it without replicated=True"
            )
        return self._adopt_together(shared), *super().adopt_first(own)

    def first_host_bytes(self, adoptees: Sequence[Adoptee]) -> int:
        shared, own = self._divide(adoptees)
        return super().first_host_bytes(shared) // self._ranks.shares.world_size + super().first_host_bytes(own)

    def _divide(self, adoptees: Sequence[Adoptee]) -> tuple[list[Adoptee], list[Adoptee]]:
        """The storages that all ranks share, and this rank's own."""
        is_shared = [self._readonly or _is_frozen(adoptee) for adoptee in adoptees]
        return [*itertools.compress(adoptees, is_shared)], [*itertools.compress(adoptees, map(operator.not_, is_shared))]

    def _adopt_together(self, adoptees: list[Adoptee]) -> SharedRange:
        """Make the shared range and write this rank's share. Every rank calls this at the same time.

        Raises:
            RegistrationError: the ranks do not have the same tensors, or are on several machines.
            HostMemoryError, DeviceMemoryError: no memory for this rank's share, or no addresses.
            GroupError, CoordinatorLost: another rank failed, or the group cannot be reached.
        """
        device, ranks, shares = self._device, self._ranks, self._ranks.shares
        layout = prepare(device, adoptees, self._addresses)
        nbytes = used_bytes(layout.nbytes)
        prints = _fingerprints(adoptees)
        extra_bytes = 8 * shares.world_size * (1 + len(prints))
        with ExitStack() as files:  # the file stays open until every rank has mapped it
            file, path = -1, ""
            if shares.rank == 0:
                file, path = files.enter_context(new_file(round_up(nbytes, PAGE) + extra_bytes))
            said = ranks.exchange_texts("layout", f"{_layout(device, adoptees, layout)} {path}")
            self._check_layouts([each.partition(" ")[0] for each in said])
            if shares.rank != 0:
                file = files.enter_context(self._file_of_rank_0(said[0].partition(" ")[2]))
            slab = device.shared_host(file, nbytes, own_spans(layout, device.chunk_bytes, shares), extra_bytes)
            self._write(adoptees, layout, slab)
            table = _prints_of(slab, shares.world_size)
            table[shares.rank] = torch.tensor([value for _, value in prints], dtype=torch.int64, device="cpu")
            ranks.exchange_texts("share", "written")
        self._check_equal(table, [name for name, _ in prints])
        self._try_out()
        slab.pin()
        return SharedRange(device, layout, slab, tuple(adoptees), shares)

    def _file_of_rank_0(self, path: str) -> AbstractContextManager[int]:
        try:
            return opened_file(path)
        except (OSError, ValueError) as error:
            raise RegistrationError(
                f"{self._name!r} cannot be replicated: this rank cannot open the memory of rank 0 ({error}). The ranks must be on one "
                "machine, as one user, and see each other's /proc (one container, or a shared PID namespace)."
            ) from error

    def _write(self, adoptees: Sequence[Adoptee], layout: RangeLayout, slab: SharedSlab) -> None:
        """Write this rank's share of the host copy, and wait until it is there."""
        copies = []
        spans = own_spans(layout, self._device.chunk_bytes, self._ranks.shares)
        for adoptee, start, first, nbytes in _overlaps(adoptees, layout.offsets, spans):
            if adoptee.storage.device == self._device.torch_device:
                copies.append(Copy(adoptee.storage.data_ptr() + first, slab.address + start, nbytes))
            else:
                slab.view(start, nbytes).copy_(byte_view(adoptee.storage)[first : first + nbytes])
        if copies:
            self._device.copy(copies, "to_host")
        self._device.sync()

    def _check_layouts(self, layouts: Sequence[str]) -> None:
        others = _minority(layouts)
        if others:
            raise RegistrationError(
                f"{self._name!r} cannot be replicated: rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} "
                f"has other tensors than the rest (names, shapes, dtypes, device, order). Build the same model on every "
                "rank and on the same kind of device, or register it without replicated=True."
            )

    def _check_equal(self, table: torch.Tensor, names: Sequence[str]) -> None:
        for column in (table != table[:1]).any(dim=0).nonzero().flatten().tolist():
            others = _minority(table[:, column].tolist())
            raise RegistrationError(
                f"{self._name!r} cannot be replicated: {names[column]!r} has other bytes on rank{'s' if len(others) > 1 else ''} "
                f"{', '.join(map(str, others))} than on the rest. Load the same values on every rank before you register it, or register "
                "it without replicated=True."
            )

    def _try_out(self) -> None:
        """Run one collective. It creates the communicator now, so that no later load lacks memory for it, and shows the ranks' order."""
        shares = self._ranks.shares
        out = torch.zeros(shares.world_size, dtype=torch.uint8, device=self._device.torch_device)
        out[shares.rank] = shares.rank
        try:
            self._ranks.gather(out, [])
        except RuntimeError as error:
            raise RegistrationError(
                f"{self._name!r} cannot be replicated: an all-gather on {self._device.torch_device} failed: {error}. The process group "
                "needs a backend for that device (nccl for CUDA, gloo for the CPU)."
            ) from error
        if (found := out.tolist()) != [*range(shares.world_size)]:
            raise RegistrationError(
                f"{self._name!r} cannot be replicated: the process group has the ranks in another order than the manager's group: {found}. "
                "Pass replicated=a process group whose ranks are in the same order."
            )


def _is_frozen(adoptee: Adoptee) -> bool:
    """Whether a storage is of parameters alone, none of which is trained. A buffer may change without that (running statistics)."""
    tensors = [owned.tensor if owned.wrapper is None else owned.wrapper for owned in adoptee.owned]
    return all(isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad for tensor in tensors)


def _layout(device: Device, adoptees: Sequence[Adoptee], layout: RangeLayout) -> str:
    """A digest that is the same on two ranks if they have the same tensors at the same places."""
    lines = [f"{device.chunk_bytes} {layout.nbytes}"]
    for adoptee, offset in zip(adoptees, layout.offsets, strict=True):
        first = adoptee.aliases[0]
        form = first.dtype, first.storage_offset(), tuple(first.size()), first.stride()
        lines.append(f"{adoptee.name} {adoptee.storage.device.type} {adoptee.nbytes} {offset} {form}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _fingerprints(adoptees: Sequence[Adoptee]) -> list[tuple[str, int]]:
    """(name, 64 bits) of every piece of every storage, computed where the storage lies.

    Storages on the host are hashed, by threads. A hash is never compared with a device's fingerprint, because ranks of the same layout have
    the same tensors on the host.
    """
    on_host = [adoptee for adoptee in adoptees if adoptee.storage.device.type == "cpu"]
    pieces = [(adoptee, start) for adoptee in on_host for start in range(0, adoptee.nbytes, _PIECE_BYTES)]
    with ThreadPoolExecutor(thread_name_prefix="placement-hash") as threads:
        hashes = list(threads.map(_hash, pieces))
    names = [adoptee.name for adoptee, _ in pieces]
    found: list[torch.Tensor] = []
    for adoptee in adoptees:
        if adoptee.storage.device.type != "cpu":
            data = byte_view(adoptee.storage)
            whole = len(data) // 8 * 8
            prints = [fingerprints(data, [min(_PIECE_BYTES, whole - start) for start in range(0, whole, _PIECE_BYTES)])]
            if whole < len(data):
                prints.append(fingerprints(torch.cat([data[whole:], data.new_zeros(whole + 8 - len(data))]), [8]))
            names += [adoptee.name] * sum(map(len, prints))
            found += prints
    return list(zip(names, hashes + (torch.cat(found).tolist() if found else []), strict=True))


def _hash(piece: tuple[Adoptee, int]) -> int:
    adoptee, start = piece
    nbytes = min(_PIECE_BYTES, adoptee.nbytes - start)
    data = (ctypes.c_char * nbytes).from_address(adoptee.storage.data_ptr() + start)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _overlaps(
    adoptees: Sequence[Adoptee], offsets: Sequence[int], spans: Sequence[tuple[int, int]]
) -> Iterator[tuple[Adoptee, int, int, int]]:
    """(adoptee, offset in the range, offset in the storage, bytes) of each part of a adoptee that lies in one of these ordered spans."""
    starts = [start for start, _ in spans]
    for adoptee, offset in zip(adoptees, offsets, strict=True):
        for start, nbytes in spans[max(0, bisect.bisect_right(starts, offset) - 1) :]:
            if start >= offset + adoptee.nbytes:
                break
            first, end = max(start, offset), min(start + nbytes, offset + adoptee.nbytes)
            if first < end:
                yield adoptee, first, first - offset, end - first


def _minority(said: Sequence[object]) -> list[int]:
    """The ranks that say something else than most do. If no answer is the most frequent, the earliest of the frequent ones counts."""
    common = max(Counter(said).values())
    usual = next(each for each in said if Counter(said)[each] == common)
    return [rank for rank, each in enumerate(said) if each != usual]
