"""Checkpoints in torch.distributed.checkpoint's format. A handle is saved and loaded where its values are, without moving it.

Values that only an object's own code can load (extra state, a state dict that shows copies, an optimizer with a `load_state_dict` of its
own) need the object on the device: `load` opens a phase `restore` for them.

Save or load everything at once:

    placement.checkpoint.save(manager, path)
    future = placement.checkpoint.async_save(manager, path)      # saves the values of this moment while training goes on
    placement.checkpoint.load(manager, path)

Or put handles into a dict of your own, beside values that placement does not know (a scheduler, random numbers, the step):

    state = {
        "model": placement.checkpoint.Model(actor),
        "optimizer": placement.checkpoint.Optimizer(adam),
        "scheduler": scheduler,                                  # any object with state_dict and load_state_dict
        "random": {"torch": torch.get_rng_state()},
        "step": step,
    }
    torch.distributed.checkpoint.save(state, checkpoint_id=path)
    torch.distributed.checkpoint.load(state, checkpoint_id=path, planner=placement.checkpoint.LoadPlanner())
    torch.set_rng_state(state["random"]["torch"])

Parameters have the names that torch's `get_model_state_dict` and `get_optimizer_state_dict` give them. So the files can be read and
written without placement, and on another number of ranks.
"""

from __future__ import annotations

from placement.checkpoint.files import LoadPlanner, async_save, load, save
from placement.checkpoint.optimizer import Optimizer
from placement.checkpoint.parts import Model

__all__ = ["LoadPlanner", "Model", "Optimizer", "async_save", "load", "save"]
