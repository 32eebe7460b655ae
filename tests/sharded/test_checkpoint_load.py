"""Checkpoints of one process: what does not fit changes nothing, and what only an object's own code
can load is loaded by it."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import placement
from placement import CheckpointError, Manager, NotResidentError, PhaseError, checkpoint
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.sweeps import diagonal, few
from tests.support.worker import Worker, assert_same, learn, make_manager, net, trained


def values(worker: Worker) -> dict[str, Any]:
    return copy.deepcopy(
        {name: handle.state_dict() for name, handle in worker.manager.handles.items()}
    )


def registered(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Manager:
    manager = Manager(device=SimulatedDevice(16 << 20, chunk_bytes=4096))
    manager.register("actor", model, role="actor")
    if optimizer is not None:
        manager.register("actor.optimizer", optimizer)
    return manager


def rewrite(root: Path, **changes: Any) -> Path:
    """The checkpoint in `root/fine` once more, with values changed by flat key; None leaves one
    out."""
    dcp_to_torch_save(root / "fine", root / "file")
    state = torch.load(root / "file", weights_only=False)
    for key, value in changes.items():
        handle, *path = key.split("__")
        inner = state[handle.replace("_", ".")]
        for each in path[:-1]:
            inner = inner[each]
        if value is None:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
    changed = root / f"changed {len([*root.iterdir()])}"
    dcp.save(state, checkpoint_id=changed)
    return changed


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"actor__0.weight": None}, "'actor': 0.weight is not in the checkpoint"),
    (
        {"critic__2.bias": torch.zeros(9)},
        (r"'critic': 2.bias has shape \(9,\) in the checkpoint, but \(8,\) here"),
    ),
    (
        {"critic__2.bias": torch.zeros(8).half()},
        ("'critic': 2.bias has dtype torch.float16 in the checkpoint, but torch.float32 here"),
    ),
    (
        {"actor__more": torch.zeros(2)},
        ("'actor': more is in the checkpoint, but the module has no such parameter"),
    ),
    ({"critic__2.bias": "words"}, "'critic': 2.bias is not a tensor in the checkpoint"),
    (
        {"actor_optimizer__state__0.weight__exp_avg": torch.zeros(2)},
        ("'actor.optimizer': state of '0.weight': 'exp_avg' has shape"),
    ),
    (
        {"actor_optimizer__state__other": {"exp_avg": torch.zeros(2)}},
        ("'actor.optimizer': state of 'other' is in the checkpoint"),
    ),
    (
        {"critic_optimizer__param_groups": None},
        ("'critic.optimizer': 'param_groups' is not in the checkpoint"),
    ),
    (
        {"critic_optimizer__param_groups": [{"lr": 1.0, "params": ["0.weight"]}]},
        "'critic.optimizer': parameter '0.bias' was in no group of the saved optimizer",
    ),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("phase", few(["checkpoint", "train"], "train"))
def test_a_checkpoint_that_does_not_fit_changes_nothing(phase: str, tmp_path: Path) -> None:
    worker = trained()
    checkpoint.save(worker.manager, tmp_path / "fine")
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam, 1)
        learn(worker.critic_net, worker.sgd, 1)
    before = values(worker)
    for changes, said in UNFIT:
        path = rewrite(tmp_path, **changes)
        with worker.manager.phase(phase), pytest.raises(CheckpointError, match=said):
            checkpoint.load(worker.manager, path)
        assert_same(values(worker), before)
    assert_nothing_resident(worker.manager)
    with worker.manager.phase("log_prob"):
        assert_same(dict(worker.net.state_dict()), dict(before["actor"]))


def test_a_checkpoint_that_cannot_be_read_changes_nothing_and_damaged_files_are_named(
    tmp_path: Path,
) -> None:
    worker = trained()
    checkpoint.save(worker.manager, tmp_path / "fine")
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam, 1)
    before = values(worker)

    def refused(said: str, folder: str = "fine") -> None:
        with pytest.raises(CheckpointError, match=said):
            checkpoint.load(worker.manager, tmp_path / folder)
        assert_same(values(worker), before)
        assert_nothing_resident(worker.manager)

    refused(r"no complete checkpoint in .*absent", "absent")
    data = next((tmp_path / "fine").glob("*.distcp"))
    whole = data.read_bytes()
    for kept in (0, 10, len(whole) // 2, len(whole) - 1):  # what a full disk leaves
        data.write_bytes(whole[:kept])
        refused(
            r"(?s)loading from .*rank 0: \w+.*[^.]\. Damaged files: "
            rf"{data.name} "
            r"ends "
            r"after "
            rf"{kept:,} of \S+ bytes"
        )
    data.unlink()
    refused(rf"Damaged files: {data.name} is missing")
    (tmp_path / "fine" / ".metadata").write_bytes(b"not one")
    refused("no complete checkpoint")


def test_what_is_being_published_or_is_readonly_is_not_written(tmp_path: Path) -> None:
    worker = trained()
    checkpoint.save(worker.manager, tmp_path / "a", only=[*worker.manager.handles])
    before = values(worker)
    with worker.manager.phase("weight_sync"), pytest.raises(PhaseError, match="'actor' is SYNCING"):
        checkpoint.load(worker.manager, tmp_path / "a")
    with pytest.raises(CheckpointError, match="'ref' is readonly"):
        checkpoint.load(worker.manager, tmp_path / "a", only=["critic", "ref"])
    assert_same(values(worker), before)
    checkpoint.save(worker.manager, tmp_path / "b")
    with pytest.raises(CheckpointError, match="'ref' is readonly"):
        checkpoint.load(worker.manager, tmp_path / "b", only=["ref"])
    with pytest.raises(PhaseError, match="critc"):
        checkpoint.load(worker.manager, tmp_path / "b", only=["critc"])


def test_some_handles_only(tmp_path: Path) -> None:
    worker = trained()
    checkpoint.save(worker.manager, tmp_path / "a", only=[worker.actor, "actor.optimizer"])
    wanted = values(worker)
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam, 1)
        learn(worker.critic_net, worker.sgd, 1)
    critic = values(worker)["critic"]
    with pytest.raises(
        CheckpointError,
        match=r"'critic': 0\.weight is not "
        r"in "
        r"the "
        r"checkpoint, "
        r"which has nothing for 'critic'",
    ):
        checkpoint.load(worker.manager, tmp_path / "a")
    checkpoint.load(worker.manager, tmp_path / "a", only=["actor", worker.optimizer])
    assert_same(values(worker)["actor"], wanted["actor"])
    assert_same(values(worker)["critic"], critic)


class RuleReward(torch.nn.Module):
    """A reward without parameters."""

    def forward(self, answers: torch.Tensor) -> torch.Tensor:
        return answers.sum()


def test_a_module_without_values_is_saved_and_loaded_with_the_others(tmp_path: Path) -> None:
    worker = trained()
    worker.manager.register("reward", RuleReward(), role="reward")
    checkpoint.save(worker.manager, tmp_path / "a")
    checkpoint.async_save(worker.manager, tmp_path / "b").result()
    wanted = values(worker)
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam, 1)
    later = values(worker)
    checkpoint.load(worker.manager, tmp_path / "a")
    assert_same(values(worker), wanted)
    checkpoint.load(worker.manager, tmp_path / "b")
    assert_same(values(worker), wanted)
    assert not later["actor"]["0.weight"].equal(wanted["actor"]["0.weight"])


def test_a_lazy_handle_that_is_not_built(tmp_path: Path) -> None:
    def manager_with_lazy() -> Manager:
        manager = make_manager()
        manager.register("actor", net(), role="actor")
        manager.register("critic", placement.Lazy(net), role="critic")
        return manager

    manager = manager_with_lazy()
    checkpoint.save(manager, tmp_path / "without")
    checkpoint.load(manager, tmp_path / "without")  # nothing of it is there to be lost
    assert not manager.handles["critic"].is_built
    with pytest.raises(
        NotResidentError, match="'critic' has no state to save or load: it is not built yet"
    ):
        checkpoint.save(manager, tmp_path / "x", only=["critic"])
    with manager.phase("values"):
        checkpoint.save(manager, tmp_path / "with")
    with pytest.raises(NotResidentError, match=r"'critic' .* not built yet"):
        # it would be built later with other values
        checkpoint.load(manager_with_lazy(), tmp_path / "with")


def test_no_step_is_made_to_save_or_to_restore_state_that_is_not_born(tmp_path: Path) -> None:
    """pytorch#164929: torch's get_optimizer_state_dict steps, and the loss of the second step
    differs ever after."""
    torch.manual_seed(1)
    plain = Worker()
    with plain.manager.phase("train"):
        losses = [learn(plain.net, plain.adam, seed) for seed in range(3)]
    torch.manual_seed(1)
    worker = Worker()
    checkpoint.save(worker.manager, tmp_path / "a")
    checkpoint.Optimizer(worker.optimizer).state_dict()
    assert not worker.adam.state
    with worker.manager.phase("train"):
        checkpoint.save(worker.manager, tmp_path / "b")
        assert not worker.adam.state
        learn(worker.net, worker.adam, 7)
    for path in ("a", "b"):
        assert worker.adam.state
        checkpoint.load(worker.manager, tmp_path / path)
        assert len(worker.adam.state) == 0  # not even empty entries
        assert_nothing_resident(worker.manager)
        with worker.manager.phase("train"):
            assert_same([learn(worker.net, worker.adam, seed) for seed in range(3)], losses)


def test_a_parameter_that_had_no_state_has_none(tmp_path: Path) -> None:
    worker = Worker()
    with worker.manager.phase("train"):
        worker.net[2].requires_grad_(False)
        learn(worker.net, worker.adam)
        worker.net[2].requires_grad_(True)
    assert len(worker.adam.state) == 2
    checkpoint.save(worker.manager, tmp_path / "a")
    wanted = values(worker)
    with worker.manager.phase("train"):
        learn(worker.net, worker.adam, 1)
    assert len(worker.adam.state) == 4
    checkpoint.load(worker.manager, tmp_path / "a")
    assert {id(key) for key in worker.adam.state} == {
        id(parameter) for parameter in worker.net[0].parameters()
    }
    assert_same(values(worker)["actor.optimizer"], wanted["actor.optimizer"])
    with worker.manager.phase("train"):
        assert_same(worker.adam.state_dict(), wanted["actor.optimizer"])
    assert_nothing_resident(worker.manager)


@pytest.mark.parametrize("phase", [None, "restore"])
def test_state_is_not_cast_to_its_parameters_type(phase: str | None, tmp_path: Path) -> None:
    """torch's Optimizer.load_state_dict casts float32 moments of bfloat16 parameters down."""

    def worker(seed: int) -> tuple[Manager, torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(8, 8).bfloat16()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return registered(model, adam), model, adam

    manager, model, adam = worker(0)
    with manager.phase("train"):
        for parameter in model.parameters():
            moments = {
                name: torch.randn(parameter.shape) * 1e-3 for name in ("exp_avg", "exp_avg_sq")
            }
            adam.state[parameter] = {"step": torch.tensor(3.0), **moments}
    wanted = copy.deepcopy(manager.handles["actor.optimizer"].state_dict())
    checkpoint.save(manager, tmp_path / "a")
    other, _model, _adam = worker(1)
    with other.phase(phase or "checkpoint"):
        checkpoint.load(other, tmp_path / "a")
    assert_same(other.handles["actor.optimizer"].state_dict(), wanted)
    assert_nothing_resident(other)
    with other.phase("restore"):
        assert_same(other.handles["actor.optimizer"].state_dict(), wanted)


def test_restoring_is_no_fault_to_who_verifies_every_move(tmp_path: Path) -> None:
    worker = trained(verify="always")
    checkpoint.save(worker.manager, tmp_path / "a")
    wanted = values(worker)
    for phase in ("checkpoint", "train"):
        with worker.manager.phase("train"):
            learn(worker.net, worker.adam, 1)
            checkpoint.async_save(worker.manager, tmp_path / phase).result()
        with worker.manager.phase(phase):
            checkpoint.load(worker.manager, tmp_path / "a")
        with worker.manager.phase("log_prob"):
            assert_same(dict(worker.net.state_dict()), dict(wanted["actor"]))
        assert_same(values(worker), wanted)
    assert_nothing_resident(worker.manager)


def test_a_buffer_that_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    manager, model = make_manager(), net()
    model.register_buffer("wide", torch.arange(4.0).unsqueeze(1).expand(4, 3))
    handle = manager.register("actor", model, role="actor")
    checkpoint.save(manager, tmp_path / "a")
    with manager.phase("log_prob"), torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(CheckpointError, match="'actor': wide has several elements at one address"):
        checkpoint.load(manager, tmp_path / "a")
    assert not handle.state_dict()["0.weight"].any()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_optimizer_without_state_asks_for_the_planner(tmp_path: Path) -> None:
    worker = trained()
    dcp.save(
        {"optimizer": checkpoint.Optimizer(worker.optimizer)},
        checkpoint_id=tmp_path / "a",
        no_dist=True,
    )
    fresh = Worker()
    before = values(fresh)
    with pytest.raises(CheckpointError, match="LoadPlanner"):
        dcp.load(
            {"optimizer": checkpoint.Optimizer(fresh.optimizer)},
            checkpoint_id=tmp_path / "a",
            no_dist=True,
        )
    assert_same(values(fresh), before)
    state = {"optimizer": checkpoint.Optimizer(fresh.optimizer)}
    dcp.load(state, checkpoint_id=tmp_path / "a", no_dist=True, planner=checkpoint.LoadPlanner())
    assert_same(values(fresh)["actor.optimizer"], values(worker)["actor.optimizer"])


def test_groups_are_matched_by_parameter_and_tensor_settings_keep_their_place(
    tmp_path: Path,
) -> None:
    def worker(order: int) -> tuple[Manager, torch.nn.Module, torch.optim.Optimizer]:
        model = net()
        groups = [
            {"params": [model[0].weight, model[2].weight], "lr": torch.tensor(0.5)},
            {"params": [model[0].bias, model[2].bias]},
        ]
        adam = torch.optim.AdamW(groups[::order], lr=0.1 * (2 + order))
        return registered(model, adam), model, adam

    manager, _model, adam = worker(1)
    adam.param_groups[0]["lr"].fill_(0.25)
    adam.param_groups[1]["weight_decay"] = 0.125
    checkpoint.save(manager, tmp_path / "a")
    other, _other_model, swapped = worker(-1)
    rate = swapped.param_groups[1]["lr"]
    checkpoint.load(other, tmp_path / "a")
    assert swapped.param_groups[1]["lr"] is rate
    assert rate.item() == 0.25
    assert swapped.param_groups[0]["lr"] == pytest.approx(0.3)
    assert swapped.param_groups[0]["weight_decay"] == 0.125


def mask(at: int) -> torch.Tensor:
    return torch.ones(1600).index_fill(0, torch.tensor([at]), 0.0)


class Schedule:
    def __init__(self, rate: float) -> None:
        self.rate = torch.tensor(rate)


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rates": ({"lr": torch.tensor(3.00001e-5)}, {"lr": torch.tensor(3.00004e-5)}),
    "masks": ({"mask": mask(700)}, {"mask": mask(800)}),
    "arrays": ({"mask": mask(700).numpy()}, {"mask": mask(800).numpy()}),
    "dtypes": ({"mask": torch.zeros(2)}, {"mask": torch.zeros(2).int()}),
    "inside": ({"mask": [(mask(700), 1)]}, {"mask": [(mask(800), 1)]}),
    "objects": ({"schedule": Schedule(3.00001e-5)}, {"schedule": Schedule(3.00004e-5)}),
    "zeros": ({"bias": torch.tensor(0.0)}, {"bias": torch.tensor(-0.0)}),
}


@pytest.mark.parametrize(("what", "differ"), diagonal(SETTINGS.keys(), [True, False]))
def test_groups_are_merged_only_if_their_settings_are_the_same_bits(
    what: str, differ: bool, tmp_path: Path
) -> None:
    one, two = SETTINGS[what]
    two = two if differ else copy.deepcopy(one)

    def optimizer(model: torch.nn.Sequential, *settings: dict[str, Any]) -> torch.optim.Optimizer:
        parts = [[*model[0].parameters()], [*model[2].parameters()]]
        parts = parts if len(settings) == 2 else [parts[0] + parts[1]]
        each = [{"params": part, **more} for part, more in zip(parts, settings, strict=True)]
        return torch.optim.SGD(each, lr=0.1)

    models = net(), net()
    extra = {"rate": float("nan")}
    checkpoint.save(
        registered(models[0], optimizer(models[0], one | extra, two | extra)), tmp_path / "a"
    )
    target = registered(models[1], optimizer(models[1], copy.deepcopy(one)))
    refused = pytest.raises(CheckpointError, match="several groups with different settings")
    with refused if differ else contextlib.nullcontext():
        checkpoint.load(target, tmp_path / "a")


@pytest.mark.parametrize("keys", [(torch.zeros(3), torch.zeros(3)), (1, "1")])
def test_state_whose_key_has_no_name_of_its_own_is_not_saved(
    keys: tuple[Any, Any], tmp_path: Path
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = registered(model, optimizer)
    for number, key in enumerate(keys):
        optimizer.state[key] = {"count": number}
    with pytest.raises(CheckpointError, match="has no name of its own"):
        checkpoint.save(manager, tmp_path / "a")


# --- weights that are one here and were several


class Pair(torch.nn.Module):
    def __init__(self, how: str | None) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.back = torch.nn.Linear(8, 4, bias=False)
        self.register_buffer("scale", torch.randn(8, 4))
        self.register_buffer("first", torch.randn(4))
        if how == "parameter":
            self.head.weight = self.embed.weight
        elif how == "transposed":
            self.back.weight = torch.nn.Parameter(self.embed.weight.detach().T)
        elif how == "buffer":
            self.scale = self.embed.weight.detach()
        elif how == "slice":
            self.first = self.embed.weight.detach()[3]


TIED = {
    "parameter": "head.weight",
    "transposed": "back.weight",
    "buffer": "scale",
    "slice": "first",
}


@pytest.mark.parametrize(("how", "phase"), diagonal(TIED.keys(), ["checkpoint", "train"]))
def test_two_values_for_one_weight_are_refused_and_change_nothing(
    how: str, phase: str, tmp_path: Path
) -> None:
    def built(how: str | None) -> Manager:
        model = Pair(how)
        return registered(model, torch.optim.SGD(model.parameters(), lr=0.1))

    source, target = built(None), built(how)
    other, other_critic = net(), net()
    target.register("critic", other, role="critic")
    source.register("critic", other_critic, role="critic")
    checkpoint.save(source, tmp_path / "a", only=["critic", "actor"])
    before = copy.deepcopy({n: h.state_dict() for n, h in target.handles.items()})
    both = rf"(embed.weight and {TIED[how]}|{TIED[how]} and embed.weight) are tied"
    with target.phase(phase):
        with pytest.raises(CheckpointError, match=both):
            checkpoint.load(target, tmp_path / "a", only=["critic", "actor"])
        with pytest.raises(CheckpointError, match=both):
            checkpoint.Model(target.handles["actor"]).load_state_dict(
                source.handles["actor"].state_dict()
            )
    assert_same({n: h.state_dict() for n, h in target.handles.items()}, before)


@pytest.mark.parametrize("how", TIED)
def test_one_value_for_tied_weights_is_loaded_nan_too(how: str, tmp_path: Path) -> None:
    source, target = registered(Pair(how)), registered(Pair(how))
    with source.phase("log_prob"), torch.no_grad():
        source.handles["actor"].object.embed.weight[3, 1] = float("nan")
    checkpoint.save(source, tmp_path / "a")
    checkpoint.load(target, tmp_path / "a")
    assert_same(
        dict(target.handles["actor"].state_dict()), dict(source.handles["actor"].state_dict())
    )


def test_weights_that_were_tied_are_loaded_where_they_are_not(tmp_path: Path) -> None:
    source, target = registered(Pair("parameter")), registered(Pair(None))
    checkpoint.save(source, tmp_path / "a")
    checkpoint.load(target, tmp_path / "a")
    assert_same(
        dict(target.handles["actor"].state_dict()), dict(source.handles["actor"].state_dict())
    )


def test_extra_state_and_a_file_that_torch_load_reads(tmp_path: Path) -> None:
    class Counting(torch.nn.Linear):
        seen = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"seen": self.seen}

        def set_extra_state(self, state: Any) -> None:
            self.seen = state["seen"]

    model = torch.nn.Sequential(Counting(8, 8))
    model[0].seen = 5  # type: ignore[assignment]
    sgd = torch.optim.SGD(model.parameters(), lr=1e-2)
    manager = registered(model, sgd)
    handle = manager.handles["actor"]
    checkpoint.save(manager, tmp_path / "a")
    dcp_to_torch_save(tmp_path / "a", tmp_path / "file")
    found = torch.load(tmp_path / "file", weights_only=False)
    assert_same(found["actor"]["0.weight"], handle.state_dict()["0.weight"])
    assert found["actor"]["0._extra_state"] == {"seen": 5}
    file = io.BytesIO()
    torch.save(handle.state_dict(), file)
    file.seek(0)
    assert_same(torch.load(file)["0.weight"], found["actor"]["0.weight"])
    model[0].seen = 0  # type: ignore[assignment]
    part = checkpoint.Model(handle)
    with pytest.raises(
        NotResidentError,
        match=r"extra state \(0\._extra_state\), "
        r".* "
        r"inside "
        r"a "
        r"phase that has it on the device",
    ):
        part.load_state_dict(copy.deepcopy(dict(part.state_dict())))
    checkpoint.load(manager, tmp_path / "a")
    assert model[0].seen == 5
    assert_nothing_resident(manager)


@pytest.mark.parametrize("do", [checkpoint.save, checkpoint.async_save, checkpoint.load])
def test_a_handle_in_place_of_the_manager_is_told_of_only(tmp_path: Path, do: Any) -> None:
    worker = Worker()
    with pytest.raises(
        TypeError,
        match=r"the first argument is the manager, not a "
        r"Handle; "
        r"for "
        r"one "
        r"handle write only=\['actor'\]",
    ):
        do(worker.actor, tmp_path / "a")
    with pytest.raises(TypeError, match=r"the manager, not a Sequential$"):
        do(worker.net, tmp_path / "a")
    assert not (tmp_path / "a").exists()


# --- objects that only their own code can load


class Layers(torch.nn.Sequential):
    """Two layers, a buffer, and a plain tensor attribute that no state dict shows."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6, bias=False))
        self.register_buffer("seen", torch.arange(3.0))
        self.scale = torch.ones(5)


class Renamed(Layers):
    """Packed into one tensor, and unpacked again."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        values = super().state_dict(*args, **kwargs)
        return {"packed": torch.cat([value.flatten() for value in values.values()])}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        start, given = 0, {}
        for name, value in super().state_dict().items():
            given[name] = state_dict["packed"][start : start + value.numel()].view_as(value)
            start += value.numel()
        return super().load_state_dict(given, strict, assign)


def casting(model: torch.nn.Module) -> None:
    """As an export in half the bytes: what comes back has lost the rest, and shows the same."""
    model._register_state_dict_hook(
        lambda _, found, *__: found.update(
            {name: value.bfloat16() for name, value in found.items()}
        )
    )


def summing(model: torch.nn.Module) -> None:
    """One entry is computed from the others, which are the module's own memory."""
    model._register_state_dict_hook(
        lambda _, found, *__: found.update(total=found["0.weight"].sum())
    )


def _with(hook: Callable[[torch.nn.Module], None]) -> torch.nn.Module:
    model = Layers()
    hook(model)
    return model


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "casts": lambda: _with(casting),
    "sums": lambda: _with(summing),
    "renamed": Renamed,
}


def within(manager: Manager, phase: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if phase is None else manager.phase(phase)


def scramble(manager: Manager, model: torch.nn.Module) -> None:
    with manager.phase("train"), torch.no_grad():
        for index, value in enumerate([*model.parameters(), *model.buffers()]):
            value.copy_(torch.full_like(value, float(index)))


def own(model: Any) -> dict[str, torch.Tensor]:
    """The values themselves, past every hook; on the device."""
    found = {
        name: value.detach().clone()
        for name, value in [*model.named_parameters(), *model.named_buffers()]
    }
    return {**found, "scale": model.scale.clone()}


@pytest.mark.parametrize(
    ("kind", "phase"),
    [("casts", "train"), ("sums", "restore"), ("renamed", "checkpoint"), ("renamed", None)],
)
def test_what_shows_copies_is_restored_in_every_state(
    kind: str, phase: str | None, tmp_path: Path
) -> None:
    model = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = registered(model, optimizer)
    shown = copy.deepcopy(dict(model.state_dict()))
    with manager.phase("log_prob"):
        wanted = own(model)
    if kind == "casts":
        wanted = {
            name: value if name == "scale" else value.bfloat16().float()
            for name, value in wanted.items()
        }
    checkpoint.save(manager, tmp_path)
    scramble(manager, model)
    held, objects = (
        manager.handles["actor"].state_dict(),
        [(id(each), each.data_ptr()) for each in model.parameters()],
    )
    with within(manager, phase):
        checkpoint.load(manager, tmp_path)
    assert_nothing_resident(manager)
    assert_same(dict(model.state_dict()), shown)
    for again in ("log_prob", "train"):
        with manager.phase(again):
            assert_same(own(model), wanted)
        assert [(id(each), each.data_ptr()) for each in model.parameters()] == objects
    manager.check_integrity()
    del held
    with manager.phase("train"):  # the optimizer still steps the module's own parameters
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert not torch.equal(own(model)["0.weight"], wanted["0.weight"])
    assert_nothing_resident(manager)


class Packing(torch.optim.SGD):
    """State of another form in its state dict, and back."""

    fails = False

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if self.fails:
            raise ValueError("half way")


@pytest.mark.parametrize(("fails", "phase"), [(False, None), (True, "restore")])
def test_an_optimizer_with_a_load_of_its_own(
    fails: bool, phase: str | None, tmp_path: Path
) -> None:
    model = Layers()
    optimizer = Packing(model.parameters(), lr=0.1, momentum=0.9)
    manager = registered(model, optimizer)
    handle = manager.handles["actor.optimizer"]
    with manager.phase("train"):
        learn(model, optimizer, width=6)
        optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    checkpoint.save(manager, tmp_path)
    with manager.phase("train"):
        learn(model, optimizer, 1, width=6)
        optimizer.zero_grad()
    weights = copy.deepcopy(dict(model.state_dict()))
    optimizer.fails = fails
    told = pytest.raises(
        CheckpointError,
        match=r"'actor.optimizer' was being loaded by "
        r"its "
        r"own "
        r"code, "
        r"which raised ValueError: half way",
    )
    with told if fails else contextlib.nullcontext(), within(manager, phase):
        checkpoint.load(manager, tmp_path)
    if fails:
        # no other handle is loaded where one cannot be
        assert_same(dict(model.state_dict()), weights)
    else:
        assert_same(handle.state_dict(), saved)
    assert_nothing_resident(manager)
    with manager.phase("train"):
        learn(model, optimizer, 2, width=6)
    manager.check_integrity()


def test_what_needs_the_device_and_does_not_fit_there_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    manager = Manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096), budget_bytes=40_000)
    models = {name: torch.nn.Sequential(torch.nn.Linear(80, 80)) for name in ("actor", "critic")}
    for name, model in models.items():
        summing(model)
        manager.register(name, model, role=name)
        manager.register(f"{name}.optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoint.save(manager, tmp_path)
    saved = {name: copy.deepcopy(dict(model.state_dict())) for name, model in models.items()}
    for name, model in models.items():
        with manager.phase("train", only=[name]), torch.no_grad():
            model[0].weight.zero_()
    with pytest.raises(placement.DeviceMemoryError):
        checkpoint.load(manager, tmp_path)
    for name, model in models.items():
        assert not model.state_dict()["0.weight"].any()
        checkpoint.load(manager, tmp_path, only=[name])  # one after the other
        assert_same(dict(model.state_dict()), saved[name])
    assert_nothing_resident(manager)
