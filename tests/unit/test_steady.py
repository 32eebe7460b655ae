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

    @property
    def tensor(self) -> torch.Tensor:
        """A tensor of the entry that is no counter."""
        found: torch.Tensor = self.entry[self.key()]
        return found

    @property
    def state(self) -> Any:
        return self.inner.state

    def replace(self, value: Any, *, counter: bool = False) -> None:
        key = self.key(counter=counter)
        self.kept.append(self.entry[key])
        self.entry[key] = value

    def rename(self, old: str, new: str) -> None:
        """Give a key another name, in its place among the others."""
        items = [(new if key == old else key, value) for key, value in self.entry.items()]
        self.entry.clear()
        self.entry.update(items)

    def set_groups(self, **options: Any) -> None:
        for group in self.inner.param_groups:
            group.update(options)

    def load(self, make: Callable[[Any], Any] = copy.deepcopy) -> None:
        self.inner.load_state_dict(make(self.inner.state_dict()))


# --- what users and frameworks do


def a_clone_at_the_same_identity_or_not(scene: Scene) -> None:
    key = scene.key()
    value = scene.entry.pop(key) + 1
    del scene.state[scene.model.weight]
    gc.collect()
    scene.state[scene.model.weight] = {key: value}


def data_that_changed_places(scene: Scene) -> None:
    """An average of the weights for evaluation."""
    tensor = scene.tensor
    if tensor.shape == scene.model.weight.shape:
        tensor.data, scene.model.weight.data = scene.model.weight.data, tensor.data


def two_tensors_that_changed_places(scene: Scene) -> None:
    keys = [key for key, value in scene.entry.items() if isinstance(value, torch.Tensor)]
    scene.entry[keys[0]], scene.entry[keys[-1]] = scene.entry[keys[-1]], scene.entry[keys[0]]


def entries_that_changed_parameters(scene: Scene) -> None:
    items = [*scene.state.items()]
    scene.state.clear()
    scene.state.update({key: entry for (key, _), (_, entry) in zip(reversed(items), items, strict=True)})


def a_group_more(scene: Scene) -> None:
    if not isinstance(scene.inner, optim.LBFGS):
        scene.inner.add_param_group({"params": [scene.model.late]})


def a_group_more_that_has_stepped(scene: Scene) -> None:
    a_group_more(scene)
    scene.step()


def state_dicts_loaded_again_and_again(scene: Scene) -> None:
    """Memory of what went before is used again, and with it the identities."""
    for _ in range(4):
        scene.load()
        gc.collect()


def a_tensor_that_becomes_a_counter(scene: Scene) -> None:
    scene.entry.pop("step", None)
    scene.rename(scene.key(), "step")


def a_view_of_another_tensor_of_the_state(scene: Scene) -> None:
    other = next(iter(reversed(scene.state.values())))
    scene.entry["view"] = next(each for each in other.values() if isinstance(each, torch.Tensor)).view(-1)


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


WITH_A_NAME: tuple[Callable[[Scene], None], ...] = (
    a_clone_at_the_same_identity_or_not,
    data_that_changed_places,
    two_tensors_that_changed_places,
    entries_that_changed_parameters,
    a_group_more,
    a_group_more_that_has_stepped,
    state_dicts_loaded_again_and_again,
    a_tensor_that_becomes_a_counter,
    a_view_of_another_tensor_of_the_state,
    a_second_optimizer,
    a_wrapper_that_lost_one,
)
MUTATIONS: dict[str, Callable[[Scene], object]] = {
    "nothing": lambda scene: None,
    "a_step": lambda scene: scene.step(),
    "a_clone_in_its_place": lambda scene: scene.replace(scene.tensor.clone()),
    "other_data": lambda scene: setattr(scene.tensor, "data", scene.tensor.data + 1),
    "data_of_a_parameter": lambda scene: setattr(scene.tensor, "data", scene.model.late.data),
    "data_without_elements": lambda scene: setattr(scene.tensor, "data", torch.empty(0)),
    "data_of_another_dtype": lambda scene: scene.entry.update({scene.key(): scene.tensor.to(torch.float64)}),
    "an_entry_more": lambda scene: scene.state.update({scene.model.late: {"mine": torch.randn(5)}}),
    "an_entry_less": lambda scene: scene.state.pop(scene.model.weight),
    "an_entry_of_no_parameter": lambda scene: scene.state.update(average={"of": torch.randn(4), "count": 3}),
    "an_entry_that_is_a_tensor": lambda scene: scene.state.update(average=torch.randn(4)),
    "an_empty_entry": lambda scene: scene.state[scene.model.late],  # a defaultdict
    "a_tensor_more": lambda scene: scene.entry.update(mine=torch.randn(2)),
    "a_number_more": lambda scene: scene.entry.update(mine=3),
    "a_number_that_becomes_a_tensor": lambda scene: scene.entry.update(number=torch.randn(2)),
    "a_number_that_becomes_a_list": lambda scene: scene.entry.update(number=[torch.randn(2)]),
    "a_tensor_less": lambda scene: scene.entry.pop(scene.key()),
    "a_tensor_that_becomes_none": lambda scene: scene.replace(None),
    "the_order_of_entries": lambda scene: scene.state.update({scene.model.weight: scene.state.pop(scene.model.weight)}),
    "the_order_of_parameters": lambda scene: scene.inner.param_groups[0]["params"].reverse(),
    "a_parameter_less": lambda scene: scene.inner.param_groups[0]["params"].remove(scene.model.weight),
    "a_loaded_state_dict": lambda scene: scene.load(),
    "its_own_state_dict_loaded": lambda scene: scene.load(lambda own: own),  # the tensors stay, in new dictionaries
    "an_entry_that_is_a_list": lambda scene: scene.state.update({scene.model.weight: [*tensors_in(scene.entry)]}),
    "an_entry_of_a_subclass": lambda scene: scene.state.update({scene.model.weight: OrderedDict(scene.entry)}),
    "an_empty_state": lambda scene: scene.state.clear(),
    "another_state": lambda scene: setattr(scene.inner, "state", {key: dict(entry) for key, entry in scene.state.items()}),
    "a_counter_that_moves": lambda scene: scene.set_groups(fused=not scene.inner.param_groups[0].get("fused")),
    "a_counter_that_is_captured": lambda scene: scene.set_groups(capturable=True),
    "a_counter_with_a_dimension": lambda scene: scene.replace(torch.ones(1), counter=True),
    "a_counter_that_gets_a_dimension": lambda scene: setattr(scene.entry[scene.key(counter=True)], "data", torch.ones(1)),
    "a_counter_that_is_a_number": lambda scene: scene.replace(1.0, counter=True),
    "a_counter_of_another_name": lambda scene: scene.rename(scene.key(counter=True), "count"),
    "a_view_of_a_parameter": lambda scene: scene.replace(scene.model.bias.data[:3]),
    "a_parameter_itself": lambda scene: scene.replace(scene.model.late),
    "a_parameter_of_its_own": lambda scene: scene.replace(nn.Parameter(torch.randn(3))),
    "the_same_tensor_twice": lambda scene: scene.entry.update(again=scene.tensor),
    "a_list_in_an_entry": lambda scene: scene.entry.update(history=[torch.randn(2), (torch.randn(3), None)]),
    "a_list_in_place_of_a_tensor": lambda scene: scene.replace([torch.randn(2)]),
    "a_dictionary_in_an_entry": lambda scene: scene.entry.update(factors={"left": torch.randn(2, 2), "count": 3}),
    **{mutation.__name__: mutation for mutation in WITH_A_NAME},
}
every_mutation = pytest.mark.parametrize("mutation", MUTATIONS)
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


SEEN_BY_ADDRESS = ("data_of_a_parameter", "data_without_elements")
"""The tensors are the same, in other memory."""


@every_mutation
@every_optimizer
def test_the_quick_look_is_the_full_walk_or_nothing(name: str, mutation: str) -> None:
    scene = Scene(name)
    scene.step()
    scene.step()
    adapter = OptimizerAdapter(scene.optimizer, name="adam", compute_device=CPU)
    addresses = [item.tensor.data_ptr() for item in adapter.owned()]
    MUTATIONS[mutation](scene)
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


@pytest.mark.parametrize("mutation", [name for name in MUTATIONS if name != "data_that_changed_places"])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "users", "chained"])
def test_values_survive_the_way_to_the_host_and_back_whatever_was_done(name: str, mutation: str) -> None:
    scene = Scene(name)
    scene.step()
    manager = Manager(device=SimulatedDevice(256 * CHUNK, chunk_bytes=CHUNK))
    manager.register("actor", scene.model, role="actor")
    manager.register("adam", scene.optimizer)
    for _ in range(2):  # to where nothing is born any more, and a phase transition looks quickly
        with manager.phase("train"):
            scene.step()
    with manager.phase("train"):
        MUTATIONS[mutation](scene)
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
