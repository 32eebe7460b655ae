"""The quick look at a module: it never says anything but what a full walk of that moment says, whatever was done in between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from placement.ownership.module import ModuleAdapter

CPU = torch.device("cpu")


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


def nothing(net: Net) -> None:
    pass


def a_write(net: Net) -> None:
    with torch.no_grad():
        net.body[0].weight.add_(1)


def a_step(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.body(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def gradients(net: Net) -> None:
    net.body(torch.randn(2, 3)).sum().backward()


def a_gradient_of_a_frozen_parameter(net: Net) -> None:
    net.frozen.grad = torch.ones(2)


def a_gradient_of_an_attribute(net: Net) -> None:
    net.scale.grad = torch.ones(2)


def a_buffer_that_joins_a_graph(net: Net) -> None:
    net.mean.mul_(net.body[0].bias)


def an_attribute_that_joins_a_graph(net: Net) -> None:
    net.scale.mul_(net.body[0].bias.sum())


def a_tensor_without_elements_that_joins_a_graph(net: Net) -> None:
    net.empty.mul_(net.body[0].bias.sum())


def a_buffer_that_left_its_graph(net: Net) -> None:
    a_buffer_that_joins_a_graph(net)
    net.mean.detach_()


def another_parameter(net: Net) -> None:
    net.body[1].weight = nn.Parameter(torch.randn(3, 3))


def a_parameter_more(net: Net) -> None:
    net.register_parameter("lora", nn.Parameter(torch.randn(2)))


def a_parameter_less(net: Net) -> None:
    net.body[0].bias = None


def two_parameters_that_changed_places(net: Net) -> None:
    first, second = net.body[0], net.body[1]
    first._parameters["weight"], second._parameters["weight"] = second.weight, first.weight


def tensors_that_were_swapped(net: Net) -> None:
    torch.utils.swap_tensors(net.body[1].weight, nn.Parameter(torch.randn(3, 3)))


def other_data(net: Net) -> None:
    net.body[1].weight.data = torch.randn(3, 3)


def a_buffer_in_place_of_nothing(net: Net) -> None:
    net.nothing = torch.randn(2)


def another_attribute(net: Net) -> None:
    net.scale = torch.randn(2)


def an_attribute_more(net: Net) -> None:
    net.cache = torch.randn(4)


def an_attribute_that_becomes_a_tensor(net: Net) -> None:
    net.number = torch.randn(3)  # type: ignore[assignment]


def a_tensor_in_a_list(net: Net) -> None:
    net.notes.append(torch.randn(2))


def a_tensor_in_a_dictionary(net: Net) -> None:
    net.table["moment"] = torch.randn(2)


def a_number_in_a_dictionary(net: Net) -> None:
    net.table["count"] = 3


def another_module(net: Net) -> None:
    net.body[1] = nn.Linear(3, 3, bias=False)


def a_module_more(net: Net) -> None:
    net.head = nn.Linear(3, 1)


def a_module_less(net: Net) -> None:
    del net.body[1]


def a_tie_that_is_undone(net: Net) -> None:
    net.tied = nn.Parameter(torch.randn(3, 3))


MUTATIONS = [each for name, each in globals().items() if callable(each) and getattr(each, "__module__", "") == __name__ and each is not Net]


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


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_the_quick_look_is_the_full_walk_or_nothing(mutation: Callable[[Net], None]) -> None:
    net = Net()
    adapter = ModuleAdapter(net, name="actor", compute_device=CPU)
    addresses = [item.tensor.data_ptr() for item in adapter.owned()]
    assert looked(adapter, addresses) is not None
    mutation(net)
    expected = walked(net)
    for _ in range(2):  # also once the change was walked over
        for _ in range(2):  # and where it is asked twice
            found = looked(adapter, addresses)
            assert found is None or [(id(tensor), False) for tensor in found] == expected
        addresses = [item.tensor.data_ptr() for item in adapter.owned()]


@pytest.mark.parametrize("mutation", [nothing, a_write, a_step, a_number_in_a_dictionary], ids=lambda mutation: mutation.__name__)
def test_it_is_quick_where_no_tensor_came_or_went(mutation: Callable[[Net], None]) -> None:
    net = Net()
    adapter = ModuleAdapter(net, name="actor", compute_device=CPU)
    addresses = [item.tensor.data_ptr() for item in adapter.owned()]
    mutation(net)
    assert looked(adapter, addresses) is not None
