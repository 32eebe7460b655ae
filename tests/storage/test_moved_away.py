"""Storages whose pointer was changed behind placement's back: `share_memory()`, a queue to another
process, a resize.

torch moves such a storage in place, and so it no longer lies where it belongs. The next phase
transition says so. A handle whose tensors were replaced or moved while it was offloaded does not
move until `restore()` or `unregister()`; what was moved on the device gets a new place.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing.reduction
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao import quantization
from torch.nn.utils import prune

from placement import (
    IntegrityError,
    NotResidentError,
    PhaseError,
    RegistrationError,
    checkpoint,
)
from placement.devices import base
from placement.tensors.plain import nested_tensors
from placement.testing import assert_nothing_resident
from tests.support.worker import Worker, assert_same, batch, learn, make_manager, net, trained


def _enlarge(model: nn.Module) -> None:
    for parameter in model.parameters():
        storage = parameter.untyped_storage()
        nbytes = storage.nbytes()
        storage._swap_data_ptr_(torch.UntypedStorage(0))  # type: ignore[attr-defined] # it can be resized now, as one of torch's allocator
        storage.resize_(2 * nbytes)


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "share": lambda model: model.share_memory(),
    "share one storage": lambda model: next(model.parameters()).untyped_storage().share_memory_(),
    "enlarge": _enlarge,
}


def _addresses(worker: Worker) -> list[int]:
    state = [
        value for entry in worker.adam.state.values() for value in entry.values() if value.dim()
    ]
    return [tensor.data_ptr() for tensor in (*worker.net.parameters(), *state)]


@pytest.fixture(params=[True, False], ids=["swap", "rebind"])
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """After a step, on a torch that can exchange the memory of storages and on one that cannot."""
    if not request.param:
        monkeypatch.setattr(base, "can_swap", lambda: False)
    made = Worker()
    with made.manager.phase("train"):
        learn(made.net, made.adam)
    return made


@pytest.mark.parametrize("way", MOVES)
def test_storages_moved_while_offloaded_are_restored(worker: Worker, way: str) -> None:
    wanted, addresses = copy.deepcopy(worker.net.state_dict()), _addresses(worker)
    forms = [(each.dtype, each.size(), each.stride()) for each in worker.net.parameters()]
    for _ in range(2):
        MOVES[way](worker.net)
        if way != "enlarge":  # a state dict needs the bytes that belong to the tensors
            assert_same(dict(worker.net.state_dict()), dict(wanted))
        assert not worker.manager.audit().ok
        with (
            pytest.raises(IntegrityError, match=r"0\.weight.* of 'actor' were replaced"),
            worker.manager.phase("log_prob"),
        ):
            pass
        assert not worker.actor.resident_bytes
        worker.actor.restore()
        assert worker.manager.audit().ok, worker.manager.audit().report
        assert_same(dict(worker.net.state_dict()), dict(wanted))
        with worker.manager.phase("log_prob"):
            assert_same(dict(worker.net.state_dict()), dict(wanted))
            worker.net(batch())
        assert _addresses(worker) == addresses
        assert [
            (each.dtype, each.size(), each.stride()) for each in worker.net.parameters()
        ] == forms
        assert_nothing_resident(worker.manager)
    worker.manager.close()
    assert_same(dict(worker.net.state_dict()), dict(wanted))


def test_other_handles_go_on_without_one_whose_tensors_were_replaced() -> None:
    worker = trained()
    manager = worker.manager
    wanted = copy.deepcopy(worker.net.state_dict())
    with manager.phase("train"):
        with (
            pytest.raises(IntegrityError, match="'actor' were replaced"),
            manager.phase("values"),
        ):
            worker.net.half()
        # the phase around wants it back, and goes on without it
        assert not worker.actor.is_on_device
        assert worker.critic.is_on_device
        with pytest.raises(NotResidentError, match="'actor' is CPU_OFFLOADED in phase 'train'"):
            worker.net(batch())
        late = net()
        manager.register("late", late)
    assert not worker.actor.resident_bytes
    with manager.phase("values") as phase:
        moved = list(manager.journal)
        with pytest.raises(IntegrityError, match=r"'actor' were replaced.*restore\(\)"):
            phase.switch("log_prob")
        assert list(manager.journal) == moved, "a byte has moved before the refusal"
        assert worker.critic.is_on_device
        worker.actor.restore()
        phase.switch("log_prob")
        assert_same(dict(worker.net.state_dict()), dict(wanted))
    assert_nothing_resident(manager)


def test_a_handle_that_leaves_keeps_what_was_put_in_place_and_gets_the_rest() -> None:
    worker = trained()
    wanted = copy.deepcopy(worker.net.state_dict())
    wanted["0.weight"] = torch.full((32, 64), 3.0)
    worker.net[0].weight.data = wanted["0.weight"].clone()
    worker.manager.unregister("actor.optimizer")
    worker.manager.unregister("actor")
    assert_same(dict(worker.net.state_dict()), dict(wanted))
    with (
        pytest.raises(IntegrityError, match=r"0\.weight of 'actor' were replaced"),
        worker.manager.phase("values"),
    ):
        pass
    with worker.manager.phase("values"):
        pass


@pytest.mark.parametrize("way", ["share", "share one storage"])
def test_storages_moved_on_the_device_keep_their_newest_values(worker: Worker, way: str) -> None:
    """What is written after it was moved is written there alone, and counts."""
    for _ in range(2):
        worker.manager.enter("train")
        learn(worker.net, worker.adam, 1)
        MOVES[way](worker.net)
        learn(worker.net, worker.adam, 2)
        with torch.no_grad():
            worker.net[0].weight.add_(1)
        wanted = copy.deepcopy(worker.net.state_dict())
        with pytest.raises(
            IntegrityError,
            match=r"0\.weight.* of 'actor' lay in "
            r"other "
            r"memory "
            r"than "
            r"theirs when it was offloaded",
        ):
            worker.manager.leave()
        assert_nothing_resident(worker.manager)
        assert worker.manager.device.memory().chunk_bytes == 0
        assert_same(dict(worker.net.state_dict()), dict(wanted))
        with worker.manager.phase("log_prob"):
            assert_same(dict(worker.net.state_dict()), dict(wanted))
            worker.net(batch())
        assert_nothing_resident(worker.manager)


def test_a_state_dict_taken_before_follows(worker: Worker) -> None:
    taken = worker.net.state_dict()
    wanted = copy.deepcopy(taken)
    worker.net.share_memory()
    assert_same(dict(taken), dict(wanted))
    worker.actor.restore()
    assert_same(dict(taken), dict(wanted))
    worker.manager.enter("log_prob")
    worker.net.share_memory()
    assert_same(dict(taken), dict(wanted))
    with pytest.raises(IntegrityError, match="lay in other memory"):
        worker.manager.leave()
    assert_same(dict(taken), dict(wanted))


def test_quantisation_aware_training() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        model = quantization.prepare_qat(model)
        manager = make_manager()
        with pytest.raises(
            RegistrationError,
            match=r"submodule "
            r"'0\.weight_fake_quant'.*run "
            r"one "
            r"forward "
            r"pass before registering",
        ):
            manager.register("actor", model, role="actor")  # by channel
        model(torch.ones(2, 4))
        plain = copy.deepcopy(model)
        manager.register("actor", model, role="actor")
        for step in range(2):
            inputs = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
            with manager.phase("log_prob"):
                assert torch.equal(model(inputs), plain(inputs))
            assert_nothing_resident(manager)
        assert_same(dict(model.state_dict()), dict(plain.state_dict()))


# --- what was put in place of tensors that share their storages


def _one_flat(model: nn.Module) -> None:
    """All of them in one new storage, as something that flattens parameters does it."""
    parameters = list(model.parameters())
    flat = torch.cat([parameter.data.reshape(-1) for parameter in parameters])
    for parameter, piece in zip(
        parameters, flat.split([each.numel() for each in parameters]), strict=True
    ):
        parameter.data = piece.view(parameter.size())


def _one_by_one(model: nn.Module) -> None:
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = nn.Parameter(parameter.detach().clone())


REPLACES: dict[str, Callable[[nn.Module], object]] = {
    "clone": lambda model: model._apply(lambda tensor: tensor.clone()),
    "half": lambda model: model.half(),
    "one flat": _one_flat,
    "one by one": _one_by_one,
    "share": MOVES["share"],
    # What a queue of torch.multiprocessing does to what is put into it:
    "send": lambda model: [
        multiprocessing.reduction.ForkingPickler.dumps(each.detach()) for each in model.parameters()
    ],
}


class Cut(nn.Module):
    """Parameters cut from one buffer, some of them transposed, one under two names, and one by
    itself."""

    def __init__(self, sizes: list[tuple[int, int]], dtype: torch.dtype) -> None:
        super().__init__()
        flat = torch.arange(
            sum(rows * columns for rows, columns in sizes) + 3, dtype=torch.float32
        ).to(dtype)
        start = 3
        for index, (rows, columns) in enumerate(sizes):
            piece = flat[start : start + rows * columns].view(rows, columns)
            self.register_parameter(f"p{index}", nn.Parameter(piece.T if index % 2 else piece))
            start += rows * columns
        self.child = nn.Module()
        self.child.tied = self.p0  # type: ignore[attr-defined]
        self.alone = nn.Parameter(torch.full((2, 2), 9.0, dtype=dtype))


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    ways=st.lists(st.sampled_from(sorted(REPLACES)), min_size=1, max_size=3),
)
def test_every_tensor_gets_its_own_form_back(
    sizes: list[tuple[int, int]], dtype: torch.dtype, ways: list[str]
) -> None:
    def forms() -> list[Any]:
        every = model.named_parameters(remove_duplicate=False)
        return [
            (name, each.dtype, each.size(), each.stride(), each.data_ptr()) for name, each in every
        ]

    model = Cut(sizes, dtype)
    wanted = copy.deepcopy(model.state_dict())
    manager = make_manager()
    actor = manager.register("actor", model, role="actor")
    before = forms()
    for way in ways:
        REPLACES[way](model)
        with (
            pytest.raises(IntegrityError, match="'actor' were replaced"),
            manager.phase("log_prob"),
        ):
            pass
        actor.restore()
        assert forms() == before
        with manager.phase("log_prob"):
            assert_same(dict(model.state_dict()), dict(wanted))
        assert_nothing_resident(manager)
    manager.close()
    assert_same(dict(model.state_dict()), dict(wanted))


def _buffer(worker: Worker) -> Callable[[], object]:
    worker.net.register_buffer("extra", worker.net[0].weight.detach().clone())
    return functools.partial(delattr, worker.net, "extra")


def _nested(worker: Worker) -> Callable[[], object]:
    worker.net.extra = {"each": [p.detach() * 2 for p in worker.net.parameters()]}  # type: ignore[assignment]
    return functools.partial(delattr, worker.net, "extra")


def _state(worker: Worker) -> Callable[[], object]:
    for entry in worker.adam.state.values():
        entry["extra"] = entry["exp_avg"].clone()
    return lambda: [entry.pop("extra") for entry in worker.adam.state.values()]


@pytest.mark.parametrize("add", [_buffer, _nested, _state])
def test_added_tensors_are_reported_once_and_stay(
    add: Callable[[Worker], Callable[[], object]], tmp_path: pathlib.Path
) -> None:
    worker = trained()
    wanted = copy.deepcopy(worker.net.state_dict())
    remove = add(worker)
    with (
        pytest.raises(IntegrityError, match=r"extra.* were added to 'actor"),
        worker.manager.phase("train"),
    ):
        pass
    with worker.manager.phase("train"):
        pass
    assert_same({name: worker.net.state_dict()[name] for name in wanted}, dict(wanted))
    states = [handle.state_dict() for handle in worker.manager.handles.values()]
    assert add is _nested or any(
        bool(tensor.isnan().any()) for _, tensor in nested_tensors(states, "")
    )
    checkpoint.save(worker.manager, tmp_path)
    assert_nothing_resident(worker.manager)
    remove()
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
    assert_nothing_resident(worker.manager)


def test_replaced_and_added_tensors_are_named_apart() -> None:
    worker = trained()
    wanted = copy.deepcopy(worker.optimizer.state_dict())
    remove = _state(worker)
    for entry in worker.adam.state.values():
        entry["exp_avg"].data = entry["extra"].clone()
    with pytest.raises(IntegrityError) as caught, worker.manager.phase("train"):
        pass
    added, replaced = str(caught.value).split("Add them inside a phase that has it on the device.")
    assert ("state.0.exp_avg" in replaced, "extra" in replaced) == (True, False)
    assert ("state.0.extra" in added, "state.0.exp_avg" in added) == (True, False)
    worker.optimizer.restore()
    with worker.manager.phase("train"):
        remove()
    assert_same(worker.optimizer.state_dict(), wanted)


def test_what_pruning_adds_is_reported_once() -> None:
    """Pruning, and the older weight norm, put a tensor with a graph under the parameter's name, and
    the parameter under another."""
    worker = trained()
    address = worker.net[0].weight.data_ptr()
    prune.random_unstructured(worker.net[0], "weight", 0.5)
    with (
        pytest.raises(IntegrityError, match=r"0\.weight.* were added to 'actor'"),
        worker.manager.phase("train"),
    ):
        pass
    with worker.manager.phase("train"):
        assert worker.net[0].weight_orig.data_ptr() == address
        learn(worker.net, worker.adam)
        assert not worker.net[0].weight.isnan().any()
    assert_nothing_resident(worker.manager)


def test_restore_on_the_device_is_refused_and_does_nothing_where_nothing_was_replaced() -> None:
    worker = trained()
    wanted = copy.deepcopy(worker.net.state_dict())
    worker.actor.restore()
    with worker.manager.phase("train"):
        worker.net[0].weight.data = worker.net[0].weight.data + 1
        with pytest.raises(PhaseError, match=r"'actor' is TRAINING.*cannot be restored"):
            worker.actor.restore()
    wanted["0.weight"] += 1
    worker.actor.restore()
    assert_same(dict(worker.net.state_dict()), dict(wanted))
    assert worker.manager.audit().ok


def test_gradients_that_were_converted_are_restored_with_the_weights() -> None:
    worker = trained()
    parameters = [*worker.net.parameters()]
    with worker.manager.phase("train"):
        wanted = [each.grad.clone() for each in parameters if each.grad is not None]
    worker.net.half()
    worker.actor.restore()  # before a transition has looked
    with worker.manager.phase("train"):
        assert_same([each.grad for each in parameters], wanted)
    worker.net.half()
    with (
        pytest.raises(IntegrityError, match=r"0\.weight\.grad.* were replaced") as raised,
        worker.manager.phase("train"),
    ):
        pass
    assert "added" not in str(raised.value)
    worker.actor.restore()


def test_a_checkpoint_is_no_mixture_of_new_and_registered_values(tmp_path: pathlib.Path) -> None:
    worker = trained()
    checkpoint.save(worker.manager, tmp_path / "sound")
    wanted = copy.deepcopy(worker.net.state_dict())
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
    worker.net[0].weight.data = torch.zeros(32, 64)
    for do in (
        lambda: checkpoint.save(worker.manager, tmp_path / "mixed"),
        lambda: checkpoint.load(worker.manager, tmp_path / "sound"),
    ):
        with pytest.raises(IntegrityError, match=r"0\.weight of 'actor' were replaced.*restore"):
            do()
    worker.actor.restore()
    checkpoint.load(worker.manager, tmp_path / "sound")
    assert_same(dict(worker.net.state_dict()), dict(wanted))
    with worker.manager.phase("train"):
        assert_same(dict(worker.net.state_dict()), dict(wanted))


def test_a_replacement_that_the_user_takes_back_needs_no_restore() -> None:
    worker = trained()
    wanted, weight = copy.deepcopy(worker.net.state_dict()), worker.net[0].weight
    worker.net[0].weight = nn.Parameter(torch.zeros_like(weight))
    with pytest.raises(IntegrityError, match="were replaced"), worker.manager.phase("train"):
        pass
    worker.net[0].weight = weight
    with worker.manager.phase("train"):
        assert_same(dict(worker.net.state_dict()), dict(wanted))
    assert_nothing_resident(worker.manager)


RENAMES: dict[str, Callable[[Worker], object]] = {
    "two layers change places": lambda worker: worker.net.__init__(*reversed(worker.net)),  # type: ignore[misc]
    "parameter groups change places": lambda worker: worker.adam.param_groups.reverse(),
}


@pytest.mark.parametrize("rename", RENAMES)
def test_tensors_with_other_names_were_not_replaced(rename: str) -> None:
    """The state of an optimizer has the numbers of its parameters as names, a list of layers those
    of its layers."""
    worker = Worker()
    worker.manager.unregister("actor.optimizer")
    layers = [{"params": layer.parameters()} for layer in (worker.net[0], worker.net[2])]
    worker.adam = torch.optim.AdamW(layers, lr=1e-2)
    worker.manager.register("actor.optimizer", worker.adam)
    parameters = [*worker.net.parameters()]

    def values() -> list[torch.Tensor]:
        moments = [worker.adam.state[parameter]["exp_avg"] for parameter in parameters]
        return copy.deepcopy([*(parameter.detach() for parameter in parameters), *moments])

    with worker.manager.phase("train"):
        learn(worker.net, worker.adam)
        wanted = values()
    RENAMES[rename](worker)
    assert worker.manager.audit().ok
    with worker.manager.phase("train"):
        assert_same(values(), wanted)
    worker.optimizer.restore()
    worker.actor.restore()
    with worker.manager.phase("train"):
        assert_same(values(), wanted)
    assert_nothing_resident(worker.manager)


def test_a_layer_put_in_before_others_is_added_and_shares_no_memory() -> None:
    worker = trained()
    wanted = copy.deepcopy(worker.net.state_dict())
    worker.net.insert(0, nn.Linear(64, 64))
    with (
        pytest.raises(IntegrityError, match=r"^0\.weight, 0\.bias were added to 'actor'"),
        worker.manager.phase("log_prob"),
    ):
        pass
    worker.actor.restore()
    with worker.manager.phase("log_prob"):
        values = worker.net.state_dict()
        assert_same([values["1.weight"], values["3.bias"]], [wanted["0.weight"], wanted["2.bias"]])
        assert len({values[name].data_ptr() for name in values}) == len(values)
    assert_nothing_resident(worker.manager)


def test_state_of_parameters_that_left_their_groups_keeps_its_places() -> None:
    worker = trained()
    group = worker.adam.param_groups[0]
    parameters = group["params"]

    def moments() -> list[torch.Tensor]:
        return [worker.adam.state[parameter]["exp_avg"].clone() for parameter in parameters]

    with worker.manager.phase("train"):
        wanted = moments()
    group["params"] = parameters[2:]  # the first layer is frozen
    with worker.manager.phase("train"):
        assert_same(moments(), wanted)
    for entry in worker.adam.state.values():
        entry["exp_avg"].data = torch.zeros_like(entry["exp_avg"])
    with pytest.raises(IntegrityError, match="were replaced"), worker.manager.phase("train"):
        pass
    worker.optimizer.restore()
    group["params"] = parameters
    with worker.manager.phase("train"):
        assert_same(moments(), wanted)
    assert_nothing_resident(worker.manager)
