"""How ranks change phase together: all of them, or none.

One common phase transition is an epoch. Each rank makes its moves reversibly, votes, and obeys ONE write-once decision:

1. propose: each rank says what it is about to do, and its budget. Rank 0 compares, and writes the basis: the least budget.
   Where their plans may differ (see `plans_may_differ`, `placing`), they compare them first: what merely stays on some devices leaves.
2. prepare: each rank moves, and keeps both copies. A rank that fails claims ABORT, with its reason.
3. vote: each rank writes a digest of its plan. Rank 0 claims COMMIT when all votes are there and equal.
4. wait: each rank waits for the decision. A rank that runs out of time claims ABORT.
5. obey: each rank does what the decision says, even if it claimed the opposite.

A rank that fails leaves its reason before it claims ABORT. A rank that obeys an ABORT gathers the reasons of all; see reasons.py.

Where engines move, a phase transition has up to three epochs: engines leave, the other handles move, engines load. A rank that has no
engine to move takes part in all of them: the decision says which stage all ranks have reached, and whether engines are to be loaded.

Every phase transition of a rank ends one epoch or more, whatever its outcome. Only a rank that skipped a phase transition falls behind. The
others give up that epoch at their deadline, in an ABORT that says so. When the late rank enters its next phase, it passes over that
epoch and proposes in the open one. It never passes over a committed epoch, because COMMIT takes all votes. Inside a phase that all
ranks have entered there is nothing to skip, so a late rank obeys the ABORT like every other rank.

Basis and decision are both write-once. Whoever ends an epoch writes the basis after the decision, so a rank waits for one key at
a time and is woken by either. A basis that holds a budget proves that all ranks have left every earlier epoch. Only then are the keys
of earlier epochs deleted, because a stopped rank may come back and ask for the decision.

A rank that cannot read the decision keeps what it prepared and raises CoordinatorLost: it must neither enter nor go back. A rank
that is interrupted after its vote goes back alone, as from a phase that it had entered; if the decision was COMMIT, it ends the
next epoch. A restarted process finds its rank's place taken, ends the open epoch, and stays outside.
The protocol's models are tests/model/barrier.pml, and stages.pml for phase transitions with engines.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple, TypeVar

from placement.core.errors import GroupError
from placement.core.states import Plan
from placement.group.base import Board, BoardLost
from placement.group.failpoints import failpoint
from placement.group.membership import REJOIN, RESTARTED, Membership
from placement.group.messages import STAGES, Basis, Decision, Outcome, Proposal, Stage, Vote, abort, decode, named, shortened
from placement.group.reasons import failures_key, gather, outcome_key

DEADLINE_SECONDS = 600.0
"""The default deadline: as long as torch's collectives wait for NCCL."""
_M = TypeVar("_M", Proposal, Vote)
_POLL_SECONDS = (0.0005, 0.05)
"""Pause between two looks at what all ranks write: the first pause, and the longest."""
_GRACE = (0.1, 1.0)
"""Extra wait for ranks that are about to write: a share of the deadline, and at most so many seconds."""
_ANOTHER_PLAN = "has another plan"
_ABOUT_PLANS = (
    ". From now on the ranks tell each other what stays on their devices before they move, so begin the step again. If that does not "
    "help, their policies, settings or registrations differ"
)
_logger = logging.getLogger("placement")


class Reached(NamedTuple):
    """The stage to which all ranks have come together in a phase transition."""

    stage: Stage
    lacks_engines: bool
    """Whether any rank has engines to load."""


class Group(Membership):
    """`world_size` ranks that change phase together.

    Args:
        board: the board that all ranks see.
        rank: the rank of this process, 0 to world_size - 1.
        deadline_seconds: the limit of each wait, on the monotonic clock. It must cover how far ranks drift apart between two phase
            transitions, for example a rollout that takes one rank minutes longer.
        generation: number of the membership. After a restart of any rank all ranks make a group of a new generation, see `Manager.rejoin`.

    Raises:
        GroupError: this rank's place is taken: the process was restarted, and the others do not know the new process.
        CoordinatorLost: the board does not answer.
        ValueError: the rank is outside the world, or the deadline is not a positive number.
    """

    def __init__(self, board: Board, rank: int, world_size: int, *, deadline_seconds: float, generation: int = 0) -> None:
        super().__init__(board, rank, world_size, deadline_seconds=deadline_seconds, generation=generation)
        self.budget_rank = rank
        """The rank with the least budget in the last change."""
        self.plans_may_differ = False
        """Whether the ranks may make different plans: a change has failed, a rank was restarted, or this one has given up a handle."""
        self.placing = ""
        """A digest of the sizes of this rank's handles and of where they are. Ranks whose digests differ compare their plans."""
        self.compares_plans = False
        """Whether the ranks compare what stays on their devices, before they move, in the present change. The same on all of them."""
        self._action = ""
        """The last action that this rank proposed."""
        self._outcome: tuple[int, str | None] = (-1, None)
        """The last epoch for which this rank wrote an outcome, and its reason if it failed there."""

    # --- one change, in its order

    def propose(self, action: str, budget_bytes: int, *, catches_up: bool = False) -> int:
        """Begin a change. Returns the least budget of all ranks in bytes; `budget_rank` is then the rank that has it.

        Args:
            catches_up: whether to pass over epochs that the others gave up because this rank did not come.

        Raises:
            GroupError: another rank does something else, failed, or did not come in time.
            CoordinatorLost: the board does not answer; nothing has moved.
        """
        self._require_certain()
        with self._reaching_the_board(action):
            failpoint("group.before_proposal")
            self._action = named(action)
            proposal = Proposal(
                action=self._action, budget_bytes=budget_bytes, plans_may_differ=self.plans_may_differ, placing=self.placing
            )
            while (basis := self._put_forward(proposal.encode(), catches_up)) is None:
                pass
            self._forget_before(self.epoch)
            failpoint("group.before_prepare")
            least_bytes, self.budget_rank, self.compares_plans = basis
            return least_bytes

    def exchange_texts(self, what: str, text: str) -> list[str]:
        """Exchange texts within a change, after `propose` and before `agree`. Returns each rank's text about `what`, by rank.

        Args:
            text: this rank's text, at most 64 KiB.

        Raises:
            GroupError: a rank failed, or did not come in time.
            CoordinatorLost: the board does not answer.
        """
        with self._reaching_the_board(what):
            deadline = time.monotonic() + self.deadline_seconds
            self._said.append(self._key(what, self.rank))
            self._board.put(self._said[-1], text.encode())
            while (found := self._written(what, deadline)) is None:
                self._obey(self._claim(self._late(what, self._missing(what))))
            return [each.decode() for each in found]

    def agree(self, plan: Plan, stage: Stage = "moved", lacks_engines: bool = False) -> Reached:
        """Vote after everything is prepared, and wait for the decision. Returns when it is COMMIT.

        Args:
            stage: how far this rank has come.
            lacks_engines: whether it has engines to load once all have moved.

        Returns:
            The stage that all ranks have reached, which may be an earlier one, and whether any rank has engines to load.

        Raises:
            GroupError: the decision is ABORT; the error has the reasons by rank. The caller must go back.
            CoordinatorLost: the decision cannot be read. The caller must keep what it prepared and enter nothing.
        """
        with self._reaching_the_board("agree", in_doubt=True):
            failpoint("group.after_prepare")
            deadline = time.monotonic() + self.deadline_seconds
            vote = Vote(digest=digest_of(plan), stage=stage, lacks_engines=lacks_engines)
            self._board.put(self._key("vote", self.rank), vote.encode())
            failpoint("group.after_vote")
            if self.rank == 0:
                self._count_votes(vote, deadline)
            decision = self._decision(deadline)
            failpoint("group.before_obey")
            self._obey(decision)
            failpoint("group.after_obey")
            return Reached(decision.stage, decision.lacks_engines)

    def abort(
        self, error: BaseException, *, blames: Mapping[int, str] | None = None, catches_up: bool = False, waits: bool = True
    ) -> GroupError | None:
        """End the epoch for all ranks, because this rank cannot do its part. Not for errors that this group raised: every rank has those.

        Args:
            blames: the failed ranks with reasons, where the failure is another rank's.
            catches_up: see `propose`; only before this rank has proposed.
            waits: whether to wait for the reasons of the other ranks.

        Returns:
            The error that every rank raises; None when this rank is in doubt.

        Raises:
            CoordinatorLost: the board does not answer. The others notice at their deadline.
        """
        if self.is_in_doubt:
            return None
        with self._reaching_the_board("abort"):
            reason = _reason(error)
            while True:
                self._leave_outcome(None if blames else reason)
                decision = self._claim(abort(blames or {self.rank: reason}))
                if decision.verdict == "commit":  # interrupted after its vote: the others have entered, so this rank ends the next change
                    self._enter_next_epoch()
                elif catches_up and self._is_missed_in(decision):
                    self._pass_over(decision)
                else:
                    return self._end(decision, waits=waits)

    # --- the steps

    def _put_forward(self, proposal: bytes, catches_up: bool) -> tuple[int, int, bool] | None:
        """Propose once. Returns what `_basis` does; None after passing over an epoch that was given up without this rank."""
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
            may_differ = len({each.placing for each in proposals}) > 1 or any(each.plans_may_differ for each in proposals)
            self._board.claim(self._key("basis"), Basis(budget_bytes=least_bytes, budget_rank=whose, compares_plans=may_differ).encode())

    def _count_votes(self, own: Vote, deadline: float) -> None:
        votes = self._collect(Vote, "vote", deadline)
        if votes is None:
            return
        different = {rank: _ANOTHER_PLAN for rank, vote in enumerate(votes) if vote.digest != own.digest}
        if different:
            self._claim(abort(different))
            return
        stage = min((vote.stage for vote in votes), key=STAGES.index)
        self._claim(Decision(verdict="commit", stage=stage, lacks_engines=any(vote.lacks_engines for vote in votes)))

    def _collect(self, kind: type[_M], what: str, deadline: float) -> list[_M] | None:
        """The messages of all ranks; None once the epoch has been decided without them."""
        found = self._written(what, deadline)
        if found is None:
            return None
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

    def _written(self, what: str, deadline: float) -> list[bytes] | None:
        """The values of all ranks, by rank; None once the epoch has been decided, which this rank does itself at the deadline."""
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
        return found

    def _basis(self, deadline: float, catches_up: bool) -> tuple[int, int, bool] | None:
        """The least budget, its rank, whether plans are compared; None after passing over the epoch. Raises the error it ended with."""
        found = self._awaited("basis", "proposal", deadline)
        if not isinstance(found, Decision):
            basis = decode(Basis, found)
            if basis.budget_bytes is not None:
                return basis.budget_bytes, basis.budget_rank, basis.compares_plans
            found = abort({self.rank: "read a basis without a budget: the epoch had ended"})
        decision = self._claim(found)
        if catches_up and self._is_missed_in(decision):
            self._pass_over(decision)
            return None
        self._obey(decision)
        raise ValueError("the ranks committed without this one: another process uses its rank in the same generation")

    def _decision(self, deadline: float) -> Decision:
        found = self._awaited("decision", "vote", deadline)
        return self._claim(found) if isinstance(found, Decision) else decode(Decision, found)

    def _awaited(self, key: str, what: str, deadline: float) -> bytes | Decision:
        """The value that rank 0 writes once all ranks have written `what`; on timeout a decision that ends the epoch."""
        found = self._board.wait(self._key(key), max(deadline - time.monotonic(), 0.0))
        if found is not None:
            return found
        missing = self._missing(what)
        if not missing:  # the last rank has just written, and rank 0 is about to answer
            found = self._board.wait(self._key(key), self._grace_seconds)
        return self._late(what, missing) if found is None else found

    def _late(self, what: str, missing: list[int]) -> Decision:
        """A decision for a timeout. It blames the ranks that have not written `what`; if all have, it blames rank 0."""
        late = dict.fromkeys(missing or [0], f"no {what if missing else 'answer'} within {self.deadline_seconds:g} s")
        return abort(late, is_silent=True, missed=self._action if missing and what == "proposal" else None)

    def _missing(self, what: str) -> list[int]:
        keys = [self._key(what, rank) for rank in range(self.world_size)]
        found = self._board.present(keys)
        return [rank for rank, key in enumerate(keys) if key not in found]

    def _obey(self, decision: Decision) -> None:
        """Enter the next epoch after COMMIT; raise the group's error after ABORT."""
        if decision.verdict == "abort":
            raise self._end(decision)
        self._enter_next_epoch()

    def _end(self, decision: Decision, *, waits: bool = True) -> GroupError:
        """Leave an epoch that ended with ABORT. Returns the error that this rank raises."""
        failures, unnamed = decision.failures, decision.unnamed
        if waits:
            # Before the next epoch begins, so that an interrupt meanwhile still belongs to this epoch.
            with suppress(BoardLost):  # a decision that was read is obeyed, even if the board is lost now
                self._leave_outcome(None)
                found = gather(self._board, self._key_of_epoch(), self.rank, self.world_size, decision, self._grace_seconds)
                failures, unnamed = found.failures, found.unnamed
            epoch, reason = self._outcome
            if epoch == self.epoch and reason is not None:  # this rank failed too late for the others to hear of it
                failures = failures | {self.rank: reason}
        self.plans_may_differ = True  # a step that some ranks have begun and others have not leaves them with different handles
        self._leave_epoch()
        reasons = [f"rank {rank}: {reason}" for rank, reason in sorted(failures.items())]
        reasons += [f"and {unnamed:,} more ranks failed"] if unnamed else []
        advice = f". A phase can only succeed again when you {REJOIN}" if RESTARTED in failures.values() else ""
        advice += _ABOUT_PLANS if _ANOTHER_PLAN in failures.values() else ""
        return GroupError(f"the ranks did not change phase together, so all went back: {'; '.join(reasons)}{advice}", failures)

    def _leave_outcome(self, reason: str | None) -> None:
        """Write how the epoch went for this rank. Only the first call in an epoch counts."""
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
            "rank %d came too late for the other ranks' attempt to %s, which they gave up; it takes part in the next change",
            self.rank,
            decision.missed,
        )
        self._leave_epoch()

    def _leave_epoch(self) -> None:
        """Go on to the next epoch after one that ended with ABORT."""
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
    except Exception:  # the exception's `__str__` may be user code that raises
        return type(error).__name__


def digest_of(plan: Plan) -> str:
    """A digest of a plan. Equal plans have equal digests on all ranks."""
    targets: Mapping[str, object] = plan.targets
    lines = [f"{name}={state}" for name, state in sorted(targets.items())]
    lines += [f"streamed={sorted(plan.streamed)}", f"dropped={sorted(plan.dropped)}"]
    lines += [f"parts of {name}={sorted(tags)}" for name, tags in sorted(plan.parts.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
