"""Whatever was done between two phase transitions, of which the second looks quickly at what the
first has seen."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from placement import IntegrityError, Manager, RegistrationError
from placement.devices.base import can_swap
from placement.ownership.adapter import Adapter
from placement.ownership.module import ModuleAdapter
from placement.ownership.optimizer import OptimizerAdapter
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.worker import assert_same, in_a_range, make_manager, tensors_in

CPU = torch.device("cpu")
CHUNK = 16384


class Forward:
    """A call with a tensor of its own."""

    __call__ = dict

    def __init__(self) -> None:
        self.scale = torch.ones(2)


class Net(nn.Module):
    """Parameters, one of them tied, buffers, a tensor for an attribute, and containers where
    tensors may come to lie."""

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


CHANGES: dict[str, Callable[[Net], object]] = {
    "nothing": lambda net: None,
    "gradients": lambda net: net.body(torch.randn(2, 3)).sum().backward(),
    "a_gradient_of_a_frozen_parameter": lambda net: setattr(net.frozen, "grad", torch.ones(2)),
    "a_buffer_that_joins_a_graph": lambda net: net.mean.mul_(net.body[0].bias),
    "a_tensor_without_elements_that_joins_a_graph": lambda net: net.empty.mul_(
        net.body[0].bias.sum()
    ),
    "another_parameter": lambda net: setattr(
        net.body[1], "weight", nn.Parameter(torch.randn(3, 3))
    ),
    "a_parameter_more": lambda net: net.register_parameter("lora", nn.Parameter(torch.randn(2))),
    "two_parameters_that_changed_places": lambda net: [
        each._parameters.update(weight=weight)
        for each, weight in zip(net.body, [net.body[1].weight, net.body[0].weight], strict=True)
    ],
    "tensors_that_were_swapped": lambda net: torch.utils.swap_tensors(
        net.body[1].weight, nn.Parameter(torch.randn(3, 3))
    ),
    "other_data": lambda net: setattr(net.body[1].weight, "data", torch.randn(3, 3)),
    "another_attribute": lambda net: setattr(net, "scale", torch.randn(2)),
    "a_tensor_without_elements_that_gets_some": lambda net: setattr(
        net.empty, "data", torch.randn(4)
    ),
    "an_attribute_more": lambda net: setattr(net, "more", torch.randn(4)),
    "an_attribute_for_another": lambda net: (
        delattr(net, "number"),
        setattr(net, "cache", torch.randn(4)),
    ),
    "a_forward_of_its_own": lambda net: setattr(net, "forward", Forward()),
    "a_method_of_its_own": lambda net: setattr(net, "half", Forward()),
    "a_tensor_under_a_method's_name": lambda net: setattr(net, "half", torch.ones(2)),
    "a_tensor_in_a_list": lambda net: net.notes.append(torch.randn(2)),
    "another_module": lambda net: setattr(net.body, "1", nn.Linear(3, 3, bias=False)),
    "a_module_more": lambda net: setattr(net, "head", nn.Linear(3, 1)),
    "a_tie_that_is_undone": lambda net: setattr(net, "tied", nn.Parameter(torch.randn(3, 3))),
}


class Model(nn.Module):
    """Two parameters that are stepped from the start, and one that may come later."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.bias = nn.Parameter(torch.randn(7))
        self.late = nn.Parameter(torch.randn(5))


class Scene:
    """A model, an AdamW that has stepped, and what a mutation may want to put its hands on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        self.optimizer = optim.AdamW([self.model.weight, self.model.bias])
        self.kept: list[Any] = []
        """Alive for as long as the scene: else what is born next may get the identity of what a
        mutation took out."""

    def step(self) -> None:
        """Nothing is stepped where state has another shape than its parameter: torch's fused kernel
        would write beyond its memory."""
        for parameter in self.model.parameters():
            parameter.grad = 2 * parameter.detach()
        entries = [
            (each, self.state[each]) for each in self.model.parameters() if each in self.state
        ]
        if all(
            entry.get(key, each).shape == each.shape
            for each, entry in entries
            for key in ("exp_avg", "exp_avg_sq")
        ):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.late.grad = None
        self.entry["number"] = 3

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def entry(self) -> dict[str, Any]:
        """The first parameter's."""
        found: dict[str, Any] = self.state[self.model.weight]
        return found

    @property
    def tensor(self) -> Any:
        return self.entry["exp_avg"]

    def replace(self, value: Any) -> None:
        self.kept.append(self.tensor)
        self.entry["exp_avg"] = value

    def rename(self, old: str, new: str) -> None:
        """Give a key another name, in its place among the others."""
        items = [(new if key == old else key, value) for key, value in self.entry.items()]
        self.entry.clear()
        self.entry.update(items)

    def load(self, make: Callable[[Any], Any] = copy.deepcopy) -> None:
        self.optimizer.load_state_dict(make(self.optimizer.state_dict()))
        gc.collect()


def data_that_changed_places(scene: Scene) -> None:
    """An average of the weights for evaluation."""
    scene.tensor.data, scene.model.weight.data = scene.model.weight.data, scene.tensor.data


def entries_that_changed_parameters(scene: Scene) -> None:
    items = [*scene.state.items()]
    scene.state.clear()
    scene.state.update(
        {key: entry for (key, _), (_, entry) in zip(reversed(items), items, strict=True)}
    )


def a_group_more(scene: Scene) -> None:
    scene.optimizer.add_param_group({"params": [scene.model.late]})


MUTATIONS: dict[str, Callable[[Scene], object]] = {
    "nothing": lambda scene: None,
    "a_step": lambda scene: scene.step(),
    "a_clone_in_its_place": lambda scene: scene.replace(scene.tensor.clone()),
    "other_data": lambda scene: setattr(scene.tensor, "data", scene.tensor.data + 1),
    "data_of_another_dtype": lambda scene: scene.entry.update(
        exp_avg=scene.tensor.to(torch.float64)
    ),
    "an_entry_more": lambda scene: scene.state.update({scene.model.late: {"mine": torch.randn(5)}}),
    "an_entry_of_no_parameter": lambda scene: scene.state.update(
        average={"of": torch.randn(4), "count": 3}
    ),
    "an_entry_that_is_a_tensor": lambda scene: scene.state.update(average=torch.randn(4)),
    "an_entry_of_a_subclass": lambda scene: scene.state.update(
        {scene.model.weight: OrderedDict(scene.entry)}
    ),
    "an_empty_state": lambda scene: scene.state.clear(),
    "another_state": lambda scene: setattr(
        scene.optimizer, "state", {key: dict(entry) for key, entry in scene.state.items()}
    ),
    "entries_that_changed_parameters": entries_that_changed_parameters,
    "a_tensor_more": lambda scene: scene.entry.update(mine=torch.randn(2)),
    "a_tensor_that_becomes_a_counter": lambda scene: (
        scene.entry.pop("step"),
        scene.rename("exp_avg", "step"),
    ),
    "a_number_that_becomes_a_list": lambda scene: scene.entry.update(number=[torch.randn(2)]),
    "the_order_of_parameters": lambda scene: scene.optimizer.param_groups[0]["params"].reverse(),
    "a_parameter_less": lambda scene: scene.optimizer.param_groups[0]["params"].remove(
        scene.model.weight
    ),
    "a_group_more": a_group_more,
    # memory is used again, and with it the identities
    "loaded_state_dicts": lambda scene: [scene.load() for _ in range(4)],
    # the tensors stay, in new dictionaries
    "its_own_state_dict_loaded": lambda scene: scene.load(lambda own: own),
    "a_counter_that_moves": lambda scene: scene.optimizer.param_groups[0].update(fused=True),
    "a_counter_that_gets_a_dimension": lambda scene: setattr(
        scene.entry["step"], "data", torch.ones(1)
    ),
    "a_counter_of_another_name": lambda scene: scene.rename("step", "count"),
    "a_view_of_a_parameter": lambda scene: scene.replace(scene.model.bias.data[:3]),
    "a_view_of_the_same": lambda scene: scene.entry.update(view=scene.tensor.view(-1)),
    "a_list_in_an_entry": lambda scene: scene.entry.update(
        history=[torch.randn(2), (torch.randn(3), None)]
    ),
    "a_dictionary_in_an_entry": lambda scene: scene.entry.update(
        factors={"left": torch.randn(2, 2), "count": 3}
    ),
}


def values(scene: Scene) -> list[torch.Tensor]:
    """Every tensor of the model and of the state, in memory of its own."""
    return [
        each.detach().clone()
        for each in (*scene.model.parameters(), *tensors_in(list(scene.state.values())))
    ]


def trained() -> tuple[Scene, Manager]:
    """A scene whose state is born, so that a phase transition looks quickly."""
    scene = Scene()
    manager = Manager(device=SimulatedDevice(256 * CHUNK, chunk_bytes=CHUNK))
    manager.register("actor", scene.model, role="actor")
    manager.register("adam", scene.optimizer)
    for _ in range(2):
        with manager.phase("train"):
            scene.step()
    return scene, manager


def check_the_ranges(adapter: Adapter) -> None:
    """Every tensor that moves lies in a range, as an adapter sees it that never looked before."""
    assert [
        list(item.tensor.shape)
        for item in adapter.owned()
        if not (item.transient or in_a_range(item.tensor))
    ] == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_moves_whole_whatever_was_done(change: str) -> None:
    net = Net()
    manager = Manager(device=SimulatedDevice(256 * CHUNK, chunk_bytes=CHUNK))
    manager.register("actor", net, role="actor")
    for _ in range(2):  # then a phase transition looks quickly
        with manager.phase("log_prob"):
            pass
    with manager.phase("log_prob"):
        CHANGES[change](net)
        expected = [each.detach().clone() for each in net.state_dict(keep_vars=True).values()]
    for _ in range(2):
        check_the_ranges(ModuleAdapter(net, name="actor", compute_device=CPU))
        assert manager.device.memory().chunk_bytes == 0
        with manager.phase("log_prob"):
            assert_same([*net.state_dict(keep_vars=True).values()], expected)
    manager.close()


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_values_survive_the_way_to_the_host_and_back_whatever_was_done(mutation: str) -> None:
    scene, manager = trained()
    with manager.phase("train"):
        MUTATIONS[mutation](scene)
        scene.kept.clear()
        expected = values(scene)
    for _ in range(2):
        check_the_ranges(OptimizerAdapter(scene.optimizer, name="adam", compute_device=CPU))
        assert [handle.resident_bytes for handle in manager.handles.values()] == [0, 0]
        assert manager.device.memory().chunk_bytes == 0
        with manager.phase("train"):
            assert_same(values(scene), expected)
    manager.check_integrity()
    manager.close()
    assert_same(values(scene), expected)


def test_memory_of_a_parameter_for_that_of_its_state_is_refused_and_nothing_is_lost() -> None:
    """As averages of the weights change places with them; in copies instead it is no matter of
    ours."""
    scene, manager = trained()
    manager.enter("train")
    expected = values(scene)
    data_that_changed_places(scene)
    with pytest.raises(
        RegistrationError, match="'weight' of 'actor' lies in a storage that belongs to 'adam'"
    ):
        manager.leave()
    data_that_changed_places(scene)
    with manager.phase("train"):
        assert_same(values(scene), expected)
    assert_nothing_resident(manager)


def test_another_storage_over_the_same_clean_memory_is_taken_in() -> None:
    """Its chunks were known to be clean, and vacated before it was seen that something was to be
    taken in from there."""
    manager = make_manager(device=SimulatedDevice(capacity_bytes=1 << 24, chunk_bytes=1 << 12))
    model = torch.nn.Linear(64, 64)
    before = model.weight.detach().clone()
    manager.register("reward", model, role="reward")
    for _ in range(2):
        with manager.phase("reward"):
            model.weight.data = torch.from_numpy(model.weight.detach().numpy())
            model.bias = torch.nn.Parameter(torch.zeros(64))  # so that every tensor is looked at
        with manager.phase("reward"):
            assert torch.equal(model.weight, before)
    assert_nothing_resident(manager)


# --- quick looks beside walks, over random changes


def look_after(
    changes: list[Callable[[Any], object]], target: Any, anew: Callable[[], Adapter]
) -> int:
    """Walk, change something, and look quickly, again and again. Where a quick look finds nothing
    changed, a walk finds what the last one has found. Returns how often that was so. `anew`: an
    adapter that has never looked."""
    adapter, times = anew(), 0
    for change in changes:
        try:
            before = [(owned.name, owned.tensor, owned.transient) for owned in adapter.owned()]
        except RegistrationError:
            break
        # what it changes is gone or part of a graph, or a step cannot take what was done to the
        # state
        with contextlib.suppress(Exception):
            change(target)
        if (seen := adapter.unchanged()) is not None:
            now = [(owned.name, owned.tensor, owned.transient) for owned in anew().owned()]
            assert [(name, id(tensor), comes) for name, tensor, comes in now] == [
                (name, id(tensor), comes) for name, tensor, comes in before
            ]
            assert [*map(id, seen.tensors)] == [id(tensor) for _, tensor, _ in now]
            assert seen.versions == [tensor._version for _, tensor, _ in now]
            assert seen.addresses == [tensor.data_ptr() for _, tensor, _ in now]
            times += 1
    return times


class Mine(nn.Parameter):
    """Of a class that placement does not know, and so cannot move."""


def become_mine(tensor: torch.Tensor) -> None:
    torch.utils.swap_tensors(tensor, Mine(torch.randn(tensor.shape)))


def zero_grad(net: Net) -> None:
    net.zero_grad()
    net.mean = net.mean.detach()
    net.empty = net.empty.detach()


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*CHANGES.values(), zero_grad, lambda net: become_mine(net.body[1].weight)]
        ),
        max_size=12,
    )
)
def test_a_quick_look_at_a_module_misses_no_change(changes: list[Callable[[Net], object]]) -> None:
    net = Net()
    look_after(changes, net, lambda: ModuleAdapter(net, name="actor", compute_device=CPU))


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([*MUTATIONS.values(), lambda scene: become_mine(scene.tensor)]), max_size=12
    )
)
def test_a_quick_look_at_the_state_misses_no_change(
    mutations: list[Callable[[Scene], object]],
) -> None:
    scene = Scene()
    scene.step()
    look_after(
        mutations, scene, lambda: OptimizerAdapter(scene.optimizer, name="adam", compute_device=CPU)
    )


def test_where_nothing_was_changed_a_quick_look_is_enough() -> None:
    net, scene = Net(), Scene()
    scene.step()
    assert (
        look_after(
            [CHANGES["nothing"]] * 3,
            net,
            lambda: ModuleAdapter(net, name="actor", compute_device=CPU),
        )
        == 3
    )
    changes = [
        MUTATIONS["nothing"],
        MUTATIONS["a_step"],
        MUTATIONS["a_tensor_more"],
        MUTATIONS["nothing"],
    ]
    assert (
        look_after(
            changes,
            scene,
            lambda: OptimizerAdapter(scene.optimizer, name="adam", compute_device=CPU),
        )
        == 3
    )


def test_memory_that_changed_places_is_restored_under_its_names_of_now() -> None:
    model, manager = (
        nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)),
        make_manager(),
    )
    actor = manager.register("actor", model, role="actor")
    first, second = model.parameters()
    with manager.phase("log_prob"):
        first.data, second.data = second.data, first.data
        expected = copy.deepcopy(model.state_dict())
    first.data = 2 * first.data
    with pytest.raises(IntegrityError, match="were replaced"), manager.phase("log_prob"):
        pass
    actor.restore()
    assert_same(dict(model.state_dict()), dict(expected))


@pytest.mark.skipif(
    not can_swap(),
    reason="torch before 2.13 cannot take in memory of two tensors on a device in host memory",
)
def test_new_state_may_become_a_parameter_before_it_moves() -> None:
    scene = Scene()
    manager = make_manager()
    manager.register("actor", scene.model, role="actor")
    handle = manager.register("adam", scene.optimizer)
    with manager.phase("train"):
        scene.step()
        handle.holding.measure_unadopted()
        scene.model.weight.data = scene.tensor
        expected = values(scene)
    with manager.phase("train"):
        assert_same(values(scene), expected)
