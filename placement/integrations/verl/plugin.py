"""The plugin that verl loads at the end of `import verl`: it registers placement's engines as soon
as verl imports its own.

Importing verl's engines earlier would choose verl's platform before other plugins have registered
theirs, and verl swallows an error in a plugin (`verl/__init__.py` of 0.9.1 logs it at DEBUG). An
error in the import of its engines is raised.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from placement.core.errors import PlacementError
from placement.integrations.verl.placed import logger, register

VENDOR = "placement"


def after_import(name: str, then: Callable[[], None]) -> None:
    """Call `then` at the end of the import of module `name`; at once, if it is imported already.
    The import raises the errors of `then`."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Finds the module where the other finders do, and adds a call to the end of its execution."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)  # else the next line would ask this finder again
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)  # an import that fails may be tried again
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def is_chosen() -> bool:
    """Whether verl will ask for the engines of the vendor `placement`."""
    return os.environ.get("VERL_ENGINE_VENDOR") == VENDOR


def register_engines() -> None:
    """Register placement's engines with verl. If this version lacks what they need, that is an
    error where they were asked for."""
    try:
        register(VENDOR)
    except (ImportError, AttributeError, TypeError, PlacementError) as error:
        if is_chosen():
            raise PlacementError(
                f"VERL_ENGINE_VENDOR=placement, but placement cannot place this verl: {error}"
            ) from error
        logger.debug("placement's engines are not available to verl: %s", error)
        return
    if is_chosen():
        logger.info(
            "placement is active: param_offload and optimizer_offload of verl's fsdp and fsdp2 "
            "engines mean that placement places"
        )


def place_rollouts() -> None:
    """Let verl use the adapters of vLLM and SGLang that report the rollout's memory to placement,
    where placement was asked for."""
    if is_chosen():
        from placement.integrations.verl.rollout import PlacedRollout, PlacedSglang, place

        for name, kind in (("vllm", PlacedRollout), ("sglang", PlacedSglang)):
            try:
                place(name, kind)
            except (AttributeError, KeyError) as error:
                logger.info(
                    "a rollout by %s is no handle of placement: this verl has no adapter under %s",
                    name,
                    error,
                )


after_import("verl.workers.engine", register_engines)
after_import("verl.workers.rollout.base", place_rollouts)
