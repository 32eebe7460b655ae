"""Whoever wants to lose or spoil a value of a sharded model: exceptions half-way, faults, odd orders, early ends. On 2 ranks with gloo.

A script runs plain and under a manager and must see the same bytes; the others say what must hold. All of it is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.sharded import disrupted_worker as scripts
from tests.sharded.disrupted_worker import Stage, twice
from tests.support.ranks import Ranks

# A case for each way that something could be lost. Not with all: DDP itself raises after a backward that broke off.
SCRIPTS = {
    scripts.forward_raises: ("fsdp2", "fsdp1_original", "fsdp1_flat"),
    scripts.backward_raises: ("fsdp2", "fsdp1_original", "fsdp1_flat"),
    scripts.graph_over_a_transition: ("fsdp2", "ddp"),  # of FSDP1: see test_fsdp1
    scripts.left_for_good: ("fsdp2", "fsdp1_original"),
}
BODIES = {
    scripts.collected: ("fsdp2", "fsdp1_original", "ddp"),
    scripts.readonly: ("fsdp2", "fsdp1_original"),
}


def cases(table: Mapping[Any, Sequence[str]]) -> list[Any]:
    return [pytest.param(body, name, id=f"{body.__name__}-{name}") for body, names in table.items() for name in names]


@pytest.mark.parametrize(("script", "name"), cases(SCRIPTS))
def test_a_script_sees_the_same_bytes_as_without_placement(two_ranks: Ranks, script: Callable[[Stage], None], name: str) -> None:
    two_ranks.run(twice, script, name)


@pytest.mark.parametrize(("name", "is_interrupt"), [("fsdp2", False), ("fsdp1_original", True)], ids=["fault", "interrupt"])
def test_a_switch_that_fails_at_any_device_call_loses_nothing(
    two_ranks: Ranks, name: str, is_interrupt: bool, counted: Callable[[str], None]
) -> None:
    failed = two_ranks.run(scripts.fail_at_every_call, name, is_interrupt, deadline_seconds=100.0)
    assert failed[0] == failed[1]
    assert all(calls > 0 for calls in failed[0].values()), failed[0]
    counted(f"a switch of {name} models, {'interrupted' if is_interrupt else 'failed'} at each device call: {failed[0]}")


@pytest.mark.parametrize(("body", "name"), cases(BODIES))
def test_ends_and_owners(two_ranks: Ranks, body: Callable[[str], None], name: str) -> None:
    two_ranks.run(body, name)
