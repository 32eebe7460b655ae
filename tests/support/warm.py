"""What the process that others are forked from has done once for all of them: torch and everything
that a first manager imports.

It has a single thread and no CUDA context, because neither lives through a fork.
"""

from __future__ import annotations

import gc
import os

# read once; a store that dies is what is wanted here, and no stack trace
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
# a step of torch's optimizers asks CUDA, where there is one
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

from placement import Manager
from placement.testing import SimulatedDevice

torch.set_num_threads(1)


def _warm_up() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    manager = Manager(device=SimulatedDevice(64 * 4096, chunk_bytes=4096))
    manager.register("actor", model, role="actor")
    manager.register("adam", optimizer)
    manager.enter("train")
    for parameter in model.parameters():
        # no backward: autograd's own threads would not live through a fork
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    manager.leave()
    manager.close()


_warm_up()
gc.enable()  # again
gc.collect()
gc.freeze()  # else the first collection in each child copies every page
