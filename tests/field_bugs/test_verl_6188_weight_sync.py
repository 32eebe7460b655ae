"""verl 6188 (issue 5995): publishing an FSDP2 model under CPUOffloadPolicy, whose shards torch keeps on the CPU.

`model.to(device)` changed the device of the DTensors and not of what they wrap, and the `state_dict()` after it raised "Attempted to set
the storage of a tensor on device cpu to a storage on different device" (pytorch#192441); the path with merged LoRA weights did so again
after the first fix. Here such a handle is external: it is never moved, and each weight is read from its local part into memory of our
own, then gathered there. Real FSDP2 and PEFT; on a CPU both devices are one, so what is checked is that neither call is ever made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor

from placement.testing import assert_nothing_resident
from tests.sharded.publish_worker import BUILDS, Model, assert_same, manager_of, read, tokens
from tests.sharded.test_publish_lora import lora, merged_by_peft, peft, quietly, randomize, saved_by_peft
from tests.support.ranks import Ranks


def _fail(*_: Any, **__: Any) -> Any:
    raise AssertionError("the module was moved or exported")


@contextmanager
def forbidden(module: torch.nn.Module) -> Iterator[None]:
    """Every way of moving a module, or of exporting it, fails."""
    names = ("to", "cpu", "cuda", "state_dict", "_apply")
    for part in module.modules():
        vars(part).update(dict.fromkeys(names, _fail))
    try:
        with pytest.raises(AssertionError, match="moved or exported"):
            module.state_dict()
        yield
    finally:
        for part in module.modules():
            for name in names:
                del vars(part)[name]


def _where(module: torch.nn.Module) -> list[tuple[int, int, str]]:
    """Identity, address and device of every shard."""
    shards = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    return [(id(each), each.to_local().data_ptr(), str(each.device)) for each in shards]


def _plain(streams: bool) -> None:
    module = BUILDS["fsdp2_external"](Model())
    adam = torch.optim.AdamW(module.parameters(), lr=1e-2)
    manager = manager_of(streams=streams)
    actor = manager.register("actor", module, role="actor")
    manager.register("adam", adam)
    assert actor.external
    for _ in range(3):
        with manager.phase("train") as phase:
            module(tokens()).square().nanmean().backward()
            adam.step()
            adam.zero_grad()
            full = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
            full = {name: value.clone() for name, value in full.items()}
            phase.switch("weight_sync")
            before = _where(module)
            with forbidden(module):
                found = read(actor, bucket_bytes=2000)
            assert _where(module) == before
        assert_same(found, {name: full[name] for name in found})
        assert_nothing_resident(manager)


@pytest.mark.parametrize("streams", [False, True], ids=["resident", "streamed"])
def test_an_external_model_is_published_between_training_steps(two_ranks: Ranks, streams: bool) -> None:
    two_ranks.run(_plain, streams)


def _with_adapters() -> None:
    base = Model()
    fixed = list(base.parameters())
    with quietly():
        whole = randomize(peft.get_peft_model(base, lora(target_modules=["up", "down"], modules_to_save=["norm"])), fixed=fixed)
        wanted = {"merged": merged_by_peft(whole), "separate": saved_by_peft(whole)}
        module = whole
        BUILDS["fsdp2_external"](module.base_model.model)
    manager = manager_of()
    actor = manager.register("actor", module, role="actor")
    assert actor.external
    with manager.phase("log_prob") as phase:
        with torch.no_grad():
            answer = module(tokens())
        phase.switch("weight_sync")
        before = _where(module)
        for adapters, values in wanted.items():
            with forbidden(module):
                found = read(actor, adapters=adapters)
            assert_same(found, values)
        assert _where(module) == before
        phase.switch("log_prob")
        with torch.no_grad():
            assert module(tokens()).view(torch.uint8).equal(answer.view(torch.uint8))
    assert not any(layer.merged_adapters for layer in module.modules() if hasattr(layer, "merged_adapters"))
    assert_nothing_resident(manager)


def test_merged_and_separate_adapters_of_an_external_model(two_ranks: Ranks) -> None:
    two_ranks.run(_with_adapters)
