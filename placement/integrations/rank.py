"""The manager of one rank, for frameworks that start their ranks themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from placement.core.settings import Settings
from placement.manager import Manager
from placement.registration.handle import Handle

POLICY = "colocated(drop_gradients=True)"
"""The default policy. The frameworks zero all gradients before each step, so that gradients need not move with their model."""


def manager_of_this_rank(**defaults: Any) -> Manager:
    """A manager with the settings of the environment (`PLACEMENT_*`), in the group of all ranks if there are several.

    The ranks are those of `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, which the frameworks set before they start
    torch.distributed.

    Args:
        defaults: keywords of `Manager`, for what the environment does not set.

    Raises:
        ValueError: a setting is invalid, or there are several ranks and one of these variables is not set.
        CoordinatorLost: the store of the ranks does not answer.
    """
    given = {"policy": POLICY, **defaults}
    for name in Settings.from_any(None).model_fields_set:
        given.pop(name, None)  # the environment takes precedence
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "group" not in given:
        from placement.group import from_environment

        given["group"] = from_environment()
    return Manager.from_settings(**given)


def is_read_from_the_host(model: Handle) -> bool:
    """Whether the policy publishes a model from its host copy in the open phase `weight_sync` (`stream_sync=True`).

    Then a state dict has the weights, but the parameters themselves must not be read.
    """
    return not model.external and not model.resident_bytes


@contextmanager
def sync_of_parameters(manager: Manager, model: Handle) -> Iterator[None]:
    """`weight_sync` for a framework that reads the parameters themselves: where the policy leaves them on the host, they are loaded."""
    with manager.phase("weight_sync"):
        if is_read_from_the_host(model):
            with manager.phase("log_prob"):
                yield
        else:
            yield
