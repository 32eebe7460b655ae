"""Why an epoch ended: the word of every rank that failed in it, and not only of the one that was first to say so.

A rank leaves its outcome before it claims ABORT, or when it obeys one that it had no part in. The lowest rank that has not failed
collects them and writes what it has found, once for all; who waits for that in vain does so itself. Every wait here is short, because
a rank that is dead, or busy with something else, must not hold up the others, and nobody's next step depends on what is found.
"""

from __future__ import annotations

import time
from contextlib import suppress

from placement.group.base import Board, BoardLost
from placement.group.messages import Decision, Failures, Outcome, decode, gathered

_POLL_SECONDS = (0.001, 0.02)
_OTHERS_WAIT = 1.5
"""How long the others wait for who collects, as a multiple of how long that waits itself."""


def outcome_key(prefix: str, rank: int) -> str:
    return f"{prefix}/outcome/{rank}"


def failures_key(prefix: str) -> str:
    """Of an epoch whose keys begin with `prefix`."""
    return f"{prefix}/failures"


def gather(board: Board, prefix: str, rank: int, world_size: int, decision: Decision, seconds: float) -> Failures:
    """The reasons of all ranks that failed in an epoch that has ended, this one's outcome being on the board.

    Args:
        prefix: of the epoch's keys.
        seconds: to wait for the outcomes of the others.

    Returns:
        The same on every rank that the board answers; else what the decision says.
    """
    known = Failures(failures=decision.failures, unnamed=decision.unnamed)
    silent = decision.failures if decision.is_silent else {}
    speaking = [each for each in range(world_size) if each not in silent]
    if known.unnamed or speaking in ([], [rank]):
        return known  # there is no room for more, or nobody to hear
    with suppress(BoardLost, ValueError):
        key = failures_key(prefix)
        # Not one that has failed, where there is another: it may be on its way out, with an exception of the user's.
        collects = next((each for each in speaking if each not in decision.failures), speaking[0])
        if rank == collects:
            _wait_for_all(board, [outcome_key(prefix, each) for each in speaking], seconds)
        elif (found := board.wait(key, seconds * _OTHERS_WAIT)) is not None:
            return decode(Failures, found)
        found_by_all = board.claim(key, gathered(decision.failures | _reasons(board, prefix, world_size)).encode())
        return decode(Failures, found_by_all)
    return known


def _wait_for_all(board: Board, keys: list[str], seconds: float) -> None:
    end = time.monotonic() + seconds
    pause = _POLL_SECONDS[0]
    while board.look(keys) is None and time.monotonic() < end:
        time.sleep(pause)
        pause = min(pause * 1.5, _POLL_SECONDS[1])


def _reasons(board: Board, prefix: str, world_size: int) -> dict[int, str]:
    """What the ranks that failed have said so far."""
    found = board.present([outcome_key(prefix, rank) for rank in range(world_size)])
    reasons = {rank: _reason(found[key]) for rank in range(world_size) if (key := outcome_key(prefix, rank)) in found}
    return {rank: reason for rank, reason in reasons.items() if reason is not None}


def _reason(value: bytes) -> str | None:
    try:
        return decode(Outcome, value).reason
    except ValueError as error:
        return f"is not understood: {error}"
