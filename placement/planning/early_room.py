"""The room for early chunks: how much of it each handle gets at first, and how much in the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Wish(NamedTuple):
    """The bytes of one handle that a plan wants to have early."""

    wanted_bytes: int
    held_bytes: int = 0
    """Device bytes that the handle has now and that may have to be saved before others can have their memory: those of a handle that
    leaves the device, and what an earlier offload has left."""


class Share(NamedTuple):
    """The room that one handle gets."""

    first_bytes: int
    last_bytes: int


def divide(room_bytes: int, wishes: Sequence[Wish]) -> list[Share]:
    """Divide the room. The wishes are in the order of the plan, soonest needed first; the shares are in the same order.

    In the end, the first have all that they want. At first, everybody keeps what is wanted of what it holds, and the first have what is
    left beside that.
    """
    room_bytes = max(0, room_bytes)
    kept, room = list[int](), room_bytes
    for wish in wishes:
        kept.append(min(wish.held_bytes, wish.wanted_bytes, room))
        room -= kept[-1]
    shares, last_room = list[Share](), room_bytes
    for wish, mine in zip(wishes, kept, strict=True):
        last = min(wish.wanted_bytes, last_room)
        more = min(max(0, last - mine), room)
        shares.append(Share(mine + more, last))
        room, last_room = room - more, last_room - last
    return shares
