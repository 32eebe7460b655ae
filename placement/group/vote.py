"""What a phase transition has to do with the other ranks of a group; nothing where there is none."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from placement.core.errors import CoordinatorLost, GroupError, PhaseError
from placement.core.states import Plan
from placement.group.budgets import LeastBudget, OtherBudgetError

if TYPE_CHECKING:
    from placement.group.agreement import Group

_TOLD = "_placement_told"


class _Told(dict[str, int]):
    """By group, after how many of this rank's words it knew of an exception. Does not go with the exception to other processes."""

    def __reduce__(self) -> tuple[type[_Told], tuple[()]]:
        return _Told, ()


class _Attempt:
    """What is known of one phase transition while it is tried.

    Attributes:
        catches_up: this rank is about to enter its first phase, and has not proposed yet: it may have skipped phase transitions of the
        others.
        has_failed: the epoch has ended for all. Whatever this rank raises from here on, they do not need to know.
        has_left: as well, because all have left the phase.
    """

    def __init__(self, *, catches_up: bool, has_failed: bool) -> None:
        self.catches_up, self.has_failed, self.has_left = catches_up, has_failed, False


class GroupVote:
    """The phase transitions of one manager as its group sees them: each consumes one epoch on every rank, whatever becomes of it.

    Raises:
        ValueError: `group` is no group.
    """

    def __init__(self, group: Group | None) -> None:
        self._group = None if group is None else checked(group)
        self._key = secrets.token_hex(8)
        self._words = 0
        """That this rank has said to its group: each is one epoch's."""
        self._attempt: _Attempt | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there is no group."""
        return self._group is None

    def rejoin(self, group: Group) -> None:
        """Take a new group in place of the old one, of which nothing is known any more.

        Raises:
            ValueError: `group` is no group, it is in doubt, or there was none before.
        """
        if self._group is None:
            raise ValueError("this manager was made without a group: make it with Manager(group=...)")
        if checked(group).is_in_doubt:
            raise ValueError("this group is in doubt about a decision, and stays so: make one anew on all ranks, with a new generation")
        self._group = group
        self._key = secrets.token_hex(8)

    @contextlib.contextmanager
    def attempt(self, *, catches_up: bool = False, error: BaseException | None = None) -> Iterator[None]:
        """While one phase transition is tried: `failed` ends its epoch once, however often it is called.

        Args:
            catches_up: it enters the first phase: epochs that the others gave up without this rank are passed over.
            error: that a phase is left with; the others may know of it.
        """
        self._attempt = _Attempt(catches_up=catches_up, has_failed=error is not None and self._is_told(error))
        try:
            yield
        finally:
            self._attempt = None

    def propose(self, action: str, ask_budget: Callable[[], int] = lambda: 0) -> LeastBudget | None:
        """Before the plan of an entry or a switch is made. Returns the least budget of all ranks; None without a group.

        Args:
            action: what every rank has to be about.
            ask_budget: gives this rank's, in bytes; not asked without a group.

        Raises:
            GroupError, CoordinatorLost: see `Group.propose`.
        """
        if self._group is None:
            return None
        with self._hearing():
            self._words += 1
            catches_up = self._may_catch_up()
            return LeastBudget(self._group.propose(action, ask_budget(), catches_up=catches_up), self._group.budget_rank)

    def go_on(self, what: str) -> None:
        """Before a further step of the same phase transition, once the one before is agreed.

        Raises:
            GroupError, CoordinatorLost: see `Group.propose`.
        """
        self.propose(what)

    @property
    def agreement(self) -> Callable[[Plan], None] | None:
        """What asks the other ranks; None without a group."""
        return None if self._group is None else self.agree

    def agree(self, plan: Plan) -> None:
        """Everything is moved, and could still go back.

        Raises:
            GroupError: go back. CoordinatorLost: keep what was prepared.
        """
        if self._group is not None:
            with self._hearing():
                self._group.agree(plan)

    def failed(self, error: BaseException, *, waits: bool = True) -> GroupError | None:
        """A phase transition did not succeed here: end its epoch for all, unless it has ended.

        Args:
            waits: for the reasons of the other ranks, because what is returned is raised.

        Returns:
            What to raise in place of `error`; None: `error` itself.
        """
        attempt = self._attempt
        if self._group is None or self._is_told(error) or (attempt is not None and attempt.has_left):
            return None
        if attempt is not None and attempt.has_failed:
            self._mark(error)
            return None
        self._words += 1
        self._mark(error)
        blames = {error.rank: error.reason} if isinstance(error, OtherBudgetError) else None
        try:
            told = self._group.abort(error, blames=blames, catches_up=self._may_catch_up(), waits=waits and isinstance(error, Exception))
        except CoordinatorLost as lost:
            with contextlib.suppress(Exception):  # a frozen one takes no note
                error.add_note(f"placement: {lost}")
            told = None
        if attempt is not None:
            attempt.has_failed = True
        if told is not None:
            self._mark(told)
        return told if isinstance(error, Exception) else None

    def left(self, action: str, plan: Plan, failures: list[Exception], error: BaseException | None) -> list[Exception]:
        """A phase was left: what is off the device stays off it, but everybody learns whether everybody came so far.

        Args:
            error: the user's, that is on its way.

        Returns:
            `failures`, and what the group has to say.
        """
        if self._group is None:
            return failures
        try:
            if error is not None or failures:
                self.failed(error if error is not None else failures[0], waits=False)
            else:
                self.propose(action)
                self.agree(plan)
                if self._attempt is not None:
                    self._attempt.has_left = True
        except (GroupError, CoordinatorLost) as told:
            return [*failures, told]
        except BaseException as interrupt:  # the others must not wait for this rank
            self.failed(interrupt)
            raise
        return failures

    def abandoned(self, name: str) -> None:
        """A phase was dropped while open: the others must not wait for this rank."""
        attempt, self._attempt = self._attempt, None  # an epoch of its own, whatever phase transition is tried now
        try:
            self.failed(PhaseError(f"phase {name!r} was abandoned"), waits=False)
        finally:
            self._attempt = attempt

    def _may_catch_up(self) -> bool:
        """Whether the next word to the group is the first of a rank that may have skipped phase transitions. Once true, it is so no
        more."""
        if self._attempt is None or not self._attempt.catches_up:
            return False
        self._attempt.catches_up = False
        return True

    def heard(self, told: GroupError | CoordinatorLost) -> None:
        """The group has raised this: the epoch has ended, and all ranks know."""
        self._mark(told)
        if self._attempt is not None:
            self._attempt.has_failed = True

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """What the group raises, all its ranks know."""
        try:
            yield
        except (GroupError, CoordinatorLost) as told:
            self.heard(told)
            raise

    def _is_told(self, error: BaseException) -> bool:
        """Whether the others know of it: an exception ends one epoch, however many phases it passes through on its way.

        Not for ever: the same object is raised again in a later phase by a future that is asked again; and each manager's group for
        itself, where it passes through phases of several.
        """
        told: _Told = vars(error).get(_TOLD, _Told())
        return told.get(self._key) == self._words

    def _mark(self, error: BaseException) -> None:
        # On the exception itself: to remember it would keep its frames, and the model, alive. Not by setattr, which a frozen one refuses.
        vars(error).setdefault(_TOLD, _Told())[self._key] = self._words


def checked(group: Group) -> Group:
    """Raises ValueError: it is no group."""
    if getattr(group, "propose", None) is None:
        raise ValueError(f"group must be a placement.group.StoreGroup or its like, not {group!r}")
    return group


def describe(verb: str, name: str, only: tuple[str, ...] | None) -> str:
    """An action as all ranks have to say it."""
    return f"{verb} {name}" if only is None else f"{verb} {name} only={','.join(sorted(only))}"
