"""Gather the reasons of every rank that failed in an epoch, not only of the rank that was first to claim ABORT.

A rank leaves its outcome before it claims ABORT, or when it obeys an ABORT of another rank. The lowest rank that has not failed
collects the outcomes and writes what it found, once for all ranks. A rank that waits for this result in vain collects itself. Every
wait here is short: a dead or busy rank must not hold up the others, and no rank's next step depends on the result.
"""

from __future__ import annotations

import time
from contextlib import suppress

from placement.group.base import Board, BoardLost
from placement.group.messages import Decision, Failures, Outcome, decode, gathered

_POLL_SECONDS = (0.001, 0.02)
_OTHERS_WAIT = 1.5
"""The other ranks wait for the collecting rank this many times as long as it waits itself."""


def outcome_key(prefix: str, rank: int) -> str:
    return f"{prefix}/outcome/{rank}"


def failures_key(prefix: str) -> str:
    """The board key under which the gathered reasons of an epoch are written."""
    return f"{prefix}/failures"


def gather(board: Board, prefix: str, rank: int, world_size: int, decision: Decision, seconds: float) -> Failures:
    """Gather the reasons of all ranks that failed in an epoch that has ended. This rank's outcome must be on the board already.

    Args:
        prefix: the beginning of the epoch's keys.
        seconds: how long to wait for the outcomes of the other ranks.

    Returns:
        The reasons, the same on every rank that reaches the board; on other ranks the reasons in the decision.
    """
    known = Failures(failures=decision.failures, unnamed=decision.unnamed)
    silent = decision.failures if decision.is_silent else {}
    speaking = [each for each in range(world_size) if each not in silent]
    if known.unnamed or speaking in ([], [rank]):
        return known  # the message is full, or no other rank will say anything
    with suppress(BoardLost, ValueError):
        key = failures_key(prefix)
        # A rank that did not fail is preferred: a failed one may be on its way out, with a user's exception.
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
    """The reasons that failed ranks have written so far."""
    found = board.present([outcome_key(prefix, rank) for rank in range(world_size)])
    reasons = {rank: _reason(found[key]) for rank in range(world_size) if (key := outcome_key(prefix, rank)) in found}
    return {rank: reason for rank, reason in reasons.items() if reason is not None}


def _reason(value: bytes) -> str | None:
    try:
        return decode(Outcome, value).reason
    except ValueError as error:
        return f"is not understood: {error}"
