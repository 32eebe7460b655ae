"""Register one object on every rank of a group, so that the ranks share its host copy. Either all ranks register it or none does.

It is one change of the group, as a phase transition is: the ranks propose it, carry it out and vote on it. A rank that cannot do its
part ends the change for all, so no rank waits for one that has failed.
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
from placement.group.protocol import Stage
from placement.group.vote import GroupVote
from placement.ownership.adapter import Adapter
from placement.registration.handle import Lazy
from placement.storage.replicated import Ranks, Shares

if TYPE_CHECKING:
    from placement.group.protocol import Group, Reached

_ADVICE = "or register it without replicated=True"


class GroupRanks(Ranks):
    """The ranks of a group, which gather by a process group of the same ranks."""

    def __init__(self, group: Group, process_group: torch.distributed.ProcessGroup) -> None:
        super().__init__(process_group, Shares(group.rank, group.world_size), group.deadline_seconds)
        self._group = group

    @property
    def change(self) -> int:
        return self._number(self._group.epoch)

    @property
    def agreed_change(self) -> int:
        return self._number(self._group.agreed_epoch)

    def _number(self, epoch: int) -> int:
        # Of this generation of the group alone: words that a rank of an earlier one left in the shared memory never equal it.
        digest = hashlib.sha256(f"{self._group.generation} {epoch}".encode()).digest()
        return int.from_bytes(digest[:7], "big") + 1  # 0 stands for no change

    @property
    def gone(self) -> str | None:
        if (self._group.rank, self._group.world_size) != (self.shares.rank, self.shares.world_size):
            return "the group was made anew with other ranks"
        return super().gone

    def rejoin(self, group: Group) -> None:
        """Use a new group from now on."""
        self._group = group

    def exchange_texts(self, what: str, text: str) -> list[str]:
        return self._group.exchange_texts(what, text)

    def agree(self, plan: Plan, stage: Stage, lacks_engines: bool) -> Reached:
        """See `Group.agree`. Where the plans of the ranks may differ otherwise, they agree that the handle has moved."""
        return self._group.agree(Plan({}) if self._group.compares_plans else plan, stage, lacks_engines)


class Replication:
    """The replicated registrations of one manager, which it makes together with the other ranks of its group."""

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self.vote = GroupVote(group)
        self._shared: weakref.WeakSet[GroupRanks] = weakref.WeakSet()
        """The ranks object of each replicated handle."""

    def rejoin(self, group: Group) -> None:
        """Use a new group from now on, for every replicated handle."""
        self.vote.rejoin(group)
        self._group = group
        for ranks in self._shared:
            ranks.rejoin(group)

    @contextmanager
    def registering(self, name: str, target: Any, replicated: bool | torch.distributed.ProcessGroup) -> Iterator[GroupRanks | None]:
        """Register an object in the body while every other rank does the same. If one rank fails, all fail.

        Yields the ranks that share the host copy; None if nothing is shared: for an ordinary handle, or in a group of one rank.

        Raises:
            RegistrationError: the object cannot be replicated, or another rank could not register it.
            CoordinatorLost: the group cannot be reached.
        """
        if replicated is False:
            yield None
            return
        if self._group is None:
            raise RegistrationError(
                f"{name!r}: replicated=True needs a group of ranks: make the manager with Manager(group=StoreGroup(...)), {_ADVICE}"
            )
        try:
            self.vote.propose(f"register {name} replicated")
            ranks = self._ranks(name, target, replicated)
            yield ranks
            if ranks is None:
                self.vote.agree(Plan({}))
        except GroupError as told:
            self.vote.heard(told)  # `exchange_texts` and `agree` ask the group past the vote, which has to learn the outcome
            raise RegistrationError(f"{name!r} cannot be replicated: {told}") from told
        except BaseException as error:
            self.vote.failed(error)
            raise

    def _ranks(self, name: str, target: Any, replicated: bool | torch.distributed.ProcessGroup) -> GroupRanks | None:
        group = self._group
        assert group is not None
        if isinstance(target, Lazy):
            raise RegistrationError(f"{name!r}: a Lazy cannot be replicated, because ranks may build it at different times; build it first")
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
    """Raise RegistrationError unless the object is a module whose bytes placement moves."""
    if adapter.kind != "module":
        raise RegistrationError(f"{name!r}: an {adapter.kind} cannot be replicated, only a module can; {_ADVICE}")
    if adapter.external is not None:
        raise RegistrationError(f"{name!r}: {adapter.external} places its bytes, so placement cannot replicate it; {_ADVICE}")
