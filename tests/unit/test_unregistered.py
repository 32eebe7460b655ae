"""An optimizer that nobody registered and that steps a registered module's parameters is found, and kept out where a write is lost."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

from placement import NotResidentError, PhaseError
from tests.support.worker import Worker, assert_same, learn

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "several groups": lambda parameters: torch.optim.SGD(
        [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": list(parameters)}], lr=0.1
    ),
}


def with_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING and "not registered" in record.message]


def findings(worker: Worker) -> list[tuple[str | None, str]]:
    return [(each.handle, each.detail.split()[1]) for each in worker.manager.audit().findings if each.what == "unregistered_optimizer"]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_in_training_it_is_said_once_and_found_as_long_as_it_lives(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    worker = Worker()
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
        learn(worker.critic_net, worker.sgd)
    assert not warnings_in(caplog)
    other = OPTIMIZERS[kind](worker.net.parameters())
    for _ in range(2):
        with worker.manager.phase("train"):
            learn(worker.net, other)
            learn(worker.net, worker.adam)
    (warning,) = warnings_in(caplog)
    assert f"({type(other).__name__}) steps parameters of 'actor'" in warning
    assert findings(worker) == [("actor", type(other).__name__)]
    del other
    gc.collect()
    assert not findings(worker)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_while_the_module_is_offloaded_it_is_refused(worker: Worker, kind: str) -> None:
    other = OPTIMIZERS[kind](worker.net.parameters())
    with_gradients(worker.net)
    message = r"'actor' is CPU_OFFLOADED in phase 'idle' and cannot be stepped.*not registered.*manager\.register\(\).*phase\('train'\)"
    with pytest.raises(NotResidentError, match=message):
        other.step()
    assert not other.state
    worker.net.zero_grad()
    assert worker.manager.audit().ok
    assert_same(dict(worker.actor.state_dict()), dict(worker.values))


@pytest.mark.parametrize(("phase", "state"), [("log_prob", "GPU_RESIDENT"), ("weight_sync", "SYNCING")])
def test_outside_training_it_is_refused(phase: str, state: str) -> None:
    worker = Worker(policy="resident")
    other = torch.optim.SGD(worker.net.parameters(), lr=0.1)
    with worker.manager.phase(phase):
        with_gradients(worker.net)
        with pytest.raises(PhaseError, match=rf"not registered \(SGD\) in phase '{phase}' would change 'actor', which is {state}"):
            other.step()
        assert_same(dict(worker.net.state_dict()), dict(worker.values))
