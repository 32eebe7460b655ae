"""The ranks of one machine that share host copies, as one of them sees them."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from datetime import timedelta

import torch

from placement.storage.replicated.range import Shares


class Ranks(abc.ABC):
    """What this rank has to do with the others while a handle that they share is registered and moved.

    Attributes:
        shares: how bytes are divided.
    """

    shares: Shares

    @property
    @abc.abstractmethod
    def change(self) -> int:
        """The number of the present change, 1 or more: the same on all ranks, and another one for each change of each group."""

    @abc.abstractmethod
    def confer(self, what: str, words: str) -> list[str]:
        """Say something, and return what each rank has said to the same, by rank.

        Raises:
            GroupError: a rank failed in the meantime, or did not come in time.
            CoordinatorLost: the group cannot be reached.
        """

    @property
    @abc.abstractmethod
    def gone(self) -> str | None:
        """Why there can be no collectives any more; None while there can."""

    @abc.abstractmethod
    def gather(self, out: torch.Tensor, works: list[object]) -> None:
        """All-gather in place: `out` has the parts of all ranks in order, this rank's filled in. On the current stream.

        Args:
            works: gets one entry once the collective has been issued, in a step that no interrupt can cut.

        Raises:
            RuntimeError: it failed.
        """

    @abc.abstractmethod
    def finish(self, works: Sequence[object]) -> None:
        """Wait for the last of these once more, which an interrupt may have cut short."""


class TorchRanks(Ranks):
    """`gather` by a torch.distributed process group.

    Args:
        process_group: of the same ranks, in the same order.
        deadline_seconds: for one collective, where its backend keeps to that (gloo; NCCL has its watchdog).
    """

    def __init__(self, process_group: torch.distributed.ProcessGroup, shares: Shares, deadline_seconds: float) -> None:
        self.shares = shares
        from torch._C._distributed_c10d import AllgatherOptions  # not in every build of torch

        self._process_group = process_group
        self._options = AllgatherOptions()
        self._options.asyncOp = False
        self._options.timeout = timedelta(seconds=deadline_seconds)

    @property
    def gone(self) -> str | None:
        try:
            torch.distributed.get_process_group_ranks(self._process_group)
        except (KeyError, ValueError, RuntimeError):
            return "the process group was destroyed"
        return None

    def gather(self, out: torch.Tensor, works: list[object]) -> None:
        # Not torch.distributed.all_gather_into_tensor: it takes no deadline, and torch 2.13 has given it another name.
        part = out.numel() // self.shares.world_size
        own = out[self.shares.rank * part :][:part]
        works.extend(itertools.starmap(self._process_group._allgather_base, [(out, own, self._options)]))
        self.finish(works)

    def finish(self, works: Sequence[object]) -> None:
        for work in works[-1:]:
            if work is not None:  # on a stream that has to wait anyway, torch 2.13 gives none
                work.wait()  # type: ignore[attr-defined]  # a Work, which not every build of torch has a name for
