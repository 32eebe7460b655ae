"""Sweeps: tests of many cases, of which few run without --slow."""

from __future__ import annotations

from collections.abc import Iterable
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
