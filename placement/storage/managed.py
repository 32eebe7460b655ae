"""The storage of an object whose bytes placement moves: the steps of its moves, and its end.
`AdoptedStorage` has all that moves nothing.

One `ManagedStorage`, which callers name `holding`, is the unit of a move. `on_device` is its one
decision: setting it commits a move. What is true of each page is in the page tables of its ranges.
After a failure the bytes are complete on the side that the decision names, and `make_consistent`
settles every page there and brings the tensors in line.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from placement.core.errors import (
    DeviceMemoryError,
    HostMemoryError,
    IntegrityError,
    RegistrationError,
)
from placement.core.journal import logger
from placement.core.modes import without_modes
from placement.storage.adopted import AdoptedStorage, Offload, Stage
from placement.storage.fingerprints import differing
from placement.storage.pages import Behind, ChunkPool, Side, fill
from placement.storage.range import Range
from placement.storage.watch.state_dicts import handed_out
from placement.tensors.alive import Unadopted


@dataclass(frozen=True, slots=True)
class MoveResult:
    """The bytes that a move copied and skipped, the time it took, and what it found wrong."""

    seconds: float = 0.0
    copied_bytes: int = 0
    skipped_bytes: int = 0
    prefetched_bytes: int = 0  # bytes of a load that had arrived before it
    rewritten_chunks: int = 0  # chunks of a readonly object whose bytes changed on the device
    stray_references: int = 0
    stray_names: str = ""
    brought_back: str = ""  # names of the relocated tensors, which the offload has given new places

    def complaints(self, name: str) -> Iterator[IntegrityError]:
        """Errors about what was found wrong with a handle, to be raised once its phase transition
        is complete."""
        if self.rewritten_chunks:
            yield IntegrityError(
                f"{name!r} is readonly, but {self.rewritten_chunks} of its chunks changed on the "
                "device; the registered values were kept. Register it without readonly=True if it "
                "is meant to be written."
            )
        if self.brought_back:
            yield IntegrityError(
                f"{self.brought_back} of {name!r} lay in other memory than theirs when it was "
                "offloaded: something moved them out of the handle's memory on the device "
                "(share_memory(), a torch.multiprocessing queue). They have new places there, with "
                "the values that they had; a process that received the shared memory no longer "
                "sees changes. Share memory before registering, or send copies (clone())."
            )


# the number of pages that are saved by one copy call, and known to be saved together
_SAVED_TOGETHER = 4


class ManagedStorage(AdoptedStorage):
    """The bytes of one object, which come and go."""

    def refuse_calls(self) -> None:
        """Refuse calls of the object until it is back on the device. A call that another thread is
        in goes on, and reads poison once the memory has gone."""
        self.stage = Stage.BEGUN
        self.calls.refuse()

    # --- adopting what comes later

    def adopt_restored(self) -> None:
        """Adopt new state that a checkpoint has put into the object. While offloaded, its bytes go
        straight into the host copy."""
        if self.on_device:
            self.measure_unadopted()
        elif (fresh := self.scanner.adopt(self.scanner.rescan().lasting)) is not None:
            self.device.sync()
            self.stage = Stage.BEGUN
            self.set_ranges((*self.ranges, fresh))
            self.make_consistent(ChunkPool(self.device))
            self.scanner.align_wrappers()
            self.count_uses()

    def adopt_dropped(self) -> None:
        """Adopt state that has become the offloaded optimizer's own since its offload: modules have
        dropped it as their gradient."""
        if not self.on_device and self.is_consistent and self.adapter.lent_gradients():
            try:
                self.adopt_restored()
            except HostMemoryError:
                # it stays on the device, and the next phase transition tries again
                self.watch.expect(self.scanner.rescan())

    # --- moving: the steps of an `Exchange`, in order

    def begin_move(self, chunk_pool: ChunkPool) -> None:
        """Begin a move; an offload after `refuse_calls`, with the device idle. From here to the end
        of `make_consistent` the object may be in any state. If it raises because values are lost,
        or tensors were replaced while offloaded, the move has not begun."""
        if self.lost is not None:
            raise IntegrityError(self.lost)
        if self.on_device:
            self._begin_offload(chunk_pool)
            return
        if dead := self.dead():
            self.watch.scan()  # a dead range may have the values of tensors that were replaced
        self.watch.require_whole()
        self.stage = Stage.BEGUN
        for r in self.ranges:
            r.pages.discard_unusable(chunk_pool)
        self.drop(dead, chunk_pool)

    def _begin_offload(self, chunk_pool: ChunkPool) -> None:
        self.wait_for_host_readers()  # the offload will overwrite the host copy
        for r in self.ranges:
            r.pages.note_idle()
        self.adapter.ready()
        # inside an autocast region it holds half-precision copies of weights, which would stay
        torch.clear_autocast_cache()
        if held := [
            each
            for each in handed_out()
            if self.adapter.kind == "optimizer" or each is self.state_dict_tensors
        ]:
            # an optimizer's state may be a tensor that the state dict of its module has shown
            seen = self.adapter.unchanged()
            live = (
                seen.tensors
                if seen
                else [*(owned.tensor for owned in self.adapter.owned()), *self.adapter.borrowed()]
            )
            for each in held:
                each.disown(live)
        dead = self.dead()
        # The coming offload can use the host memory of gradients that are dead.
        slabs = [r.host for r in dead if r.transient]
        self.scanner.spare = max(slabs, key=lambda slab: slab.nbytes, default=None)
        self.drop(dead, chunk_pool)

    def hide(self, r: Range, indices: Sequence[int]) -> bool:
        """Put the memory of leaving pages aside. Returns False, with no page moved, where somebody
        has got tensors of a state dict meanwhile: they would read poison until `save_aside`, which
        has to follow either way."""
        self.host_has_newest.clear()
        self.stage = Stage.HIDING
        self.state_dict_tensors.num_pointings += 1  # what is handed out at this moment waits, too
        if is_unseen := not self.state_dict_tensors:
            r.pages.hide(indices)
        return is_unseen

    def save_aside(self) -> None:
        """Start saving what stays aside. Called after all of it has moved, because the driver is
        quick only while the link is idle."""
        for r in self.ranges:
            unsaved = [
                index
                for index in r.pages.at(Behind.ASIDE)
                if r.pages.table[index].newest is Side.DEVICE
            ]
            for start in range(0, len(unsaved), _SAVED_TOGETHER):
                r.pages.save(unsaved[start : start + _SAVED_TOGETHER])
        if self.stage is Stage.HIDING:  # from here on, what was hidden is as good as vacated
            self.stage = Stage.VACATING
        self.host_has_newest.set()

    @property
    def left_bytes(self) -> int:
        """Device bytes of the pages that an offload has left aside, some of which may still be
        being saved."""
        return sum(r.pages.bytes_of(r.pages.left()) for r in self.ranges)

    def give_up_early(self, keep_bytes: int, chunk_pool: ChunkPool) -> int:
        """Give up the pages that are aside, except for the first ones, up to `keep_bytes`. Returns
        the device bytes given up."""
        # an offload that broke off: only these pages may have the bytes
        if self.on_device or not self.is_consistent:
            return 0
        given = 0
        for r in self.ranges:
            kept = set[int]()
            for index in r.pages.at(Behind.ASIDE):
                keep_bytes -= r.chunk_sizes[index]
                if keep_bytes >= 0:
                    kept.add(index)
            given += r.pages.discard(chunk_pool, keep=kept.__contains__)
        return given

    def vacate(self, r: Range, indices: Sequence[int], chunk_pool: ChunkPool) -> None:
        """Take away the memory of pages (ascending) whose bytes are on the host, or on their way
        there."""
        if self.stage is not Stage.VACATING:
            # Another thread may read these tensors, or be given some just now. It must never read
            # poison.
            self.stage = Stage.VACATING
            self._show_host_copy()
            if self.state_dict_tensors:
                self.device.sync()  # for what it has begun to read where they were
        r.pages.vacate(indices, chunk_pool)

    def _show_host_copy(self) -> None:
        """Point the tensors of state dicts to the host copy, before memory is taken away. Their
        holders may write there. Idempotent."""
        for r in self.ranges:
            if r.is_shared and (self.state_dict_tensors or self.state_dict_tensors.are_held):
                self.make_host_copy_own(r)
        self.state_dict_tensors.point_to_host(except_for=self._offload.moving_in)

    def commit_offload(
        self,
        fresh: tuple[Range, ...],
        prints: Sequence[tuple[Range, torch.Tensor]],
        dropped: tuple[Range, ...] | None = None,
    ) -> MoveResult:
        """Commit an offload whose bytes are all in the slabs. Returns what was found wrong: stray
        references and relocated storages.
        `fresh`: ranges of the new storages.
        `prints`: the new fingerprints of the slabs.
        `dropped`: ranges that were not saved, because every gradient becomes None with the commit;
        None: gradients were saved."""
        for r, now in prints:
            r.pages.prints = now
        self._show_host_copy()
        surplus = self.stray_references() if self._offload.may_have_stray_references else {}
        self.set_ranges(self.ranges + fresh)
        self.offloaded_timestamp_seconds = time.time()
        self._offload.dropped = dropped
        self.stage = Stage.VACATING  # also where nothing had memory
        self.on_device = False
        brought_back = [
            each.entry.name
            for each in self._offload.relocated
            if each.adoptee.nbytes == each.entry.nbytes
        ]
        return MoveResult(
            stray_references=sum(surplus.values()),
            stray_names=", ".join([*surplus][:8]),
            brought_back=", ".join(brought_back[:8]),
        )

    def commit_load(self) -> None:
        """Commit a load whose bytes are all on their way; the current stream waits for them."""
        for r in self.ranges:
            # also of a readonly object: what was written into a state dict is its value now
            if r.pages.prints is None or r.is_shown:
                r.pages.prints = r.fingerprint(0, len(r.chunk_sizes))
            r.is_shown = False
        self.on_device = True

    def make_consistent(self, chunk_pool: ChunkPool) -> None:
        """Finish a move that was committed, or undo one that was not: bring everything in line with
        `on_device`. Idempotent. If an unfinished offload gave up memory that cannot be had back,
        the rest of the object is offloaded, too."""
        if self.is_consistent:
            return
        if self.on_device:
            # prepared for an offload that was not committed
            pending = [r for r in self.ranges if r.moving_in is not None]
            for r in pending:
                self.scanner.reserved = r.host  # the next one can use its slab
            self.drop([*pending, *self.dead()], chunk_pool)
            self._have_back(chunk_pool)
            # who asks for a value from here on is shown the side that was decided on
            self.stage = Stage.BEGUN
            self.state_dict_tensors.point_to_device()
            # Views may still write into the host copy, so the next offload copies every chunk
            # there. That of a readonly object stays as they leave it: the next load takes the
            # fingerprints anew.
            for r, _ in self.state_dict_tensors.left_on_host():
                if self.readonly:
                    r.note_shown()
                elif not r.is_shared:
                    r.pages.prints = None
        if self.on_device:
            self.calls.allow()
        else:
            self._leave_device(chunk_pool)
        self._offload, self.scanner.spare = Offload(), None
        self.stage = Stage.SETTLED

    def _have_back(self, chunk_pool: ChunkPool) -> None:
        """Have every page on the device. Where memory for that is gone, decide that the object is
        offloaded."""
        try:
            for r in self.ranges:
                if r.moving_in is None:
                    r.pages.settle(Side.DEVICE, chunk_pool)
        except DeviceMemoryError:
            for r in self.ranges:
                self._note_unchanged(r)
            self.calls.refuse()
            self.on_device = False

    def _note_unchanged(self, r: Range) -> None:
        """Note which pages need not be saved, because the rest of the object has to leave, too:
        those whose bytes are in the host copy, and all of a readonly object."""
        known = None if r.pages.prints is None else r.pages.prints.cpu()
        keeps_host_copy = self.readonly and known is not None and not r.transient
        changed = []
        for index, page in enumerate(r.pages.table):
            if page.newest is not Side.DEVICE:
                continue
            is_clean = keeps_host_copy or (
                known is not None
                and page.behind is Behind.OWN
                and bool(r.fingerprint(index, index + 1).cpu()[0] == known[index])
            )
            if is_clean:
                r.pages.note_clean((index,))
            else:
                changed.append(index)
        if changed:
            self.make_host_copy_own(r, changed)

    def _leave_device(self, chunk_pool: ChunkPool) -> None:
        """Have every page on the host, and the tensors in line: of a committed offload, a load that
        failed, or a streamed step."""
        if (dropped := self._offload.dropped) is not None:
            self.gradients.drop(zero_buffers=False)
            staying = self.gradients.zero_lasting(dropped)
            for r in staying:
                r.pages.vacate(range(len(r.chunk_sizes)), chunk_pool)
            self.drop([r for r in dropped if r not in staying], chunk_pool)
        # no offload, which has waited: copies and kernels may be under way
        if self.stage is not Stage.VACATING:
            self.device.sync()
        for r in self.ranges:
            r.pages.settle(Side.HOST, chunk_pool)
        self.state_dict_tensors.point_to_host()  # first those over storages that move to poison now
        for r in self.ranges:
            r.move_in()
        if self.stage is Stage.STEPPING:
            self._take_in_created()
            self.stage = Stage.BEGUN
        for r, entry, _ in self._offload.relocated:  # which have moved to new places
            r.forget(entry)
        self._offload.relocated = ()
        self.state_dict_tensors.point_to_host()
        self.state_dict_tensors.note_all_shown()
        if self.state_dict_tensors:
            self.object_ranges.may_be_written = True
        self.unadopted = Unadopted()
        self.look_at_unborn()
        self.adapter.drop_caches()
        self.look_at_framework_memory()

    def _take_in_created(self) -> None:
        """Give state that a streamed step has created its place, wherever the step stopped."""
        with without_modes():
            if (fresh := self.adopt_created()) is not None:
                self.device.sync()
                self.set_ranges((*self.ranges, fresh))
                fresh.move_in()
            # state that lacks host memory stays in torch's
            self.watch.expect(self.scanner.rescan())
            # the step has written the state
            self.object_ranges.note_versions(self.scanner.versions)

    def give_back_unused(self) -> None:
        """Give back the memory of dropped gradients, page by page."""
        chunk_pool = ChunkPool(self.device)
        for r in self.ranges if self.is_consistent else ():
            # a state dict of state that was a gradient may have been loaded back
            if (indices := r.unused_pages()) and not r.has_any(
                self.state_dict_tensors.held_addresses
            ):
                if self.on_device:
                    self.device.sync()  # kernels on any stream may still read what was dropped
                r.pages.give_up(indices, chunk_pool)
        chunk_pool.release()

    def immovable(self) -> Iterator[RegistrationError]:
        for name, problem in self.adapter.immovable():
            yield RegistrationError(
                f"{self.name!r}: {name!r} {problem}. The rest of the handle was offloaded; this "
                "tensor stays."
            )

    def warn_of_views(self) -> bool:
        """Log a warning if views show the host copy of the loaded object. Returns whether there are
        any."""
        if names := self.views_left_on_host():
            logger.warning(
                "%r: views of tensors of a state dict (%s) were taken while it was offloaded, and "
                "somebody still holds them. The tensors themselves show the device now, these "
                "views show the host copy: they do not see what is changed from here on, and what "
                "is written to them is %s. Take views anew in each phase, or clone() them",
                self.name,
                ", ".join(names[:8]),
                "the handle's value from the next offload on" if self.readonly else "lost",
            )
        return bool(names)

    def mirror(self) -> None:
        """Copy the chunks that changed on the device to the host copy, as an offload would. Nothing
        moves and no memory is given up, for a reader of the host copy (an asynchronous checkpoint).
        The next offload need not copy the same chunks again. Gradients are left out, and storages
        that are new since the last offload, because they have no place in the host copy yet."""
        # the host copy of a readonly object is always right
        if not self.on_device or self.readonly:
            return
        self.wait_for_host_readers()
        self.device.sync()
        prints: list[tuple[Range, torch.Tensor]] = []
        for r in self.ranges:
            if r.transient or r.moving_in is not None:
                continue
            host_prints = None if r.pages.prints is None else r.pages.prints.cpu()
            device_prints = r.fingerprint(0, len(r.chunk_sizes)).cpu()
            if changed := differing(host_prints, device_prints):
                self.make_host_copy_own(r, changed)
                r.pages.save(changed)
            prints.append((r, device_prints))
        self.device.wait(self.device.mark("to_host"))
        for r, device_prints in prints:
            r.pages.note_changed(range(len(r.chunk_sizes)))  # from here on, as far as anybody knows
            r.pages.prints = device_prints

    # --- loading, where `ReplicatedStorage` leaves some bytes to `complete`

    def bring(self, r: Range, indices: Sequence[int]) -> int:
        """Start copying chunks (ascending) that were mapped just now to the device. Returns the
        bytes."""
        return fill(self.device, [(r.pages, indices)])

    def complete(self) -> None:
        """Start the missing transfers of an incomplete load, once its phase transition is
        decided."""

    def restore(self) -> None:
        """See `Handle.restore`."""
        if self.lost is not None:
            raise IntegrityError(self.lost)
        self.watch.restore()
        self.count_uses()
        self.look_at_unborn()

    # --- leaving

    def _ready_to_leave(self, *, is_repeated: bool) -> ChunkPool:
        """Bring the tensors and the bytes to where `unadopt` expects them. After a failure the
        object stays. `is_repeated`: an earlier call has taken away pages that tensors had left.
        They get no memory again, which the others may lack."""
        chunk_pool = ChunkPool(self.device)
        if self.on_device or any(r.pages.own_bytes for r in self.ranges):
            self.device.sync()
            for r in self.ranges:
                r.pages.note_idle()
        if self.on_device and not is_repeated:
            self._have_back(chunk_pool)
        if not self.on_device:
            for r in self.ranges:  # while the object can stay as it is, because the device may fail
                r.pages.settle(Side.HOST, chunk_pool)
                r.pages.discard(chunk_pool)
        return chunk_pool

    def unadopt(self) -> None:
        """Give every tensor ordinary storage again, on the device while resident, else on the host,
        and drop the ranges. Idempotent."""
        self.scanner.discovered = frozenset()  # these may be another's from now on
        if not self.ranges:
            return
        self.wait_for_host_readers()
        before = self.stage
        if self.on_device:
            self.refuse_calls()
        # what the object has got and nobody can move must not keep its values here
        self.adapter.hands_back = True
        try:
            chunk_pool = self._ready_to_leave(is_repeated=before is Stage.LEAVING)
        except BaseException:
            self.adapter.hands_back = False
            if self.on_device:  # it stays, and can be called
                self.calls.allow()
                self.stage = before
            raise
        self.stage = Stage.LEAVING

        def have_left(address: int) -> None:
            if self.on_device:
                self.device.wait_for_work()
                for r in self.ranges:
                    base = r.layout.addresses.base
                    r.pages.vacate(
                        [i for i, start in enumerate(r.starts) if base + start >= address],
                        chunk_pool,
                    )
                chunk_pool.release()

        self.scanner.unadopt(on_device=self.on_device, have_left=have_left)
        if self.on_device:
            # the kernels that copy the values out of the ranges have only been started
            self.device.wait_for_work()
        self.on_device = False
        for r in self.ranges:
            r.pages.vacate(range(len(r.chunk_sizes)), chunk_pool)
        chunk_pool.release()
        self.set_ranges(())
