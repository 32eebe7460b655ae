"""The ranks of one machine that share host copies, as their group and their process group show them."""

from __future__ import annotations

import abc
from datetime import timedelta

import torch

from placement.storage.shared.copy import Shares


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
        self.deadline_seconds = deadline_seconds
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

    @property
    @abc.abstractmethod
    def change_is_over(self) -> bool:
        """Whether the present change has ended, because a rank has failed, or the group cannot be reached."""

    @abc.abstractmethod
    def exchange_texts(self, what: str, text: str) -> list[str]:
        """Send text to these ranks under the topic `what`. Returns the text of each on this topic, by rank.

        Raises:
            GroupError: a rank failed in the meantime, or did not answer in time.
            CoordinatorLost: the group cannot be reached.
        """

    @property
    def parted(self) -> str | None:
        """Why these ranks change together no longer; None while they do."""
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
        """All-gather in place, on the current stream. `out` has the parts of all ranks, in rank order; this rank's is filled in.

        Raises:
            RuntimeError: the collective failed.
        """
        # Not torch.distributed.all_gather_into_tensor: it takes no deadline, and torch 2.13 has renamed it.
        part = out.numel() // self.shares.world_size
        work = self._process_group._allgather_base(out, out[self.shares.rank * part :][:part], self._options)
        if work is not None:  # torch 2.13 returns None where the stream waits by itself
            work.wait()
