"""The plugin that verl loads at the end of `import verl`: it registers placement's engines as soon as verl imports its own.

Importing verl's engines earlier would choose verl's platform before other plugins have registered theirs, and an error in a plugin is
swallowed by verl (`verl/__init__.py` of 0.9.1 logs it at DEBUG), while an error in the import of its engines is not.
"""

from __future__ import annotations

import os

from placement.core.errors import PlacementError
from placement.integrations.verl.after_import import after_import
from placement.integrations.verl.log import logger

VENDOR = "placement"


def is_chosen() -> bool:
    """Whether verl will ask for the engines of the vendor `placement`."""
    return os.environ.get("VERL_ENGINE_VENDOR") == VENDOR


def register_engines() -> None:
    """Register placement's engines with verl.

    Raises:
        PlacementError: this version of verl lacks something that they need, and they were asked for.
    """
    try:
        from placement.integrations.verl import engines

        names = engines.register(VENDOR)
    except (ImportError, AttributeError, TypeError, PlacementError) as error:
        if is_chosen():
            raise PlacementError(f"VERL_ENGINE_VENDOR=placement, but placement cannot place this verl: {error}") from error
        logger.debug("placement's engines are not available to verl: %s", error)
        return
    if is_chosen():
        logger.info("placement is active: param_offload and optimizer_offload of verl's %s engines mean that placement places", names)


def place_rollouts() -> None:
    """Let verl use the adapters of vLLM and SGLang that tell placement what the rollout holds, where placement was asked for."""
    if is_chosen():
        from placement.integrations.verl.rollout import PlacedRollout, place
        from placement.integrations.verl.sglang import PlacedSglang

        for name, kind in (("vllm", PlacedRollout), ("sglang", PlacedSglang)):
            try:
                place(name, kind)
            except (AttributeError, KeyError) as error:
                logger.info("a rollout by %s is no handle of placement: this verl has no adapter under %s", name, error)


after_import("verl.workers.engine", register_engines)
after_import("verl.workers.rollout.base", place_rollouts)
