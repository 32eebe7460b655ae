"""One rank's place in a group: its epoch, its keys on the board, and how a restarted process is recognised."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from placement.core.errors import CoordinatorLost, GroupError
from placement.group.base import Board, BoardLost
from placement.group.failpoints import failpoint
from placement.group.messages import Basis, Decision, abort, decode

RESTARTED = "was restarted, and knows nothing of what the others hold"
REJOIN = "make the group anew on all ranks, with a new generation, and pass it to manager.rejoin(group)"


class Membership:
    """A rank among `world_size`, from the time it joins them. The base of `Group`, which documents the arguments."""

    def __init__(self, board: Board, rank: int, world_size: int, *, deadline_seconds: float, generation: int = 0) -> None:
        check_place(rank, world_size, deadline_seconds)
        self.rank, self.world_size, self.deadline_seconds = rank, world_size, deadline_seconds
        self.generation = generation
        self._board = board
        self._prefix = f"placement/g{generation}"
        self.epoch = 0
        """The number of the next change."""
        self._oldest = 0
        """The first epoch whose keys may still be on the board."""
        self._said: list[str] = []
        """Further keys that this rank has written in earlier epochs."""
        self.is_in_doubt = False
        """Whether a decision could not be read. If so, this rank may not take part any more."""
        with self._reaching_the_board("join"):
            self._join()

    # --- epochs

    def _claim(self, decision: Decision) -> Decision:
        failpoint("group.before_claim")
        stands = decode(Decision, self._board.claim(self._key("decision"), decision.encode()))
        failpoint("group.after_claim")
        if stands.verdict == "abort":  # for ranks that wait for the basis
            self._board.claim(self._key("basis"), Basis(budget_bytes=None).encode())
        return stands

    def _enter_next_epoch(self) -> None:
        # Written first: until then an interrupt belongs to the epoch that this rank has not left yet.
        with suppress(BoardLost):  # a decision that was read is obeyed; only a process that replaces this one reads this key
            self._board.put(f"{self._prefix}/at/{self.rank}", str(self.epoch + 1).encode())
        self.epoch += 1

    def _forget_before(self, end: int) -> None:
        """Delete this rank's keys before epoch `end`, which all ranks have reached."""
        for epoch in range(self._oldest, end):
            own = [self._key(what, self.rank, epoch=epoch) for what in ("proposal", "vote")]
            self._board.remove(own + ([self._key(what, epoch=epoch) for what in ("basis", "decision")] if self.rank == 0 else []))
        if self._said:
            self._board.remove(self._said)
            self._said = []
        self._oldest = end

    # --- membership

    def _join(self) -> None:
        """Take this rank's place. A restarted process finds it taken, and ends the epoch that its predecessor is missing in."""
        mine = secrets.token_hex(8).encode()
        if self._board.claim(f"{self._prefix}/member/{self.rank}", mine) == mine:
            return
        at = [self._board.look([f"{self._prefix}/at/{rank}"]) for rank in range(self.world_size)]
        self.epoch = max((int(found[0]) for found in at if found), default=0)
        own = abort({self.rank: RESTARTED}, is_silent=True)
        while self._claim(own) != own:
            self.epoch += 1  # that epoch was decided without this rank; try to end the next one
        raise GroupError(f"rank {self.rank} was restarted: its place is taken. To go on, {REJOIN}", {self.rank: RESTARTED})

    def _require_certain(self) -> None:
        if self.is_in_doubt:
            raise CoordinatorLost(f"an earlier decision could not be read; {REJOIN}")

    def _key(self, name: str, rank: int | None = None, *, epoch: int | None = None) -> str:
        key = f"{self._key_of_epoch(epoch)}/{name}"
        return key if rank is None else f"{key}/{rank}"

    def _key_of_epoch(self, epoch: int | None = None) -> str:
        return f"{self._prefix}/e{self.epoch if epoch is None else epoch}"

    @contextmanager
    def _reaching_the_board(self, what: str, *, in_doubt: bool = False) -> Iterator[None]:
        try:
            yield
        except (BoardLost, ValueError) as error:
            self.is_in_doubt = True
            kept = "the prepared move is kept, and no phase was entered" if in_doubt else "nothing was entered"
            raise CoordinatorLost(
                f"rank {self.rank} cannot reach the group ({what}, epoch {self.epoch}): {error}; {kept}. To go on, {REJOIN}"
            ) from error


def check_place(rank: int, world_size: int, deadline_seconds: float) -> None:
    """Raise ValueError if the rank is outside the world, or the deadline is not a positive finite number."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is outside a world of {world_size} ranks; give 0 to {world_size - 1}")
    if not 0 < deadline_seconds < math.inf:
        raise ValueError(f"deadline_seconds must be more than 0 and finite, not {deadline_seconds}")
