"""NeMo-RL's policy workers under placement: they register their model once, and NeMo-RL's own hooks declare the phases.

In a copy of NeMo-RL's run_grpo.py:

    from placement.integrations.nemo_rl import policy_factory

    setup(config, tokenizer, dataset, val_dataset, policy_factory=policy_factory)

Elsewhere, `Policy(..., worker_extension_cls_fqn=worker_for(config))`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from placement.core.errors import RegistrationError
from placement.integrations.rank import is_read_from_the_host, manager_of_this_rank, refuse_steps_apart, sync_of_parameters
from placement.integrations.turns import Turns
from placement.manager import Manager

if TYPE_CHECKING:

    class _PolicyWorker:
        """The part of NeMo-RL's policy workers that the mixin uses."""

        model: torch.nn.Module

        def __init__(self, config: Mapping[str, Any], *args: Any, **kwargs: Any) -> None: ...
        def prepare_for_training(self, *args: Any, **kwargs: Any) -> None: ...
        def finish_training(self, *args: Any, **kwargs: Any) -> None: ...
        def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None: ...
        def finish_inference(self) -> None: ...
        def offload_before_refit(self) -> None: ...
        def offload_after_refit(self) -> None: ...
        def prepare_refit_info(self) -> Any: ...
        def stream_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> None: ...
        def stream_weights_via_http(self, *args: Any, **kwargs: Any) -> None: ...
        def broadcast_weights_for_collective(self, *args: Any, **kwargs: Any) -> None: ...
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None: ...
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> None: ...
        def move_model(self, model: torch.nn.Module, device: str, move_params: bool = True, move_grads: bool = True) -> torch.nn.Module: ...
        def move_optimizer(self, device: str) -> None: ...
        def move_to_device(self, model: torch.nn.Module, device: str | torch.device) -> torch.nn.Module: ...
        def move_buffer_to_device(self, model: torch.nn.Module, device: str | torch.device) -> torch.nn.Module: ...
        def move_optimizer_to_device(self, device: str | torch.device) -> None: ...

else:
    _PolicyWorker = object

_WORKERS = {
    "DTensorPolicyWorker": "dtensor_policy_worker",
    "DTensorPolicyWorkerV2": "dtensor_policy_worker_v2",
    "MegatronPolicyWorker": "megatron_policy_worker",
}
"""NeMo-RL's policy workers, each with its module in `nemo_rl.models.policy.workers`. Here they have the same names."""


class PlacedPolicyWorker(_PolicyWorker):
    """A mixin for NeMo-RL's `...PolicyWorkerImpl`: it comes before one of them among the bases. It reads `model` and `optimizer`.

    | hook | phase that begins |
    |---|---|
    | `prepare_for_lp_inference` | `log_prob`; `train` goes on if the train buffers are to be kept |
    | `prepare_for_training` | `train` |
    | `offload_before_refit` | `weight_sync` |
    | `offload_after_refit`, `finish_inference`, `finish_training` | none: everything leaves the device |

    NeMo-RL's hooks run as they are, but the methods by which they move the model and the optimizer do nothing for these two. A
    model that its framework places (FSDP2 under `CPUOffloadPolicy`) is moved by NeMo-RL as before.

    Attributes:
        placement: the manager; None until everything is built.
    """

    placement: Manager | None = None
    _turns: Turns | None = None
    """The phase that the last hook began. None until everything is built."""
    _reads_parameters = False
    """Whether the parameters themselves are read in a sync: by Megatron-Bridge. The DTensor workers read a state dict."""
    _is_leaving = False
    """Whether `offload_after_refit` runs, which calls `offload_before_refit`."""

    def make_manager(self) -> Manager:
        """The manager of this process. Override it to give it a device, a policy or a group of your own.

        Raises:
            ValueError: a setting is invalid.
            CoordinatorLost: the store of the ranks does not answer.
        """
        return manager_of_this_rank()

    def __init__(self, config: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """NeMo-RL's worker, then the registration.

        Raises:
            RegistrationError: the model is to generate as well (colocated Megatron generation), the policy has
                `optimizer_in="optimizer_step"`, or the model cannot be registered. In the first case nothing has been built.
            HostMemoryError, DeviceMemoryError: there is not enough memory to register it.
            ValueError, CoordinatorLost: see `make_manager`.
        """
        generation = config.get("generation") or {}
        if generation.get("backend") == "megatron" and (generation.get("colocated") or {}).get("enabled"):
            raise RegistrationError(
                "colocated Megatron generation moves the policy's model itself: generate with vLLM or SGLang, or use NeMo-RL's own worker"
            )
        super().__init__(config, *args, **kwargs)
        self._reads_parameters = bool((config.get("megatron_cfg") or {}).get("enabled"))
        manager = self.make_manager()
        steps = getattr(self, "optimizer", None) is not None
        if steps:
            refuse_steps_apart(manager, "actor", "NeMo-RL")
        manager.register("actor", self.model, role="actor")
        if steps:
            manager.register("actor.optimizer", self.optimizer)  # type: ignore[attr-defined] # a worker that only infers has none
        self.placement, self._turns = manager, Turns(manager)

    # --- the hooks: each begins or ends a phase

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Begin `train`."""
        self._turn_to("train")
        super().prepare_for_training(*args, **kwargs)

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Begin `log_prob`, or stay in `train` where a train step is open (`keep_train_buffers`)."""
        if not (keep_train_buffers and self._open == "train"):
            self._turn_to("log_prob")
        super().prepare_for_lp_inference(keep_train_buffers)

    def offload_before_refit(self) -> None:
        """Begin `weight_sync`, after NeMo-RL has ended its asynchronous checkpoint and dropped its caches."""
        super().offload_before_refit()
        if not self._is_leaving:
            self._turn_to("weight_sync")
            if self.placement is not None and self._reads_parameters and is_read_from_the_host(self.placement.handles["actor"]):
                self._turn_to("log_prob")

    def offload_after_refit(self) -> None:
        """End the open phase."""
        self._is_leaving = True
        try:
            super().offload_after_refit()
        finally:
            self._is_leaving = False
        self._turn_to(None)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """End the open phase."""
        super().finish_training(*args, **kwargs)
        self._turn_to(None)

    def finish_inference(self) -> None:
        """End the open phase."""
        super().finish_inference()
        self._turn_to(None)

    # --- work that no hook announces: in a phase of its own where the open one does not do

    def prepare_refit_info(self) -> Any:
        """NeMo-RL's method, with the weights on the device: it may gather them."""
        with self._in("weight_sync"):
            return super().prepare_refit_info()

    def stream_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> None:
        """NeMo-RL's method, with the weights on the device."""
        with self._in("weight_sync"):
            super().stream_weights_via_ipc_zmq(*args, **kwargs)

    def stream_weights_via_http(self, *args: Any, **kwargs: Any) -> None:
        """NeMo-RL's method, with the weights on the device."""
        with self._in("weight_sync"):
            super().stream_weights_via_http(*args, **kwargs)

    def broadcast_weights_for_collective(self, *args: Any, **kwargs: Any) -> None:
        """NeMo-RL's method, with the weights on the device. Engines on other GPUs get weights while no hook has been called."""
        with self._in("weight_sync"):
            super().broadcast_weights_for_collective(*args, **kwargs)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """NeMo-RL's method, with model and optimizer on the device."""
        with self._in("restore"):
            super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """NeMo-RL's method, with model and optimizer on the device."""
        with self._in("restore"):
            super().load_checkpoint(*args, **kwargs)

    # --- the moves that NeMo-RL makes itself

    def move_model(self, model: torch.nn.Module, device: str, move_params: bool = True, move_grads: bool = True) -> torch.nn.Module:
        """Do nothing with the registered model; move any other one as NeMo-RL does."""
        return model if self._is_placed(model) else super().move_model(model, device, move_params, move_grads)

    def move_to_device(self, model: torch.nn.Module, device: str | torch.device) -> torch.nn.Module:
        """Do nothing with the registered model; move any other one as NeMo-RL does."""
        return model if self._is_placed(model) else super().move_to_device(model, device)

    def move_buffer_to_device(self, model: torch.nn.Module, device: str | torch.device) -> torch.nn.Module:
        """Do nothing with the registered model; move any other one as NeMo-RL does."""
        return model if self._is_placed(model) else super().move_buffer_to_device(model, device)

    def move_optimizer(self, device: str) -> None:
        """Do nothing with the registered optimizer."""
        if not self._moves("actor.optimizer"):
            super().move_optimizer(device)

    def move_optimizer_to_device(self, device: str | torch.device) -> None:
        """Do nothing with the registered optimizer."""
        if not self._moves("actor.optimizer"):
            super().move_optimizer_to_device(device)

    def _is_placed(self, model: torch.nn.Module) -> bool:
        return model is self.model and self._moves("actor")

    def _moves(self, name: str) -> bool:
        handle = None if self.placement is None else self.placement.handles.get(name)
        return handle is not None and not handle.external

    @property
    def _open(self) -> str | None:
        """The phase that a hook began and none has ended."""
        return None if self._turns is None else self._turns.phase

    def _turn_to(self, phase: str | None) -> None:
        """End the open phase and begin another one, or none."""
        if self._turns is None:
            return
        if phase is None:
            self._turns.over()
        else:
            self._turns.to(phase)

    def _in(self, phase: str) -> AbstractContextManager[Any]:
        """The phase for a `with` statement, unless the open one has all that it needs.

        That is never so for `restore`: in `train`, a policy may leave the optimizer on the host and stream its steps.
        """
        if self.placement is None or (phase == "weight_sync" and self._open in ("weight_sync", "train", "log_prob")):
            return nullcontext()
        if phase == "weight_sync" and self._reads_parameters:
            return sync_of_parameters(self.placement, self.placement.handles["actor"])
        return self.placement.phase(phase)


def worker_for(config: Mapping[str, Any], *, py_executable: str | None = None) -> str:
    """The name of the placed worker for a policy's configuration, for `worker_extension_cls_fqn=`. Call it in the driver.

    Args:
        config: the configuration under `policy`, as NeMo-RL's `Policy` takes it.
        py_executable: the interpreter or `uv run` command of the workers; placement must be installed there. None: the one of
            NeMo-RL's own worker.

    Raises:
        ValueError: neither backend is enabled, or the model is quantised by ModelOpt, whose workers are others.
        ImportError: NeMo-RL is not installed here.
    """
    from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY

    if config.get("quant_cfg") is not None:
        raise ValueError("policy.quant_cfg: workers of ModelOpt are not supported; leave worker_extension_cls_fqn out")
    dtensor = config.get("dtensor_cfg") or {}
    if (config.get("megatron_cfg") or {}).get("enabled"):
        name = "MegatronPolicyWorker"
    elif dtensor.get("enabled"):
        name = "DTensorPolicyWorkerV2" if dtensor.get("_v2") else "DTensorPolicyWorker"
    else:
        raise ValueError("enable policy.megatron_cfg or policy.dtensor_cfg")
    own = f"nemo_rl.models.policy.workers.{_WORKERS[name]}.{name}"
    placed = f"{__name__}.{name}"
    ACTOR_ENVIRONMENT_REGISTRY[placed] = ACTOR_ENVIRONMENT_REGISTRY[own] if py_executable is None else py_executable
    return placed


def policy_factory(**keywords: Any) -> Any:
    """NeMo-RL's `Policy` with placed workers, for `policy_factory=` of `nemo_rl.algorithms.grpo.setup`.

    Raises:
        ValueError, ImportError: see `worker_for`.
    """
    from nemo_rl.models.policy.lm_policy import Policy

    return Policy(**keywords, worker_extension_cls_fqn=worker_for(keywords["config"]))


def __getattr__(name: str) -> Any:
    """The placed workers as Ray actor classes, made when NeMo-RL looks for one by its name."""
    if name not in _WORKERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    import ray
    from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker

    implementation = getattr(importlib.import_module(f"nemo_rl.models.policy.workers.{_WORKERS[name]}"), f"{name}Impl")
    worker = type(name, (PlacedPolicyWorker, implementation), {"__module__": __name__})
    found = ray.remote(runtime_env=get_runtime_env_for_policy_worker(_WORKERS[name]))(worker)
    globals()[name] = found
    return found
