"""The manager of a rank that a framework started: settings of the environment, and the group of all ranks."""

from __future__ import annotations

import pytest

from placement import PolicyError
from placement.integrations.rank import manager_of_this_rank
from placement.policies import Colocated, Resident


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_DEVICE", "simulated:16MiB")


def test_gradients_are_dropped_by_default() -> None:
    policy = manager_of_this_rank().policy
    assert isinstance(policy, Colocated)
    assert policy.drop_gradients


def test_the_environment_takes_precedence_over_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_POLICY", "resident")
    manager = manager_of_this_rank(policy="colocated", budget_bytes="1MiB")
    assert isinstance(manager.policy, Resident)
    assert manager.settings.budget_bytes == 1 << 20
    assert manager.device.capacity_bytes == 16 << 20


def test_an_error_tells_the_variables_that_were_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_POLICY", "colocatd")
    with pytest.raises(PolicyError, match="Did you mean 'colocated'") as raised:
        manager_of_this_rank(headroom=0.1)
    assert raised.value.__notes__ == [
        "placement: set in the environment: PLACEMENT_DEVICE='simulated:16MiB', PLACEMENT_POLICY='colocatd'",
    ]


def test_several_ranks_need_the_variables_of_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="RANK, MASTER_ADDR, MASTER_PORT not set"):
        manager_of_this_rank()


def test_a_group_of_the_callers_own_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of the environment then."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert manager_of_this_rank(group=None).settings.device == "simulated:16MiB"
