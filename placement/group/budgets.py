"""The budgets of other ranks: a plan has to fit the least of them."""

from __future__ import annotations

from typing import NamedTuple

from placement.core.errors import DeviceMemoryError


class LeastBudget(NamedTuple):
    """What every rank of a group can have its handles hold."""

    nbytes: int
    rank: int
    """Whose budget that is."""


class OtherBudgetError(DeviceMemoryError):
    """A plan does not fit the budget of another rank of the group.

    Attributes:
        rank: the other one.
        reason: to say of it.
    """

    def __init__(self, message: str, rank: int, reason: str) -> None:
        super().__init__(message)
        self.rank, self.reason = rank, reason

    def __reduce__(self) -> tuple[type[OtherBudgetError], tuple[str, int, str]]:
        return type(self), (str(self), self.rank, self.reason)
