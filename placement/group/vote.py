"""The part of a phase transition that concerns the other ranks of a group."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from placement.core.errors import CoordinatorLost, DeviceMemoryError, GroupError, PhaseError
from placement.core.snapshot import SuspensionRequest
from placement.core.states import Plan
from placement.group.protocol import Basis, Decision, Group, Stage

# the attribute of an exception that the group knows: `{key of a group's vote: epochs used by then}`
_KNOWN_TO = "_placement_told"
Agree = Callable[[Plan, Stage, bool], Decision]  # asks the other ranks to agree, see `Group.agree`

_ALL_HAVE_LEFT = Plan({})
"""The plan for which ranks vote that have left a phase, where their plans may differ. The next
entry makes these equal."""


class Suspended(PhaseError):
    """An outermost phase cannot begin now. Caught where phases are entered."""


class OtherBudgetError(DeviceMemoryError):
    """A plan does not fit the budget of another rank of the group, which `blames` names with the
    reason."""

    blames: Mapping[int, str]


@dataclass
class _Attempt:
    """One phase transition, as this rank knows it."""

    catches_up: bool = False
    """Whether this rank is about to enter its first phase and has not proposed yet, so that it may
    have skipped phase transitions."""
    # whether its epoch has ended for all ranks. They need not hear of later errors of this rank.
    is_over: bool = False
    has_left: bool = False  # whether it has ended because all have left the phase


class GroupVote:
    """The phase transitions of one manager as its group sees them. Each uses the same epochs on
    every rank, also where it fails."""

    def __init__(self, group: Group) -> None:
        if getattr(group, "propose", None) is None:
            raise ValueError(
                "group must be a placement.group.StoreGroup or another placement.group.Group, not "
                f"{group!r}"
            )
        self.group = group
        self._key = secrets.token_hex(8)
        self._epochs_used = 0  # the number of epochs in which this rank has written to its group
        self._attempt: _Attempt | None = None
        self.agreed: SuspensionRequest | None = None  # heard by all ranks, which carry it out next

    @classmethod
    def rejoin(cls, group: Group) -> GroupVote:
        """The vote in a group that replaces one whose state is unknown. Raises ValueError: `group`
        is not a group, or it is in doubt."""
        vote = cls(group)
        if group.is_in_doubt:
            raise ValueError(
                "this group could not read a decision and is unusable: make a new group on all "
                "ranks, with a new generation"
            )
        # a rank that was restarted has its handles elsewhere, and has seen no cycle of phases
        group.plans_may_differ = True
        return vote

    @contextlib.contextmanager
    def attempt(
        self, *, catches_up: bool = False, error: BaseException | None = None
    ) -> Iterator[None]:
        """Context of one phase transition. `failed` ends its open epoch once, however often it is
        called inside.
        `catches_up`: the first phase is entered. `error`: the exception with which a phase is left,
        if any."""
        is_over = error is not None and self._is_known(error)
        self._attempt = _Attempt(catches_up=catches_up, is_over=is_over)
        try:
            yield
        finally:
            self._attempt = None

    def propose(
        self,
        action: str,
        ask_budget: Callable[[], int] = lambda: 0,
        ask_whereabouts: Callable[[], Mapping[str, Any]] | None = None,
    ) -> Basis:
        """Propose an entry or a switch before its plan is made, or a further step of it after the
        one before was agreed. Returns the basis of the plans of all ranks.
        `ask_whereabouts`: returns the bytes of each handle and where they are; None: as in the last
        proposal."""
        if ask_whereabouts is not None:
            text = json.dumps(ask_whereabouts(), sort_keys=True)
            self.group.whereabouts = hashlib.sha256(text.encode()).hexdigest()
        with self._hearing():
            self._epochs_used += 1
            attempt = self._current
            catches_up = attempt.catches_up
            attempt.catches_up = False
            return self.group.propose(action, ask_budget(), catches_up=catches_up)

    def in_common(
        self, staying: Iterable[tuple[str, str]], streamed: Iterable[str]
    ) -> tuple[frozenset[tuple[str, str]], frozenset[str]]:
        """The handles that stay on every rank's device, and those that any rank streams.
        `staying`: those that merely stay on this rank's device, an engine once for each of its
        tags; a handle without tags has ""."""
        staying_everywhere = {*staying}
        streamed_anywhere = {*streamed}
        own_text = json.dumps([sorted(staying_everywhere), sorted(streamed_anywhere)])
        with self._hearing():
            texts = self.group.exchange_texts("plan", own_text)
        for text in texts:
            staying_on_rank, streamed_by_rank = json.loads(text)
            staying_everywhere &= {(name, tag) for name, tag in staying_on_rank}
            streamed_anywhere.update(streamed_by_rank)
        return frozenset(staying_everywhere), frozenset(streamed_anywhere)

    def agree(self, plan: Plan, stage: Stage = "moved", lacks_engines: bool = False) -> Decision:
        """Ask the other ranks to agree, after every move is made and while each can still be
        undone. See `Group.agree`."""
        with self._hearing():
            return self.group.agree(plan, stage, lacks_engines)

    def failed(self, error: BaseException) -> GroupError | None:
        """Report that a phase transition failed on this rank: end its epoch for all ranks, unless
        it has ended. Returns the error to raise in place of `error`; None to raise `error`
        itself."""
        attempt = self._current
        if self._is_known(error) or attempt.has_left or isinstance(error, Suspended):
            return None
        if attempt.is_over:
            self._mark(error)
            return None
        self._epochs_used += 1
        self._mark(error)
        blames = error.blames if isinstance(error, OtherBudgetError) else None
        group_error = None
        try:
            group_error = self.group.abort(error, blames=blames)
        except CoordinatorLost as lost:
            with contextlib.suppress(Exception):  # a frozen exception refuses notes
                error.add_note(f"placement: {lost}")
        attempt.is_over = True
        if group_error is not None:
            self._mark(group_error)
        return group_error if isinstance(error, Exception) else None

    def left(
        self, action: str, plan: Plan, failures: list[Exception], error: BaseException | None
    ) -> list[Exception]:
        """Report that a phase was left. Offloaded bytes stay offloaded, but every rank learns
        whether all came this far. Returns `failures`, and the group's error if there is one.
        `error`: the user's exception that is propagating."""
        try:
            if error is not None or failures:
                self.failed(error if error is not None else failures[0])
            else:
                basis = self.propose(action)
                self.agree(_ALL_HAVE_LEFT if self.group.compares_plans else plan)
                self._current.has_left = True
                self.agreed = basis.suspension
        except (GroupError, CoordinatorLost) as group_error:
            return [*failures, group_error]
        return failures

    def abandoned(self, name: str) -> None:
        """Report that a phase was dropped while open, so that the other ranks do not wait for this
        one."""
        # the report takes an epoch of its own, even during another phase transition
        attempt = self._attempt
        self._attempt = None
        try:
            self.failed(PhaseError(f"phase {name!r} was abandoned"))
        finally:
            self._attempt = attempt

    def heard(self, error: GroupError | CoordinatorLost) -> None:
        """Note that the group raised this error: the epoch has ended, and all ranks know it."""
        self._mark(error)
        self._current.is_over = True

    @property
    def _current(self) -> _Attempt:
        return self._attempt or _Attempt()

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """Note errors that the group raises inside: GroupError, after which the caller goes back,
        and CoordinatorLost."""
        try:
            yield
        except (GroupError, CoordinatorLost) as error:
            self.heard(error)
            raise

    def _is_known(self, error: BaseException) -> bool:
        """Whether the other ranks know this exception, which ends one epoch in all phases that it
        passes through. The knowledge expires, because a future that is asked twice raises the same
        object later. It is noted by group, because an exception may pass through several managers'
        phases."""
        epochs = vars(error).get(_KNOWN_TO, {})
        return bool(epochs.get(self._key) == self._epochs_used)

    def _mark(self, error: BaseException) -> None:
        """Note that the other ranks know this exception."""
        # The exception has the note: a table here would keep its frames and the model alive. A
        # frozen exception refuses setattr.
        vars(error).setdefault(_KNOWN_TO, {})[self._key] = self._epochs_used
