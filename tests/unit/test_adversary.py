"""Programs that once lost or spoilt a value, or were told the wrong thing. Each is named for what was wrong."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from placement import IntegrityError, NotResidentError
from placement.testing import assert_nothing_resident
from tests.unit.worker import Worker, assert_same, batch, learn


@pytest.mark.parametrize("taken_in", ["idle", "log_prob"])
def test_values_written_through_a_state_dict_while_offloaded_came_back_after_they_were_undone(taken_in: str) -> None:
    worker = Worker()
    with worker.manager.phase("log_prob"):
        pass
    if taken_in == "idle":
        shown = worker.net.state_dict()
    else:
        with worker.manager.phase("log_prob"):
            shown = worker.net.state_dict()
    for value in shown.values():
        value.fill_(1.0)
    with worker.manager.phase("eval"):
        assert all(bool((value == 1.0).all()) for value in worker.net.parameters())
        for name, value in worker.net.state_dict().items():
            value.copy_(worker.values[name])
    assert_same(dict(worker.net.state_dict()), dict(worker.values))
    with worker.manager.phase("log_prob"):
        assert_same(dict(worker.net.state_dict()), dict(worker.values))
    assert worker.manager.audit().ok
