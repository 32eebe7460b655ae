"""Registering one object on every rank of a group, so that they share its host copy: all of them, or none.

It is one change of the group, as a phase transition is: proposed, carried out, voted on. A rank that cannot do its part ends it for
all, so nobody waits for who has failed.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from placement.core.errors import GroupError, RegistrationError
from placement.core.states import Plan
from placement.group.vote import GroupVote
from placement.registration.handle import Lazy
from placement.storage.replicated.range import Shares
from placement.storage.replicated.ranks import TorchRanks
from placement.tensors.owned import Adapter

if TYPE_CHECKING:
    from placement.group.agreement import Group

_ADVICE = "or register it without replicated=True"


class GroupRanks(TorchRanks):
    """The ranks of a group, with a process group that has the same ones."""

    def __init__(self, group: Group, process_group: torch.distributed.ProcessGroup) -> None:
        super().__init__(process_group, Shares(group.rank, group.world_size), group.deadline_seconds)
        self._group = group

    @property
    def change(self) -> int:
        # Of this membership alone: what a rank has left in the shared memory that is none of the new one must never look like it.
        digest = hashlib.sha256(f"{self._group.generation} {self._group.epoch}".encode()).digest()
        return int.from_bytes(digest[:7], "big") + 1  # 0 is what is said of none

    @property
    def gone(self) -> str | None:
        if (self._group.rank, self._group.world_size) != (self.shares.rank, self.shares.world_size):
            return "the group was made anew with other ranks"
        return super().gone

    def rejoin(self, group: Group) -> None:
        """The ranks go on in a new group."""
        self._group = group

    def confer(self, what: str, words: str) -> list[str]:
        return self._group.confer(what, words)

    def agree(self, plan: Plan) -> None:
        """See `Group.agree`."""
        self._group.agree(plan)


class Replication:
    """What one manager registers together with the others of its group."""

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self.together = GroupVote(group)
        self._shared: weakref.WeakSet[GroupRanks] = weakref.WeakSet()
        """Of each handle that is replicated."""

    def rejoin(self, group: Group) -> None:
        """Go on in a new group, with every handle."""
        self.together.rejoin(group)
        self._group = group
        for ranks in self._shared:
            ranks.rejoin(group)

    @contextmanager
    def registering(
        self, name: str, target: Any, readonly: bool, replicated: bool | torch.distributed.ProcessGroup
    ) -> Iterator[GroupRanks | None]:
        """While the body registers it here, every other rank does the same; what fails on one fails on all.

        Gives None where nothing is shared: an ordinary handle, or a group of one rank.

        Raises:
            RegistrationError: it cannot be replicated, or another rank could not register it.
            CoordinatorLost: the group cannot be reached.
        """
        if replicated is False:
            yield None
            return
        if self._group is None:
            raise RegistrationError(
                f"{name!r}: replicated=True needs the ranks that share it: make the manager with Manager(group=StoreGroup(...)), {_ADVICE}"
            )
        try:
            self.together.go_on(f"register {name} replicated")
            ranks = self._ranks(name, target, readonly, replicated)
            yield ranks
            if ranks is None:
                self.together.agree(Plan({}))
        except GroupError as told:
            self.together.heard(told)  # who confers and agrees here asks the group itself
            raise RegistrationError(f"{name!r} cannot be replicated: {told}") from told
        except BaseException as error:
            self.together.failed(error)
            raise

    def _ranks(self, name: str, target: Any, readonly: bool, replicated: bool | torch.distributed.ProcessGroup) -> GroupRanks | None:
        group = self._group
        assert group is not None
        if isinstance(target, Lazy):
            raise RegistrationError(f"{name!r}: a Lazy cannot be replicated, because ranks may build it at different times; build it first")
        if not readonly:
            raise RegistrationError(f"{name!r}: what is replicated must stay as it is on every rank; add readonly=True, {_ADVICE}")
        if group.world_size == 1:
            return None
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise RegistrationError(f"{name!r}: replicated=True gathers by torch.distributed: call init_process_group first, {_ADVICE}")
        process_group = torch.distributed.group.WORLD if replicated is True else replicated
        if not isinstance(process_group, torch.distributed.ProcessGroup):
            raise RegistrationError(f"{name!r}: replicated must be True or a ProcessGroup that this rank is in, not {replicated!r}")
        if (process_group.rank(), process_group.size()) != (group.rank, group.world_size):
            raise RegistrationError(
                f"{name!r}: this is rank {group.rank} of {group.world_size} in the manager's group, but rank {process_group.rank()} of "
                f"{process_group.size()} in the process group; pass replicated=a process group of the same ranks"
            )
        ranks = GroupRanks(group, process_group)
        self._shared.add(ranks)
        return ranks


def check_can_be_replicated(name: str, adapter: Adapter) -> None:
    """Raise RegistrationError unless it is a module whose bytes we move."""
    if adapter.kind != "module":
        raise RegistrationError(f"{name!r}: an {adapter.kind} cannot be replicated, only a module can; {_ADVICE}")
    if adapter.external is not None:
        raise RegistrationError(f"{name!r}: {adapter.external} places its bytes, so placement cannot replicate it; {_ADVICE}")
