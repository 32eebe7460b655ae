"""Which host copy leaves host memory next, and which one comes back: pure functions of what is where and of the order of need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple


class HostCopy(NamedTuple):
    """The facts about one host copy that decide its place."""

    nbytes: int
    is_here: bool
    """Whether it is in host memory now."""
    can_leave: bool = True


class Step(NamedTuple):
    """One host copy to move."""

    what: Literal["leave", "come"]
    """Whether it leaves host memory or comes back."""
    position: int
    """Its position in the order of need."""


def next_step(copies: Sequence[HostCopy], fixed_bytes: int, limit_bytes: int) -> Step | None:
    """The next thing to do in the background; None when every copy is where it should be, as far as the limit allows.

    Copies leave only where the limit is exceeded, or where one that is needed sooner takes their place.

    Args:
        copies: soonest needed first.
        fixed_bytes: host memory beside them that counts and cannot leave.
    """
    held = fixed_bytes + sum(copy.nbytes for copy in copies if copy.is_here)
    if held > limit_bytes:
        last = _last(copies, 0)
        return None if last is None else Step("leave", last)
    for index, copy in enumerate(copies):
        if copy.is_here:
            continue
        lacking = held + copy.nbytes - limit_bytes
        if lacking <= 0:
            return Step("come", index)
        if sum(each.nbytes for each in copies[index + 1 :] if each.is_here and each.can_leave) >= lacking:
            last = _last(copies, index + 1)
            assert last is not None
            return Step("leave", last)
    return None


def _last(copies: Sequence[HostCopy], start: int) -> int | None:
    """The copy in host memory that is needed last, among those from `start` on."""
    found = [index for index in range(start, len(copies)) if copies[index].is_here and copies[index].can_leave and copies[index].nbytes]
    return found[-1] if found else None
