"""The least budget of a group's ranks. A plan has to fit it."""

from __future__ import annotations

from typing import NamedTuple

from placement.core.errors import DeviceMemoryError


class LeastBudget(NamedTuple):
    """The least of the budgets of all ranks of a group, in bytes."""

    nbytes: int
    rank: int
    """The rank that has the least budget."""


class OtherBudgetError(DeviceMemoryError):
    """A plan does not fit the budget of another rank of the group.

    Attributes:
        rank: the rank whose budget is too small.
        reason: the text to report for that rank.
    """

    def __init__(self, message: str, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank, self.reason = rank, reason

    def __reduce__(self) -> tuple[type[OtherBudgetError], tuple[str, int, str]]:
        return type(self), (str(self), self.rank, self.reason)
