"""Views of a state dict's tensors that were taken while the handle was offloaded: they stay with the host copy, and that is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from placement import Manager

VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index": lambda tensor: tensor[0],
    "flatten": torch.flatten,
    "numpy": lambda tensor: tensor.numpy(),
    "storage": lambda tensor: tensor.untyped_storage(),
}


class Job:
    def __init__(self, *, readonly: bool = False) -> None:
        torch.manual_seed(0)
        self.manager = Manager(device="simulated:64MiB")
        self.net = nn.Linear(64, 64)
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.manager.register("actor", self.net, role="ref" if readonly else "actor", readonly=readonly)
        if not readonly:
            self.manager.register("actor.optimizer", self.sgd)

    def findings(self) -> list[str]:
        return [f"{each.what}: {each.detail}" for each in self.manager.audit().findings]

    def told(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        return [record.getMessage() for record in caplog.records if "views of tensors of a state dict" in record.getMessage()]


@pytest.mark.parametrize("take", VIEWS.values(), ids=VIEWS)
def test_a_view_taken_while_offloaded_is_told_once_and_by_every_audit(take: Callable[[torch.Tensor], Any], caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    job = Job()
    shown = job.net.state_dict()
    view = take(shown["weight"])
    assert job.findings() == []
    for _ in range(2):
        with job.manager.phase("train"):
            (finding,) = job.findings()
            assert finding.startswith("stray_reference: a view of weight of a state dict")
        assert job.findings() == []
    (told,) = job.told(caplog)
    assert told.startswith("'actor': views of tensors of a state dict (weight) were taken")
    del view
    with job.manager.phase("train"):
        assert job.findings() == []
        assert torch.equal(shown["weight"], job.net.weight), "the tensor itself follows"


def test_what_is_written_to_such_a_view_inside_a_phase_does_not_reach_the_handle() -> None:
    job = Job()
    view = job.net.state_dict()["weight"][0]
    for step in range(3):
        with job.manager.phase("train" if step else "log_prob"):
            values = job.net.weight.detach().clone()
            view.fill_(77.0)
        assert torch.equal(job.net.state_dict()["weight"], values), "the bytes on the device count, those of the host copy do not"
    assert torch.equal(view, values[0]), "it shows the host copy, and so the present values again"


def test_a_view_written_while_offloaded_is_loaded() -> None:
    job = Job()
    view = job.net.state_dict()["weight"][0]
    view.fill_(5.0)
    with job.manager.phase("train"):
        assert bool((job.net.weight[0] == 5.0).all())
        with torch.no_grad():
            job.net.weight[0] = 6.0
    assert bool((view == 6.0).all())


@pytest.mark.parametrize("phase", ["log_prob", "train"])
def test_tensors_whole_state_dicts_and_copies_are_not_told(phase: str, caplog: Any) -> None:
    caplog.set_level(logging.WARNING)
    job = Job()
    shown = job.net.state_dict()
    copies = [tensor[0].clone() for tensor in shown.values()]
    with job.manager.phase(phase):
        inside = shown["weight"][0]
        assert job.findings() == []
        assert torch.equal(inside, job.net.weight[0])
        assert torch.equal(copies[0], job.net.weight[0])
    assert job.told(caplog) == []
