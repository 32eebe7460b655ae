"""The quick look at an optimizer's state: it never says anything but what a full walk of that moment says, whatever was done in between."""

from __future__ import annotations

import copy
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn, optim

from placement import Manager, RegistrationError
from placement.ownership.optimizer import OptimizerAdapter
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.worker import Worker, assert_same

CPU = torch.device("cpu")
CHUNK = 16384


class Model(nn.Module):
    """Two parameters that are stepped from the start, and one that may come later."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.randn(7))
        self.late = nn.Parameter(torch.randn(5))
        self.second = nn.Parameter(torch.randn(6))
        """Of a second optimizer, where there is one."""


class ByAttribute:
    """Wraps as accelerate does."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class Chained:
    """The shape of Megatron's ChainedOptimizer."""

    def __init__(self, *optimizers: optim.Optimizer) -> None:
        self.chained_optimizers = [*optimizers]

    def step(self, closure: Any = None) -> None:
        for optimizer in self.chained_optimizers:
            optimizer.step(closure)


class Velocity(optim.Optimizer):
    """Somebody's own: a subclass with a step of its own, whose state has an entry that no parameter is the key of."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
                entry = self.state[parameter]
                entry["velocity"] = entry.get("velocity", torch.zeros_like(parameter)).mul(0.9).add(parameter.grad)  # new at each step
                parameter.sub_(0.1 * entry["velocity"])
            totals = self.state["totals"]
            totals.setdefault("norm", torch.zeros(3)).add_(1)


Optimize = Callable[[Model], Any]
OPTIMIZERS: dict[str, Optimize] = {
    "adamw": lambda model: optim.AdamW([model.weight, model.bias]),
    "adamw-foreach": lambda model: optim.AdamW([model.weight, model.bias], foreach=True),
    "adamw-fused": lambda model: optim.AdamW([model.weight, model.bias], fused=True),
    "adamw-subclass": lambda model: type("Mine", (optim.AdamW,), {})([model.weight, model.bias]),
    "sgd-momentum": lambda model: optim.SGD([model.weight, model.bias], lr=0.1, momentum=0.9),
    "adagrad": lambda model: optim.Adagrad([model.weight, model.bias]),
    "nadam": lambda model: optim.NAdam([model.weight, model.bias]),
    "asgd": lambda model: optim.ASGD([model.weight, model.bias]),
    "adafactor": lambda model: optim.Adafactor([model.weight, model.bias]),
    "lbfgs": lambda model: optim.LBFGS([model.weight, model.bias], max_iter=3),
    "users": lambda model: Velocity([model.weight, model.bias]),
    "wrapped": lambda model: ByAttribute(optim.AdamW([model.weight, model.bias])),
    "chained": lambda model: Chained(optim.AdamW([model.weight, model.bias]), optim.SGD([model.second], lr=0.1, momentum=0.9)),
}
NEVER_QUICK = {"lbfgs"}
"""It has lists in its state."""
NEW_AT_EACH_STEP = {"users"}


def inner(optimizer: Any) -> Any:
    """The first optimizer with a state of its own."""
    while not isinstance(optimizer, optim.Optimizer):
        optimizer = optimizer.optimizer if isinstance(optimizer, ByAttribute) else optimizer.chained_optimizers[0]
    return optimizer


def step(model: Model, optimizer: Any) -> None:
    def closure() -> float:
        for parameter in model.parameters():
            parameter.grad = 2 * parameter.detach()
        return float(sum(parameter.detach().square().sum() for parameter in model.parameters()))

    closure()
    optimizer.step(closure)
    for parameter in model.parameters():
        parameter.grad = None


class Scene:
    """A model, an optimizer that has stepped, and what a mutation may want to put its hands on."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = OPTIMIZERS[name](self.model)
        self.kept: list[Any] = []
        """Alive for as long as the scene: else what is born next may get the identity of what a mutation took out."""

    def step(self) -> None:
        step(self.model, self.optimizer)
        self.entry["number"] = 3

    @property
    def inner(self) -> Any:
        return inner(self.optimizer)

    @property
    def entry(self) -> dict[str, Any]:
        """The first parameter's."""
        found: dict[str, Any] = self.inner.state[self.model.weight]
        return found

    def key(self, *, counter: bool = False) -> str:
        """Of a tensor in the entry; of the counter, where there is one."""
        tensors = [key for key, value in self.entry.items() if isinstance(value, torch.Tensor) and value.dim()]
        return "step" if counter and isinstance(self.entry.get("step"), torch.Tensor) else tensors[0]

    def replace(self, value: Any, *, counter: bool = False) -> None:
        key = self.key(counter=counter)
        self.kept.append(self.entry[key])
        self.entry[key] = value


# --- what users and frameworks do


def nothing(scene: Scene) -> None:
    pass


def a_step(scene: Scene) -> None:
    scene.step()


def a_clone_in_its_place(scene: Scene) -> None:
    scene.replace(scene.entry[scene.key()].clone())


def a_clone_at_the_same_identity_or_not(scene: Scene) -> None:
    key = scene.key()
    value = scene.entry.pop(key) + 1
    del scene.inner.state[scene.model.weight]
    gc.collect()
    scene.inner.state[scene.model.weight] = {key: value}


def other_data(scene: Scene) -> None:
    tensor = scene.entry[scene.key()]
    tensor.data = tensor.data + 1


def data_of_a_parameter(scene: Scene) -> None:
    scene.entry[scene.key()].data = scene.model.late.data


def data_without_elements(scene: Scene) -> None:
    scene.entry[scene.key()].data = torch.empty(0)


def data_of_another_dtype(scene: Scene) -> None:
    tensor = scene.entry[scene.key()]
    scene.entry[scene.key()] = tensor.to(torch.float64)


def data_that_changed_places(scene: Scene) -> None:
    """An average of the weights for evaluation."""
    tensor = scene.entry[scene.key()]
    if tensor.shape == scene.model.weight.shape:
        tensor.data, scene.model.weight.data = scene.model.weight.data, tensor.data


def an_entry_more(scene: Scene) -> None:
    scene.inner.state[scene.model.late] = {"mine": torch.randn(5)}


def an_entry_less(scene: Scene) -> None:
    del scene.inner.state[scene.model.weight]


def an_entry_of_no_parameter(scene: Scene) -> None:
    scene.inner.state["average"] = {"of": torch.randn(4), "count": 3}


def an_entry_that_is_a_tensor(scene: Scene) -> None:
    scene.inner.state["average"] = torch.randn(4)


def an_empty_entry(scene: Scene) -> None:
    scene.inner.state[scene.model.late]  # a defaultdict


def a_tensor_more(scene: Scene) -> None:
    scene.entry["mine"] = torch.randn(2)


def a_number_more(scene: Scene) -> None:
    scene.entry["mine"] = 3


def a_number_that_becomes_a_tensor(scene: Scene) -> None:
    scene.entry["number"] = torch.randn(2)


def a_number_that_becomes_a_list(scene: Scene) -> None:
    scene.entry["number"] = [torch.randn(2)]


def a_tensor_less(scene: Scene) -> None:
    del scene.entry[scene.key()]


def a_tensor_that_becomes_none(scene: Scene) -> None:
    scene.replace(None)


def two_tensors_that_changed_places(scene: Scene) -> None:
    keys = [key for key, value in scene.entry.items() if isinstance(value, torch.Tensor)]
    scene.entry[keys[0]], scene.entry[keys[-1]] = scene.entry[keys[-1]], scene.entry[keys[0]]


def the_order_of_entries(scene: Scene) -> None:
    state = scene.inner.state
    state[scene.model.weight] = state.pop(scene.model.weight)


def entries_that_changed_parameters(scene: Scene) -> None:
    state = scene.inner.state
    items = [*state.items()]
    state.clear()
    for (key, _), (_, entry) in zip(reversed(items), items, strict=True):
        state[key] = entry


def the_order_of_parameters(scene: Scene) -> None:
    scene.inner.param_groups[0]["params"].reverse()


def a_group_more(scene: Scene) -> None:
    if not isinstance(scene.inner, optim.LBFGS):
        scene.inner.add_param_group({"params": [scene.model.late]})


def a_group_more_that_has_stepped(scene: Scene) -> None:
    a_group_more(scene)
    scene.step()


def a_parameter_less(scene: Scene) -> None:
    scene.inner.param_groups[0]["params"].remove(scene.model.weight)


def a_loaded_state_dict(scene: Scene) -> None:
    scene.inner.load_state_dict(copy.deepcopy(scene.inner.state_dict()))


def its_own_state_dict_loaded(scene: Scene) -> None:
    """The tensors stay, in new dictionaries."""
    scene.inner.load_state_dict(scene.inner.state_dict())


def state_dicts_loaded_again_and_again(scene: Scene) -> None:
    """Memory of what went before is used again, and with it the identities."""
    for _ in range(4):
        scene.inner.load_state_dict(copy.deepcopy(scene.inner.state_dict()))
        gc.collect()


def an_entry_that_is_a_list(scene: Scene) -> None:
    scene.inner.state[scene.model.weight] = [each for each in scene.entry.values() if isinstance(each, torch.Tensor)]


def an_entry_of_a_subclass(scene: Scene) -> None:
    scene.inner.state[scene.model.weight] = OrderedDict(scene.entry)


def an_empty_state(scene: Scene) -> None:
    scene.inner.state.clear()


def another_state(scene: Scene) -> None:
    scene.inner.state = {key: dict(entry) for key, entry in scene.inner.state.items()}


def a_counter_that_moves(scene: Scene) -> None:
    for group in scene.inner.param_groups:
        group["fused"] = not group.get("fused")


def a_counter_that_is_captured(scene: Scene) -> None:
    for group in scene.inner.param_groups:
        group["capturable"] = True


def a_counter_with_a_dimension(scene: Scene) -> None:
    scene.replace(torch.ones(1), counter=True)


def a_counter_that_gets_a_dimension(scene: Scene) -> None:
    scene.entry[scene.key(counter=True)].data = torch.ones(1)


def a_counter_that_is_a_number(scene: Scene) -> None:
    scene.replace(1.0, counter=True)


def renamed(entry: dict[str, Any], old: str, new: str) -> None:
    """In its place among the others."""
    items = [(new if key == old else key, value) for key, value in entry.items()]
    entry.clear()
    entry.update(items)


def a_counter_of_another_name(scene: Scene) -> None:
    renamed(scene.entry, scene.key(counter=True), "count")


def a_tensor_that_becomes_a_counter(scene: Scene) -> None:
    scene.entry.pop("step", None)
    renamed(scene.entry, scene.key(), "step")


def a_view_of_a_parameter(scene: Scene) -> None:
    scene.replace(scene.model.bias.data[:3])


def a_parameter_itself(scene: Scene) -> None:
    scene.replace(scene.model.late)


def a_parameter_of_its_own(scene: Scene) -> None:
    scene.replace(nn.Parameter(torch.randn(3)))


def a_view_of_another_tensor_of_the_state(scene: Scene) -> None:
    other = next(iter(reversed(scene.inner.state.values())))
    scene.entry["view"] = next(each for each in other.values() if isinstance(each, torch.Tensor)).view(-1)


def the_same_tensor_twice(scene: Scene) -> None:
    scene.entry["again"] = scene.entry[scene.key()]


def a_list_in_an_entry(scene: Scene) -> None:
    scene.entry["history"] = [torch.randn(2), (torch.randn(3), None)]


def a_list_in_place_of_a_tensor(scene: Scene) -> None:
    scene.replace([torch.randn(2)])


def a_dictionary_in_an_entry(scene: Scene) -> None:
    scene.entry["factors"] = {"left": torch.randn(2, 2), "count": 3}


def a_second_optimizer(scene: Scene) -> None:
    """Under a name of the user's own."""
    if isinstance(scene.optimizer, Chained):
        scene.optimizer.chained_optimizers.append(optim.SGD([scene.model.late], lr=0.1, momentum=0.9))
    else:
        scene.optimizer.another = optim.SGD([scene.model.late], lr=0.1, momentum=0.9)
    step(scene.model, scene.optimizer if isinstance(scene.optimizer, Chained) else scene.optimizer.another)


def a_wrapper_that_lost_one(scene: Scene) -> None:
    if isinstance(scene.optimizer, Chained):
        scene.kept.append(scene.optimizer.chained_optimizers.pop())


MUTATIONS: list[Callable[[Scene], None]] = [
    nothing,
    a_step,
    a_clone_in_its_place,
    a_clone_at_the_same_identity_or_not,
    other_data,
    data_of_a_parameter,
    data_without_elements,
    data_of_another_dtype,
    data_that_changed_places,
    an_entry_more,
    an_entry_less,
    an_entry_of_no_parameter,
    an_entry_that_is_a_tensor,
    an_empty_entry,
    a_tensor_more,
    a_number_more,
    a_number_that_becomes_a_tensor,
    a_number_that_becomes_a_list,
    a_tensor_less,
    a_tensor_that_becomes_none,
    two_tensors_that_changed_places,
    the_order_of_entries,
    entries_that_changed_parameters,
    the_order_of_parameters,
    a_group_more,
    a_group_more_that_has_stepped,
    a_parameter_less,
    a_loaded_state_dict,
    its_own_state_dict_loaded,
    state_dicts_loaded_again_and_again,
    an_entry_that_is_a_list,
    an_entry_of_a_subclass,
    an_empty_state,
    another_state,
    a_counter_that_moves,
    a_counter_that_is_captured,
    a_counter_with_a_dimension,
    a_counter_that_gets_a_dimension,
    a_counter_that_is_a_number,
    a_counter_of_another_name,
    a_tensor_that_becomes_a_counter,
    a_view_of_a_parameter,
    a_parameter_itself,
    a_parameter_of_its_own,
    a_view_of_another_tensor_of_the_state,
    the_same_tensor_twice,
    a_list_in_an_entry,
    a_list_in_place_of_a_tensor,
    a_dictionary_in_an_entry,
    a_second_optimizer,
    a_wrapper_that_lost_one,
]
every_mutation = pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def walked(optimizer: Any) -> list[torch.Tensor]:
    """What an adapter that never looked before finds."""
    return [item.tensor for item in OptimizerAdapter(optimizer, name="adam", compute_device=CPU).owned()]


def unchanged(adapter: OptimizerAdapter) -> list[torch.Tensor] | None:
    """What the quick look finds, having checked the counters that it tells."""
    if (found := adapter.unchanged()) is None:
        return None
    tensors, versions, addresses = found
    assert addresses == [each.data_ptr() for each in tensors]
    assert versions == [each._version for each in tensors]
    return list(tensors)


def identities(tensors: Any) -> list[int]:
    return list(map(id, tensors))


def looked(adapter: OptimizerAdapter, addresses: list[int] | None) -> list[torch.Tensor] | None:
    """What the quick look says; with addresses, as its one caller believes it: `StorageScanner` compares them, too."""
    found = unchanged(adapter)
    return None if found is None or (addresses and [each.data_ptr() for each in found] != addresses) else found


SEEN_BY_ADDRESS = (data_of_a_parameter, data_without_elements)
"""The tensors are the same, in other memory."""


@every_mutation
@every_optimizer
def test_the_quick_look_is_the_full_walk_or_nothing(name: str, mutation: Callable[[Scene], None]) -> None:
    scene = Scene(name)
    scene.step()
    scene.step()
    adapter = OptimizerAdapter(scene.optimizer, name="adam", compute_device=CPU)
    addresses = [item.tensor.data_ptr() for item in adapter.owned()]
    mutation(scene)
    expected = identities(walked(scene.optimizer))
    for _ in range(2):  # also once the change was walked over
        found = looked(adapter, addresses if mutation in SEEN_BY_ADDRESS else None)
        assert found is None or identities(found) == expected
        addresses = [item.tensor.data_ptr() for item in adapter.owned()]


@every_optimizer
def test_it_is_quick_where_nothing_changed(name: str) -> None:
    scene = Scene(name)
    adapter = OptimizerAdapter(scene.optimizer, name="adam", compute_device=CPU)
    scene.step()
    expected = identities(item.tensor for item in adapter.owned())
    assert expected
    if name in NEVER_QUICK:
        assert unchanged(adapter) is None
        return
    assert identities(unchanged(adapter)) == expected
    scene.step()
    if name in NEW_AT_EACH_STEP:
        assert unchanged(adapter) is None
        expected = identities(item.tensor for item in adapter.owned())
    assert identities(unchanged(adapter)) == expected
    other = next(iter(scene.inner.state.values()))
    other["another"] = 7
    assert unchanged(adapter) is None
    del other["another"]
    assert identities(unchanged(adapter)) == expected, "what was undone is no change"


def test_before_the_first_step_and_without_an_optimizer_nothing_is_said_of_nobody() -> None:
    scene = Scene("adamw")
    adapter = OptimizerAdapter(scene.optimizer, name="adam", compute_device=CPU)
    assert unchanged(adapter) == []
    scene.step()
    assert unchanged(adapter) is None
    assert len(list(adapter.owned())) == len(unchanged(adapter) or ()) == 4
    scene.optimizer = None
    gc.collect()
    assert unchanged(adapter) is None
    assert list(adapter.owned()) == []


# --- through a manager


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def optimizers_in(optimizer: Any) -> list[Any]:
    found = [optimizer, *getattr(optimizer, "chained_optimizers", ()), *vars(optimizer).values()]
    return [each for each in found if isinstance(each, optim.Optimizer)]


def values(scene: Scene) -> list[torch.Tensor]:
    """Every tensor of the model and of the state, in memory of its own."""
    states = [list(each.state.values()) for each in optimizers_in(scene.optimizer)]
    return [each.detach().clone() for each in (*scene.model.parameters(), *tensors_in(states))]


@pytest.mark.parametrize("mutation", [each for each in MUTATIONS if each is not data_that_changed_places], ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", ["adamw", "adafactor", "users", "chained"])
def test_values_survive_the_way_to_the_host_and_back_whatever_was_done(name: str, mutation: Callable[[Scene], None]) -> None:
    scene = Scene(name)
    scene.step()
    manager = Manager(device=SimulatedDevice(256 * CHUNK, chunk_bytes=CHUNK))
    manager.register("actor", scene.model, role="actor")
    manager.register("adam", scene.optimizer)
    for _ in range(2):  # to where nothing is born any more, and a phase transition looks quickly
        with manager.phase("train"):
            scene.step()
    with manager.phase("train"):
        mutation(scene)
        scene.kept.clear()
        expected = values(scene)
    for _ in range(2):
        assert [handle.resident_bytes for handle in manager.handles.values()] == [0, 0]
        assert manager.device.memory().chunk_bytes == 0
        with manager.phase("train"):
            assert_same(values(scene), expected)
    manager.check_integrity()
    manager.close()
    assert_same(values(scene), expected)


def test_memory_of_a_parameter_for_that_of_its_state_is_refused_and_nothing_is_lost() -> None:
    """As averages of the weights change places with them; in copies instead it is no matter of ours."""
    scene = Scene("adamw")
    manager = Manager(device=SimulatedDevice(256 * CHUNK, chunk_bytes=CHUNK))
    manager.register("actor", scene.model, role="actor")
    manager.register("adam", scene.optimizer)
    for _ in range(2):
        with manager.phase("train"):
            scene.step()
    manager.enter("train")
    expected = values(scene)
    data_that_changed_places(scene)
    with pytest.raises(RegistrationError, match="'weight' of 'actor' lies in a storage that belongs to 'adam'"):
        manager.leave()
    data_that_changed_places(scene)
    with manager.phase("train"):
        assert_same(values(scene), expected)
    assert_nothing_resident(manager)


def test_memory_of_two_modules_that_changed_places_is_refused_until_it_changes_back() -> None:
    worker = Worker()
    mine, its = worker.net[0].weight, worker.critic_net[0].weight

    def swap() -> None:
        mine.data, its.data = its.data, mine.data

    worker.manager.enter("train")
    expected = [mine.detach().clone(), its.detach().clone()]
    swap()
    with pytest.raises(RegistrationError, match=r"'0\.weight' of 'actor' lies in a storage that belongs to 'critic'"):
        worker.manager.leave()
    with pytest.raises(RegistrationError, match="belongs to 'critic'"), worker.manager.phase("train"):
        assert_same([its, mine], expected)
    swap()
    with worker.manager.phase("train"):
        assert_same([mine, its], expected)
    assert_nothing_resident(worker.manager)
