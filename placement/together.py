"""What a border has to do with the other ranks of a group; nothing where there is none."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from placement.errors import CoordinatorLost, GroupError, PhaseError
from placement.states import Plan

if TYPE_CHECKING:
    from placement.group.agreement import Group

_TOLD = "_placement_told"


class _Told(dict[str, int]):
    """By group, after how many of this rank's words it knew of an exception. Does not go with the exception to other processes."""

    def __reduce__(self) -> tuple[type[_Told], tuple[()]]:
        return _Told, ()


class Together:
    """The borders of one manager as its group sees them: each consumes one epoch on every rank, whatever becomes of it.

    Raises:
        ValueError: `group` is no group.
    """

    def __init__(self, group: Group | None) -> None:
        if group is not None and not callable(getattr(group, "propose", None)):
            raise ValueError(f"group must be a placement.group.StoreGroup or its like, not {group!r}")
        self._group = group
        self._key = secrets.token_hex(8)
        self._words = 0
        """That this rank has said to its group: each is one epoch's."""

    def propose(self, action: str, ask_budget: Callable[[], int] = lambda: 0) -> int | None:
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
            return self._group.propose(action, ask_budget())

    def go_on(self, what: str) -> None:
        """Before a further step of the same border, once the one before is agreed.

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

    def failed(self, error: BaseException) -> GroupError | None:
        """An entry or a switch did not succeed here. Returns what to raise in place of `error`; None: `error` itself."""
        if self._group is None or self._is_told(error):
            return None
        self._words += 1
        self._mark(error)
        try:
            told = self._group.abort(error)
        except CoordinatorLost as lost:
            with contextlib.suppress(Exception):  # a frozen one takes no note
                error.add_note(f"placement: {lost}")
            return None
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
                self.failed(error if error is not None else failures[0])
            else:
                self.propose(action)
                self.agree(plan)
        except (GroupError, CoordinatorLost) as told:
            return [*failures, told]
        except BaseException as interrupt:  # the others must not wait for this rank
            self.failed(interrupt)
            raise
        return failures

    def abandoned(self, name: str) -> None:
        """A phase was dropped while open: the others must not wait for this rank."""
        if self._group is not None:
            self.failed(PhaseError(f"phase {name!r} was abandoned"))

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """What the group raises, all its ranks know."""
        try:
            yield
        except (GroupError, CoordinatorLost) as told:
            self._mark(told)
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


def describe(verb: str, name: str, only: tuple[str, ...] | None) -> str:
    """An action as all ranks have to say it."""
    return f"{verb} {name}" if only is None else f"{verb} {name} only={','.join(sorted(only))}"
