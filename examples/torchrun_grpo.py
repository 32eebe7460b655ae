"""The demo's GRPO loop on several ranks that change phase together, with the group of a torchrun
job.

torchrun --nproc-per-node 2 examples/torchrun_grpo.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import placement
from placement.cli.demo import digest_of
from placement.testing import SimulatedDevice, assert_nothing_resident

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples._tiny import data_parallel


def main() -> None:
    """Run three steps. After each step every device is empty; at the end all ranks have the same
    weights."""
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    device = (
        f"cuda:{os.environ['LOCAL_RANK']}" if cuda else SimulatedDevice(capacity_bytes=16 << 20)
    )
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    manager = placement.Manager(
        device=device, group=placement.group.from_environment(deadline_seconds=60)
    )
    worker = data_parallel(seed=0, device=manager.device.torch_device, steps=3)

    for number, result in enumerate(worker.train(manager), start=1):
        assert_nothing_resident(manager)
        print(
            f"rank {dist.get_rank()} step {number}: loss {result.loss:+.4f} reward "
            f"{result.reward:.3f}, 0 bytes left on the device"
        )
    print(
        f"rank {dist.get_rank()} weights {digest_of(manager.handles['actor'].state_dict())[:16]}",
        flush=True,
    )
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
