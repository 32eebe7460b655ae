"""The storage of an object that has the same bytes on every rank of one machine. The ranks share
its host copy and load it together.

`shared.py` says how they write the host copy. To load it, each rank copies its parts over its own
link, chunk by chunk. The rest comes by all-gather, over NVLink where there is one. No rank may wait
in a collective for another one that may still fail for lack of memory, so a load has two halves. In
the phase transition's move, each rank maps all chunks, and enqueues the copies of its own parts
with an event behind each chunk's. The load is not committed yet: if the transition fails, the host
copy was authoritative all the time. Then `complete` gets the rest. Where the ranks have agreed on
the change for which they prepared the load, they all-gather, each chunk behind its event.
Everywhere else (going back after a failure, a rank that is alone) the rest comes over the rank's
own link.

Before it votes, every rank writes into the shared memory for which change it has prepared a load.
After the vote all ranks read the same words, so all of them gather or none does. A rank that has
left, or whose collective failed, writes that there for good.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from placement.core.errors import HostMemoryError, RegistrationError
from placement.core.journal import logger
from placement.devices.base import Device, round_up
from placement.devices.host.shared_slab import new_file, opened_file
from placement.devices.host.slab import PAGE
from placement.devices.memory import Copy, HostSlab, Mark
from placement.ownership.adapter import Adapter
from placement.storage.fingerprints import fingerprints, used_bytes
from placement.storage.layout import Adoptee, RangeLayout, byte_view
from placement.storage.managed import ManagedStorage
from placement.storage.pages import Behind, ChunkPool
from placement.storage.range import Owner, Range
from placement.storage.scan import StorageScanner
from placement.storage.shared import (
    ALONE,
    LEFT,
    Ranks,
    Refusal,
    SharedCopy,
    SharedRange,
    others,
    spans_of,
)
from placement.storage.state_dicts import are_only_read

# bytes of a storage for one fingerprint. Computing one takes temporary memory of a few times as
# much.
_PIECE_BYTES = 64 << 20
_REASONS = {
    ALONE: ("rank {} takes part no longer, and has logged why"),
    LEFT: "rank {} has unregistered it",
}


class ReplicatedStorage(ManagedStorage):
    """The storage of an object of which every rank has the same bytes, but for what is each rank's
    own (buffers, gradients).
    `ranks`: the ranks that share it. All of them register it in the same change of the group."""

    scanner: SharedScanner

    def __init__(
        self, device: Device, adapter: Adapter, name: str, readonly: bool, ranks: Ranks
    ) -> None:
        super().__init__(
            device,
            adapter,
            name,
            readonly,
            SharedScanner(device, adapter, name, self, ranks, readonly=readonly),
        )
        self._ranks = ranks
        # chunks whose own part is on its way, and what tells its arrival
        self._waiting: list[tuple[SharedRange, int, Mark]] = []
        # the number of the group's change for which this rank has last prepared a load
        self._prepared = 0

    @property
    def can_prefetch(self) -> bool:  # type: ignore[override]
        # What other ranks copy cannot come early: all ranks would have to bring the same chunks
        # early.
        return any(not r.is_replica for r in self.ranges)

    @property
    def is_written_together(self) -> bool:
        return not self.readonly and any(True for _ in self._copies())

    def _shared_ranges(self) -> Iterator[SharedRange]:
        return (r for r in self.ranges if isinstance(r, SharedRange))

    def _copies(self) -> Iterator[SharedCopy]:
        """The host copies that this rank shares, or may share again."""
        return filter(None, [*(r.copy for r in self._shared_ranges()), self.scanner.free_state()])

    def adopt_apart(self, adoptees: list[Adoptee]) -> tuple[list[Range], list[Adoptee]]:
        return self.scanner.adopt_shared(adoptees)

    def bring(self, r: Range, indices: Sequence[int]) -> int:
        if isinstance(r, SharedRange) and r.is_shared and (reason := self._ranks.gone) is not None:
            self._give_up(r, reason)
        if (
            not isinstance(r, SharedRange)
            or r.copy is None
            or not r.is_shared
            or r.alone is not None
        ):
            return super().bring(r, indices)
        self._prepared = r.copy.loads[r.shares.rank] = self._ranks.change
        brought = 0
        for index in indices:
            copies, _ = r.copies(index)
            self.device.copy(copies, "to_device")
            brought += sum(copy.nbytes for copy in copies)
            r.pages.note_filling((index,))
            if r.part_bytes(index):
                self._waiting.append((r, index, self.device.mark("to_device")))
                self.is_complete = False
        return brought

    def complete(self) -> None:
        together: set[SharedRange] = set()
        if self._prepared == self._ranks.agreed_change:
            together = {r for r in {r for r, _, _ in self._waiting} if self._all_are_ready(r)}
        else:
            self._prepare_nothing()
        try:
            self._gather(together)
        except Exception as error:
            for r in self._shared_ranges():
                self._give_up(r, f"a collective failed: {error}")
            together = set()
        if rest := [
            each
            for r, index, _ in self._waiting
            if r not in together
            for each in r.copies(index)[1]
        ]:
            self.device.copy(rest, "to_device")
        self.device.order()
        self._waiting.clear()
        self.is_complete = True

    def _gather(self, ranges: set[SharedRange]) -> None:
        # Sorted, so that every rank gathers in the same order, whatever chunks its chunk pool had.
        order = {r: position for position, r in enumerate(self.ranges)}
        for r, index, mark in sorted(self._waiting, key=lambda each: (order[each[0]], each[1])):
            if r in ranges:
                with self.device.after(mark):
                    self._ranks.gather(r.on_device(*r.gathered(index)))

    def begin_move(self, chunk_pool: ChunkPool) -> None:
        super().begin_move(chunk_pool)
        # before this rank votes: another one may be about to offload right after
        for copy in self._copies():
            copy.note_place(on_device=True)

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        if self.on_device and self.scanner.moves_together:  # an offload has failed
            for copy in self._copies():
                copy.fail()
        for r in self._shared_ranges():
            r.pages.together = None
        self.scanner.moves_together = False
        if not self.on_device and self._prepared == self._ranks.change:
            self._prepare_nothing()
        super().make_consistent(chunk_pool)
        self._waiting.clear()
        self.is_complete = True
        for copy in self._copies():
            copy.note_place(on_device=self.on_device)

    def unadopt(self) -> None:
        for copy in self._copies():
            copy.leave(LEFT)
        super().unadopt()

    def pages_to_save(
        self, r: Range, prints: torch.Tensor, changed: Sequence[int]
    ) -> Sequence[int]:
        if not isinstance(r, SharedRange) or r.copy is None:
            return changed
        refusal = self._refusal(r, prints, is_clean=r.is_shared and not changed)
        if refusal is None:
            if not r.is_shared:
                self._use(r, r.copy.slab)
                changed = range(len(prints))
            r.pages.together = r.copy
            return changed
        if r.is_shared and changed:
            logger.warning(
                "%r has %s bytes of host memory on this rank alone now: %s",
                self.name,
                f"{r.nbytes:,}",
                refusal.reason,
            )
            self.make_host_copy_own(r)
        if refusal.is_final and not r.is_shared:
            r.leave(refusal.reason)
        return changed

    def _refusal(self, r: SharedRange, prints: torch.Tensor, *, is_clean: bool) -> Refusal | None:
        """Why this rank does not write pages with the others now; None if it does, or has nothing
        to write."""
        assert r.copy is not None
        if (reason := self._ranks.parted) is not None:
            return Refusal(reason, True)
        if not self.scanner.moves_together or r.copy.has_met:
            return Refusal("this rank has offloaded it alone", False)
        r.copy.meet(prints, num_arrived=len(prints) if is_clean else 0)
        return (
            None
            if is_clean
            else r.copy.wait_for_all(len(prints), self._ranks.deadline_seconds, r.names_in)
        )

    def show_host_copy(self) -> None:
        # Where somebody has a tensor of a state dict, it will show a host copy of this rank's own:
        # whoever writes there, writes alone.
        if self.state_dict_tensors or self.state_dict_tensors.are_held:
            for r in self._shared_ranges():
                if r.is_shared and not r.is_frozen:
                    r.pages.wait(range(len(r.chunk_sizes)))
                    self.make_host_copy_own(r)
        super().show_host_copy()

    def before_shown(self) -> None:
        for r in () if are_only_read.get() else self._shared_ranges():
            if r.is_shared and not r.is_frozen and not self.on_device:
                try:
                    self.make_host_copy_own(r)
                except HostMemoryError as error:
                    error.add_note(
                        f"placement: ranks share {self.name!r}, and this one needs its own to "
                        "write there; load it first"
                    )
                    raise

    def make_host_copy_own(self, r: Range) -> None:
        if isinstance(r, SharedRange) and r.is_shared:
            prints, own = r.pages.prints, self.device.host(r.nbytes)
            own.view(0, r.nbytes).copy_(r.host.view(0, r.nbytes))
            self._use(r, own)
            r.pages.prints = prints

    def _use(self, r: SharedRange, slab: HostSlab) -> None:
        r.pages.host, r.pages.prints = slab, None
        self.object_ranges.set(self.ranges)

    def before_forced_offload(self, r: Range) -> None:
        if not isinstance(r, SharedRange) or not r.is_shared:
            return
        held = r.pages.at(Behind.OWN)
        prints = None if r.pages.prints is None else r.pages.prints.cpu()
        if not self.readonly and (
            prints is None
            or any(r.fingerprint(each, each + 1).cpu()[0] != prints[each] for each in held)
        ):
            self.make_host_copy_own(r)
            r.pages.note_changed(held)
        else:
            r.pages.note_clean(held)

    def _all_are_ready(self, r: SharedRange) -> bool:
        """Whether every rank has prepared the same load and will gather it. Meaningful once all of
        them have voted."""
        said = [] if r.copy is None else r.copy.loads.tolist()
        for rank, word in enumerate(said):
            if word in _REASONS:
                self._give_up(r, _REASONS[word].format(r.shares.members[rank]))
        return r.alone is None and set(said) == {self._prepared}

    def _give_up(self, r: SharedRange, reason: str) -> None:
        if r.alone is None:
            r.alone = reason
            if r.copy is not None:
                r.copy.loads[r.shares.rank] = ALONE
            logger.warning(
                "%r is loaded by each rank alone from now on, at the speed of its own link: %s",
                self.name,
                reason,
            )

    def _prepare_nothing(self) -> None:
        """So that a rank that has not looked yet does not wait for this one."""
        for r in self._shared_ranges():
            if r.alone is None and r.copy is not None:
                r.copy.loads[r.shares.rank] = 0


# --- registration: the ranks compare what they have, and make a host copy that they share


class SharedScanner(StorageScanner):
    """A scanner whose first ranges are shared by all ranks. All of a readonly object and of an
    optimizer is in one; the frozen parameters of another module are in one, and those that are
    trained in a second. Every other range is this rank's own. An optimizer's state does not exist
    yet. Its host copy is made at registration, and all ranks write it together at the first
    offload."""

    def __init__(
        self,
        device: Device,
        adapter: Adapter,
        name: str,
        owner: Owner,
        ranks: Ranks,
        *,
        readonly: bool,
    ) -> None:
        super().__init__(device, adapter, name, owner)
        self._ranks = ranks
        self._readonly = readonly
        self.state: SharedCopy | None = None  # the host copy for state that is not created yet

    def adopt_shared(self, adoptees: list[Adoptee]) -> tuple[list[Range], list[Adoptee]]:
        """Adopt, at registration, what ranks share. Returns its ranges, and the storages that are
        left."""
        frozen, trained, own = self._divide(adoptees)
        if not frozen and not trained and self.adapter.kind != "optimizer":
            raise RegistrationError(
                f"{self.name!r} has no parameters, so there is nothing to share; register it "
                "without replicated=True"
            )
        said = self._ranks.exchange_texts(
            "what", f"{self.adapter.kind}-{self._readonly}-{len(frozen)} {len(trained)}"
        )
        self._check_layouts([each.partition(" ")[0] for each in said])
        found: list[Range] = [self._shared_range(frozen, is_frozen=True)] if frozen else []
        try:
            self._check_layouts(said)
            found += [self._shared_range(trained, is_frozen=False)] if trained else []
        except UnequalRanks as unequal:  # on each of these ranks, because all compare the same
            if not frozen:
                raise
            logger.info("%s Each rank has a host copy of what is trained.", unequal)
            own = trained + own
        return found, own

    def _divide(
        self, adoptees: Sequence[Adoptee]
    ) -> tuple[list[Adoptee], list[Adoptee], list[Adoptee]]:
        """Split storages into those that never change, those that training changes alike on all
        ranks, and this rank's own."""
        groups: tuple[list[Adoptee], list[Adoptee], list[Adoptee]] = ([], [], [])
        for adoptee in adoptees:
            groups[
                0
                if self._readonly
                else 1
                if self.adapter.kind == "optimizer"
                else _kind_of(adoptee)
            ].append(adoptee)
        return groups

    def reserve(self, sizes: Sequence[int], parts: int = 1) -> None:
        """Make a host copy for state of these sizes that all ranks share. Every rank calls this at
        the same time. See `_shared_range`."""
        if self.adapter.kind != "optimizer":
            super().reserve(sizes, parts)
            return
        nbytes = self.host_bytes_for(sizes)
        num_prints = sum(size // _PIECE_BYTES + 2 for size in sizes)
        self._check_layouts(self._ranks.exchange_texts("state", f"{nbytes} {num_prints}"))
        if sizes:
            self._reserved_addresses = self._device.reserve(nbytes)
            self.state = self._copy_for("", nbytes, num_prints, what="state")
            self.state.slab.pin()

    @property
    def reserved_bytes(self) -> int:
        return super().reserved_bytes + (
            0 if (copy := self.free_state()) is None else copy.slab.held_bytes
        )

    def free_state(self) -> SharedCopy | None:
        """The host copy for state that is not created yet, unless it was created meanwhile."""
        is_used = any(isinstance(r, SharedRange) and r.copy is self.state for r in self.ranges.all)
        return None if is_used else self.state

    def adopt(
        self,
        adoptees: list[Adoptee],
        *,
        transient: bool = False,
        in_parts: bool = False,
    ) -> Range | None:
        copy = None if transient or not adoptees else self.free_state()
        if (
            copy is None
            or self.host_bytes_for([each.nbytes for each in adoptees]) > copy.slab.nbytes
        ):
            return super().adopt(adoptees, transient=transient, in_parts=in_parts)
        layout = RangeLayout(self._device, adoptees, self._addresses)
        slab: HostSlab = copy.slab
        if (refusal := self._refusal(copy, adoptees, layout)) is None:
            self._write(adoptees, layout, slab, self._ranks.shares.rank)
            copy.note_arrived(1)
            lacking: Iterable[int] = copy.wait_for_shares(1)
        else:
            logger.warning(
                "%r: its new state has a host copy of this rank's own: %s",
                self.name,
                refusal.reason,
            )
            slab, lacking = (
                self._device.host(used_bytes(layout.nbytes)),
                range(self._ranks.shares.world_size),
            )
        for rank in lacking:
            self._write(adoptees, layout, slab, rank)
        fresh = SharedRange(self._device, layout, slab, tuple(adoptees), copy, is_frozen=False)
        if refusal is not None and refusal.is_final:
            fresh.leave("it was created unequal on the ranks")
        return fresh

    def _refusal(
        self, copy: SharedCopy, adoptees: Sequence[Adoptee], layout: RangeLayout
    ) -> Refusal | None:
        if not self.moves_together or copy.has_met:
            return Refusal("this rank has offloaded it alone", False)
        prints = [
            ("its tensors", int(_layout(self._device, adoptees, layout)[:15], 16)),
            *_fingerprints(adoptees),
        ]
        if len(prints) > copy.table.shape[1]:
            return Refusal("it has more tensors than was expected", False)
        copy.meet(torch.tensor([value for _, value in prints], dtype=torch.int64, device="cpu"))
        return copy.wait_for_all(
            len(prints), self._ranks.deadline_seconds, lambda column: repr(prints[column][0])
        )

    def _shared_range(self, adoptees: list[Adoptee], *, is_frozen: bool) -> SharedRange:
        """Make a shared range and write this rank's share. Every rank calls this at the same time.
        Raises RegistrationError: the ranks do not have the same tensors, or are on several
        machines."""
        device, shares = self._device, self._ranks.shares
        layout = RangeLayout(device, adoptees, self._addresses)
        prints = _fingerprints(adoptees)
        what = "frozen" if is_frozen else "trained"
        num_prints = max(len(prints), used_bytes(layout.nbytes) // device.chunk_bytes + 1)
        copy = self._copy_for(
            _layout(device, adoptees, layout), used_bytes(layout.nbytes), num_prints, what=what
        )
        self._write(adoptees, layout, copy.slab, shares.rank)
        copy.table[shares.rank, : len(prints)] = torch.tensor(
            [value for _, value in prints], dtype=torch.int64, device="cpu"
        )
        self._ranks.exchange_texts(f"share of {what}", "written")
        table = copy.table[:, : len(prints)]
        for column in (table != table[:1]).any(dim=0).nonzero().flatten().tolist():
            other = others(shares, table[:, column].tolist())
            raise UnequalRanks(
                f"{self.name!r} cannot be replicated: {prints[column][0]!r} has other bytes on "
                f"rank{other} than on the rest. Load the same values on every rank before you "
                "register it, or register it without replicated=True."
            )
        self._try_out()
        copy.slab.pin()
        return SharedRange(device, layout, copy.slab, tuple(adoptees), copy, is_frozen=is_frozen)

    def _copy_for(self, digest: str, nbytes: int, num_prints: int, *, what: str) -> SharedCopy:
        """A new host copy of so many bytes that all ranks have mapped, where all give the same
        digest."""
        device, ranks, shares = self._device, self._ranks, self._ranks.shares
        extra_bytes = SharedCopy.extra_bytes(shares, num_prints)
        with ExitStack() as files:  # the file stays open until every rank has mapped it
            file, path = -1, ""
            if shares.rank == 0:
                file, path = files.enter_context(new_file(round_up(nbytes, PAGE) + extra_bytes))
            said = ranks.exchange_texts(f"layout of {what}", f"{digest} {path}")
            self._check_layouts([each.partition(" ")[0] for each in said])
            if shares.rank != 0:
                try:
                    file = files.enter_context(opened_file(said[0].partition(" ")[2]))
                except (OSError, ValueError) as error:
                    raise RegistrationError(
                        f"{self.name!r} cannot be replicated: this rank cannot open the memory of "
                        f"rank 0 ({error}). The ranks must be on one machine, as one user, and see "
                        "each other's /proc (one container, or a shared PID namespace)."
                    ) from error
            slab = device.shared_host(
                file, nbytes, spans_of(shares.rank, nbytes, device.chunk_bytes, shares), extra_bytes
            )
            copy = SharedCopy(
                slab, shares, lambda: ranks.change, lambda: bool(ranks.group.is_decided)
            )
            ranks.exchange_texts(f"mapping of {what}", "done")
        copy.watch()
        return copy

    def _write(
        self, adoptees: Sequence[Adoptee], layout: RangeLayout, slab: HostSlab, rank: int
    ) -> None:
        copies = []
        spans = spans_of(rank, layout.nbytes, self._device.chunk_bytes, self._ranks.shares)
        for adoptee, start, first, nbytes in _overlaps(adoptees, layout.offsets, spans):
            if adoptee.storage.device == self._device.torch_device:
                copies.append(
                    Copy(adoptee.storage.data_ptr() + first, slab.address + start, nbytes)
                )
            else:
                slab.view(start, nbytes).copy_(byte_view(adoptee.storage)[first : first + nbytes])
        if copies:
            self._device.copy(copies, "to_host")
        self._device.sync()

    def _check_layouts(self, layouts: Sequence[str]) -> None:
        if (other := others(self._ranks.shares, layouts)) is not None:
            raise UnequalRanks(
                f"{self.name!r} cannot be replicated: rank{other} has other tensors than the rest "
                "(names, shapes, dtypes, device, order), or registers them in another way "
                "(readonly=True). Build the same model on every rank and on the same kind of "
                "device, or leave out replicated=True."
            )

    def _try_out(self) -> None:
        """Run one collective. It creates the communicator now, so that no later load lacks memory
        for it."""
        out = torch.zeros(
            self._ranks.shares.world_size, dtype=torch.uint8, device=self._device.torch_device
        )
        try:
            self._ranks.gather(out)
        except RuntimeError as error:
            raise RegistrationError(
                f"{self.name!r} cannot be replicated: an all-gather on {self._device.torch_device} "
                f"failed: {error}. The process group needs a backend for that device (nccl for "
                "CUDA, gloo for the CPU)."
            ) from error


class UnequalRanks(RegistrationError):
    """The ranks do not have the same tensors, or other bytes in them. All of them raise it."""


def _kind_of(adoptee: Adoptee) -> int:
    """0 for parameters that are not trained, 1 for those that are, 2 for what is each rank's own:
    buffers change with a rank's data."""
    tensors = [owned.tensor if owned.wrapper is None else owned.wrapper for owned in adoptee.owned]
    # FSDP2 has plain tensors over each one's bytes
    parameters = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
    return int(any(parameter.requires_grad for parameter in parameters)) if parameters else 2


def _layout(device: Device, adoptees: Sequence[Adoptee], layout: RangeLayout) -> str:
    """A digest that is the same on two ranks if they have the same tensors at the same places."""
    lines = [f"{device.chunk_bytes} {layout.nbytes}"]
    for adoptee, offset in zip(adoptees, layout.offsets, strict=True):
        first = adoptee.aliases[0]
        form = first.dtype, first.storage_offset(), tuple(first.size()), first.stride()
        lines.append(
            f"{adoptee.name} {adoptee.storage.device.type} {adoptee.nbytes} {offset} {form}"
        )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _fingerprints(adoptees: Sequence[Adoptee]) -> list[tuple[str, int]]:
    """(name, 64 bits) of every piece of every storage, computed where the storage lies. Storages on
    the host are hashed, by threads. A hash is never compared with a device's fingerprint, because
    ranks of the same layout have the same tensors on the host."""
    on_host = [adoptee for adoptee in adoptees if adoptee.storage.device.type == "cpu"]
    pieces = [
        (adoptee, start) for adoptee in on_host for start in range(0, adoptee.nbytes, _PIECE_BYTES)
    ]
    with ThreadPoolExecutor(thread_name_prefix="placement-hash") as threads:
        hashes = list(threads.map(_hash, pieces))
    names = [adoptee.name for adoptee, _ in pieces]
    found: list[torch.Tensor] = []
    for adoptee in adoptees:
        if adoptee.storage.device.type != "cpu":
            data = byte_view(adoptee.storage)
            whole = len(data) // 8 * 8
            prints = [
                fingerprints(
                    data,
                    [min(_PIECE_BYTES, whole - start) for start in range(0, whole, _PIECE_BYTES)],
                )
            ]
            if whole < len(data):
                prints.append(
                    fingerprints(
                        torch.cat([data[whole:], data.new_zeros(whole + 8 - len(data))]), [8]
                    )
                )
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
    """(adoptee, offset in the range, offset in the storage, bytes) of each part of an adoptee that
    lies in one of these ordered spans."""
    starts = [start for start, _ in spans]
    for adoptee, offset in zip(adoptees, offsets, strict=True):
        for start, nbytes in spans[max(0, bisect.bisect_right(starts, offset) - 1) :]:
            if start >= offset + adoptee.nbytes:
                break
            first, end = max(start, offset), min(start + nbytes, offset + adoptee.nbytes)
            if first < end:
                yield adoptee, first, first - offset, end - first
