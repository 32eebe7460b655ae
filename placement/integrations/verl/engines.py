"""The engines that verl gets from placement: verl's own classes with `PlacedEngine` before them."""

from __future__ import annotations

import inspect

import verl
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from placement.core.errors import PlacementError
from placement.integrations.verl.placed import PlacedEngine

_NEEDED = ("_build_fsdp_module", *(name for name in vars(PlacedEngine) if not name.startswith("_")))


def register(vendor: str) -> str:
    """Register the engines under a vendor's name and return what was registered, as text.

    Raises:
        PlacementError: verl's engines lack what is overridden here, or its registry knows no vendors.
    """
    engines = {"language_model": FSDPEngineWithLMHead, "value_model": FSDPEngineWithValueHead}
    missing = [f"{base.__name__}.{name}" for base in engines.values() for name in _NEEDED if not hasattr(base, name)]
    if "vendor" not in inspect.signature(EngineRegistry.register).parameters:
        missing.append("EngineRegistry.register(vendor=...)")
    if missing:
        raise PlacementError(f"verl {verl.__version__} lacks {', '.join(missing)}; verl 0.9.1 has them")
    for model_type, base in engines.items():
        placed = type(f"Placed{base.__name__}", (PlacedEngine, base), {"__doc__": f"{base.__name__}, placed by placement."})
        EngineRegistry.register(model_type, ["fsdp", "fsdp2"], ["cuda", "npu"], vendor)(placed)
    return "fsdp and fsdp2"
