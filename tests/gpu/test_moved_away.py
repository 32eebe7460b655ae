"""Storages that are shared, converted or resized behind placement's back, on a real device: an
error or right values, never NaN."""

from __future__ import annotations

import copy
import multiprocessing.reduction
from collections.abc import Callable

import pytest
import torch
import torch.multiprocessing
from torch import nn

import placement
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same

pytestmark = pytest.mark.gpu


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in model.state_dict().items()}


def test_share_memory_leaves_device_memory_where_it_is(manager: placement.Manager) -> None:
    model = _model()
    wanted = _values(model)
    manager.register("actor", model, role="actor")
    model.share_memory()
    for _ in range(2):
        with manager.phase("log_prob"):
            assert_same(_values(model), wanted)
            model.share_memory()
    assert manager.audit().ok


@pytest.mark.parametrize("where", ["offloaded", "device"])
def test_a_queue_cannot_export_the_range(manager: placement.Manager, where: str) -> None:
    """Memory behind a range has no handle that another process could open: sending is an error, and
    changes nothing."""
    model = _model()
    wanted = _values(model)
    manager.register("actor", model, role="actor")
    if where == "device":
        manager.enter("log_prob")
    for parameter in model.parameters():
        with pytest.raises(RuntimeError):
            multiprocessing.reduction.ForkingPickler.dumps(parameter.detach())
    if where == "device":
        manager.leave()
    for _ in range(2):
        with manager.phase("log_prob"):
            assert_same(_values(model), wanted)
            # what the message advises
            copied = multiprocessing.reduction.ForkingPickler.dumps(
                model[0].weight.detach().clone()
            )
            assert len(copied)


def _to_cpu(model: nn.Module) -> None:
    model.to("cpu")


def _half(model: nn.Module) -> None:
    model.half()


def _data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.cpu()


@pytest.mark.parametrize("change", [_to_cpu, _half, _data])
def test_what_is_converted_while_offloaded_is_restored_to_its_address(
    manager: placement.Manager, change: Callable[[nn.Module], None]
) -> None:
    model = _model()
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = (
        torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)
    )
    actor = manager.register("actor", model, role="actor")
    manager.register("actor.optimizer", optimizer)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    for step in range(3):
        change(model)
        with (
            pytest.raises(placement.IntegrityError, match="of 'actor' were replaced"),
            manager.phase("train"),
        ):
            pass
        actor.restore()
        assert [
            (parameter.data_ptr(), parameter.device.type) for parameter in model.parameters()
        ] == [(each, "cuda") for each in addresses]
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).cuda()
        with manager.phase("train"):
            for each, stepped in ((model, optimizer), (plain, plain_optimizer)):
                each(inputs).square().mean().backward()
                stepped.step()
                stepped.zero_grad()
        assert manager.audit().ok
    assert_same(_values(model), _values(plain))


def test_a_resize_on_the_device_is_an_error_or_new_state(manager: placement.Manager) -> None:
    model = _model()
    model.register_buffer("scale", torch.ones(1, device="cuda"))
    manager.register("actor", model, role="actor")
    wanted = [1.0]
    with manager.phase("log_prob"):
        if model.get_buffer("scale").untyped_storage().resizable():
            model.get_buffer("scale").resize_(4096).fill_(2)
            wanted = [2.0] * 4096
        else:
            with pytest.raises(RuntimeError, match="not resizable"):
                model.get_buffer("scale").resize_(4096)
    assert_nothing_resident(manager)
    for _ in range(2):
        with manager.phase("log_prob"):
            assert model.get_buffer("scale").tolist() == wanted
