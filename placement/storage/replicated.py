"""The storage of an object that has the same bytes on every rank of one machine. The ranks share one host copy and load it together.

A readonly object has all of its bytes in the shared range. Another one has its frozen parameters there; what it trains is in ranges of
each rank's own. The shared host copy is never written. If frozen parameters change on a rank (a LoRA merge), its next offload gives this
rank a host copy of its own, with the new values.

The object does not change before every rank has proved that it has the same bytes at the same places, and has written its share of the
host copy. The proofs are fingerprints of the object's own storages, which each rank leaves in the shared memory.

Each rank copies its parts over its own link, chunk by chunk. The rest comes by all-gather, over NVLink where there is one. No rank may
wait in a collective for another one that may still fail for lack of memory. So a load has two halves:

* In the phase transition's move, each rank maps all chunks, and enqueues the copies of its own parts with an event behind each chunk's.
  The load is not committed yet. If the transition fails, the memory is taken away again; the host copy was authoritative all the time.
* `complete` gets the rest. Where the ranks have agreed on the change for which they prepared the load, they all-gather chunk by chunk,
  each behind its event. Everywhere else (going back after a failure, a rank that is alone) the rest comes over the rank's own link.

Before it votes, every rank writes into the shared memory for which change it has prepared a load. After the vote all ranks read the same
words, so all of them gather or none does. A rank that has left, or whose collective failed, writes that there for good.
"""

from __future__ import annotations

import abc
import bisect
import ctypes
import hashlib
import itertools
import logging
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import timedelta

import torch

from placement.core.errors import RegistrationError
from placement.devices.base import Device
from placement.devices.host.mapping import PAGE, round_up
from placement.devices.host.shared_slab import new_file, opened_file
from placement.devices.memory import Copy, HostSlab, Mark, SharedSlab
from placement.ownership.adapter import Adapter
from placement.storage.layout import Adoptee, Owner, RangeLayout, byte_view
from placement.storage.managed import ManagedStorage
from placement.storage.pages import Behind
from placement.storage.range import Range, used_bytes
from placement.storage.scan import StorageScanner
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.fingerprint import fingerprints

_PIECE_BYTES = 64 << 20
"""Bytes of a storage for one fingerprint. Computing one takes temporary memory of a few times as much."""
_ALONE, _LEFT = -1, -2
_REASONS = {_ALONE: "rank {} takes part no longer, and has logged why", _LEFT: "rank {} has unregistered it"}
_logger = logging.getLogger("placement")


# --- the shared range


@dataclass(frozen=True, slots=True)
class Shares:
    """How a run of bytes is divided among ranks: one equal part of whole pages for each, in rank order, and then an undivided rest."""

    rank: int
    world_size: int

    def part_bytes(self, nbytes: int) -> int:
        """Size in bytes of each rank's part."""
        return nbytes // self.world_size // PAGE * PAGE

    def own(self, nbytes: int) -> tuple[int, int]:
        """(offset, bytes) of the span that this rank writes: its part, and for the last rank the rest as well."""
        part = self.part_bytes(nbytes)
        start = self.rank * part
        return start, nbytes - start if self.rank == self.world_size - 1 else part


def chunk_spans(nbytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of each chunk's used bytes, rounded up to whole pages."""
    end = round_up(nbytes, PAGE)
    for start in range(0, end, chunk_bytes):
        yield start, min(chunk_bytes, end - start)


class SharedRange(Range):
    """A range whose chunks are divided among the ranks one by one, so that a chunk can be gathered as soon as its parts have arrived."""

    def __init__(self, device: Device, layout: RangeLayout, slab: SharedSlab, adoptees: tuple[Adoptee, ...], shares: Shares) -> None:
        super().__init__(device, layout, slab, adoptees, transient=False)
        self.shared_slab: SharedSlab | None = slab
        """The host copy of all ranks; None once this rank has one of its own."""
        self.shares = shares
        self._spans = tuple(chunk_spans(self.nbytes, device.chunk_bytes))

    @property
    def is_shared(self) -> bool:
        return self.shared_slab is not None

    def leave_shared(self, own: HostSlab) -> None:
        """Use another slab, which has the same bytes, from now on."""
        self.pages.host, self.shared_slab = own, None

    def part_bytes(self, index: int) -> int:
        """Size in bytes of each rank's part of one chunk; 0 where the chunk is too small to divide."""
        return self.shares.part_bytes(self._spans[index][1])

    def gathered(self, index: int) -> tuple[int, int]:
        """(offset, bytes) in the range of the parts of all ranks together, in one chunk."""
        return self._spans[index][0], self.shares.world_size * self.part_bytes(index)

    def own_copies(self, index: int) -> list[Copy]:
        """The copies that this rank makes of one chunk: its part, and the undivided rest."""
        part, used = self.part_bytes(index), self.used_sizes[index]
        runs = [(self.shares.rank * part, part), (self.shares.world_size * part, used - self.shares.world_size * part)]
        return [self._copy(self.starts[index] + start, nbytes) for start, nbytes in runs if nbytes > 0]

    def others_copies(self, index: int) -> list[Copy]:
        """The copies of the other ranks' parts of one chunk."""
        part = self.part_bytes(index)
        first, last = self.shares.rank * part, (self.shares.rank + 1) * part
        runs = [(0, first), (last, self.shares.world_size * part - last)]
        return [self._copy(self.starts[index] + start, nbytes) for start, nbytes in runs if nbytes > 0]

    def _copy(self, offset: int, nbytes: int) -> Copy:
        return Copy(self.layout.addresses.base + offset, self.slab.address + offset, nbytes)


def own_spans(layout: RangeLayout, chunk_bytes: int, shares: Shares) -> list[tuple[int, int]]:
    """(offset, bytes) of each span that this rank writes in the host copy of a range, in order."""
    spans = []
    for start, nbytes in chunk_spans(used_bytes(layout.nbytes), chunk_bytes):
        offset, own = shares.own(nbytes)
        if own:
            spans.append((start + offset, own))
    return spans


# --- the ranks


class Ranks(abc.ABC):
    """The ranks of one machine that share host copies, and gather by a torch.distributed process group.

    Args:
        process_group: a group of the same ranks, in the same order.
        shares: how bytes are divided among the ranks; it has this rank's number.
        deadline_seconds: the limit for one collective, where its backend keeps to it (gloo does; NCCL has its watchdog instead).
    """

    def __init__(self, process_group: torch.distributed.ProcessGroup, shares: Shares, deadline_seconds: float) -> None:
        from torch._C._distributed_c10d import AllgatherOptions  # not in every build of torch

        self.shares = shares
        self._process_group = process_group
        self._options = AllgatherOptions()
        self._options.asyncOp = False
        self._options.timeout = timedelta(seconds=deadline_seconds)

    @property
    @abc.abstractmethod
    def change(self) -> int:
        """The number of the present change of the group, 1 or more. All ranks have the same one; every change of every group another."""

    @property
    @abc.abstractmethod
    def agreed_change(self) -> int:
        """The number of the last change on which all ranks have agreed."""

    @abc.abstractmethod
    def exchange_texts(self, what: str, text: str) -> list[str]:
        """Send text to all ranks under the topic `what`. Returns the text of each rank on this topic, by rank.

        Raises:
            GroupError: a rank failed in the meantime, or did not answer in time.
            CoordinatorLost: the group cannot be reached.
        """

    @property
    def gone(self) -> str | None:
        """Why no collective is possible any more; None while they are possible."""
        try:
            torch.distributed.get_process_group_ranks(self._process_group)
        except (KeyError, ValueError, RuntimeError):
            return "the process group was destroyed"
        return None

    def gather(self, out: torch.Tensor) -> None:
        """All-gather in place, on the current stream. `out` has the parts of all ranks, in rank order; this rank's is filled in.

        Raises:
            RuntimeError: the collective failed.
        """
        # Not torch.distributed.all_gather_into_tensor: it takes no deadline, and torch 2.13 has renamed it.
        part = out.numel() // self.shares.world_size
        work = self._process_group._allgather_base(out, out[self.shares.rank * part :][:part], self._options)
        if work is not None:  # torch 2.13 returns None where the stream waits by itself
            work.wait()


# --- registration


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
                f"{self.name!r} has no frozen parameters, so there is nothing to share; add readonly=True if it never changes on any "
                "rank, or register it without replicated=True"
                if own
                else f"{self.name!r} has no tensors, so there is nothing to share; register it without replicated=True"
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
        layout = RangeLayout(device, adoptees, self._addresses)
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
            table = slab.extra[8 * shares.world_size :].view(torch.int64).view(shares.world_size, -1)  # behind the words, a row a rank
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
                f"{self.name!r} cannot be replicated: this rank cannot open the memory of rank 0 ({error}). The ranks must be on one "
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
                f"{self.name!r} cannot be replicated: rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))} "
                f"has other tensors than the rest (names, shapes, dtypes, device, order). Build the same model on every "
                "rank and on the same kind of device, or register it without replicated=True."
            )

    def _check_equal(self, table: torch.Tensor, names: Sequence[str]) -> None:
        for column in (table != table[:1]).any(dim=0).nonzero().flatten().tolist():
            others = _minority(table[:, column].tolist())
            raise RegistrationError(
                f"{self.name!r} cannot be replicated: {names[column]!r} has other bytes on rank{'s' if len(others) > 1 else ''} "
                f"{', '.join(map(str, others))} than on the rest. Load the same values on every rank before you register it, or register "
                "it without replicated=True."
            )

    def _try_out(self) -> None:
        """Run one collective. It creates the communicator now, so that no later load lacks memory for it, and shows the ranks' order."""
        shares = self._ranks.shares
        out = torch.zeros(shares.world_size, dtype=torch.uint8, device=self._device.torch_device)
        out[shares.rank] = shares.rank
        try:
            self._ranks.gather(out)
        except RuntimeError as error:
            raise RegistrationError(
                f"{self.name!r} cannot be replicated: an all-gather on {self._device.torch_device} failed: {error}. The process group "
                "needs a backend for that device (nccl for CUDA, gloo for the CPU)."
            ) from error
        if (found := out.tolist()) != [*range(shares.world_size)]:
            raise RegistrationError(
                f"{self.name!r} cannot be replicated: the process group has the ranks in another order than the manager's group: {found}. "
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
    """(adoptee, offset in the range, offset in the storage, bytes) of each part of an adoptee that lies in one of these ordered spans."""
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


# --- the storage


class ReplicatedStorage(ManagedStorage):
    """The storage of an object of which every rank has the same bytes, or the same frozen parameters.

    Args:
        ranks: the ranks that share it. All of them register it in the same change of the group.
    """

    def __init__(self, device: Device, adapter: Adapter, name: str, readonly: bool, ranks: Ranks) -> None:
        super().__init__(device, adapter, name, readonly, SharedScanner(device, adapter, name, self, ranks, readonly=readonly))
        self._ranks = ranks
        self._waiting: list[tuple[SharedRange, int, Mark]] = []
        """Chunks whose own part is on its way, each with a mark that tells when it has arrived."""
        self._prepared = 0
        """The number of the group's change for which this rank has last prepared a load."""
        self.alone: str | None = None
        """Why this rank loads everything over its own link from now on; None while the ranks load together."""

    @property
    def can_prefetch(self) -> bool:
        """Whether bytes can arrive early: those of this rank alone. A load gathers what other ranks copy, so all ranks would have to bring
        the same chunks of the shared range early."""
        return any(not r.is_shared for r in self.ranges)

    # --- loading

    def bring(self, r: Range, indices: Sequence[int]) -> int:
        if not isinstance(r, SharedRange) or not self._may_gather():
            return super().bring(r, indices)
        self._prepared = self._ranks.change
        self._say(self._prepared)
        brought = 0
        for index in indices:
            copies = r.own_copies(index)
            self.device.copy(copies, "to_device")
            brought += sum(copy.nbytes for copy in copies)
            r.pages.note_filling((index,))
            if r.part_bytes(index):
                self._waiting.append((r, index, self.device.mark("to_device")))
        return brought

    @property
    def is_complete(self) -> bool:
        return not self._waiting

    def complete(self) -> None:
        if self._prepared == self._ranks.agreed_change and self._all_are_ready():
            try:
                self._gather()
            except Exception as error:
                self._give_up(f"a collective failed: {error}")
                self._load_rest()
        else:
            self._prepare_nothing()
            self._load_rest()
        self.device.order()
        self._waiting.clear()

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        if not self.on_device and self._prepared == self._ranks.change:
            self._prepare_nothing()
        super().make_consistent(chunk_pool)
        self._waiting.clear()

    def unadopt(self) -> None:
        self._say(_LEFT)
        super().unadopt()

    def _gather(self) -> None:
        # Sorted, so that every rank gathers in the same order, whatever chunks its chunk pool had.
        order = {r: position for position, r in enumerate(self.ranges)}
        for r, index, mark in sorted(self._waiting, key=lambda each: (order[each[0]], each[1])):
            with self.device.after(mark):
                self._ranks.gather(self.device.view(r.layout.addresses, *r.gathered(index)))

    def _load_rest(self) -> None:
        self.device.copy([copy for r, index, _ in self._waiting for copy in r.others_copies(index)], "to_device")

    # --- a host copy of this rank's own

    def make_host_copy_own(self, r: Range) -> None:
        if isinstance(r, SharedRange) and r.is_shared:
            own = self.device.host(r.nbytes)
            own.view(0, r.nbytes).copy_(r.host.view(0, r.nbytes))
            self._give_up(f"its frozen parameters changed on this rank, which has a host copy of {r.nbytes:,} bytes of its own from now on")
            r.leave_shared(own)
            self.by_address.set(self.ranges)

    def before_forced_offload(self, r: Range) -> None:
        if r.is_shared and not self.readonly and self._has_changed(r):
            self.make_host_copy_own(r)
        elif r.is_shared:
            r.pages.note_clean(r.pages.at(Behind.OWN))

    def _has_changed(self, r: Range) -> bool:
        """Whether any chunk that a range has on the device differs from the host copy."""
        prints = None if r.prints is None else r.prints.cpu()
        held = r.pages.at(Behind.OWN)
        return prints is None or any(self.fingerprint(r, each, each + 1).cpu()[0] != prints[each] for each in held)

    # --- who takes part

    def _may_gather(self) -> bool:
        if self.alone is None and (reason := self._ranks.gone) is not None:
            self._give_up(reason)
        return self.alone is None

    def _all_are_ready(self) -> bool:
        """Whether every rank has prepared the same load and will gather it. Meaningful once all of them have voted."""
        words = self._words()
        said = [] if words is None else words.tolist()
        for rank, word in enumerate(said):
            if word in _REASONS:
                self._give_up(_REASONS[word].format(rank))
        return self.alone is None and set(said) == {self._prepared}

    def _give_up(self, reason: str) -> None:
        """Load alone from now on, and tell the other ranks."""
        if self.alone is None:
            self.alone = reason
            self._say(_ALONE)
            _logger.warning("%r is loaded by each rank alone from now on, at the speed of its own link: %s", self.name, reason)

    def _words(self) -> torch.Tensor | None:
        """The word of each rank, right behind the host copy: the number of the change for which it has prepared a load, or why it takes
        part no longer. None where this rank does not share the host copy any more."""
        slab = next((r.shared_slab for r in self.ranges if isinstance(r, SharedRange)), None)
        return None if slab is None else slab.extra[: 8 * self._ranks.shares.world_size].view(torch.int64)

    def _say(self, word: int) -> None:
        """Write this rank's word, unless it does not share the host copy any more: its last word stays."""
        if (words := self._words()) is not None:
            words[self._ranks.shares.rank] = word

    def _prepare_nothing(self) -> None:
        """So that a rank that has not looked yet does not wait for this one."""
        if self.alone is None:
            self._say(0)
