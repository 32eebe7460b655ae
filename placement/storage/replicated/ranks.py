"""The ranks of one machine that share host copies: the contract by which one rank deals with the others."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Sequence
from datetime import timedelta

import torch

from placement.storage.replicated.range import Shares


class Ranks(abc.ABC):
    """The exchange with the other ranks while a handle that they share is registered and moved.

    Attributes:
        shares: how bytes are divided among the ranks; it has this rank's number.
    """

    shares: Shares

    @property
    @abc.abstractmethod
    def change(self) -> int:
        """The number of the present change of the group, 1 or more. All ranks have the same one; every change of every group another."""

    @abc.abstractmethod
    def exchange_texts(self, what: str, text: str) -> list[str]:
        """Send text to all ranks under the topic `what`. Returns the text of each rank on this topic, by rank.

        Raises:
            GroupError: a rank failed in the meantime, or did not answer in time.
            CoordinatorLost: the group cannot be reached.
        """

    @property
    @abc.abstractmethod
    def gone(self) -> str | None:
        """Why no collective is possible any more; None while they are possible."""

    @abc.abstractmethod
    def gather(self, out: torch.Tensor, works: list[object]) -> None:
        """All-gather in place, on the current stream.

        Args:
            out: the parts of all ranks, in rank order. This rank's part is filled in.
            works: gets one entry once the collective has been issued, in a step that no interrupt can cut.

        Raises:
            RuntimeError: the collective failed.
        """

    @abc.abstractmethod
    def finish(self, works: Sequence[object]) -> None:
        """Wait once more for the last of these collectives, because an interrupt may have cut the first wait short."""


class TorchRanks(Ranks):
    """Ranks that gather by a torch.distributed process group.

    Args:
        process_group: a group of the same ranks, in the same order.
        deadline_seconds: the limit for one collective, where its backend keeps to it (gloo does; NCCL has its watchdog instead).
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
        # Not torch.distributed.all_gather_into_tensor: it takes no deadline, and torch 2.13 has renamed it.
        part = out.numel() // self.shares.world_size
        own = out[self.shares.rank * part :][:part]
        works.extend(itertools.starmap(self._process_group._allgather_base, [(out, own, self._options)]))
        self.finish(works)

    def finish(self, works: Sequence[object]) -> None:
        for work in works[-1:]:
            if work is not None:  # torch 2.13 returns None where the stream waits by itself
                work.wait()  # type: ignore[attr-defined]  # its class, Work, has no name in some builds of torch
