"""Sweeps: tests of many cases, of which few run without --slow.

Cases that run a path which others run, too, with other values, are marked `sweep`. What remains has
each value at least once, so that a fault of one value shows without --slow; a fault of two values
together shows in CI. A whole test is marked where it takes seconds, and the tests beside it run
most of what it does; where it imports Ray or verl; or where it needs a package of the system
(tests/system_packages.sh).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest


def few(cases: Iterable[Any], *shown: Any) -> list[Any]:
    """All cases as parameters of a test. Those that are not among `shown` are marked `sweep`:
    they show the same once more."""
    cases = list(cases)
    unknown = [case for case in shown if case not in cases]
    assert not unknown, f"no such cases: {unknown}"
    return [
        case if case in shown else pytest.param(case, marks=pytest.mark.sweep) for case in cases
    ]


def diagonal(*axes: Iterable[Any]) -> list[Any]:
    """Every combination of the values of some axes, as parameters of a test. All are marked `sweep`
    but the diagonal, which has each value of each axis once, or more often in a shorter axis.

    Args:
        axes: the values, or a mapping from their ids to them.
    """
    columns = [
        list(axis.items()) if isinstance(axis, Mapping) else [(str(value), value) for value in axis]
        for axis in axes
    ]
    longest = max(len(column) for column in columns)
    shown = {tuple(turn % len(column) for column in columns) for turn in range(longest)}
    parameters = []
    for places in itertools.product(*(range(len(column)) for column in columns)):
        names, values = zip(
            *(column[place] for column, place in zip(columns, places, strict=True)), strict=True
        )
        marks = [] if places in shown else [pytest.mark.sweep]
        parameters.append(pytest.param(*values, id="-".join(names), marks=marks))
    return parameters
