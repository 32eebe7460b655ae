"""How ranks change phase together: all of them, or none.

An epoch is one common decision; most phase transitions have one. Each rank makes its moves
reversibly, votes, and obeys ONE write-once decision:

1. propose: each rank writes its next action, and its budget. Rank 0 compares, and writes the basis:
   the least budget. Ranks whose plans may differ then compare the handles that merely stay on their
   devices. A handle that does not stay on all of them leaves.
2. prepare: each rank moves, and keeps both copies. A rank that fails claims ABORT, with its reason.
3. vote: each rank writes a digest of its plan. Rank 0 claims COMMIT when all votes are there and
   equal.
4. obey: each rank waits for the decision, and obeys it even if it claimed the opposite. A rank that
   runs out of time claims ABORT. Every rank raises the reasons of the decision. A rank that failed
   after it was made adds its own.

Where engines move, a phase transition has up to three epochs: engines leave, the other handles
move, engines load. A rank that has no engine to move takes part in all of them: the decision says
which stage all ranks have reached, and whether engines are to be loaded.

A rank that skipped a phase transition falls behind: the others give that epoch up at their
deadline. When the late rank enters its next phase, it passes over epochs that were given up for its
sake, and proposes in the open epoch. It never passes over a committed epoch, because COMMIT takes
all votes. Inside a phase that all ranks have entered a late rank obeys the ABORT like every other
rank.

A rank that ends an epoch writes the basis after the decision. So ranks wait for one key at a time,
and either key wakes them. A basis that holds a budget proves that all ranks have left every earlier
epoch. Only then are the keys of earlier epochs deleted, because a stopped rank may come back and
ask for the decision.

A rank that cannot read the decision keeps its prepared move and raises CoordinatorLost: it must
neither enter nor go back. A rank that is interrupted after its vote goes back alone; if the
decision was COMMIT, it ends the next epoch. A restarted process finds its rank's place taken, ends
the open epoch, and stays outside. The protocol's models are tests/model/barrier.pml, and stages.pml
for phase transitions with engines.
"""

from __future__ import annotations

import abc
import hashlib
import math
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Literal, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from placement.core import interrupts
from placement.core.errors import CoordinatorLost, GroupError
from placement.core.journal import logger
from placement.core.snapshot import SuspensionRequest
from placement.core.states import Plan

DEADLINE_SECONDS = 600.0  # the default deadline: as long as torch's collectives wait for NCCL
MAX_BYTES = 1 << 20  # the longest message
_MAX_TEXT, _ALL_TEXTS = 2_000, 100_000
"""The most characters of one reason, and of all reasons in one message: thousands of ranks may fail
at once."""
# pause between two looks at the values of all ranks: the first pause, and the longest
_POLL_SECONDS = (0.0005, 0.05)
_ANOTHER_PLAN = "has another plan"
_ABOUT_PLANS = (
    ". Begin the step again. If that does not help, the ranks' policies, settings or registrations "
    "differ"
)
_RESTARTED = "was restarted, and knows nothing of what the others hold"
_REJOIN = (
    "make the group anew on all ranks, with a new generation, and pass it to manager.rejoin(group)"
)

Stage = Literal["engines left", "moved", "engines loaded"]
"""How far a phase transition has come. Only ranks whose engines move have a first and a last
stage."""
_STAGES: tuple[Stage, ...] = get_args(Stage)


class BoardLost(Exception):
    """The board does not answer, or not in time."""


class Board(abc.ABC):
    """A small key-value store that all ranks see. `put` overwrites a value; `claim` writes a key
    once and for all.

    Every call is idempotent: a call whose answer was lost may be made again. Each call may raise
    `BoardLost`, and then it is unknown whether it took effect. No call blocks for ever: a board
    that does not answer counts as lost. A value has at most 1 MiB.
    """

    @abc.abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Write a value under a key that only this rank writes."""

    @abc.abstractmethod
    def claim(self, key: str, value: bytes) -> bytes:
        """Write `value` if the key has none, and return the key's value. All ranks get the same
        value, for ever."""

    @abc.abstractmethod
    def look(self, keys: Sequence[str]) -> list[bytes] | None:
        """The values of these keys, or None while one of them is missing. Does not wait."""

    def present(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of those keys that have one. Does not wait."""
        values = self.look(keys)
        if values is not None:
            return dict(zip(keys, values, strict=True))
        middle = len(keys) // 2
        if not middle:
            return {}
        return self.present(keys[:middle]) | self.present(keys[middle:])

    @abc.abstractmethod
    def wait(self, key: str, seconds: float) -> bytes | None:
        """The key's value as soon as it has one; None when it has none within `seconds`."""

    @abc.abstractmethod
    def remove(self, keys: Sequence[str]) -> None:
        """Delete keys that no rank reads any more. A missing key is no error."""


# --- messages: small JSON with a closed schema. No part of a message is executed.


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def encode(self) -> bytes:
        return self.model_dump_json().encode()


class Proposal(Message):
    """The action that a rank is about to take. It is written before the rank asks its policy."""

    # for example "enter train only=actor" or "leave train"; must be the same on all ranks
    action: str
    budget_bytes: int = Field(ge=0)
    plans_may_differ: bool = False
    whereabouts: str = Field(default="", max_length=64)
    """A digest of the sizes of the rank's handles and of where they are, on which policies may base
    their plans."""
    suspension: SuspensionRequest | None = None


class Basis(Message):
    """The result of comparing all proposals. Write-once."""

    budget_bytes: int = Field(ge=0)  # the least budget of all ranks, which each plan has to fit
    budget_rank: int = Field(default=0, ge=0)  # the rank that has it
    # whether one rank says that plans may differ, or the handles differ in size or place
    compares_plans: bool = False
    is_over: bool = False  # whether the epoch has ended before: then see its decision
    suspension: SuspensionRequest | None = None  # a rank's, of several the newest: all carry it out


class Vote(Message):
    """A rank's vote: it has made its move, reversibly."""

    digest: str = Field(max_length=64)
    stage: Stage = "moved"
    lacks_engines: bool = False  # whether the rank has engines to load once all have moved


class Decision(Message):
    """The decision about an epoch. Write-once."""

    verdict: Literal["commit", "abort"]
    stage: Stage = "moved"
    """COMMIT: the stage that all ranks have reached. A rank that voted for a later one votes for it
    again, in the next epoch."""
    # COMMIT: whether a rank has engines to load. Then one more epoch follows, on all ranks.
    lacks_engines: bool = False
    failures: dict[int, str] = Field(default_factory=dict)
    is_late: bool = False  # whether the other ranks have waited for the failed ones in vain


_M = TypeVar("_M", bound=Message)


def decode(kind: type[_M], value: bytes) -> _M:
    """Decode a message. Raises ValueError if it is too long, is not JSON, or does not fit the
    schema."""
    if len(value) > MAX_BYTES:
        raise ValueError(f"a message has {len(value):,} bytes; the limit is {MAX_BYTES:,}")
    try:
        return kind.model_validate_json(value)
    except ValidationError as error:
        raise ValueError(
            f"not a valid {kind.__name__}: {error.error_count()} errors in {value[:200]!r}"
        ) from error


def abort(failures: Mapping[int, str], *, is_late: bool = False) -> Decision:
    """A decision that ends an epoch. Where many ranks have failed, their reasons are cut short."""
    limit = min(_MAX_TEXT, _ALL_TEXTS // max(len(failures), 1))
    reasons = {rank: shortened(reason, limit) for rank, reason in failures.items()}
    return Decision(verdict="abort", failures=reasons, is_late=is_late)


def shortened(text: str, limit: int = _MAX_TEXT) -> str:
    """Cut a text, and replace unprintable characters: an exception's text may be long, or hold a
    file name that is not Unicode."""
    letters = [
        letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text[:limit]
    ]
    if len(text) > limit:
        letters[-1:] = "…"
    return "".join(letters)


def digest_of(plan: Plan) -> str:
    """A text that is the same for equal plans."""
    targets: Mapping[str, object] = plan.targets
    lines = [f"{name}={state}" for name, state in sorted(targets.items())]
    lines += [f"streamed={sorted(plan.streamed)}", f"dropped={sorted(plan.dropped)}"]
    lines += [f"parts of {name}={sorted(tags)}" for name, tags in sorted(plan.parts.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Group:
    """`world_size` ranks that change phase together.

    Args:
        board: the board that all ranks see.
        rank: the rank of this process, 0 to world_size - 1.
        deadline_seconds: the limit of each wait, on the monotonic clock. It must cover how far
            ranks drift apart between two phase transitions, for example a rollout that takes one
            rank minutes longer.
        generation: number of the membership. After a restart of any rank all ranks make a group of
            a new generation, see `Manager.rejoin`.

    Raises:
        GroupError: this rank's place is taken: the process was restarted, and the others do not
            know the new process.
        CoordinatorLost: the board does not answer.
        ValueError: the rank is outside the world, or the deadline is not a positive number.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        *,
        deadline_seconds: float,
        generation: int = 0,
    ) -> None:
        check_place(rank, world_size, deadline_seconds)
        self.rank = rank
        self.world_size = world_size
        self.deadline_seconds = deadline_seconds
        self.generation = generation
        self._board = board
        self._prefix = f"placement/g{generation}"
        self.epoch = 0  # the number of the next change
        self.agreed_epoch = -1  # the number of the last change on which all ranks agreed
        # whether the board could not be reached. If so, this rank may not take part any more.
        self.is_in_doubt = False
        # whether a change has failed, a rank was restarted, or this one has given up a handle
        self.plans_may_differ = False
        self.whereabouts = ""
        """A digest of the sizes of this rank's handles and of where they are. Ranks whose digests
        differ compare their plans."""
        # whether the ranks compare the handles that stay on their devices before they move, in the
        # present change
        self.compares_plans = False
        self.suspension: SuspensionRequest | None = None  # asked for here: the next proposal tells
        # the keys on the board that this rank has to delete, each with its epoch
        self._keys: list[tuple[int, str]] = []
        with self._reaching_the_board("join"):
            self._join()

    def _join(self) -> None:
        """Take this rank's place. A restarted process finds it taken, and ends the epoch that its
        predecessor is missing in."""
        token = secrets.token_hex(8).encode()
        if self._board.claim(f"{self._prefix}/member/{self.rank}", token) == token:
            return
        keys = [f"{self._prefix}/at/{rank}" for rank in range(self.world_size)]
        epochs = self._board.present(keys)
        self.epoch = max(map(int, epochs.values()), default=0)
        own = abort({self.rank: _RESTARTED})
        while self._claim(own) != own:
            self.epoch += 1  # that epoch was decided without this rank; try to end the next one
        raise GroupError(
            f"rank {self.rank} was restarted: its place is taken. To go on, {_REJOIN}",
            {self.rank: _RESTARTED},
        )

    def propose(self, action: str, budget_bytes: int, *, catches_up: bool = False) -> Basis:
        """Begin a change. Returns the basis of the plans of all ranks.

        With `catches_up` it passes over epochs that the other ranks gave up because this one did
        not come.

        Raises:
            GroupError: another rank does something else, failed, or did not come in time.
            CoordinatorLost: the board does not answer; nothing has moved.
        """
        if self.is_in_doubt:
            raise CoordinatorLost(f"an earlier decision could not be read; {_REJOIN}")
        with self._reaching_the_board(action):
            readable = action.encode("utf-8", "backslashreplace").decode()
            own = Proposal(
                action=readable,
                budget_bytes=budget_bytes,
                plans_may_differ=self.plans_may_differ,
                whereabouts=self.whereabouts,
                suspension=self.suspension,
            )
            while True:
                deadline = time.monotonic() + self.deadline_seconds
                self._put("proposal", own.encode())
                if self.rank == 0:
                    self._compare_proposals(deadline)
                answer = self._awaited(Basis, "proposal", deadline)
                if isinstance(answer, Decision):
                    decision = answer
                elif answer.is_over:
                    decision = self._claim(abort({self.rank: "found the epoch over"}))
                else:
                    self._forget_earlier()
                    self.compares_plans = answer.compares_plans
                    return answer
                if not (catches_up and decision.is_late and self.rank in decision.failures):
                    raise self._end(decision)
                logger.warning(
                    "rank %d came too late for a phase transition, which the others gave up; it "
                    "goes on with them",
                    self.rank,
                )
                self._enter_next_epoch()

    def exchange_texts(
        self,
        topic: str,
        text: str,
        ranks: Sequence[int] | None = None,
    ) -> list[str]:
        """Exchange texts of at most 1 MiB about a topic, after `propose` and before `agree`.
        Returns those of these ranks in their order; None: of all ranks.

        Raises:
            GroupError: a rank failed, or did not come in time.
            CoordinatorLost: the board does not answer.
        """
        with self._reaching_the_board(topic):
            deadline = time.monotonic() + self.deadline_seconds
            self._put(topic, text.encode())
            values = self._of_all(topic, deadline, ranks)
            if isinstance(values, Decision):
                raise self._end(values)
            return [value.decode() for value in values]

    def agree(
        self,
        plan: Plan,
        stage: Stage = "moved",
        lacks_engines: bool = False,
    ) -> Decision:
        """Vote after the move is prepared, and wait for the decision.

        `stage` says how far this rank has come, `lacks_engines` whether it has engines to load once
        all have moved. Returns the decision COMMIT, with the stage that all ranks have reached,
        which may be an earlier one.

        Raises:
            GroupError: the decision is ABORT; the error has the reasons by rank. The caller must go
                back.
            CoordinatorLost: the decision cannot be read. The caller must keep its prepared move and
                enter no phase.
        """
        with self._reaching_the_board("agree", has_prepared=True):
            deadline = time.monotonic() + self.deadline_seconds
            vote = Vote(digest=digest_of(plan), stage=stage, lacks_engines=lacks_engines)
            self._put("vote", vote.encode())
            if self.rank == 0:
                self._count_votes(deadline)
            decision = self._awaited(Decision, "vote", deadline)
            if decision.verdict == "abort":
                raise self._end(decision)
            self.agreed_epoch = self.epoch
            self._enter_next_epoch()
            return decision

    def abort(
        self, error: BaseException, *, blames: Mapping[int, str] | None = None
    ) -> GroupError | None:
        """End the epoch for all ranks, because this rank cannot do its part. Not called for errors
        that this group raised: every rank has those.

        Args:
            blames: the failed ranks with reasons, where the failure is another rank's.

        Returns the error that this rank raises; None when it is in doubt.

        Raises:
            CoordinatorLost: the board does not answer. The other ranks notice at their deadline.
        """
        if self.is_in_doubt:
            return None
        with self._reaching_the_board("abort"):
            own = abort(blames or {self.rank: _reason(error)})
            while True:
                decision = self._claim(own)
                if decision.verdict == "abort":
                    return self._end(decision, own.failures)
                # interrupted after its vote: the others have entered, so this rank ends the next
                # change
                self._enter_next_epoch()

    def note_resumed(self, suspension: int) -> None:
        """Tell all ranks that a suspension is over. Raises CoordinatorLost; it may be repeated."""
        key = f"{self._prefix}/resumed/{suspension}"
        try:  # no change is in doubt, as it would be in `_reaching_the_board`
            self._board.claim(key, b"-")
        except BoardLost as error:
            raise CoordinatorLost(f"the other ranks cannot resume: {error}") from error
        self._keys.append((self.epoch, key))  # read until all ranks have come to another epoch

    def is_resumed(self, suspension: int) -> bool:
        """Whether a rank has told that. Does not wait. Raises CoordinatorLost; may be repeated."""
        try:
            return self._board.look([f"{self._prefix}/resumed/{suspension}"]) is not None
        except BoardLost as error:
            raise CoordinatorLost(f"suspended, and no rank can resume: {error}") from error

    def _compare_proposals(self, deadline: float) -> None:
        """Rank 0's part of `propose`."""
        proposals = self._messages(Proposal, "proposal", deadline)
        if proposals is None:
            return
        actions = {rank: f"is about to {own.action}" for rank, own in enumerate(proposals)}
        different = {rank: text for rank, text in actions.items() if text != actions[0]}
        if different:
            self._claim(abort({0: actions[0], **different}))
            return
        poorest = min(range(self.world_size), key=lambda rank: proposals[rank].budget_bytes)
        suspensions = [own.suspension for own in proposals if own.suspension is not None]
        basis = Basis(
            budget_bytes=proposals[poorest].budget_bytes,
            budget_rank=poorest,
            compares_plans=(
                len({proposal.whereabouts for proposal in proposals}) > 1
                or any(proposal.plans_may_differ for proposal in proposals)
            ),
            suspension=max(suspensions, key=lambda asked: asked.epoch or 0, default=None),
        )
        self._board.claim(self._key("basis"), basis.encode())

    def _count_votes(self, deadline: float) -> None:
        """Rank 0's part of `agree`."""
        votes = self._messages(Vote, "vote", deadline)
        if votes is None:
            return
        different = [rank for rank, vote in enumerate(votes) if vote.digest != votes[0].digest]
        stage = min((vote.stage for vote in votes), key=_STAGES.index)
        lacks_engines = any(vote.lacks_engines for vote in votes)
        decision = Decision(verdict="commit", stage=stage, lacks_engines=lacks_engines)
        if different:
            decision = abort(dict.fromkeys(different, _ANOTHER_PLAN))
        self._claim(decision)

    def _messages(
        self,
        kind: type[_M],
        topic: str,
        deadline: float,
    ) -> list[_M] | None:
        """The messages of all ranks; None once the epoch has been decided without them."""
        values = self._of_all(topic, deadline)
        if isinstance(values, Decision):
            return None
        messages: list[_M] = []
        for rank, value in enumerate(values):
            try:
                messages.append(decode(kind, value))
            except ValueError as error:
                self._claim(abort({rank: f"is not understood: {error}"}))
                return None
        return messages

    def _of_all(
        self, topic: str, deadline: float, ranks: Sequence[int] | None = None
    ) -> list[bytes] | Decision:
        """The values of these ranks; the decision if the epoch has been decided, which this rank
        does itself at the deadline."""
        keys = [*self._keys_of(topic, ranks).values()]
        decision = [self._key("decision")]
        for _ in interrupts.looks(deadline - time.monotonic(), *_POLL_SECONDS):
            values = self._board.look(keys)
            if values is not None:
                return values
            if self._board.look(decision) is not None:
                break
        return self._give_up(topic, self._missing(topic, ranks))

    def _awaited(self, kind: type[_M], topic: str, deadline: float) -> _M | Decision:
        """The message that rank 0 writes once all ranks have written about the topic. At the
        deadline this rank ends the epoch: the decision."""
        key = self._key(kind.__name__.lower())
        missing: list[int] = []
        value = self._board.wait(key, max(deadline - time.monotonic(), 0.0))
        if value is None:
            missing = self._missing(topic)
        if value is None and not missing:
            # the last rank has just written, and rank 0 is about to answer
            value = self._board.wait(key, min(0.1 * self.deadline_seconds, 1.0))
        return self._give_up(topic, missing) if value is None else decode(kind, value)

    def _give_up(self, topic: str, missing: list[int]) -> Decision:
        """End the epoch at the deadline. Blames the ranks that have not written; if all have,
        rank 0."""
        reason = f"no {topic if missing else 'answer'} within {self.deadline_seconds:g} s"
        return self._claim(abort(dict.fromkeys(missing or [0], reason), is_late=True))

    def _missing(
        self,
        topic: str,
        ranks: Sequence[int] | None = None,
    ) -> list[int]:
        """The ranks that have not written about a topic."""
        keys = self._keys_of(topic, ranks)
        values = self._board.present([*keys.values()])
        return [rank for rank, key in keys.items() if key not in values]

    # --- the end of an epoch

    def _claim(self, decision: Decision) -> Decision:
        """Claim a decision about the epoch. Returns the decision that holds."""
        value = self._board.claim(self._key("decision"), decision.encode())
        claimed = decode(Decision, value)
        if claimed.verdict == "abort":  # for ranks that wait for the basis
            basis = Basis(budget_bytes=0, is_over=True)
            self._board.claim(self._key("basis"), basis.encode())
        return claimed

    def _end(
        self,
        decision: Decision,
        own: Mapping[int, str] = MappingProxyType({}),
    ) -> GroupError:
        """Leave an epoch that ended with ABORT. Returns the error that this rank raises, with its
        `own` reason if it has failed, too."""
        if decision.verdict == "commit":
            raise ValueError(
                "the ranks committed without this one: another process uses its rank in the same "
                "generation"
            )
        failures = dict(sorted({**own, **decision.failures}.items()))
        # a step that some ranks have begun and others have not leaves them with different handles
        self.plans_may_differ = True
        self._enter_next_epoch()
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in failures.items())
        advice = ""
        if _RESTARTED in failures.values():
            advice = f". A phase can only succeed again when you {_REJOIN}"
        if _ANOTHER_PLAN in failures.values():
            advice += _ABOUT_PLANS
        return GroupError(
            f"the ranks did not change phase together, so all went back: {reasons}{advice}",
            failures,
        )

    def _enter_next_epoch(self) -> None:
        # Written first: until then an interrupt belongs to the epoch that this rank has not left
        # yet. A lost board is no error: only a process that replaces this one reads the key.
        with suppress(BoardLost):
            self._board.put(f"{self._prefix}/at/{self.rank}", str(self.epoch + 1).encode())
        if self.rank == 0:
            for name in ("basis", "decision"):
                self._keys.append((self.epoch, self._key(name)))
        self.epoch += 1

    def _forget_earlier(self) -> None:
        """Delete this rank's keys of the epochs before this one, which all ranks have reached."""
        old_keys = [key for epoch, key in self._keys if epoch < self.epoch]
        if old_keys:
            self._board.remove(old_keys)
        self._keys = [(epoch, key) for epoch, key in self._keys if epoch == self.epoch]

    # --- the board

    def _put(self, topic: str, value: bytes) -> None:
        key = f"{self._key(topic)}/{self.rank}"
        self._keys.append((self.epoch, key))
        self._board.put(key, value)

    def _key(self, topic: str) -> str:
        return f"{self._prefix}/e{self.epoch}/{topic}"

    def _keys_of(
        self,
        topic: str,
        ranks: Sequence[int] | None = None,
    ) -> dict[int, str]:
        """The keys under which these ranks write about a topic; None: all ranks."""
        if ranks is None:
            ranks = range(self.world_size)
        return {rank: f"{self._key(topic)}/{rank}" for rank in ranks}

    @contextmanager
    def _reaching_the_board(
        self,
        step: str,
        *,
        has_prepared: bool = False,
    ) -> Iterator[None]:
        """Raise CoordinatorLost where the board is lost in the body. `has_prepared`: this rank's
        moves are made, and can be undone."""
        try:
            yield
        except (BoardLost, ValueError) as error:
            self.is_in_doubt = True
            outcome = "nothing was entered"
            if has_prepared:
                outcome = "the prepared move is kept, and no phase was entered"
            raise CoordinatorLost(
                f"rank {self.rank} cannot reach the group ({step}, epoch {self.epoch}): {error}; "
                f"{outcome}. To go on, {_REJOIN}"
            ) from error


def check_place(rank: int, world_size: int, deadline_seconds: float) -> None:
    """Raise ValueError if the rank is outside the world, or the deadline is not a positive finite
    number."""
    if not 0 <= rank < world_size:
        raise ValueError(
            f"rank {rank} is outside a world of {world_size} ranks; give 0 to {world_size - 1}"
        )
    if not 0 < deadline_seconds < math.inf:
        raise ValueError(f"deadline_seconds must be more than 0 and finite, not {deadline_seconds}")


def _reason(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the exception's `__str__` may be user code that raises
        return type(error).__name__
