"""State dicts that are computed, on a real device: from the host copy while offloaded, and nothing
of the live tensors is touched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement.testing import assert_nothing_resident
from tests.support.worker import assert_same

pytestmark = pytest.mark.gpu


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, Any]:
        return {
            "amax": self.weight.detach().abs().max().cpu(),
            "on_its_device": (
                torch.ones(1, device=self.weight.device) + self.weight.detach().min()
            ).cpu(),
            "bytes": self.weight.detach().cpu().numpy().tobytes(),
        }

    def set_extra_state(self, state: Any) -> None:
        pass


def on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {key: on_host(each) for key, each in value.items()}
    return [on_host(each) for each in value] if isinstance(value, (list, tuple)) else value


def test_what_hooks_compute_is_the_same_in_every_state(manager: placement.Manager) -> None:
    model = nn.Sequential(nn.Linear(300, 200), Extra(200, 300), nn.Linear(300, 8)).cuda()
    model[0]._register_state_dict_hook(
        lambda _, found, prefix, __: found.update(
            {prefix + "weight": found[prefix + "weight"].bfloat16()}
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer.register_state_dict_post_hook(
        lambda _, found: {**found, "state": copy.deepcopy(found["state"])}
    )
    reduced: list[int] = []
    nodes = []  # as DDP and Megatron do: a hook on the node that accumulates a gradient
    for index, parameter in enumerate(model.parameters()):
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *_, index=index: reduced.append(index))
        nodes.append(node)
    actor = manager.register("actor", model, role="actor")
    adam = manager.register("actor.optimizer", optimizer)
    for _ in range(2):
        with manager.phase("train"):
            model(torch.randn(4, 300, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            wanted = on_host(
                [
                    dict(model.state_dict()),
                    dict(model[1].state_dict()),
                    optimizer.state_dict()["state"],
                ]
            )
            places = [
                (id(each), each.data_ptr(), each.device, each._version)
                for each in model.parameters()
            ]
        found = [dict(actor.state_dict()), dict(model[1].state_dict()), adam.state_dict()["state"]]
        assert_same(on_host(found), wanted)
        assert [
            (id(each), each.data_ptr(), each.device, each._version) for each in model.parameters()
        ] == places
        assert_nothing_resident(manager)
        del found
    assert sorted(reduced) == sorted([*range(len(nodes))] * 2), (
        "a gradient was accumulated past the hook of a framework"
    )
    assert manager.audit().ok, manager.audit()


def test_a_write_into_a_state_dict_that_is_still_queued_is_loaded(
    manager: placement.Manager,
) -> None:
    model = nn.Linear(4096, 4096, bias=False, device="cuda")
    manager.register("actor", model, role="actor")
    shown, source = model.state_dict()["weight"], torch.randn(4096, 4096, device="cuda")
    torch.cuda._sleep(1 << 28)  # about 0.1 s of work before it
    shown.copy_(source, non_blocking=True)
    with manager.phase("log_prob"):
        assert torch.equal(model.weight, source)
