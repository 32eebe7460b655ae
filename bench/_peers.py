"""Import the peers' own code from their installed packages, without dependencies that moving bytes
does not need."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def _bare(package: str, attributes: Mapping[str, Any] | None = None) -> None:
    """Let `import package.x` find x without running the package's `__init__`, which imports a whole
    framework."""
    if package in sys.modules:
        return
    top, *rest = package.split(".")
    if top in sys.modules:
        folders = [str(Path(folder, *rest)) for folder in sys.modules[top].__path__]
    else:
        spec = importlib.util.find_spec(top)
        if spec is None or spec.submodule_search_locations is None:
            raise ModuleNotFoundError(f"No module named {top!r}", name=top)
        folders = list(spec.submodule_search_locations)
    module = ModuleType(package)
    module.__path__ = folders
    # other code checks whether the package is there
    module.__spec__ = ModuleSpec(package, None, is_package=True)
    for name, value in (attributes or {}).items():
        setattr(module, name, value)
    sys.modules[package] = module


def _unless_installed(name: str, attributes: Mapping[str, Any]) -> None:
    """Stand in for a module that the peer imports at its top, but does not use for a move."""
    try:
        importlib.import_module(name)
    except Exception:  # a package of another version may fail in other ways than ImportError
        _bare_alone(name, attributes)


def _bare_alone(name: str, attributes: Mapping[str, Any]) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        if path not in sys.modules:
            sys.modules[path] = ModuleType(path)
    for key, value in attributes.items():
        setattr(sys.modules[name], key, value)


def deepspeed() -> Any:
    """`deepspeed.runtime.zero.offload_states`."""
    for package in ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.zero"):
        _bare(package)
    _bare("deepspeed.utils", {"logger": logging.getLogger("DeepSpeed")})
    return importlib.import_module("deepspeed.runtime.zero.offload_states")


def deepspeed_cpu_adam() -> Any:
    """DeepSpeed's `DeepSpeedCPUAdam`, whose C++ code is compiled at its first use. It needs the
    whole package."""
    if not hasattr(sys.modules.get("deepspeed"), "ops"):
        for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
            del sys.modules[name]  # stand-ins of `deepspeed` above
    return importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam


def megatron_hybrid() -> Any:
    """Megatron's `HybridDeviceOptimizer`. Its streams need a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("HybridDeviceOptimizer needs a GPU")
    return importlib.import_module("megatron.core.optimizer.cpu_offloading").HybridDeviceOptimizer


def verl() -> Any:
    """`verl.utils.fsdp_utils`."""
    for package in ("verl", "verl.utils"):
        _bare(package)
    _unless_installed(
        "verl.utils.model", {"check_exclude_modules": None, "check_target_modules": None}
    )
    _unless_installed("peft.utils.save_and_load", {"get_peft_model_state_dict": None})
    helpers: Any = importlib.import_module("verl.utils.fsdp_utils")
    if not torch.cuda.is_available():
        # its platform layer knows only accelerators
        helpers.get_device_id = lambda: torch.device("cpu")
    return helpers


def accelerate() -> Any:
    return importlib.import_module("accelerate")


def torch_memory_saver() -> Any:
    """The process's only saver, in the mode that needs no LD_PRELOAD. It needs a GPU."""
    if not torch.cuda.is_available():
        raise RuntimeError("torch_memory_saver needs a GPU")
    saver = importlib.import_module("torch_memory_saver").torch_memory_saver
    if saver._impl is None:
        saver.hook_mode = "torch"
    return saver


PEERS: dict[str, Callable[[], Any]] = {
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "torch_memory_saver": torch_memory_saver,
    "verl": verl,
}


def check(names: Sequence[str] = tuple(PEERS)) -> dict[str, str]:
    """Import each peer. Returns "ok" or the problem for each."""
    found = {}
    for name in names:
        try:
            PEERS[name]()
            found[name] = "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
