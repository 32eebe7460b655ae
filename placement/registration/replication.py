"""Register one object on all ranks of a group, some of which then share its host copy: all register
it or none does.

To the group this is one change, like a phase transition: the ranks propose it, carry it out and
vote on it. A rank that cannot do its part ends the change for all.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
        self.vote = GroupVote.rejoin(group)
        self._group = group
        for ranks in self._shared:
            ranks.group = group

    @contextmanager
    def registering(
        self, name: str, target: Any, replicated: bool | torch.distributed.ProcessGroup
    ) -> Iterator[Ranks | None]:
        """Register an object in the body while every other rank does the same. If one rank fails,
        all fail. Yields the ranks that share the host copy; None in a group of one rank."""
        group = self._group
        vote = self.vote
        if group is None or vote is None:
            raise RegistrationError(
                f"{name!r}: replicated=True needs a group of ranks: make the manager with "
                f"Manager(group=StoreGroup(...)), {_ADVICE}"
            )
        try:
            vote.propose(f"register {name} replicated")
            ranks = self._ranks(group, name, target, replicated)
            yield ranks
            if ranks is None:  # the body asked no other rank: end the group's change here
                vote.agree(Plan({}))
        except GroupError as error:
            # `exchange_texts` and `agree` ask the group past the vote, which has to learn the
            # outcome
            vote.heard(error)
            raise RegistrationError(f"{name!r} cannot be replicated: {error}") from error

    def _ranks(
        self,
        group: Group,
        name: str,
        target: Any,
        replicated: bool | torch.distributed.ProcessGroup,
    ) -> Ranks | None:
        """The ranks that share the host copy with this one; None for a group of one rank. Raises
        RegistrationError: the handle cannot be replicated."""
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
        members = _members(group, name, process_group)
        local = [member for member in members if member.machine == _machine()]
        numbers = tuple(member.number for member in local)
        if replicated is True and local != members:
            # each member on this machine makes it at the same time
            if numbers not in self._machine_groups:
                global_ranks = torch.distributed.get_process_group_ranks(process_group)
                self._machine_groups[numbers] = torch.distributed.new_group(
                    [global_ranks[member.place] for member in local],
                    use_local_synchronization=True,
                )
            process_group = self._machine_groups[numbers]
            members = local
        ranks = Ranks(group, process_group, tuple(member.number for member in members))
        self._shared.add(ranks)
        return ranks


class _Member(NamedTuple):
    """A rank of a process group."""

    place: int  # its rank there
    number: int  # its rank in the manager's group
    machine: str  # see `_machine`


def _members(
    group: Group, name: str, process_group: torch.distributed.ProcessGroup
) -> list[_Member]:
    """The ranks of a process group, in its order."""
    numbers = torch.distributed.get_process_group_ranks(process_group)
    own_text = json.dumps([process_group.rank(), numbers, _machine()])
    members = list[_Member]()
    for rank, text in enumerate(group.exchange_texts("members", own_text)):
        place, numbers_of_rank, machine = json.loads(text)
        if numbers_of_rank == numbers:
            members.append(_Member(place, rank, machine))
    members.sort()
    if [member.place for member in members] != [*range(len(numbers))]:
        raise RegistrationError(
            f"{name!r}: of the {len(numbers)} ranks of its process group {len(members)} register "
            f"it with that group in the manager's group of {group.world_size}; pass replicated=a "
            "process group of ranks that all do"
        )
    return members


def _group_of(name: str, target: Any) -> Any:
    """The process group whose ranks have the same values of a module, as the module itself says;
    else the default one."""
    if isinstance(target, torch.nn.parallel.DistributedDataParallel):
        return target.process_group
    group = getattr(target, "dp_cp_group", None)  # Megatron-Core's own
    if isinstance(group, torch.distributed.ProcessGroup):
        return group
    parameters = target.parameters() if isinstance(target, torch.nn.Module) else ()
    # DTensor, whose module need not be imported
    sharded: list[Any] = [tensor for tensor in parameters if hasattr(tensor, "device_mesh")]
    if not sharded:
        return torch.distributed.group.WORLD
    mesh = sharded[0].device_mesh
    has_one_mesh = all(tensor.device_mesh == mesh for tensor in sharded)
    replicating = [*range(mesh.ndim)] if has_one_mesh else []
    for tensor in sharded:
        replicating = [dim for dim in replicating if tensor.placements[dim].is_replicate()]
    if len(replicating) != 1:
        raise RegistrationError(
            f"{name!r}: of the dimensions of its parameters' device mesh {len(replicating)} "
            "replicate all of them, and replicated=True needs one: pass replicated=the process "
            f"group of the ranks that hold the same, {_ADVICE}"
        )
    return mesh.get_group(replicating[0])


def _machine() -> str:
    """A text that is the same for processes that see each other's /proc: the machine's start, and
    the PID namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return os.uname().nodename
