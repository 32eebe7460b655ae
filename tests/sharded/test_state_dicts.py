"""State dicts of sharded and wrapped modules: readable in every state, and following the handle for
as long as they are held."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

from placement import Manager
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.sharded.checkpoint_worker import Program, build
from tests.sharded.training import bytes_of, local_parts
from tests.support.ranks import on_ranks
from tests.support.sweeps import few


def live(program: Program) -> dict[str, bytes]:
    """The same of what the objects have, read on the device."""
    with program.manager.phase("restore"):
        model = dict(program.model.state_dict(keep_vars=True))  # the parameters themselves
        stepped = [each for group in program.optimizer.param_groups for each in group["params"]]
        state = {index: program.optimizer.state[each] for index, each in enumerate(stepped)}
        return bytes_of({"model": model, "state": state})


class Gathering(torch.nn.Linear):
    """Extra state of a sharded layer: what it gathers from all ranks, and what it computes of its
    own shard."""

    def get_extra_state(self) -> dict[str, Any]:
        weight: Any = self.weight
        return {
            "whole": weight.full_tensor().sum(),
            "own": weight.to_local().double(),
            "norm": weight.norm().full_tensor(),
        }

    def set_extra_state(self, state: Any) -> None:
        pass


@on_ranks("two_ranks")
def test_what_hooks_compute_of_sharded_parameters() -> None:
    """What hooks compute of sharded parameters while these are offloaded is what they compute on
    the device."""
    model: Any = torch.nn.Sequential(Gathering(7, 5), torch.nn.Linear(5, 3))
    model[1]._register_state_dict_hook(
        lambda _, found, prefix, __: found.update(
            {prefix + "weight": found[prefix + "weight"].bfloat16()}
        )
    )
    model._register_state_dict_hook(
        lambda _, found, *__: found.update(
            total=sum(p.to_local().sum() for p in model.parameters())
        )
    )
    for part in (*model, model):
        fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_state_dict_post_hook(
        lambda _, found: tree_map_only(torch.Tensor, lambda tensor: tensor * 2, found)
    )
    manager = Manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))
    handle = manager.register("actor", model, role="actor")
    adam = manager.register("actor.optimizer", optimizer)
    with manager.phase("train"):
        model(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted = bytes_of(
            [model.state_dict(), model[1].state_dict(), optimizer.state_dict()["state"]]
        )
        assert "0.0._extra_state.whole" in wanted
    assert (
        bytes_of([handle.state_dict(), model[1].state_dict(), adam.state_dict()["state"]]) == wanted
    )
    assert_nothing_resident(manager)


@pytest.mark.parametrize("kind", few(["fsdp2", "tp", "lora"], "fsdp2"))
@on_ranks("two_ranks")
def test_a_held_state_dict_follows_a_sharded_handle(kind: str) -> None:
    """State dicts taken in one state and held through all others: the same objects, with what the
    object has by then."""
    program = build(kind)
    manager = program.manager
    program.train(1)
    for taken in (None, "log_prob", "train"):
        if taken is None:
            shown = {
                "model": program.model.state_dict(),
                "state": program.optimizer.state_dict()["state"],
            }
        else:
            with manager.phase(taken):
                shown = {
                    "model": program.model.state_dict(),
                    "state": program.optimizer.state_dict()["state"],
                }
        objects = [id(part) for _, value in _tensors(shown) for _, part in local_parts(value)]
        for number in (2, 3):
            wanted = live(program)
            assert bytes_of(shown) == wanted, f"{kind}, taken in {taken}"
            assert_nothing_resident(manager)
            with manager.phase("log_prob"):
                assert bytes_of(shown) == wanted
            program.train(number)
            assert live(program) != wanted
        assert [
            id(part) for _, value in _tensors(shown) for _, part in local_parts(value)
        ] == objects
        file = io.BytesIO()
        torch.save(shown, file)
        file.seek(0)
        assert bytes_of(torch.load(file, weights_only=False)) == live(program)
        if kind == "fsdp2" and dist.get_world_size() > 1:
            assert any(
                part.numel() == 0
                for _, value in _tensors(shown["model"])
                for _, part in local_parts(value)
            ) == (dist.get_rank() == 1)
    last = live(program)
    manager.close()
    assert bytes_of(shown) == last  # from here on it is a copy
    program.manager = None
    program.train(4)
    assert bytes_of(shown) == last


def _tensors(values: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(values, torch.Tensor):
        return [("", values)]
    return (
        [found for value in values.values() for found in _tensors(value)]
        if isinstance(values, dict)
        else []
    )
