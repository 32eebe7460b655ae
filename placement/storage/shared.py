"""A host copy that the ranks of one machine share, and the range that has it.

The ranks write the copy once, at registration, each its share. Afterwards it is only read, so it
needs no rules about who may write. A rank whose values have changed gets a host copy of its own.

To load it, each rank copies a part of each chunk, and the rest comes from the others. Behind the
copy is a word of each rank, by which it says for which change of the group it has prepared a load.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch

from placement.core.states import Plan
from placement.devices.base import Device, round_up
from placement.devices.host.slab import PAGE
from placement.devices.memory import Copy, SharedHostSlab
from placement.storage.fingerprints import used_bytes
from placement.storage.layout import Adoptee, RangeLayout
from placement.storage.range import Range

# last words: this rank loads by itself from now on, or has unregistered the object
ALONE, LEFT = -1, -2

Span = tuple[int, int]  # offset and number of bytes


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

    def of(self, nbytes: int) -> Span:
        """The span that this rank writes: its part, and for the last rank the rest as well."""
        part = self.part_bytes(nbytes)
        start = self.rank * part
        return start, nbytes - start if self.rank == self.world_size - 1 else part


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
        self._world_size = group.world_size
        self._process_group = process_group
        self._options = AllgatherOptions()
        self._options.asyncOp = False
        self._options.timeout = timedelta(seconds=group.deadline_seconds)

    @property
    def change(self) -> int:
        """The number of the present change of the group, 1 or more. All ranks have the same number.
        Every change of every group has another one."""
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

    def exchange_texts(self, topic: str, text: str) -> list[str]:
        return cast("list[str]", self.group.exchange_texts(topic, text, self.shares.members))

    def agree(self, plan: Plan, stage: str, lacks_engines: bool) -> Any:
        """See `Group.agree`. Where the plans of the ranks may differ otherwise, they agree that the
        handle has moved."""
        return self.group.agree(
            Plan({}) if self.group.compares_plans else plan, stage, lacks_engines
        )

    @property
    def obstacle(self) -> str | None:
        """Why no collective is possible any more; None while they are possible."""
        try:
            torch.distributed.get_process_group_ranks(self._process_group)
        except (KeyError, ValueError, RuntimeError):
            return "the process group was destroyed"
        # A restarted rank with an old number is no obstacle: its word never says that it is ready.
        if (self.group.rank, self.group.world_size) != (
            self.shares.members[self.shares.rank],
            self._world_size,
        ):
            return "the group was made anew with other ranks"
        return None

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


class SharedCopy:
    """A host copy that ranks share, as one of them sees it.
    `slab`: with `extra_bytes` behind the copy."""

    def __init__(self, slab: SharedHostSlab, shares: Shares) -> None:
        self.slab = slab
        self.shares = shares
        num_ranks = shares.world_size
        words = slab.extra[: len(slab.extra) // 8 * 8].view(torch.int64)
        self.loads = words[:num_ranks]
        """A word of each rank: the change for which it prepared a load, or why it loads alone."""
        self.table = words[num_ranks:].view(num_ranks, -1)
        """A row of each rank, for the fingerprints that the ranks compare at registration."""

    @staticmethod
    def extra_bytes(shares: Shares, num_prints: int) -> int:
        """Bytes of the words, and of rows of so many fingerprints, behind a copy."""
        return 8 * shares.world_size * (num_prints + 1)

    def say(self, word: int) -> None:
        """Set the word of this rank."""
        self.loads[self.shares.rank] = word


def deviating_ranks(shares: Shares, answers: Sequence[object]) -> str | None:
    """The ranks whose answer is not that of most ranks, as words behind "rank"; None where all
    answers are equal. If no answer is the most frequent, the earliest of the frequent ones
    counts."""
    usual, _ = Counter(answers).most_common(1)[0]
    numbers = list[str]()
    for member, answer in zip(shares.members, answers, strict=True):
        if answer != usual:
            numbers.append(str(member))
    if not numbers:
        return None
    return f"{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


# --- the range


def spans_of(nbytes: int, chunk_bytes: int, shares: Shares) -> list[Span]:
    """The spans that this rank writes in the host copy of a range of `nbytes`, in order."""
    end = round_up(used_bytes(nbytes), PAGE)
    spans = list[Span]()
    for start in range(0, end, chunk_bytes):
        offset, share_bytes = shares.of(min(chunk_bytes, end - start))
        if share_bytes:
            spans.append((start + offset, share_bytes))
    return spans


class SharedRange(Range):
    """A range of which each chunk is divided among the ranks. So a chunk can be gathered as soon as
    its parts have arrived."""

    def __init__(
        self, device: Device, layout: RangeLayout, copy: SharedCopy, adoptees: tuple[Adoptee, ...]
    ) -> None:
        super().__init__(device, layout, copy.slab, adoptees, transient=False)
        self.copy = copy
        self.shares = copy.shares
        self.is_shared = True
        # why this rank loads the whole over its own link from now on; None while the ranks load
        # together
        self.alone: str | None = None

    def load_alone(self, reason: str) -> None:
        """Load the whole range over this rank's own link from now on, and tell the other ranks."""
        self.alone = reason
        self.copy.say(ALONE)

    def part_bytes(self, index: int) -> int:
        """Size in bytes of each rank's part of one chunk; 0 where the chunk is too small to
        divide."""
        return self.shares.part_bytes(round_up(self.used_sizes[index], PAGE))

    def gathered(self, index: int) -> Span:
        """The span in the range of the parts of all ranks together, in one chunk."""
        return self.starts[index], self.shares.world_size * self.part_bytes(index)

    def copies(self, index: int) -> tuple[list[Copy], list[Copy]]:
        """The copies that this rank makes of one chunk (its part, and the undivided rest), and
        those of the other ranks' parts."""
        start, divided_bytes = self.gathered(index)
        part_bytes = self.part_bytes(index)
        bytes_before = self.shares.rank * part_bytes
        bytes_behind = divided_bytes - part_bytes - bytes_before
        part = start + bytes_before
        rest_bytes = self.used_sizes[index] - divided_bytes
        own = [(part, part_bytes), (start + divided_bytes, rest_bytes)]
        other = [(start, bytes_before), (part + part_bytes, bytes_behind)]
        return self._copies_of(own), self._copies_of(other)

    def _copies_of(self, spans: Sequence[Span]) -> list[Copy]:
        """The copies of these spans of the range."""
        device = self.layout.addresses.base
        host = self.host.address
        copies = list[Copy]()
        for start, nbytes in spans:
            if nbytes > 0:
                copies.append(Copy(device + start, host + start, nbytes))
        return copies
