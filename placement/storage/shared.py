"""A host copy that the ranks of one machine share, how they write it together, and the ranges that
have it.

A readonly object's host copy is never written. Another one's is written by all ranks at once, each
its share, when they offload the object in the same change of the group and it has the same bytes on
all of them. Each rank says what it does in words of its own behind the copy:

1. Meet. A rank that is about to offload leaves the fingerprints of its pages, and then the number
  of the change. It waits until all
   ranks have left theirs. Where the fingerprints are equal, the ranks write. A rank whose pages are
   as in the host copy already leaves its fingerprints, and neither waits nor writes.
2. Write. Each rank copies its share of each page that changed, in order, and counts the pages whose
  share has arrived.
3. Give up the memory. A rank takes the memory of a page only once every rank's share of it has
  arrived. The share of a rank that has died,
   failed or stopped is copied by each of the others: they have the same bytes.

So what is lost with a rank is on the device of each of the others, until it is in the host copy.
Where step 1 does not succeed, nothing was written or given up: a rank whose pages changed gets a
host copy of its own, and saves all of them there.

The shared copy is only written from when all ranks have left the same number until each leaves its
next one. By that one a rank also says that it needs nothing of the copy, and has nothing on the way
there. So a rank that was stopped in step 2 and goes on later writes the bytes that belong there,
and a copy that was torn by failures in step 2 is read by nobody.

A rank that has got a host copy of its own comes to the next meeting, too. Where all are equal
there, the shared copy is used again. Where values differ, or a rank has gone, it leaves the shared
copy for good, and says so in its last word.
"""

from __future__ import annotations

import hashlib
import math
import os
import select
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch

from placement.core import interrupts
from placement.core.states import Plan
from placement.devices.base import Device, round_up
from placement.devices.host.slab import PAGE
from placement.devices.memory import Copy, HostSlab, SharedHostSlab
from placement.storage.fingerprints import used_bytes
from placement.storage.layout import Adoptee, RangeLayout
from placement.storage.pages import Pages, Side
from placement.storage.range import Range

# pause between two looks at what the others say: the first one, and the longest
_PAUSE_SECONDS = (0.00005, 0.005)
_LOOK_SECONDS = 0.2  # how often a rank that waits looks whether the change has ended without it
# how long a rank waits for another's share that gets no further, before it copies it itself
_PATIENCE_SECONDS = 10.0
_NUM_WORDS = 6
# last words: this rank loads by itself from now on, or has unregistered the object
ALONE, LEFT = -1, -2
_ON_DEVICE, _GONE = 1, -1  # words for where a rank has its values. 0: in a host copy.
_FAILED = 1  # beside the number of a change: what is missing of this rank's share does not come


@dataclass(frozen=True, slots=True)
class Shares:
    """How a run of bytes is divided among ranks: one equal part of whole pages for each, in rank
    order, and then an undivided rest."""

    rank: int  # the place of this rank among them
    # the number of each rank in the manager's group, by which messages call it
    members: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return len(self.members)

    def part_bytes(self, nbytes: int) -> int:
        return nbytes // self.world_size // PAGE * PAGE

    def of(self, rank: int, nbytes: int) -> tuple[int, int]:
        """(offset, bytes) of the span that a rank writes: its part, and for the last rank the rest
        as well."""
        part = self.part_bytes(nbytes)
        start = rank * part
        return start, nbytes - start if rank == self.world_size - 1 else part


class Ranks:
    """Those ranks of a group that are in a torch.distributed process group, by which they gather,
    and share host copies on one machine.
    `group`: a `Group`, whose module is above this one. Its deadline is also the limit for one
    collective, where the backend keeps to it (gloo does; NCCL has its watchdog instead).
    `members`: the number of each in the group, in the order of the process group."""

    def __init__(
        self, group: Any, process_group: torch.distributed.ProcessGroup, members: tuple[int, ...]
    ) -> None:
        from torch._C._distributed_c10d import AllgatherOptions  # not in every build of torch

        self.group = group  # another one after a `rejoin`
        self.shares = Shares(process_group.rank(), members)
        self.deadline_seconds: float = group.deadline_seconds
        self._world_size = group.world_size
        self._process_group = process_group
        self._options = AllgatherOptions()
        self._options.asyncOp = False
        self._options.timeout = timedelta(seconds=self.deadline_seconds)

    @property
    def change(self) -> int:
        """The number of the present change of the group, 1 or more. All ranks have the same one;
        every change of every group another."""
        return self._number(self.group.epoch)

    @property
    def agreed_change(self) -> int:
        """The number of the last change on which all ranks have agreed."""
        return self._number(self.group.agreed_epoch)

    def _number(self, epoch: int) -> int:
        # Of this generation of the group alone: words that a rank of an earlier one left in the
        # shared memory never equal it.
        digest = hashlib.sha256(f"{self.group.generation} {epoch}".encode()).digest()
        return int.from_bytes(digest[:7], "big") + 1  # 0 stands for no change

    def exchange_texts(self, what: str, text: str) -> list[str]:
        return cast("list[str]", self.group.exchange_texts(what, text, self.shares.members))

    def agree(self, plan: Plan, stage: str, lacks_engines: bool) -> Any:
        """See `Group.agree`. Where the plans of the ranks may differ otherwise, they agree that the
        handle has moved."""
        return self.group.agree(
            Plan({}) if self.group.compares_plans else plan, stage, lacks_engines
        )

    @property
    def parted(self) -> str | None:
        """Why these ranks change together no longer; None while they do."""
        if (self.group.rank, self.group.world_size) != (
            self.shares.members[self.shares.rank],
            self._world_size,
        ):
            return "the group was made anew with other ranks"
        return None

    @property
    def gone(self) -> str | None:
        """Why no collective is possible any more; None while they are possible."""
        try:
            torch.distributed.get_process_group_ranks(self._process_group)
        except (KeyError, ValueError, RuntimeError):
            return "the process group was destroyed"
        return self.parted

    def gather(self, out: torch.Tensor) -> None:
        """All-gather in place, on the current stream. `out` has the parts of all ranks, in rank
        order; this rank's is filled in."""
        # Not torch.distributed.all_gather_into_tensor: it takes no deadline, and torch 2.13 has
        # renamed it.
        part = out.numel() // self.shares.world_size
        work = self._process_group._allgather_base(
            out, out[self.shares.rank * part :][:part], self._options
        )
        if work is not None:  # torch 2.13 returns None where the stream waits by itself
            work.wait()


class Refusal(NamedTuple):
    """Why the ranks do not write together."""

    reason: str
    is_final: bool  # whether they never will


class SharedCopy:
    """A host copy that ranks share, as one of them sees it. All methods but `leave` are for a rank
    that has not left it.
    `slab`: with `extra_bytes` behind the copy.
    `change`: returns the number of the group's present change, see `Ranks.change`.
    `is_over`: returns whether that change has ended, because a rank has failed."""

    def __init__(
        self,
        slab: SharedHostSlab,
        shares: Shares,
        change: Callable[[], int],
        is_over: Callable[[], bool],
    ) -> None:
        self.slab = slab
        self.shares = shares
        self._change, self._is_over = change, is_over
        self._ours, n = shares.rank, shares.world_size
        words = slab.extra[: len(slab.extra) // 8 * 8].view(torch.int64)
        self.loads, self.shown, self._places, self._turns, self._arrived, self._processes = words[
            : _NUM_WORDS * n
        ].view(_NUM_WORDS, n)
        """A word of each rank. `loads`: the change for which it prepared a load, or why it loads
        alone. `shown`: how often it was shown."""
        self.table = words[_NUM_WORDS * n :].view(n, -1)  # a row of each rank, for fingerprints
        self._processes[self._ours] = os.getpid()
        self._watched: dict[int, int] = {}
        self.lost: set[int] = set()  # the ranks whose shares will not come in the present writing

    @staticmethod
    def extra_bytes(shares: Shares, num_prints: int) -> int:
        """Bytes of the words, and of rows of so many fingerprints, behind a copy."""
        return 8 * shares.world_size * (_NUM_WORDS + num_prints + 1)

    def watch(self) -> None:
        """From now on know when a rank dies. Called when every rank has made its `SharedCopy`. Not
        every kernel can tell."""
        for rank, process in enumerate(self._processes.tolist()):
            if rank != self._ours:
                with suppress(OSError, AttributeError):
                    self._watched[rank] = os.pidfd_open(process)
        weakref.finalize(self, _close, [*self._watched.values()])

    # --- what this rank says

    def note_place(self, *, on_device: bool) -> None:
        """Say where this rank has its values from now on."""
        self._places[self._ours] = _ON_DEVICE if on_device else 0

    def leave(self, word: int) -> None:
        """Say for good that this rank shares the copy no longer. `word` stays in `loads`."""
        self.loads[self._ours], self._places[self._ours] = word, _GONE

    @property
    def has_met(self) -> bool:
        """Whether this rank has left its fingerprints in the present change. It does so once,
        whatever happens then."""
        return bool(self._turns[self._ours] >> 1 == self._change())

    def fail(self) -> None:
        """Say that what is missing of this rank's share does not come."""
        if self.has_met:
            self._turns[self._ours] |= _FAILED

    # --- step 1

    def meet(self, prints: torch.Tensor, *, num_arrived: int = 0) -> None:
        """Leave fingerprints (int64, on the CPU) for the present change. The first `num_arrived`
        pages need nothing of this rank."""
        self.lost.clear()
        self.table[self._ours, : len(prints)] = prints
        self._arrived[self._ours] = num_arrived
        self._turns[self._ours] = self._change() << 1

    def wait_for_all(
        self, count: int, seconds: float, name_of: Callable[[int], str]
    ) -> Refusal | None:
        """Wait until every rank has left its fingerprints. Returns None where all `count` of them
        are equal.
        `seconds`: the longest time.
        `name_of`: the name of the tensor that a fingerprint stands for, for a message."""
        number, look = self._change(), time.monotonic() + _LOOK_SECONDS
        late = ""
        for _ in interrupts.looks(seconds, *_PAUSE_SECONDS):
            # first: who has offloaded without leaving its fingerprints before will not leave them
            # now
            places = self._places.tolist()
            missing = [
                rank for rank, turn in enumerate(self._turns.tolist()) if turn >> 1 != number
            ]
            if not missing:
                break
            for rank in missing:
                name = f"rank {self.shares.members[rank]}"
                if places[rank] == _GONE or self._has_died(rank):
                    return Refusal(
                        f"{name} shares it no longer"
                        if places[rank] == _GONE
                        else f"{name} has died",
                        True,
                    )
                if places[rank] != _ON_DEVICE:
                    return Refusal(f"{name} has offloaded it alone", False)
            late = f"rank {self.shares.members[missing[0]]} has not offloaded it"
            if time.monotonic() >= look:
                if self._is_over():
                    return Refusal(late, False)
                look = time.monotonic() + _LOOK_SECONDS
        else:
            return Refusal(f"{late} within {seconds:g} s", False)
        rows = self.table[:, :count].clone()
        # the others have given the change up, and one is in the next one
        if any(turn >> 1 != number for turn in self._turns.tolist()):
            return Refusal("the ranks have gone on", False)
        for column in (rows != rows[:1]).any(dim=0).nonzero().flatten().tolist():
            other = others(self.shares, rows[:, column].tolist())
            return Refusal(
                f"{name_of(column)} has other bytes on rank{other} than on the rest", True
            )
        return None

    # --- step 3

    def note_arrived(self, count: int) -> None:
        """Say that this rank's shares of the first `count` pages have arrived."""
        self._arrived[self._ours] = count

    def wait_for_shares(self, count: int) -> set[int]:
        """Wait until the shares of the first `count` pages have arrived. Returns the ranks whose
        shares will not come."""
        number = self._change()
        since, before = time.monotonic(), self._arrived.tolist()
        for _ in interrupts.looks(math.inf, *_PAUSE_SECONDS):
            turns, arrived = self._turns.tolist(), self._arrived.tolist()
            # Who is in another change by now has left this one, and nobody knows how far it came.
            lacking = {
                rank
                for rank, turn in enumerate(turns)
                if (turn >> 1 != number or arrived[rank] < count) and rank not in self.lost
            }
            if arrived != before:
                since, before = time.monotonic(), arrived
            is_late = time.monotonic() - since > _PATIENCE_SECONDS
            self.lost |= {
                rank
                for rank in lacking
                if is_late or turns[rank] != number << 1 or self._has_died(rank)
            }
            if lacking <= self.lost:
                break
        return self.lost

    def _has_died(self, rank: int) -> bool:
        if rank not in self._watched:
            return False
        poll = select.poll()
        poll.register(self._watched[rank], select.POLLIN)
        return bool(poll.poll(0))


def others(shares: Shares, said: Sequence[object]) -> str | None:
    """The ranks that say something else than most do, as words behind "rank"; None where all say
    the same. If no answer is the most frequent, the earliest of the frequent ones counts."""
    usual, _ = Counter(said).most_common(1)[0]
    numbers = [str(shares.members[rank]) for rank, each in enumerate(said) if each != usual]
    return f"{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}" if numbers else None


def _close(files: Sequence[int]) -> None:
    for file in files:
        with suppress(OSError):
            os.close(file)


# --- the ranges, of whose pages each rank copies its share


def spans_of(rank: int, nbytes: int, chunk_bytes: int, shares: Shares) -> list[tuple[int, int]]:
    """(offset, bytes) of each span that a rank writes in the host copy of a range of `nbytes`, in
    order."""
    end = round_up(used_bytes(nbytes), PAGE)
    spans = [
        (start, *shares.of(rank, min(chunk_bytes, end - start)))
        for start in range(0, end, chunk_bytes)
    ]
    return [(start + offset, own) for start, offset, own in spans if own]


class SharedPages(Pages):
    """Pages that ranks save together: each its share of a page. `SharedCopy` says how."""

    # the host copy that the ranks are writing now; None: this rank saves whole pages
    together: SharedCopy | None = None
    shares: Shares

    def share(self, rank: int, index: int) -> Copy | None:
        """The copy of a rank's share of a page; None where it has none, because the page is too
        small to divide."""
        start, used = self.starts[index], self.used_sizes[index]
        offset, nbytes = self.shares.of(rank, round_up(used, PAGE))
        nbytes = min(nbytes, used - offset)
        return (
            Copy(self._addresses.base + start + offset, self.host.address + start + offset, nbytes)
            if nbytes > 0
            else None
        )

    def reserve_aside(self, stop: object) -> None:
        """Do nothing: what other ranks copy or wait for does not stay aside."""

    def bytes_to_save(self, indices: Iterable[int]) -> int:
        if self.together is None:
            return super().bytes_to_save(indices)
        return sum(
            copy.nbytes
            for index in indices
            if (copy := self.share(self.shares.rank, index)) is not None
        )

    def _start_saving(self, unsaved: Sequence[int]) -> None:
        if self.together is None:
            super()._start_saving(unsaved)
        else:
            # newest stays the device until the shares of all ranks are there
            self._send([self.shares.rank], unsaved)

    def wait(self, indices: Iterable[int]) -> None:
        """Where the ranks write together, wait for the shares of all of them as well, of all pages
        up to the last of these."""
        wanted = [*indices]
        if self.together is None:
            super().wait(wanted)
            return
        last = max((index for index in wanted if self._is_sent(index)), default=-1)
        sent = [index for index in range(last + 1) if self._is_sent(index)]
        super().wait([*{*wanted, *sent}])
        if not sent:
            return
        self.together.note_arrived(last + 1)
        if lost := self.together.wait_for_shares(last + 1):
            self._send(sorted(lost), sent)
            super().wait(sent)
        for index in sent:
            page = self.table[index]
            page.newest, page.copied, page.mark = Side.BOTH, None, None

    def _is_sent(self, index: int) -> bool:
        """Whether this rank has started to copy its share of a page, and the shares of others may
        lack."""
        page = self.table[index]
        return page.copied == "to_host" and page.newest is Side.DEVICE

    def _send(self, ranks: Sequence[int], indices: Sequence[int]) -> None:
        for index in indices:
            self.table[index].copied, self.table[index].mark = "to_host", None
        if copies := [
            copy
            for index in indices
            for rank in ranks
            if (copy := self.share(rank, index)) is not None
        ]:
            self._device.copy(copies, "to_host")
        mark = self._device.mark("to_host")
        for index in indices:
            self.table[index].mark = mark


class SharedRange(Range):
    """A range whose chunks are divided among the ranks one by one, so that a chunk can be gathered
    as soon as its parts have arrived.
    `slab`: the host copy to begin with: that of `copy`, or one of this rank's own.
    `is_frozen`: whether training does not change what is in it."""

    is_replica = True
    _pages_class = SharedPages
    pages: SharedPages

    def __init__(
        self,
        device: Device,
        layout: RangeLayout,
        slab: HostSlab,
        adoptees: tuple[Adoptee, ...],
        copy: SharedCopy,
        *,
        is_frozen: bool,
    ) -> None:
        # shared by the ranks; None once this rank has left it for good. `is_shared`: it is in use.
        self.copy: SharedCopy | None = copy
        self.shares, self.is_frozen = copy.shares, is_frozen
        super().__init__(device, layout, slab, adoptees, transient=False)
        self.pages.shares = copy.shares
        # why this rank loads everything over its own link from now on; None while the ranks load
        # together
        self.alone: str | None = None

    @property
    def is_shared(self) -> bool:
        return self.copy is not None and self.pages.host is self.copy.slab

    @property
    def is_shown(self) -> bool:
        """A frozen range counts as shown where any rank has shown it, because who writes there
        writes for all."""
        return self._is_shown or (
            self.is_frozen and self.copy is not None and self.copy.shown.tolist() != self._seen
        )

    @is_shown.setter
    def is_shown(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        if self.copy is not None:
            self.copy.shown[self.shares.rank] += is_shown
            self._seen = self.copy.shown.tolist()

    @property
    def held_host_bytes(self) -> int:
        return super().held_host_bytes + (
            0 if self.copy is None or self.is_shared else self.copy.slab.held_bytes
        )

    def leave(self, reason: str) -> None:
        """Share no host copy from now on. This rank has one of its own."""
        if self.copy is not None:
            self.alone = self.alone or reason
            self.copy.leave(ALONE)
            self.copy = None

    def part_bytes(self, index: int) -> int:
        """Size in bytes of each rank's part of one chunk; 0 where the chunk is too small to
        divide."""
        return self.shares.part_bytes(round_up(self.used_sizes[index], PAGE))

    def gathered(self, index: int) -> tuple[int, int]:
        """(offset, bytes) in the range of the parts of all ranks together, in one chunk."""
        return self.starts[index], self.shares.world_size * self.part_bytes(index)

    def copies(self, index: int) -> tuple[list[Copy], ...]:
        """The copies that this rank makes of one chunk (its part, and the undivided rest), and
        those of the other ranks' parts."""
        part, rank, (start, after) = self.part_bytes(index), self.shares.rank, self.gathered(index)
        own = (rank * part, part), (after, self.used_sizes[index] - after)
        rest = (0, rank * part), ((rank + 1) * part, after - (rank + 1) * part)
        device, host = self.layout.addresses.base + start, self.host.address + start
        return tuple(
            [Copy(device + at, host + at, nbytes) for at, nbytes in runs if nbytes > 0]
            for runs in (own, rest)
        )

    def names_in(self, index: int) -> str:
        """The names of the tensors in a chunk, for a message."""
        start, end = self.starts[index], self.starts[index] + self.used_sizes[index]
        names = [
            repr(each.name)
            for each in self.placed
            if each.offset < end and each.offset + each.nbytes > start
        ]
        return " or ".join(names[:4] + ([f"{len(names) - 4} more"] if len(names) > 4 else []))
