"""The storage of an object whose frozen parts have the same bytes on every rank of one machine. The
ranks share one host copy of these, and load it together. Frozen are all parts of a readonly
object, and the parameters of another module that are not trained.

To load the copy, each rank copies its parts over its own link, chunk by chunk. The rest comes by
all-gather, over NVLink where there is one. In a collective no rank may wait for one that may still
fail for lack of memory. So a load has two halves. In the phase transition's move, each rank maps
all chunks, and enqueues the copies of its own parts with an event behind each chunk's. The load is
not committed yet: if the transition fails, the host copy was authoritative all the time. Then
`complete` gets the rest. Where the ranks have agreed on the change for which they prepared the
load, they all-gather, each chunk behind its event. Everywhere else (going back after a failure, a
rank that is alone) the rest comes over the rank's own link.

Before it votes, every rank writes into the shared memory for which change it has prepared a load.
After the vote all ranks read the same words, so all of them gather or none does. A rank that has
left, or whose collective failed, writes that there for good.

The copy is never written after the registration. A rank gets a copy of its own, for good, where its
values have changed, or before a caller may write into its host copy.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import torch

from placement.core.errors import HostMemoryError, RegistrationError, listed
from placement.core.journal import logger
from placement.devices.base import Device, round_up
from placement.devices.host.shared_slab import new_file, opened_file
from placement.devices.host.slab import PAGE
from placement.devices.memory import Copy, HostSlab, Mark
from placement.ownership.adapter import Adapter
from placement.storage.adoption import Adoption, start_saving
from placement.storage.fingerprints import fingerprints, used_bytes
from placement.storage.layout import Adoptee, RangeLayout, byte_view, form_of
from placement.storage.managed import ManagedStorage
from placement.storage.pages import ChunkPool
from placement.storage.range import Range
from placement.storage.shared import (
    ALONE,
    LEFT,
    Ranks,
    SharedCopy,
    SharedRange,
    Span,
    deviating_ranks,
    spans_of,
)

# bytes of a storage for one fingerprint. Computing one takes temporary memory of a few times as
# much.
_PIECE_BYTES = 64 << 20
_REASONS = {
    ALONE: "rank {} takes part no longer, and has logged why",
    LEFT: "rank {} has unregistered it",
}


class ReplicatedStorage(ManagedStorage):
    """The storage of an object whose frozen parts are in a range that ranks share. All other parts
    (trained parameters, buffers, gradients) are in ranges of this rank alone.
    `ranks`: the ranks that share it. All of them register it in the same change of the group."""

    def __init__(
        self,
        device: Device,
        adapter: Adapter,
        name: str,
        readonly: bool,
        adoption: Adoption,
        ranks: Ranks,
    ) -> None:
        super().__init__(device, adapter, name, readonly, adoption)
        self._ranks = ranks
        # chunks whose own part is on its way, and the mark that tells its arrival
        self._waiting: list[tuple[SharedRange, int, Mark]] = []
        # the number of the group's change for which this rank has last prepared a load
        self._prepared = 0
        self._making_own = threading.Lock()  # any thread may ask for a state dict

    @property
    def can_prefetch(self) -> bool:  # type: ignore[override]
        # Shared chunks cannot come early: all ranks would have to bring the same chunks early.
        return any(not r.is_shared for r in self.ranges)

    @property
    def host_bytes(self) -> int:
        # the other ranks read this one's share of the copy even where it has a copy of its own
        shares = sum(r.copy.slab.held_bytes for r in self._shared_ranges() if not r.is_shared)
        return super().host_bytes + shares

    def _shared_ranges(self) -> Iterator[SharedRange]:
        return (r for r in self.ranges if isinstance(r, SharedRange))

    # --- loading

    def bring(self, r: Range, indices: Sequence[int]) -> int:
        """Start copying chunks to the device. Of those of a shared range only this rank's parts are
        copied: `complete` gets the rest. Returns the bytes."""
        if not isinstance(r, SharedRange):
            return super().bring(r, indices)
        if r.alone is None and not r.is_shared:
            r.load_alone("it has a host copy of its own")
        reason = self._ranks.obstacle
        if r.alone is None and reason is not None:
            self._give_up(r, reason)
        if r.alone is not None:
            return super().bring(r, indices)
        self._prepared = self._ranks.change
        r.copy.say(self._prepared)
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
        """Get the parts of the other ranks: from these, where all ranks agreed on the change for
        which this load was prepared, else over this rank's own link."""
        gathered: set[SharedRange] = set()
        if self._prepared == self._ranks.agreed_change:
            waiting = {r for r, _, _ in self._waiting}
            gathered = {r for r in waiting if self._all_are_ready(r)}
        else:
            self._prepare_nothing()
        try:
            self._gather(gathered)
        except Exception as error:  # all ranges need the same process group
            for r in self._shared_ranges():
                self._give_up(r, f"a collective failed: {error}")
            gathered = set()
        copies = list[Copy]()
        for r, index, _ in self._waiting:
            if r not in gathered:
                _, copies_of_other_parts = r.copies(index)
                copies += copies_of_other_parts
        if copies:
            self.device.copy(copies, "to_device")
        self.device.order()
        self._waiting.clear()
        self.is_complete = True

    def _gather(self, ranges: set[SharedRange]) -> None:
        # In order, so that every rank gathers in the same one: their chunk pools may have had other
        # chunks.
        marks = {(r, index): mark for r, index, mark in self._waiting if r in ranges}
        for r in self._shared_ranges():
            for index in range(len(r.chunk_sizes)):
                if (r, index) in marks:
                    with self.device.after(marks[r, index]):
                        self._ranks.gather(r.on_device(*r.gathered(index)))

    def _all_are_ready(self, r: SharedRange) -> bool:
        """Whether every rank has prepared the same load and will gather it. Meaningful once all of
        them have voted."""
        words = r.copy.loads.tolist()
        for rank, word in enumerate(words):
            if word in _REASONS:
                self._give_up(r, _REASONS[word].format(r.shares.members[rank]))
        return r.alone is None and set(words) == {self._prepared}

    def _give_up(self, r: SharedRange, reason: str) -> None:
        if r.alone is None:
            r.load_alone(reason)
            logger.warning(
                "%r is loaded by each rank alone from now on, at the speed of its own link: %s",
                self.name,
                reason,
            )

    def _prepare_nothing(self) -> None:
        """Say that no load is prepared, so that a rank that has not looked yet does not wait for
        this one."""
        for r in self._shared_ranges():
            if r.alone is None:
                r.copy.say(0)

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        if not self.on_device and self._prepared == self._ranks.change:
            self._prepare_nothing()
        super().make_consistent(chunk_pool)
        self._waiting.clear()
        self.is_complete = True

    def unadopt(self) -> None:
        for r in self._shared_ranges():
            r.copy.say(LEFT)
        super().unadopt()

    # --- a host copy of this rank's own

    def make_host_copy_own(self, r: Range, changed: Sequence[int] = ()) -> None:
        """Have this rank read a host copy of its own from now on, with the same bytes, if the range
        is shared. See `ManagedStorage.make_host_copy_own`."""
        with self._making_own:
            if not isinstance(r, SharedRange) or not r.is_shared:
                return
            shared = r.host
            try:
                own = self.adoption.new_slab(r.nbytes)
            except HostMemoryError as error:
                error.add_note(
                    f"placement: ranks share the host copy of what is frozen in {self.name!r}, and "
                    "this one needs its own to write there. Ask for a state dict, or load a "
                    "checkpoint, in a phase that has it on the device; it needs none then unless "
                    "values change."
                )
                raise
            own.view(0, r.nbytes).copy_(shared.view(0, r.nbytes))
            reason = "a caller may write into its host copy, through a tensor of a state dict"
            if changed:
                names = list[str]()
                for index in changed:
                    names = names or _changed_names(r, index)
                reason = f"{listed(names) or 'its bytes'} changed on the device"
            r.pages.host = own
            r.is_shared = False
            self.object_ranges.set(self.ranges)
        logger.warning(
            "%r has %s bytes of host memory for frozen tensors on this rank alone from now on, and "
            "loads them over its own link: %s",
            self.name,
            f"{r.nbytes:,}",
            reason,
        )

    # --- registration: the ranks compare their tensors, and make a host copy that they share

    def adopt_shared(
        self, adoptees: Sequence[Adoptee]
    ) -> tuple[Sequence[Range], Sequence[Adoptee]]:
        """See `ManagedStorage.adopt_shared`. The ranks share the frozen storages, all of a readonly
        object. Raises RegistrationError: none is frozen, or `_shared_range` refuses them. The
        caller tells the other ranks, which wait for this one."""
        frozen, own = list[Adoptee](), list[Adoptee]()
        for adoptee in adoptees:
            (frozen if self.readonly or _is_frozen(adoptee) else own).append(adoptee)
        if not frozen:
            raise RegistrationError(
                f"{self.name!r} has no frozen parameters, and ranks share nothing else; register "
                "it without replicated=True, or with readonly=True if nothing writes it"
            )
        return [self._shared_range(frozen)], own

    def _shared_range(self, adoptees: list[Adoptee]) -> SharedRange:
        """Make the shared range and write this rank's share. Every rank calls this at the same
        time, and meets the others three times: for the layout, the mapping and the share. Raises
        RegistrationError: the ranks do not have the same tensors, are on several machines, or have
        no all-gather on this device."""
        device = self.device
        shares = self._ranks.shares
        layout = RangeLayout(device, adoptees)
        prints = _fingerprints(adoptees)
        copy = self._shared_copy(
            f"{self.readonly}-{_layout(device, adoptees, layout)}",
            used_bytes(layout.nbytes),
            len(prints),
        )
        self._write_share(adoptees, layout, copy.slab)
        copy.table[shares.rank] = torch.tensor(
            [value for _, value in prints], dtype=torch.int64, device="cpu"
        )
        self._ranks.exchange_texts("share", "written")
        for column in (copy.table != copy.table[0]).any(dim=0).nonzero().flatten().tolist():
            name, _ = prints[column]
            ranks = deviating_ranks(shares, copy.table[:, column].tolist())
            if ranks is not None:
                raise RegistrationError(
                    f"{self.name!r} cannot be replicated: {name!r} has other bytes on rank{ranks} "
                    "than on the rest. Load the same values on every rank before you register it, "
                    "or register it without replicated=True."
                )
        self._try_out()
        copy.slab.pin()
        return SharedRange(device, layout, copy, tuple(adoptees))

    def _shared_copy(self, digest: str, nbytes: int, num_prints: int) -> SharedCopy:
        """A new host copy of so many bytes that all ranks have mapped, where all give the same
        digest."""
        ranks = self._ranks
        shares = ranks.shares
        extra_bytes = SharedCopy.extra_bytes(shares, num_prints)
        with ExitStack() as files:  # the file stays open until every rank has mapped it
            file, path = -1, ""
            if shares.rank == 0:
                file, path = files.enter_context(new_file(round_up(nbytes, PAGE) + extra_bytes))
            texts = ranks.exchange_texts("layout", f"{digest} {path}")
            digests = [text.partition(" ")[0] for text in texts]
            deviating = deviating_ranks(shares, digests)
            if deviating is not None:
                raise RegistrationError(
                    f"{self.name!r} cannot be replicated: rank{deviating} has other frozen tensors "
                    "than the rest (names, shapes, dtypes, device, order), or registers them in "
                    "another way (readonly=True). Build the same model on every rank and on the "
                    "same kind of device, or leave out replicated=True."
                )
            if shares.rank != 0:
                _, _, path_of_first = texts[0].partition(" ")
                try:
                    file = files.enter_context(opened_file(path_of_first))
                except (OSError, ValueError) as error:
                    raise RegistrationError(
                        f"{self.name!r} cannot be replicated: this rank cannot open the memory of "
                        f"rank 0 ({error}). The ranks must be on one machine, as one user, and see "
                        "each other's /proc (one container, or a shared PID namespace)."
                    ) from error
            spans = spans_of(nbytes, self.device.chunk_bytes, shares)
            copy = SharedCopy(self.device.shared_host(file, nbytes, spans, extra_bytes), shares)
            ranks.exchange_texts("mapping", "done")
        return copy

    def _write_share(
        self, adoptees: Sequence[Adoptee], layout: RangeLayout, slab: HostSlab
    ) -> None:
        spans = spans_of(layout.nbytes, self.device.chunk_bytes, self._ranks.shares)
        start_saving(self.device, slab, _pieces(adoptees, layout.offsets, spans))
        self.device.sync()

    def _try_out(self) -> None:
        """Run one collective. It creates the communicator now, so that no later load lacks memory
        for it."""
        out = torch.zeros(
            self._ranks.shares.world_size, dtype=torch.uint8, device=self.device.torch_device
        )
        try:
            self._ranks.gather(out)
        except RuntimeError as error:
            raise RegistrationError(
                f"{self.name!r} cannot be replicated: an all-gather on {self.device.torch_device} "
                f"failed: {error}. The process group needs a backend for that device (nccl for "
                "CUDA, gloo for the CPU)."
            ) from error


def _changed_names(r: Range, index: int) -> list[str]:
    """The names of the tensors whose bytes differ from the host copy in a page that is on the
    device."""
    names = []
    page_start = r.starts[index]
    page_end = page_start + r.used_sizes[index]
    for entry in r.placed:
        start = max(page_start, entry.offset)
        nbytes = min(page_end, entry.offset + entry.nbytes) - start
        if nbytes <= 0:
            continue
        on_device = r.on_device(start, nbytes).cpu()
        if not on_device.equal(r.host.view(start, nbytes)):
            names.append(entry.name)
    return names


def _is_frozen(adoptee: Adoptee) -> bool:
    """Whether a storage has parameters, of which none is trained. Buffers change with a rank's
    data."""
    tensors = [owned.tensor if owned.wrapper is None else owned.wrapper for owned in adoptee.owned]
    # FSDP2 has plain tensors over each one's bytes
    parameters = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


def _layout(device: Device, adoptees: Sequence[Adoptee], layout: RangeLayout) -> str:
    """A digest that is the same on two ranks if they have the same tensors at the same places."""
    lines = [f"{device.chunk_bytes} {layout.nbytes}"]
    for adoptee, offset in zip(adoptees, layout.offsets, strict=True):
        dtype, start, size, stride = form_of(adoptee.aliases[0])
        form = dtype, start, tuple(size), stride
        lines.append(
            f"{adoptee.name} {adoptee.storage.device.type} {adoptee.nbytes} {offset} {form}"
        )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _fingerprints(adoptees: Sequence[Adoptee]) -> list[tuple[str, int]]:
    """(name, 64 bits) of every piece of every storage, computed where the storage lies. Storages on
    the host are hashed, by threads. A hash is never compared with a device's fingerprint, because
    ranks of the same layout have the same tensors on the host."""
    pieces = list[tuple[Adoptee, int]]()
    on_device = list[Adoptee]()
    for adoptee in adoptees:
        if adoptee.storage.device.type == "cpu":
            pieces += [(adoptee, start) for start in range(0, adoptee.nbytes, _PIECE_BYTES)]
        else:
            on_device.append(adoptee)
    with ThreadPoolExecutor(thread_name_prefix="placement-hash") as threads:
        hashes = list(threads.map(_hash, pieces))
    names = [adoptee.name for adoptee, _ in pieces]
    prints = list[torch.Tensor]()
    for adoptee in on_device:
        prints.append(_device_fingerprints(byte_view(adoptee.storage)))
        names += [adoptee.name] * len(prints[-1])
    if prints:  # to the CPU together: each transfer is a wait for the device
        hashes += torch.cat(prints).tolist()
    return list(zip(names, hashes, strict=True))


def _device_fingerprints(content: torch.Tensor) -> torch.Tensor:
    """The fingerprints of each piece of a storage on the device. Behind its last whole word are
    zeros."""
    whole = len(content) // 8 * 8
    sizes = [min(_PIECE_BYTES, whole - start) for start in range(0, whole, _PIECE_BYTES)]
    prints = fingerprints(content, sizes)
    if whole < len(content):
        padded = content.new_zeros(8)
        padded[: len(content) - whole] = content[whole:]
        prints = torch.cat([prints, fingerprints(padded, [8])])
    return prints


def _hash(piece: tuple[Adoptee, int]) -> int:
    adoptee, start = piece
    nbytes = min(_PIECE_BYTES, adoptee.nbytes - start)
    data = (ctypes.c_char * nbytes).from_address(adoptee.storage.data_ptr() + start)
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _pieces(
    adoptees: Sequence[Adoptee], offsets: Sequence[int], spans: Sequence[Span]
) -> Iterator[tuple[torch.UntypedStorage, int, int, int]]:
    """(storage, offset in it, offset in the range, bytes) of each part of an adoptee that lies in
    one of these ordered spans."""
    starts = [start for start, _ in spans]
    for adoptee, offset in zip(adoptees, offsets, strict=True):
        storage_end = offset + adoptee.nbytes
        for start, nbytes in spans[max(0, bisect.bisect_right(starts, offset) - 1) :]:
            if start >= storage_end:
                break
            first = max(start, offset)
            end = min(start + nbytes, storage_end)
            if first < end:
                yield adoptee.storage, first - offset, first, end - first
