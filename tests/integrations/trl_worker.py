"""TRL's trainers under DistributedDataParallel, on each rank of test_trl_runs.py."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch.distributed as dist

import placement
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.integrations.trl_jobs import assert_same, grpo_config, make, placed, trl
from tests.support import huggingface as hf


def trains_alike(folder: str, out: str) -> tuple[int, list[str]]:
    """Train with TRL's own trainer and with the placed one, whose ranks change phase together, and compare.

    Returns:
        The number of optimizer steps, and the classes of what the trainers have made of the model.
    """
    os.environ["CI"] = "1"  # TRL sends telemetry otherwise
    warnings.simplefilter("ignore")
    store = dist.PrefixStore("trl", dist.distributed_c10d._get_default_store())
    group = placement.group.StoreGroup(store, dist.get_rank(), dist.get_world_size())
    device = SimulatedDevice(capacity_bytes=16 << 20, chunk_bytes=4096)
    manager = placement.Manager(device=device, group=group, phases=placed.PHASES)
    trainers = []
    for name, cls, keywords in (("own", trl.GRPOTrainer, {}), ("ours", placed.PlacedGRPOTrainer, {"manager": manager})):
        each = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2}
        ddp = {"ddp_backend": "gloo", "ddp_find_unused_parameters": False}
        config = grpo_config(Path(out, name), max_steps=3, save_strategy="steps", save_steps=2, **each, **ddp)
        trainers.append(make(cls, config, folder, eval_dataset=hf.prompts(), **keywords))
        trainers[-1].train()
    own, ours = trainers
    assert_same(ours, own)
    assert_nothing_resident(manager)  # the reducer's buckets included
    manager.close()
    return ours.state.global_step, [type(trainer.model_wrapped).__name__ for trainer in trainers]
