"""The quick look at a module: it never says anything but what a full walk of that moment says, whatever was done in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from placement.ownership.module import ModuleAdapter

CPU = torch.device("cpu")


class Forward:
    """A call with a tensor of its own."""

    def __init__(self) -> None:
        self.scale = torch.ones(2)


class Net(nn.Module):
    """Parameters, one of them tied, buffers, a tensor for an attribute, and containers where tensors may come to lie."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        self.tied = self.body[0].weight
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.empty(0))
        self.scale = torch.randn(2)
        self.notes: list[object] = ["a"]
        self.table: dict[str, object] = {}
        self.number = 7


def a_step(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.body(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def two_parameters_that_changed_places(net: Net) -> None:
    first, second = net.body[0], net.body[1]
    first._parameters["weight"], second._parameters["weight"] = second.weight, first.weight


MUTATIONS: dict[str, Callable[[Net], object]] = {
    "nothing": lambda net: None,
    "a_write": lambda net: net.body[0].weight.detach().add_(1),
    "a_step": a_step,
    "gradients": lambda net: net.body(torch.randn(2, 3)).sum().backward(),
    "a_gradient_of_a_frozen_parameter": lambda net: setattr(net.frozen, "grad", torch.ones(2)),
    "a_gradient_of_an_attribute": lambda net: setattr(net.scale, "grad", torch.ones(2)),
    "a_buffer_that_joins_a_graph": lambda net: net.mean.mul_(net.body[0].bias),
    "an_attribute_that_joins_a_graph": lambda net: net.scale.mul_(net.body[0].bias.sum()),
    "a_tensor_without_elements_that_joins_a_graph": lambda net: net.empty.mul_(net.body[0].bias.sum()),
    "a_buffer_that_left_its_graph": lambda net: net.mean.mul_(net.body[0].bias).detach_(),
    "another_parameter": lambda net: setattr(net.body[1], "weight", nn.Parameter(torch.randn(3, 3))),
    "a_parameter_more": lambda net: net.register_parameter("lora", nn.Parameter(torch.randn(2))),
    "a_parameter_less": lambda net: setattr(net.body[0], "bias", None),
    "two_parameters_that_changed_places": two_parameters_that_changed_places,
    "tensors_that_were_swapped": lambda net: torch.utils.swap_tensors(net.body[1].weight, nn.Parameter(torch.randn(3, 3))),
    "other_data": lambda net: setattr(net.body[1].weight, "data", torch.randn(3, 3)),
    "a_buffer_in_place_of_nothing": lambda net: setattr(net, "nothing", torch.randn(2)),
    "another_attribute": lambda net: setattr(net, "scale", torch.randn(2)),
    "an_attribute_more": lambda net: setattr(net, "cache", torch.randn(4)),
    "an_attribute_for_another": lambda net: (delattr(net, "number"), setattr(net, "cache", torch.randn(4))),
    "an_attribute_that_becomes_a_tensor": lambda net: setattr(net, "number", torch.randn(3)),
    "a_forward_of_its_own": lambda net: setattr(net, "forward", Forward()),
    "a_tensor_in_a_list": lambda net: net.notes.append(torch.randn(2)),
    "a_tensor_in_a_dictionary": lambda net: net.table.update(moment=torch.randn(2)),
    "a_number_in_a_dictionary": lambda net: net.table.update(count=3),
    "another_module": lambda net: setattr(net.body, "1", nn.Linear(3, 3, bias=False)),
    "a_module_more": lambda net: setattr(net, "head", nn.Linear(3, 1)),
    "a_module_less": lambda net: delattr(net.body, "1"),
    "a_tie_that_is_undone": lambda net: setattr(net, "tied", nn.Parameter(torch.randn(3, 3))),
}


def walked(net: Net) -> list[tuple[int, bool]]:
    """What an adapter that never looked before finds: which tensors, and whether they are loose."""
    return [(id(item.tensor), item.transient) for item in ModuleAdapter(net, name="actor", compute_device=CPU).owned()]


def looked(adapter: ModuleAdapter, addresses: list[int]) -> list[torch.Tensor] | None:
    """What the quick look says as its one caller believes it: `StorageScanner` compares the addresses, too."""
    if (found := adapter.unchanged()) is None:
        return None
    tensors, versions, seen = found
    assert seen == [tensor.data_ptr() for tensor in tensors]
    assert versions == [tensor._version for tensor in tensors]
    return list(tensors) if [tensor.data_ptr() for tensor in tensors] == addresses else None


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_quick_look_is_the_full_walk_or_nothing(mutation: str) -> None:
    net = Net()
    adapter = ModuleAdapter(net, name="actor", compute_device=CPU)
    addresses = [item.tensor.data_ptr() for item in adapter.owned()]
    assert looked(adapter, addresses) is not None
    MUTATIONS[mutation](net)
    expected = walked(net)
    for _ in range(2):  # also once the change was walked over
        for _ in range(2):  # and where it is asked twice
            found = looked(adapter, addresses)
            assert found is None or [(id(tensor), False) for tensor in found] == expected
        addresses = [item.tensor.data_ptr() for item in adapter.owned()]


@pytest.mark.parametrize("mutation", ["nothing", "a_write", "a_step", "a_number_in_a_dictionary"])
def test_it_is_quick_where_no_tensor_came_or_went(mutation: str) -> None:
    net = Net()
    adapter = ModuleAdapter(net, name="actor", compute_device=CPU)
    addresses = [item.tensor.data_ptr() for item in adapter.owned()]
    MUTATIONS[mutation](net)
    assert looked(adapter, addresses) is not None
