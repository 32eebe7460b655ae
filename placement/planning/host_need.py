"""Which host copies are needed next, and whether those that are needed at once can fit a limit on host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from placement.core.errors import HostMemoryError
from placement.planning.budget import mib
from placement.planning.history import MOST_PHASES, PhaseHistory


class UseHistory:
    """The handles whose host copies each recent phase transition has used (read or written), to tell which is used when."""

    def __init__(self) -> None:
        self._phases = PhaseHistory()
        self._uses: deque[frozenset[str]] = deque(maxlen=MOST_PHASES)
        """For each phase in the history, what was used since the one before it."""
        self._upcoming: tuple[frozenset[str], ...] = ()
        """The handles that coming phase transitions are expected to use, nearest first, up to the next one into the open phase."""
        self._last: dict[str, int] = {}
        """The number of the phase transition that used each handle last."""
        self._count = 0

    def note(self, phase: str, used: frozenset[str]) -> None:
        """Note a phase transition.

        Args:
            phase: the phase that is open after it. `idle` is one, too: what leaves then needs its host copy.
            used: the handles whose host copies were used since the last one was noted.
        """
        followed = len(self._phases.upcoming(phase))
        self._upcoming = (*list(self._uses)[len(self._uses) - followed :], used)
        self._phases.began(phase)
        self._uses.append(used)
        self._count += 1
        self._last.update(dict.fromkeys(used, self._count))

    def order(self, names: Iterable[str]) -> list[str]:
        """The handles, soonest needed first.

        A handle on the device needs its host copy when it is offloaded, and an offloaded one when it is loaded: each is one of the uses.
        Handles that no coming phase transition is known to use come last, the least recently used at the very end.
        """
        first: dict[str, int] = {}
        for distance, used in enumerate(self._upcoming):
            for name in used:
                first.setdefault(name, distance)
        return sorted(names, key=lambda name: (first.get(name, len(self._upcoming)), -self._last.get(name, -1)))


class HostShare(NamedTuple):
    """The host memory of one handle."""

    total_bytes: int
    """Bytes of its host copy, wherever it is now, and what is reserved for state that is not created yet."""
    fixed_bytes: int
    """The part that cannot leave host memory: reserved, shared with other processes."""
    held_bytes: int
    """The part that is in host memory now."""


def check_fits_host(name: str, nbytes: int, owners: Sequence[str], shares: Mapping[str, HostShare], limit_bytes: int) -> None:
    """Refuse a registration of which is certain that it cannot be offloaded within the limit.

    What is needed at once is at least the handle itself and, for an optimizer, the modules that it steps, beside what cannot leave.

    Args:
        nbytes: host memory that the registration takes now, beside what the handle has in `shares` already.
        owners: the modules that the handle steps.

    Raises:
        HostMemoryError: it does not fit; the message has a table of who holds what.
    """
    at_once = {name, *owners}
    needed = nbytes + sum(share.total_bytes if each in at_once else share.fixed_bytes for each, share in shares.items())
    if needed > limit_bytes:
        together = f" together with {', '.join(owners)}, which it steps," if owners else ""
        raise HostMemoryError(
            f"{name!r}{together} needs {mib(needed)} of host memory at once, beside what cannot leave it; host_limit_bytes is "
            f"{mib(limit_bytes)}.\n{host_table(name, nbytes, shares)}\nRaise host_limit_bytes, or shard the object over more ranks."
        )


def host_table(name: str, nbytes: int, shares: Mapping[str, HostShare]) -> str:
    """A table of the host memory that each handle holds now and takes in all, largest first."""
    known = shares.get(name, HostShare(0, 0, 0))
    rows = {**shares, name: HostShare(known.total_bytes + nbytes, known.fixed_bytes, known.held_bytes)}
    lines = [f"  {'handle':<24} {'in host memory':>18} {'host copy':>18}"]
    for each, share in sorted(rows.items(), key=lambda row: -row[1].total_bytes):
        lines.append(f"  {each:<24} {share.held_bytes:>18,} {share.total_bytes:>18,}")
    return "\n".join(lines)
