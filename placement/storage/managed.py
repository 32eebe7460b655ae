"""The storage of an object whose bytes placement moves: where they are, and the steps that load and offload them as a whole.

One `ManagedStorage`, which callers name `holding`, is the unit of a move. `on_device` is its one decision: setting it commits a move,
and `make_consistent` can repeat all work that follows. So after an interrupt the bytes are complete on the side that the decision
names, and `make_consistent` brings everything else in line with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial

import torch

from placement.core.errors import DeviceMemoryError, HostMemoryError, IntegrityError
from placement.storage import nan_check
from placement.storage.held import HeldStorage
from placement.storage.layout import RANGES
from placement.storage.range import Range
from placement.storage.scan import lasting_stray_references
from placement.storage.state_dicts import handed_out
from placement.storage.stepping import settle
from placement.storage.transfer.chunk_pool import ChunkPool
from placement.storage.transfer.result import MoveResult


class ManagedStorage(HeldStorage):
    """The unit of a move: the steps that load and offload the bytes of one object."""

    @property
    def can_prefetch(self) -> bool:
        return True

    # --- adopting

    def adopt(self) -> None:
        """Adopt the object at registration: every storage gets its place, its bytes go into the slab, and poison lies behind the place.

        Raises:
            RegistrationError: a storage belongs to another handle, or a tensor that nobody named uses it; nothing changed.
            DeviceMemoryError, HostMemoryError: no addresses or no host memory; nothing changed.
        """
        try:
            self.storages.adopt()
        except BaseException:
            self.unadopt()
            raise

    def adopt_restored(self) -> None:
        """Adopt new state that a checkpoint has put into the object. While offloaded, its bytes go straight into the host copy."""
        if self.on_device:
            self.storages.look()
            return
        fresh = self.storages.adopt_lasting()
        if fresh is not None:
            self.device.sync()
            self.is_consistent = False
            self.storages.keep((*self.ranges, fresh))
            self.make_consistent(ChunkPool(self.device))
            self.storages.align_wrappers()
            self.storages.count_uses()

    def adopt_dropped(self) -> None:
        """Adopt state that has become the offloaded optimizer's own since its offload: modules have dropped it as their gradient."""
        if self.adapter.lent_gradients() and not self.on_device and self.is_consistent:
            with contextlib.suppress(HostMemoryError):  # it stays on the device, and the next phase transition tries again
                self.adopt_restored()

    # --- moving: the steps of an `Exchange`, in order

    def begin_move(self, chunk_pool: ChunkPool) -> None:
        """Begin a move. From here to the end of `make_consistent` the object may be in any intermediate state.

        Raises:
            HostMemoryError: the host copy is on disk, and there is not enough memory for it; the move has not begun.
            IntegrityError: values are lost, were written while offloaded, or were computed from poison; the move has not begun.
        """
        if self.lost is not None:
            raise IntegrityError(self.lost)
        for r in self.ranges:
            r.claim()  # before anything changes
        if self.on_device:
            self.host_read_locks.wait()  # the offload will overwrite the host copy
        if not self.on_device and self.storages.dead():
            # Before the dead ranges are dropped: they may hold the only good values of tensors that were replaced.
            self.storages.writes.new_unless_changed()
        tensors = self.storages.state_dict_tensors
        self.is_consistent = False
        self._is_copying = not self.on_device
        for r in () if self.on_device else self.ranges:
            if r.early is not None:
                r.early.settle(chunk_pool)
        if self.on_device:
            self.adapter.ready()
            torch.clear_autocast_cache()  # inside an autocast region it holds half-precision copies of weights, which would stay
        if self.on_device and (held := [each for each in handed_out() if self.adapter.kind == "optimizer" or each is tensors]):
            seen = self.adapter.unchanged()  # an optimizer's state may be a tensor that the state dict of its module has shown
            live = seen.tensors if seen else [*(owned.tensor for owned in self.adapter.owned()), *self.adapter.borrowed()]
            for each in held:
                each.disown(live)
        dead = self.storages.dead()
        if self.on_device:
            if any(not r.transient for r in dead):  # before they are dropped: they have the numbers of tensors that were replaced
                nan_check.look_at_new(self, self.storages.rescan().stay)
            self.storages.offer_slab(dead)
        self.storages.drop(dead, chunk_pool)

    def adopt_new(self, *, drops: bool = False) -> tuple[tuple[Range, ...], bool]:
        """Reserve places for the new storages and start saving them. Returns their ranges, and whether any of them is not transient.

        Args:
            drops: leave the gradients out, because they are dropped when the offload is committed.
        """
        fresh, stays = self.storages.adopt_new(drops=drops, look=partial(nan_check.look_at_new, self))
        # Counted here because the link is busy now. If there are none now, the commit, when the link is idle, need not look again.
        self._may_have_stray_references = bool(self.storages.state_dict_tensors) or bool(self.stray_references())
        return fresh, stays

    def bring(self, r: Range, indices: Sequence[int]) -> int:
        """Start copying these chunks (ascending), which were mapped just now, to the device. Returns the bytes to copy.

        A part may be left to other ranks (see `ReplicatedStorage`): then the load is incomplete until `complete`.
        """
        copies = r.copies(indices)
        self.device.copy(copies, "to_device")
        return sum(copy.nbytes for copy in copies)

    def own_host_copy(self, r: Range) -> None:
        """Called before chunks of a range's host copy are written: see `ReplicatedStorage`.

        Raises:
            HostMemoryError: other processes read the host copy, and there is no memory for one that this process may write.
        """

    def stay_early(self, r: Range, indices: Sequence[int], dirty: Sequence[int]) -> None:
        """Make neighbouring chunks of an offload early ones. `save_early` saves those that differ from the slab (`dirty`)."""
        self._is_vacating = True
        assert r.early is not None
        r.early.stay(r.layout.addresses, r.chunks, indices, dirty)

    def save_early(self) -> None:
        """Start saving what stays early."""
        for r in self.ranges:
            if r.early is not None:
                r.early.save()

    @property
    def left_bytes(self) -> int:
        """Device bytes of the early chunks that an offload has left, some of which may still be being saved."""
        return sum(r.chunk_sizes[index] for r in self.ranges if r.early is not None for index in r.early.left)

    def take_early(self) -> int:
        """Map what arrived early behind the object's own addresses. Returns its bytes."""
        return sum(r.early.hand_over(r.layout.addresses, r.chunks) for r in self.ranges if r.early is not None)

    def give_up_early(self, keep_bytes: int, chunk_pool: ChunkPool) -> int:
        """Give up what arrived early, except for the first chunks, up to `keep_bytes`. Returns the device bytes given up."""
        if self.on_device or not self.is_consistent:  # an offload that broke off: only these chunks may have the bytes
            return 0
        before = self.prefetched_bytes
        for r in self.ranges:
            gone = []
            for index in [] if r.early is None else sorted(r.early.chunks):
                keep_bytes -= r.chunk_sizes[index]
                if keep_bytes < 0:
                    gone.append(index)
            if r.early is not None:
                r.early.discard(gone, chunk_pool)
        return before - self.prefetched_bytes

    def complete(self) -> None:
        """Start the missing transfers of an incomplete load, once its phase transition is decided.

        Raises:
            RuntimeError: the device failed. The host copy is complete.
        """

    def commit_offload(
        self, fresh: tuple[Range, ...], prints: Sequence[tuple[Range, torch.Tensor]], dropped: tuple[Range, ...] | None = None
    ) -> MoveResult:
        """Commit an offload whose bytes are all in the slabs. Returns what was found wrong: stray references and relocated storages.

        Args:
            fresh: ranges of the new storages.
            prints: the new fingerprints of the slabs.
            dropped: ranges that were not saved, because every gradient becomes None with the commit; None: gradients were saved.
        """
        before = self.ranges
        for r, now in prints:
            r.prints = now
        self.storages.state_dict_tensors.point_to_host(self.storages.by_address, except_for=self.storages.moving_in)
        surplus = self.stray_references(before) if self._may_have_stray_references else {}
        self.storages.keep(before + fresh)
        nan = nan_check.take(self)  # it names the time of the offload before
        self.offloaded_timestamp_seconds = time.time()
        self._dropped = dropped
        self.calls.refuse()
        self.on_device = False
        return MoveResult(
            stray_references=sum(surplus.values()),
            stray_names=", ".join([*surplus][:8]),
            brought_back=", ".join(self.storages.relocated_names[:8]),
            nan=nan,
        )

    def stray_references(self, ranges: Sequence[Range] | None = None) -> dict[str, int]:
        """The number of stray references to each adopted storage, by the storage's name. Storages without any are left out."""
        return self.storages.stray_references(self.ranges if ranges is None else ranges)

    def lasting_stray_references(self) -> dict[str, int]:
        """The stray references that remain after a short wait (see `scan.lasting_stray_references`)."""
        return lasting_stray_references(self.stray_references)

    def commit_load(self) -> None:
        """Commit a load whose bytes are all on their way; the current stream waits for them."""
        for r in self.ranges:
            if r.prints is None or r.is_shown:  # also of a readonly object: what was written into a state dict is its value from now on
                r.prints = self.storages.fingerprint(r, 0, len(r.chunk_sizes))
            r.is_shown = False
        shown = self.storages.state_dict_tensors
        shown.host_versions.raise_written(self.adapter, self.storages.by_address, are_held=shown.are_held)
        self.on_device = True

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        """Finish a move that was committed, or undo one that was not: bring everything in line with `on_device`. Idempotent.

        If an unfinished offload gave up chunks whose memory cannot be had back, the rest of the object is offloaded, too.
        """
        if self.is_consistent:
            return
        if self.on_device:
            for r in self.ranges:
                if r.claims is not None:  # prepared for an offload that was not committed; the next one can use its slab
                    self.storages.set_aside(r)
            self.storages.drop([*(r for r in self.ranges if r.claims is not None), *self.storages.dead()], chunk_pool)
            chunk_pool.forget(chunk for r in self.ranges for chunk in r.chunks.values())
            if self._is_vacating:
                self._take_back_early()
            if self._is_vacating and not self._have_back(chunk_pool):
                self.calls.refuse()
                self.on_device = False
            self.storages.state_dict_tensors.point_to_device(self.storages.by_address)
            self._distrust_host_copies_with_views()
        if not self.on_device:
            settle(self, chunk_pool)
            if self._is_copying:
                self.device.sync()
                self._drop_early(chunk_pool)
            if self._dropped is not None:
                self.gradients.drop(zero_buffers=False)
                staying = self.gradients.zero_lasting(self._dropped)
                self.storages.drop([r for r in self._dropped if r not in staying], chunk_pool)
            for r in self.ranges:
                self.storages.vacate(r, chunk_pool)
                r.move_in()
            self.storages.end_offload()
            self.storages.state_dict_tensors.point_to_host(self.storages.by_address)
            self.storages.state_dict_tensors.note_shown(self.storages.by_address)
            self.storages.state_dict_tensors.note_held(self.storages.by_address)
            if self.storages.state_dict_tensors:
                self.storages.writes.allow()
            self.storages.unadopted_bytes = 0
            self.storages.look_at_unborn()
            self.adapter.drop_caches()
            self.storages.look_at_framework_memory()
        else:
            self.calls.allow()
        self._is_copying = self._is_vacating = False
        self._dropped = None
        self.storages.forget_offload()
        self.is_consistent = True

    def vacate(self, r: Range, first: int, last: int, chunk_pool: ChunkPool) -> None:
        """Take away the memory behind chunks `first` up to `last` (not included), whose bytes are on the host."""
        if not self._is_vacating and self.storages.state_dict_tensors:
            # Another thread may be writing a checkpoint from these tensors, which must never read poison.
            self.device.wait(self.device.mark("to_host"))
            self.storages.state_dict_tensors.point_to_host(self.storages.by_address, except_for=self.storages.moving_in)
        self._is_vacating = True
        r.give(range(first, last), chunk_pool)  # before unmapping: at an interrupt every chunk in `r.chunks` is still mapped
        self.device.unmap(r.layout.addresses, sum(r.chunk_sizes[first:last]), r.starts[first])

    def _distrust_host_copies_with_views(self) -> None:
        """Let the next offload copy every chunk of ranges whose host copy somebody may still write.

        They can through a view of a state dict's tensor. The host copy of a readonly object stays as they leave it, because nothing is
        copied back. So its ranges count as shown until the next load, which takes the fingerprints anew.
        """
        if self.storages.state_dict_tensors.are_held:
            for r, _ in self.storages.state_dict_tensors.left_on_host(self.storages.by_address):
                if self.readonly:
                    r.note_shown()
                elif not r.is_shared:
                    r.prints = None

    def _take_back_early(self) -> None:
        """Have back the early chunks of a broken-off offload, which have bytes that the slab may lack."""
        for r in self.ranges:
            if r.early is not None:
                r.early.give_back(r.layout.addresses, r.chunks)

    def _drop_early(self, chunk_pool: ChunkPool) -> None:
        for r in self.ranges:
            if r.early is not None:
                r.early.forget(r.chunks.values())
                r.early.discard_all(chunk_pool)

    def _have_back(self, chunk_pool: ChunkPool) -> bool:
        """Take back the chunks that a broken-off offload gave up, and fill them from the slab, which has their bytes.

        Returns False where their memory is gone. Then the remaining chunks were copied to the host, which has every byte.
        """
        self.device.sync()
        missing = [(r, index) for r in self.ranges for index in r.missing()]
        for r, index in missing:
            self.device.unmap(r.layout.addresses, r.chunk_sizes[index], r.starts[index])
        try:
            for r, index in missing:
                (chunk,) = chunk_pool.take_wiped([r.chunk_sizes[index]])
                try:
                    self.device.map(r.layout.addresses, (chunk,), r.starts[index])
                    self.device.copy(r.copies((index,)), "to_device")
                except BaseException:
                    self.device.unmap(r.layout.addresses, r.chunk_sizes[index], r.starts[index])
                    chunk_pool.give((chunk,))
                    raise
                r.chunks[index] = chunk  # last: a chunk in `r.chunks` has its bytes
        except DeviceMemoryError:
            for r in self.ranges:
                self.save_rest(r)
            self.device.sync()
            return False
        self.device.order()
        return True

    def save_rest(self, r: Range) -> None:
        """Start copying the chunks that a range still has on the device to the host copy, which has all others."""
        r.prints = None
        self.device.copy(r.copies(sorted(r.chunks)), "to_host")

    # --- writes while offloaded

    def written(self) -> list[str]:
        """Names of the storages that were written in place while offloaded, without gradients, as far as version counters tell.

        Looks at every tensor.
        """
        return [] if self.on_device else self.storages.writes.found()

    def forget_writes(self) -> None:
        """Do not report again what `written` has found."""
        self.storages.writes.forget()

    def take_written_gradients(self) -> list[str]:
        """Names of the gradients that were written while offloaded, otherwise than by `zero_grad()`. They are not reported again."""
        return [] if self.on_device else self.storages.writes.take_gradients()

    # --- leaving

    def _ready_to_leave(self) -> ChunkPool:
        """Bring the tensors and the bytes to where `unadopt` expects them. After a failure the object stays."""
        if self.on_device or self._is_copying:
            self.device.sync()
        if self.on_device and self._is_vacating:
            self._take_back_early()
        if not self.on_device and self.is_consistent:  # no tensor may leave with poison for values
            self.storages.writes.put_back(self.storages.rescan())
        chunk_pool = ChunkPool(self.device)
        if not self.on_device:
            self._drop_early(chunk_pool)  # while the object can stay as it is, because the device may fail
        return chunk_pool

    def unadopt(self) -> None:
        """Give every tensor ordinary storage again, on the device while resident, else on the host, and drop the ranges. Idempotent."""
        self.storages.give_up_discovered()
        if not self.ranges:
            return
        self.host_read_locks.wait()
        was_consistent = self.is_consistent
        if self.on_device:
            self.end_calls(time.monotonic())
        self.adapter.hands_back = True  # what the object has got and nobody can move must not keep its values here
        try:
            chunk_pool = self._ready_to_leave()
        except BaseException:
            self.adapter.hands_back = False
            if self.on_device:  # it stays, and can be called
                self.calls.allow()
                self.is_consistent = was_consistent
            raise
        self.is_leaving = True
        self.storages.unadopt(on_device=self.on_device)
        if self.on_device:
            self.device.wait_for_work()  # the kernels that copy the values out of the ranges have only been started
        self.on_device = False
        self._drop_early(chunk_pool)
        for r in self.ranges:
            self.storages.vacate(r, chunk_pool)
            RANGES.remove(r.layout.addresses.base)
        chunk_pool.release()
        self.storages.ranges = ()
