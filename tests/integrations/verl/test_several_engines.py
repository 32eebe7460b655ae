"""Several engines of verl in one process, adapters, and engines that FSDP2 places: bit for bit what
they compute without placement."""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.integrations.verl import worker as workers
from tests.integrations.verl.subject import (
    GPU,
    OFF,
    SYNC,
    TRAIN,
    Pair,
    Subject,
    logged,
    lora_of,
    pair,
)
from tests.sharded.training import as_bytes, bytes_of, local_parts
from tests.support.frameworks import needs
from tests.support.ranks import on_ranks

needs("verl")
pytestmark = pytest.mark.sweep


@on_ranks("one_rank")
def test_actor_reference_and_critic_in_one_process(model: Path) -> None:
    """With one manager, in phases that are opened and closed in any order."""
    own = [Subject(each, None) for each in _three(model, False)]
    manager = workers.use_simulated()
    placed = [Subject(each, manager) for each in _three(model, True)]
    roles = {
        "actor": "actor",
        "actor.optimizer": "actor",
        "ref": "ref",
        "critic": "critic",
        "critic.optimizer": "critic",
    }
    assert {name: (handle.role, handle.external) for name, handle in manager.handles.items()} == {
        name: (r, False) for name, r in roles.items()
    }
    for three, pinning in ((own, workers.unpinned()), (placed, contextlib.nullcontext())):
        with pinning:
            _two_steps(*three)
    away = dict.fromkeys(roles, OFF)
    assert {subject.engine._role: subject.seen.states for subject in placed} == {
        "actor": {
            "infer": {**away, "actor": GPU},
            "train": {**away, "actor": TRAIN, "actor.optimizer": TRAIN},
            "publish": {**away, "actor": SYNC},
        },
        "ref": {"infer": {**away, "ref": GPU}},
        "critic": {
            "infer": {**away, "critic": GPU},
            "train": {**away, "critic": TRAIN, "critic.optimizer": TRAIN},
        },
    }
    actor, ref, critic = placed

    def present() -> list[str]:
        return [name for name, state in actor.states().items() if state != OFF]

    orders = []
    weights, _ = actor.engine.get_per_tensor_param()
    with ref.engine.eval_mode():
        orders.append(present())
        for _ in weights:  # ends inside the other's phase, which goes on
            pass
        orders.append(present())
        entered = critic.engine.train_mode()
        entered.__enter__()
        orders.append(present())
    orders.append(present())
    with actor.engine.train_mode():
        orders.append(present())
        entered.__exit__(None, None, None)
        orders.append(present())
        # verl's own eval mode would take the model away from the training around it
        with actor.engine.eval_mode():
            orders.append(present())
        orders.append(present())
    orders.append(present())
    actors, critics = ["actor", "actor.optimizer"], ["critic", "critic.optimizer"]
    assert orders == [
        ["actor", "ref"],
        ["ref"],
        ["ref", *critics],
        critics,
        [*actors, *critics],
        actors,
        ["actor"],
        actors,
        [],
    ]
    for mine, theirs in zip(placed, own, strict=True):
        with workers.unpinned():
            theirs.infer(9)
        mine.infer(9)
        Pair(theirs, mine).same()
    for mine in placed:
        mine.check()


def _two_steps(actor: Subject, ref: Subject, critic: Subject) -> None:
    for seed in range(2):
        actor.infer(seed)
        ref.infer(seed)
        critic.infer(seed)
        critic.train(seed)
        actor.train(seed)
        actor.publish()


def _three(model: Path, placed: bool) -> list[Any]:
    build = functools.partial(workers.build, model, placed=placed)
    return [build(), build(forward_only=True), build(model_type="value_model")]


def lora(model: Path, keywords: dict[str, Any], merge: bool) -> None:
    """Steps with LoRA, and what is published of it: merged, or the base once and the adapters
    alone."""
    _, placed = both = pair(model, lora=lora_of(merge=merge), **keywords)
    for seed in range(2):
        both.train(seed)
        both.infer(seed)
        if not merge and not seed:
            both.publish(base_sync_done=False)
        both.publish(base_sync_done=True)
        if not merge:
            layered = {"base_sync_done": True, "layered_summon": True}
            both.publish(**layered)
        if merge:  # given up half-way: what was merged is undone before the model leaves
            for subject in both:
                weights, _ = subject.engine.get_per_tensor_param()
                next(weights)
                weights.close()
            placed.check()
    both.same()
    assert len(placed.publish(base_sync_done=True)) == (27 if merge else 28)
    assert placed.seen.states["publish"]["actor"] == SYNC


@pytest.mark.parametrize(
    ("merge", "keywords"),
    [(False, {}), (True, {"offload_policy": True})],
    ids=["unmerged", "merged, left to FSDP2"],
)
@on_ranks("one_rank")
def test_lora(model: Path, merge: bool, keywords: dict[str, Any]) -> None:
    needs("peft")
    lora(model, keywords, merge)


@on_ranks("one_rank")
def test_a_base_that_verl_moves_to_the_host_and_back(model: Path) -> None:
    """verl publishes a LoRA base from the CPU. On an accelerator both ways replace the memory of
    the model, and so they do here."""
    both = pair(model, lora=lora_of(merge=False))
    published = []
    for subject in both:
        subject.train(0)
        with mock.patch.object(
            torch.nn.Module, "to", lambda module, *_, **__: module._apply(torch.clone)
        ):
            published.append(subject.publish(base_sync_done=False))
        subject.train(1)
        subject.infer(2)
    assert published[0] == published[1]
    both.same()
    assert len(published[1]) == 27


def left_to_fsdp2(model: Path, keywords: dict[str, Any]) -> dict[str, Any]:
    """FSDP2's CPUOffloadPolicy places the model. What placement says of it in every state, and that
    nothing of it has moved or changed."""
    with logged() as records:
        own, placed = both = pair(model, offload_policy=True, **keywords)
    handles = placed.manager.handles
    name = placed.engine._role
    handle, found = (
        handles[name],
        {
            "external": {each.name: each.external_reason for each in handles.values()},
            "log": records,
        },
    )
    places = _places(placed)
    infos = handle.weights_info()
    for seed in range(2):
        for subject in both:
            subject.infer(seed)
            if not keywords.get("forward_only"):
                subject.train(seed)
        both.publish()
    placed.worker.to("device")  # verl's own `to` fails on a GPU here
    found["by hand"] = placed.states()
    placed.worker.to("cpu")
    placed.check()
    for phase in (None, "log_prob", "train", "weight_sync"):
        with (
            contextlib.nullcontext()
            if phase is None
            else placed.manager.phase(phase, only=[handle])
        ):
            assert handle.weights_info() == infos
            values = handle.state_dict()
            assert bytes_of(values) == bytes_of(own.engine.module.state_dict())
            if phase == "weight_sync" and name == "actor":
                published = {
                    label: as_bytes(value) for bucket in handle.weights() for label, value in bucket
                }
                assert published == own.publish()
                assert published.keys() == {info.name for info in infos}
    assert _places(placed) == places
    assert all(each.counters.loaded_bytes == each.host_bytes == 0 for each in handles.values())
    assert placed.manager.audit().ok
    both.same()
    found["states"] = placed.seen.states
    return found


def _places(subject: Subject) -> dict[str, tuple[torch.device, int]]:
    values = {
        name: part
        for name, value in subject.engine.module.named_parameters()
        for _, part in local_parts(value)
    }
    return {name: (part.device, part.data_ptr()) for name, part in values.items()}


@pytest.mark.parametrize(
    "offload",
    [(True, True), (False, False)],
    ids=["both flags", "no flag"],
)
@on_ranks("one_rank")
def test_what_fsdp2_places_is_tracked_and_never_moved(
    model: Path, offload: tuple[bool, bool]
) -> None:
    """verl#5995: its sync crashed on such a model, which `to` had left half-moved."""
    found = left_to_fsdp2(model, {"offload": offload})
    assert found["external"] == dict.fromkeys(
        ("actor", "actor.optimizer"), "FSDP2's CPUOffloadPolicy keeps its parameters on the CPU"
    )
    said = (
        "placement tracks 'actor', which FSDP2's CPUOffloadPolicy places: offload_policy=True "
        "(PlacedFSDPEngineWithLMHead)"
    )
    assert found["log"] == [said]
    assert found["by hand"] == {"actor": TRAIN, "actor.optimizer": TRAIN}
    assert found["states"] == {
        "infer": {"actor": GPU, "actor.optimizer": OFF},
        "train": {"actor": TRAIN, "actor.optimizer": TRAIN},
        "publish": {"actor": SYNC, "actor.optimizer": OFF},
    }


@pytest.mark.parametrize(
    ("keywords", "role"),
    [
        ({"policy": "colocated('streamed', stream_sync=True)"}, "actor"),
        ({"policy": "resident"}, "actor"),
        ({"forward_only": True, "offload": (False, False)}, "ref"),
        ({"model_type": "value_model"}, "critic"),
    ],
    ids=["streamed", "resident", "reference without flags", "critic"],
)
@on_ranks("one_rank")
def test_no_policy_moves_what_fsdp2_places_and_no_role_is_moved(
    model: Path, keywords: dict[str, Any], role: str
) -> None:
    found = left_to_fsdp2(model, keywords)
    assert list(found["external"]) == ([role] if role == "ref" else [role, f"{role}.optimizer"])
    assert found["states"]["infer"][role] == GPU
