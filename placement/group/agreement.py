"""How ranks change phase together: all of them, or none.

One change is an epoch. Each rank makes its move reversibly, votes, and obeys ONE write-once decision:

1. propose: what is about to be done, and this rank's budget. Rank 0 compares, and puts down the least budget.
2. prepare: the move, with both copies kept. What fails claims ABORT, with the reason.
3. vote: a digest of the plan. Rank 0 claims COMMIT when all votes are there and equal.
4. wait for the decision; whoever runs out of time claims ABORT.
5. obey, also when the own claim lost.

A rank that cannot read the decision keeps what it prepared and raises CoordinatorLost: it must neither enter nor go back. A process
that takes a rank's place after a restart finds the place taken, ends the epoch, and stays outside. Model: tests/model/barrier.pml.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from placement.errors import CoordinatorLost, GroupError
from placement.group.base import Board, BoardLost
from placement.group.failpoints import failpoint
from placement.group.messages import Basis, Decision, Proposal, Vote, decode, shortened
from placement.states import Plan

_POLL_SECONDS = (0.0005, 0.05)
"""Between two looks of rank 0 at the votes: at first, and after a while."""
_KEPT_EPOCHS = 2
"""Epochs whose keys stay: a rank is at most one epoch behind."""


class Group:
    """`world_size` ranks that change phase together.

    Args:
        board: what all of them see.
        rank: of this process, 0 to world_size - 1.
        deadline_seconds: for each wait, on the monotonic clock. It has to cover how far ranks drift apart between two borders: a
            rollout that takes one of them minutes longer.
        generation: of the membership. After a restart of any rank all ranks make a group of a new generation.

    Raises:
        GroupError: this rank's place is taken: the process was restarted, and the others know nothing of it.
        CoordinatorLost: the board does not answer.
        ValueError: a rank outside the world, or a deadline that is none.
    """

    def __init__(self, board: Board, rank: int, world_size: int, *, deadline_seconds: float, generation: int = 0) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is outside a world of {world_size}")
        if not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds must be more than 0, not {deadline_seconds}")
        self.rank, self.world_size, self.deadline_seconds = rank, world_size, deadline_seconds
        self._board = board
        self._prefix = f"placement/g{generation}"
        self.epoch = 0
        """The next change."""
        self.is_in_doubt = False
        """Whether a decision could not be read: this rank may not take part any more."""
        with self._reaching_the_board("join"):
            self._join()

    # --- one change, in its order

    def propose(self, action: str, budget_bytes: int) -> int:
        """Begin a change. Returns the least budget of all ranks, in bytes.

        Raises:
            GroupError: a rank does something else, failed, or did not come in time.
            CoordinatorLost: the board does not answer; nothing has moved.
        """
        self._require_certain()
        with self._reaching_the_board(action):
            failpoint("group.before_proposal")
            deadline = time.monotonic() + self.deadline_seconds
            self._board.put(self._key("proposal", self.rank), Proposal(action=action, budget_bytes=budget_bytes).encode())
            failpoint("group.after_proposal")
            if self.rank == 0:
                self._compare_proposals(action, deadline)
            basis = self._wait_for("basis", deadline)
            failpoint("group.before_prepare")
            return decode(Basis, basis).budget_bytes

    def agree(self, plan: Plan) -> None:
        """Everything is prepared: vote, and wait for the decision. Returns when it is COMMIT.

        Raises:
            GroupError: it is ABORT; with the reasons by rank. Go back.
            CoordinatorLost: it cannot be read. Keep what was prepared, enter nothing.
        """
        with self._reaching_the_board("agree", in_doubt=True):
            failpoint("group.after_prepare")
            deadline = time.monotonic() + self.deadline_seconds
            vote = Vote(digest=digest_of(plan))
            self._board.put(self._key("vote", self.rank), vote.encode())
            failpoint("group.after_vote")
            if self.rank == 0:
                self._count_votes(vote, deadline)
            decision = self._decision(deadline)
            failpoint("group.before_obey")
            self._obey(decision)
            failpoint("group.after_obey")

    def abort(self, error: BaseException) -> GroupError | None:
        """This rank cannot do its part: end the epoch for all.

        Returns:
            What every rank raises; None when the failure is the group's own, and everybody has it already.

        Raises:
            CoordinatorLost: the board does not answer. The others find out at their deadline.
        """
        if self.is_in_doubt or isinstance(error, (GroupError, CoordinatorLost)):
            return None
        with self._reaching_the_board("abort"):
            failures = {self.rank: shortened(f"{type(error).__name__}: {error}")}
            decision = self._claim(Decision(verdict="abort", failures=failures))
            try:
                self._obey(decision)
            except GroupError as told:
                return told
        return None

    # --- the steps

    def _compare_proposals(self, action: str, deadline: float) -> None:
        keys = [self._key("proposal", rank) for rank in range(self.world_size)]
        found = self._collect(keys, deadline, "proposal")
        if found is None:
            return
        proposals = [decode(Proposal, value) for value in found]
        others = {rank: f"is about to {each.action}" for rank, each in enumerate(proposals) if each.action != action}
        if others:
            self._claim(Decision(verdict="abort", failures={0: f"is about to {action}", **others}))
        else:
            basis = Basis(budget_bytes=min(each.budget_bytes for each in proposals))
            self._board.put(self._key("basis"), basis.encode())

    def _count_votes(self, own: Vote, deadline: float) -> None:
        found = self._collect([self._key("vote", rank) for rank in range(self.world_size)], deadline, "vote")
        if found is None:
            return
        different = {rank: "has another plan" for rank, value in enumerate(found) if decode(Vote, value) != own}
        self._claim(Decision(verdict="abort", failures=different) if different else Decision(verdict="commit"))

    def _collect(self, keys: list[str], deadline: float, what: str) -> list[bytes] | None:
        """The values of all ranks; None once the epoch has been decided without them."""
        pause = _POLL_SECONDS[0]
        while (found := self._board.look(keys)) is None:
            if self._board.look([self._key("decision")]) is not None:
                return None
            if time.monotonic() >= deadline:
                late = f"no {what} within {self.deadline_seconds:g} s"
                missing = [rank for rank, key in enumerate(keys) if self._board.look([key]) is None]
                self._claim(Decision(verdict="abort", failures=dict.fromkeys(missing, late)))
                return None
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_SECONDS[1])
        return found

    def _wait_for(self, name: str, deadline: float) -> bytes:
        """What rank 0 puts down, or the error that the epoch ended with."""
        pause = _POLL_SECONDS[0]
        while (found := self._board.wait(self._key(name), pause)) is None:
            if (decided := self._board.look([self._key("decision")])) is not None:
                self._obey(decode(Decision, decided[0]))
            if time.monotonic() >= deadline + self.deadline_seconds:  # rank 0 may wait as long for the others first
                self._obey(self._claim(self._late()))
            pause = min(pause * 1.5, _POLL_SECONDS[1])
        return found

    def _decision(self, deadline: float) -> Decision:
        found = self._board.wait(self._key("decision"), max(deadline - time.monotonic(), 0.0))
        return self._claim(self._late()) if found is None else decode(Decision, found)

    def _late(self) -> Decision:
        return Decision(verdict="abort", failures={0: f"no decision within {self.deadline_seconds:g} s"})

    def _claim(self, decision: Decision) -> Decision:
        failpoint("group.before_claim")
        stands = decode(Decision, self._board.claim(self._key("decision"), decision.encode()))
        failpoint("group.after_claim")
        return stands

    def _obey(self, decision: Decision) -> None:
        """The epoch is over, for this rank as for all."""
        self._board.put(f"{self._prefix}/at/{self.rank}", str(self.epoch + 1).encode())
        self._forget(self.epoch - _KEPT_EPOCHS)
        self.epoch += 1
        if decision.verdict == "abort":
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(decision.failures.items()))
            raise GroupError(f"the ranks did not change together, and all went back: {reasons}", decision.failures)

    def _forget(self, epoch: int) -> None:
        if epoch >= 0 and self.rank == 0:
            shared = [self._key(name, epoch=epoch) for name in ("basis", "decision")]
            own = [self._key(name, rank, epoch=epoch) for name in ("proposal", "vote") for rank in range(self.world_size)]
            self._board.remove(shared + own)

    # --- membership

    def _join(self) -> None:
        """Take this rank's place; a restarted process finds it taken, and ends the epoch that its predecessor is missing in."""
        mine = secrets.token_hex(8).encode()
        if self._board.claim(f"{self._prefix}/member/{self.rank}", mine) == mine:
            return
        at = [self._board.look([f"{self._prefix}/at/{rank}"]) for rank in range(self.world_size)]
        self.epoch = max((int(found[0]) for found in at if found), default=0)
        reason = "was restarted, and knows nothing of what the others hold"
        while self._claim(Decision(verdict="abort", failures={self.rank: reason})).verdict == "commit":
            self.epoch += 1  # that epoch goes on without it; the next one ends
        raise GroupError(
            f"rank {self.rank} was restarted: its place is taken. Make the group anew on all ranks, with a new generation",
            {self.rank: reason},
        )

    def _require_certain(self) -> None:
        if self.is_in_doubt:
            raise CoordinatorLost("an earlier decision could not be read; make the group anew on all ranks, with a new generation")

    def _key(self, name: str, rank: int | None = None, *, epoch: int | None = None) -> str:
        key = f"{self._prefix}/e{self.epoch if epoch is None else epoch}/{name}"
        return key if rank is None else f"{key}/{rank}"

    @contextmanager
    def _reaching_the_board(self, what: str, *, in_doubt: bool = False) -> Iterator[None]:
        try:
            yield
        except (BoardLost, ValueError) as error:
            self.is_in_doubt = True
            kept = "what was prepared is kept, and nothing was entered" if in_doubt else "nothing was entered"
            raise CoordinatorLost(f"rank {self.rank} cannot reach the group ({what}, epoch {self.epoch}): {error}; {kept}") from error


def digest_of(plan: Plan) -> str:
    """The same for equal plans on all ranks."""
    targets: Mapping[str, object] = plan.targets
    lines = [f"{name}={state}" for name, state in sorted(targets.items())]
    lines += [f"streamed={sorted(plan.streamed)}", f"dropped={sorted(plan.dropped)}"]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
