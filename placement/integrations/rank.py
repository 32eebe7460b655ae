"""The manager of one rank from the environment, and what several integrations ask of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from placement.core.errors import RegistrationError
from placement.core.settings import Settings
from placement.core.states import HandleView, State, View
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


def manager_with_phases(phases: Mapping[str, Sequence[str] | Mapping[str, State | str]]) -> Manager:
    """A manager of this process alone with the settings of the environment. `PLACEMENT_PHASES` adds to `phases` and takes precedence.

    Raises:
        ValueError: a setting is invalid.
    """
    return Manager.from_settings(phases={**phases, **Settings.from_any(None).phases})


def refuse_steps_apart(manager: Manager, name: str, framework: str) -> None:
    """Refuse a policy by which the optimizer cannot step in `train`, for a framework that has no hook for a phase around its step.

    Args:
        name: the model's name and role; its optimizer is `name.optimizer`.
        framework: the framework's name, for the message.

    Raises:
        RegistrationError: the policy is such a one: `optimizer_in="optimizer_step"`.
    """
    optimizer = f"{name}.optimizer"
    model = HandleView(name=name, kind="module", role=name, state=State.CPU_OFFLOADED, num_bytes=1)
    stepping = HandleView(name=optimizer, kind="optimizer", role=name, owners=(name,), state=State.CPU_OFFLOADED, num_bytes=1)
    handles = {name: model, optimizer: stepping}
    policy, settings = manager.policy, manager.settings
    plan = policy.plan(View(phase="train", handles=handles, budget_bytes=2, worker_role=settings.worker_role, phases=settings.phases))
    if plan[name] is State.TRAINING and plan[optimizer] is not State.TRAINING:
        raise RegistrationError(
            f"{framework} steps in the phase 'train', where the policy {policy.name!r} leaves {optimizer!r} out, and has no hook for "
            "another phase: write optimizer_in='train', or 'streamed' to keep the optimizer on the host (\"colocated('streamed')\")"
        )


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
