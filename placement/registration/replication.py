"""Register one object on all ranks of a group, some of which then share its host copy: all register
it or none does.

To the group this is one change, like a phase transition: the ranks propose it, carry it out and
vote on it. A rank that cannot do its part ends it for all.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from placement.core.errors import GroupError, RegistrationError
from placement.core.states import Plan
from placement.group.vote import GroupVote
from placement.registration.handle import Lazy
from placement.storage.shared import Ranks

if TYPE_CHECKING:
    from placement.group.protocol import Group

_ADVICE = "or register it without replicated=True"


class Replication:
    """The replicated registrations of one manager, which it makes together with the other ranks of
    its group."""

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self.vote = None if group is None else GroupVote(group)
        # the ranks of each replicated handle
        self._shared: weakref.WeakSet[Ranks] = weakref.WeakSet()
        self._machine_groups: dict[tuple[int, ...], torch.distributed.ProcessGroup] = {}
        """Process groups made here, by the numbers of their ranks in the group."""

    def rejoin(self, group: Group) -> None:
        """Use a new group from now on, for every replicated handle."""
        self.vote, self._group = GroupVote.rejoin(group), group
        for ranks in self._shared:
            ranks.group = group

    @contextmanager
    def registering(
        self, name: str, target: Any, replicated: bool | torch.distributed.ProcessGroup
    ) -> Iterator[Ranks | None]:
        """Register an object in the body while every other rank does the same. If one rank fails,
        all fail. Yields the ranks that share the host copy; None in a group of one rank."""
        group, vote = self._group, self.vote
        if group is None or vote is None:
            raise RegistrationError(
                f"{name!r}: replicated=True needs a group of ranks: make the manager with "
                f"Manager(group=StoreGroup(...)), {_ADVICE}"
            )
        try:
            vote.propose(f"register {name} replicated")
            ranks = self._ranks(group, name, target, replicated)
            yield ranks
            if ranks is None:
                vote.agree(Plan({}))
        except GroupError as told:
            # `exchange_texts` and `agree` ask the group past the vote, which has to learn the
            # outcome
            vote.heard(told)
            raise RegistrationError(f"{name!r} cannot be replicated: {told}") from told

    def _ranks(
        self,
        group: Group,
        name: str,
        target: Any,
        replicated: bool | torch.distributed.ProcessGroup,
    ) -> Ranks | None:
        if isinstance(target, Lazy):
            raise RegistrationError(
                f"{name!r}: a Lazy cannot be replicated, because ranks may build it at different "
                "times; build it first"
            )
        if group.world_size == 1:
            return None
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise RegistrationError(
                f"{name!r}: replicated=True gathers by torch.distributed: call init_process_group "
                f"first, {_ADVICE}"
            )
        process_group = _group_of(name, target) if replicated is True else replicated
        if not isinstance(process_group, torch.distributed.ProcessGroup):
            raise RegistrationError(
                f"{name!r}: replicated must be True or a ProcessGroup that this rank is in, not "
                f"{replicated!r}"
            )
        members, machines = _members(group, name, process_group)
        here = tuple(
            rank for rank, machine in zip(members, machines, strict=True) if machine == _machine()
        )
        if replicated is True and here != members:
            # each member on this machine makes it at the same time
            if here not in self._machine_groups:
                theirs = dict(
                    zip(
                        members,
                        torch.distributed.get_process_group_ranks(process_group),
                        strict=True,
                    )
                )
                made = torch.distributed.new_group(
                    [theirs[rank] for rank in here], use_local_synchronization=True
                )
                self._machine_groups[here] = made
            process_group, members = self._machine_groups[here], here
        ranks = Ranks(group, process_group, members)
        self._shared.add(ranks)
        return ranks


def _members(
    group: Group, name: str, process_group: torch.distributed.ProcessGroup
) -> tuple[tuple[int, ...], list[str]]:
    """The numbers in the group of the ranks of a process group, in the order of that, and the
    machine of each."""
    numbers = torch.distributed.get_process_group_ranks(process_group)
    mine = json.dumps([process_group.rank(), numbers, _machine()])
    members = []
    for rank, text in enumerate(group.exchange_texts("members", mine)):
        place, their_numbers, machine = json.loads(text)
        if their_numbers == numbers:
            members.append((place, rank, machine))
    members.sort()
    if [place for place, _, _ in members] != [*range(len(numbers))]:
        raise RegistrationError(
            f"{name!r}: of the {len(numbers)} ranks of its process group {len(members)} register "
            f"it with that group in the manager's group of {group.world_size}; pass replicated=a "
            "process group of ranks that all do"
        )
    return tuple(rank for _, rank, _ in members), [machine for _, _, machine in members]


def _group_of(name: str, target: Any) -> Any:
    """The process group whose ranks have the same values of a module, as that says itself; else the
    default one."""
    if isinstance(target, torch.nn.parallel.DistributedDataParallel):
        return target.process_group
    # Megatron-Core's own
    if isinstance(group := getattr(target, "dp_cp_group", None), torch.distributed.ProcessGroup):
        return group
    parameters = target.parameters() if isinstance(target, torch.nn.Module) else ()
    # DTensor, whose module need not be imported
    sharded: list[Any] = [each for each in parameters if hasattr(each, "device_mesh")]
    if not sharded:
        return torch.distributed.group.WORLD
    mesh = sharded[0].device_mesh
    alike = [
        dim
        for dim in range(mesh.ndim)
        if all(each.device_mesh == mesh and each.placements[dim].is_replicate() for each in sharded)
    ]
    if len(alike) != 1:
        raise RegistrationError(
            f"{name!r}: of the dimensions of its parameters' device mesh {len(alike)} replicate "
            "all of them, and replicated=True needs one: pass replicated=the process group of the "
            f"ranks that hold the same, {_ADVICE}"
        )
    return mesh.get_group(alike[0])


def _machine() -> str:
    """A text that is the same for processes that see each other's /proc: the machine's start, and
    the PID namespace."""
    said = [os.uname().nodename]
    with suppress(OSError):
        said = [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            os.readlink("/proc/self/ns/pid"),
        ]
    return " ".join(said)
