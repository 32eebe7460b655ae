"""TRL's GRPO trainer on two ranks, with DistributedDataParallel, under placement and without."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import placement
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.integrations.test_trl import (
    assert_same,
    grpo_config,
    make,
    placed,
    train,
    train_both,
    trl,
)
from tests.support import huggingface as hf
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.sweep


@contextmanager
def quiet_and_offline(**variables: str) -> Iterator[None]:
    """On a rank, which later tests use too."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as environment:
        warnings.simplefilter("ignore")
        for name, value in {"CI": "1", **variables}.items():  # TRL sends telemetry without CI
            environment.setenv(name, value)
        yield


@on_ranks("two_ranks")
def test_two_ranks(folder: str, tmp_path: Path) -> None:
    """Gradients lie in the reducer's buckets, which leave the device with the model. The ranks
    change phase together."""
    store = dist.PrefixStore("trl", dist.distributed_c10d._get_default_store())
    group = placement.group.StoreGroup(store, dist.get_rank(), dist.get_world_size())
    device = SimulatedDevice(capacity_bytes=16 << 20, chunk_bytes=4096)
    manager = placement.Manager(device=device, group=group, phases=placed.PHASES)
    each: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    each |= {
        "max_steps": 3,
        "save_strategy": "steps",
        "save_steps": 2,
        "ddp_backend": "gloo",
        "ddp_find_unused_parameters": False,
    }
    with quiet_and_offline():
        trainers = train_both(
            folder, tmp_path, lambda: {"eval_dataset": hf.prompts()}, manager, **each
        )
    assert_nothing_resident(manager)  # the reducer's buckets included
    manager.close()
    assert trainers[0].state.global_step == 3
    assert {type(trainer.model_wrapped) for trainer in trainers} == {DistributedDataParallel}


@on_ranks("two_ranks")
def test_two_ranks_without_a_manager_train_twice(folder: str, tmp_path: Path) -> None:
    each = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
    trainers = []
    with quiet_and_offline(PLACEMENT_DEVICE="simulated:16MiB"):
        for cls in (trl.GRPOTrainer, placed.PlacedGRPOTrainer):
            config = grpo_config(tmp_path / cls.__name__, max_steps=1, **each)
            trainers.append(make(cls, config, folder, eval_dataset=hf.prompts()))
            train(trainers[-1])
            trainers[-1].evaluate()
            train(trainers[-1])
    own, ours = trainers
    assert_same(ours, own)
    assert not ours.manager.handles
