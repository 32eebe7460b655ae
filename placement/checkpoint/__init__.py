"""Checkpoints in torch.distributed.checkpoint's format. A handle is saved and loaded where its
values are, without moving it.

Some values can be loaded only by an object's own code: extra state, a state dict that shows copies,
an optimizer with a `load_state_dict` of its own. They need the object on the device: `load` opens a
phase `restore` for them.

`save` and `load` take everything at once; `Model` and `Optimizer` put handles into a dict of your
own (docs/worker.md shows both). Parameters have the names that torch's `get_model_state_dict` and
`get_optimizer_state_dict` give them. So the files can be read and written without placement, and on
another number of ranks.
"""

from __future__ import annotations

from placement.checkpoint.files import LoadPlanner, async_save, load, save
from placement.checkpoint.optimizer import Optimizer
from placement.checkpoint.parts import Model

__all__ = ["LoadPlanner", "Model", "Optimizer", "async_save", "load", "save"]
