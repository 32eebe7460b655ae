"""How ranks change phase together: all of them, or none.

One change is an epoch. Each rank makes its move reversibly, votes, and obeys ONE write-once decision:

1. propose: what is about to be done, and this rank's budget. Rank 0 compares, and writes the basis: the least budget.
2. prepare: the move, with both copies kept. What fails claims ABORT, with the reason.
3. vote: a digest of the plan. Rank 0 claims COMMIT when all votes are there and equal.
4. wait for the decision; whoever runs out of time claims ABORT.
5. obey, also when the own claim lost.

A rank that fails leaves its reason before it claims ABORT, and who obeys an ABORT gathers the reasons of all; see reasons.py.

Every phase transition of a rank ends one epoch, whatever becomes of it; only a rank that skipped a phase transition falls behind. The
others give that epoch up at their deadline, in an ABORT that says so, and the rank passes over it when it comes to enter its next phase:
it proposes in the epoch that is open now. Nothing that committed is passed over, because COMMIT takes all votes. Within a phase that all
ranks are in there is nothing to skip: there a rank that is late obeys, as everybody else did.

Basis and decision are both write-once. Whoever ends an epoch writes the basis after the decision, so that a rank waits for one key
at a time, however long, and is woken by whatever comes. A basis that holds a budget proves that all ranks are past every earlier
epoch, whose keys are then forgotten; never before, because a stopped rank may come back to ask what was decided.

A rank that cannot read the decision keeps what it prepared and raises CoordinatorLost: it must neither enter nor go back. One that
is interrupted after its vote goes back by itself, as from a phase that it had entered: where COMMIT stands, it ends the next epoch.
A process that takes a rank's place after a restart finds the place taken, ends the open epoch, and stays outside.
Model: tests/model/barrier.pml.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

from placement.core.errors import GroupError
from placement.core.states import Plan
from placement.group.base import Board, BoardLost
from placement.group.failpoints import failpoint
from placement.group.membership import REJOIN, RESTARTED, Membership
from placement.group.messages import Basis, Decision, Outcome, Proposal, Vote, abort, decode, named, shortened
from placement.group.reasons import failures_key, gather, outcome_key

DEADLINE_SECONDS = 600.0
"""As torch's collectives wait for NCCL."""
_M = TypeVar("_M", Proposal, Vote)
_POLL_SECONDS = (0.0005, 0.05)
"""Between two looks of rank 0 at the votes: at first, and after a while."""
_GRACE = (0.1, 1.0)
"""What is waited for those who are about to say something: as a share of the deadline, and in seconds at most."""
_logger = logging.getLogger("placement")


class Group(Membership):
    """`world_size` ranks that change phase together.

    Args:
        board: what all of them see.
        rank: of this process, 0 to world_size - 1.
        deadline_seconds: for each wait, on the monotonic clock. It has to cover how far ranks drift apart between two phase transitions: a
            rollout that takes one of them minutes longer.
        generation: of the membership. After a restart of any rank all ranks make a group of a new generation, see `Manager.rejoin`.

    Raises:
        GroupError: this rank's place is taken: the process was restarted, and the others know nothing of it.
        CoordinatorLost: the board does not answer.
        ValueError: a rank outside the world, or a deadline that is none.
    """

    def __init__(self, board: Board, rank: int, world_size: int, *, deadline_seconds: float, generation: int = 0) -> None:
        super().__init__(board, rank, world_size, deadline_seconds=deadline_seconds, generation=generation)
        self.budget_rank = rank
        """Whose budget was the least in the last change."""
        self._action = ""
        """What this rank has last proposed."""
        self._outcome: tuple[int, str | None] = (-1, None)
        """The last epoch of which this rank has left an outcome, and why it failed there."""

    # --- one change, in its order

    def propose(self, action: str, budget_bytes: int, *, catches_up: bool = False) -> int:
        """Begin a change. Returns the least budget of all ranks, in bytes; whose it is, is in `budget_rank`.

        Args:
            catches_up: pass over what the others have given up because this rank did not come to it.

        Raises:
            GroupError: a rank does something else, failed, or did not come in time.
            CoordinatorLost: the board does not answer; nothing has moved.
        """
        self._require_certain()
        with self._reaching_the_board(action):
            failpoint("group.before_proposal")
            self._action = named(action)
            proposal = Proposal(action=self._action, budget_bytes=budget_bytes).encode()
            while (basis := self._put_forward(proposal, catches_up)) is None:
                pass
            self._forget_before(self.epoch)
            failpoint("group.before_prepare")
            least_bytes, self.budget_rank = basis
            return least_bytes

    def confer(self, what: str, words: str) -> list[str]:
        """Within a change, after `propose` and before `agree`: say something, and hear what each rank has said to the same, by rank.

        Args:
            words: at most 64 KiB.

        Raises:
            GroupError: a rank failed, or did not come in time.
            CoordinatorLost: the board does not answer.
        """
        with self._reaching_the_board(what):
            deadline = time.monotonic() + self.deadline_seconds
            self._said.append(self._key(what, self.rank))
            self._board.put(self._said[-1], words.encode())
            keys = [self._key(what, rank) for rank in range(self.world_size)]
            while (found := self._board.look(keys)) is None:
                if (decided := self._board.look([self._key("decision")])) is not None:
                    self._obey(decode(Decision, decided[0]))
                elif time.monotonic() >= deadline:
                    self._obey(self._claim(self._late(what, self._missing(what))))
                time.sleep(_POLL_SECONDS[0])
            return [each.decode() for each in found]

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

    def abort(
        self, error: BaseException, *, blames: Mapping[int, str] | None = None, catches_up: bool = False, waits: bool = True
    ) -> GroupError | None:
        """This rank cannot do its part: end the epoch for all. Not for what this group has raised itself, which everybody has already.

        Args:
            blames: whose failure it is, and why, where it is another rank's.
            catches_up: see `propose`; before this rank has proposed.
            waits: for the reasons of the other ranks.

        Returns:
            What every rank raises; None when this rank is in doubt.

        Raises:
            CoordinatorLost: the board does not answer. The others find out at their deadline.
        """
        if self.is_in_doubt:
            return None
        with self._reaching_the_board("abort"):
            reason = _reason(error)
            while True:
                self._leave_outcome(None if blames else reason)
                decision = self._claim(abort(blames or {self.rank: reason}))
                if decision.verdict == "commit":  # interrupted after its vote: the others have entered, and it ends the next change
                    self._enter_next_epoch()
                elif catches_up and self._is_missed_in(decision):
                    self._pass_over(decision)
                else:
                    return self._end(decision, waits=waits)

    # --- the steps

    def _put_forward(self, proposal: bytes, catches_up: bool) -> tuple[int, int] | None:
        """The least budget and whose it is; None where the others gave the epoch up without this rank, and it has passed over that."""
        deadline = time.monotonic() + self.deadline_seconds
        self._board.put(self._key("proposal", self.rank), proposal)
        failpoint("group.after_proposal")
        if self.rank == 0:
            self._compare_proposals(deadline)
        return self._basis(deadline, catches_up)

    def _compare_proposals(self, deadline: float) -> None:
        proposals = self._collect(Proposal, "proposal", deadline)
        if proposals is None:
            return
        action = proposals[0].action
        others = {rank: f"is about to {each.action}" for rank, each in enumerate(proposals) if each.action != action}
        if others:
            self._claim(abort({0: f"is about to {action}", **others}))
        else:
            failpoint("group.before_basis")
            least_bytes, whose = min((each.budget_bytes, rank) for rank, each in enumerate(proposals))
            self._board.claim(self._key("basis"), Basis(budget_bytes=least_bytes, budget_rank=whose).encode())

    def _count_votes(self, own: Vote, deadline: float) -> None:
        votes = self._collect(Vote, "vote", deadline)
        if votes is None:
            return
        different = {rank: "has another plan" for rank, vote in enumerate(votes) if vote != own}
        self._claim(abort(different) if different else Decision(verdict="commit"))

    def _collect(self, kind: type[_M], what: str, deadline: float) -> list[_M] | None:
        """What all ranks said; None once the epoch has been decided without it."""
        keys = [self._key(what, rank) for rank in range(self.world_size)]
        pause = _POLL_SECONDS[0]
        while (found := self._board.look(keys)) is None:
            if self._board.look([self._key("decision")]) is not None:
                return None
            if time.monotonic() >= deadline:
                self._claim(self._late(what, self._missing(what)))
                return None
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_SECONDS[1])
        said: list[_M] = []
        unclear: dict[int, str] = {}
        for rank, value in enumerate(found):
            try:
                said.append(decode(kind, value))
            except ValueError as error:
                unclear[rank] = f"is not understood: {error}"
        if unclear:
            self._claim(abort(unclear))
        return None if unclear else said

    def _basis(self, deadline: float, catches_up: bool) -> tuple[int, int] | None:
        """The least budget and whose it is, or the error that the epoch ended with. None: it was passed over."""
        found = self._awaited("basis", "proposal", deadline)
        if not isinstance(found, Decision):
            basis = decode(Basis, found)
            if basis.budget_bytes is not None:
                return basis.budget_bytes, basis.budget_rank
            found = abort({self.rank: "was told that it had ended"})
        decision = self._claim(found)
        if catches_up and self._is_missed_in(decision):
            self._pass_over(decision)
            return None
        self._obey(decision)
        raise ValueError("the ranks changed without this one: another process has its place in the same generation")

    def _decision(self, deadline: float) -> Decision:
        found = self._awaited("decision", "vote", deadline)
        return self._claim(found) if isinstance(found, Decision) else decode(Decision, found)

    def _awaited(self, key: str, what: str, deadline: float) -> bytes | Decision:
        """What rank 0 writes once all ranks have said `what`; or how to end the epoch, because it is not there in time."""
        found = self._board.wait(self._key(key), max(deadline - time.monotonic(), 0.0))
        if found is not None:
            return found
        missing = self._missing(what)
        if not missing:  # the last has just come, and rank 0 is about to write
            found = self._board.wait(self._key(key), self._grace_seconds)
        return self._late(what, missing) if found is None else found

    def _late(self, what: str, missing: list[int]) -> Decision:
        """Time is up: whose word is missing; where none is, rank 0 has not answered."""
        late = dict.fromkeys(missing or [0], f"no {what if missing else 'answer'} within {self.deadline_seconds:g} s")
        return abort(late, is_silent=True, missed=self._action if missing and what == "proposal" else None)

    def _missing(self, what: str) -> list[int]:
        keys = [self._key(what, rank) for rank in range(self.world_size)]
        found = self._board.present(keys)
        return [rank for rank, key in enumerate(keys) if key not in found]

    def _obey(self, decision: Decision) -> None:
        """The epoch is over, for this rank as for all."""
        if decision.verdict == "abort":
            raise self._end(decision)
        self._enter_next_epoch()

    def _end(self, decision: Decision, *, waits: bool = True) -> GroupError:
        """The epoch has ended with ABORT. Returns what this rank raises."""
        failures, unnamed = decision.failures, decision.unnamed
        if waits:
            # Before the next epoch begins: an interrupt in the meantime is still about this one.
            with suppress(BoardLost):  # a decision that was read is obeyed
                self._leave_outcome(None)
                found = gather(self._board, self._key_of_epoch(), self.rank, self.world_size, decision, self._grace_seconds)
                failures, unnamed = found.failures, found.unnamed
            epoch, reason = self._outcome
            if epoch == self.epoch and reason is not None:  # what came too late for the others to hear
                failures = failures | {self.rank: reason}
        self._leave_epoch()
        reasons = [f"rank {rank}: {reason}" for rank, reason in sorted(failures.items())]
        reasons += [f"and {unnamed:,} more ranks"] if unnamed else []
        advice = f". A phase can only succeed again when you {REJOIN}" if RESTARTED in failures.values() else ""
        return GroupError(f"the ranks did not change together, and all went back: {'; '.join(reasons)}{advice}", failures)

    def _leave_outcome(self, reason: str | None) -> None:
        """Say how the epoch went for this rank; what it has said first counts."""
        if self._outcome[0] == self.epoch:
            return
        reason = None if reason is None else shortened(reason)
        self._outcome = self.epoch, reason
        self._said.append(outcome_key(self._key_of_epoch(), self.rank))
        self._board.put(self._said[-1], Outcome(reason=reason).encode())

    def _is_missed_in(self, decision: Decision) -> bool:
        """Whether the others gave up waiting for this rank."""
        return decision.missed is not None and self.rank in decision.failures

    def _pass_over(self, decision: Decision) -> None:
        _logger.warning(
            "rank %d was not there when the other ranks were about to %s, and they gave that up; it goes on with the next change",
            self.rank,
            decision.missed,
        )
        self._leave_epoch()

    def _leave_epoch(self) -> None:
        """One that has ended with ABORT."""
        if self.rank == 0:
            self._said.append(failures_key(self._key_of_epoch()))
        self._enter_next_epoch()

    @property
    def _grace_seconds(self) -> float:
        share, most = _GRACE
        return min(share * self.deadline_seconds, most)


def _reason(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the text of a user's exception is the user's code
        return type(error).__name__


def digest_of(plan: Plan) -> str:
    """The same for equal plans on all ranks."""
    targets: Mapping[str, object] = plan.targets
    lines = [f"{name}={state}" for name, state in sorted(targets.items())]
    lines += [f"streamed={sorted(plan.streamed)}", f"dropped={sorted(plan.dropped)}"]
    lines += [f"parts of {name}={sorted(tags)}" for name, tags in sorted(plan.parts.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
