"""slime's Megatron actors under placement: each registers its model once, and each of its methods declares its phase.

In a copy of slime's train.py, started with `--no-offload-train`:

    from placement.integrations.slime import train_actor_class

    actor_model, critic_model = create_training_models(args, pgs, rollout_manager, actor_cls=train_actor_class())
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from placement.core.errors import RegistrationError
from placement.integrations.rank import manager_of_this_rank, refuse_steps_apart, sync_of_parameters
from placement.manager import Manager
from placement.registration.handle import Handle

if TYPE_CHECKING:

    class _TrainActor:
        """The part of slime's `MegatronTrainRayActor` that the mixin uses."""

        args: Any
        model: list[torch.nn.Module]
        optimizer: Any

        def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int | None: ...
        def train(self, rollout_id: int, rollout_data_ref: Any, external_data: Any = None) -> Any: ...
        def save_model(self, rollout_id: int, force_sync: bool = False) -> None: ...
        def update_weights(self) -> None: ...

else:
    _TrainActor = object


class PlacedTrainActor(_TrainActor):
    """A mixin for slime's `MegatronTrainRayActor`: it comes before it among the bases. It reads `args`, `model` and `optimizer`.

    | method | phase |
    |---|---|
    | `init` | registers the model and the optimizer, after everything is loaded; they are offloaded until the first phase |
    | `train` | `train`: log-probabilities, reference and teacher included, since slime copies their weights into the one model |
    | `save_model` | `restore`, which has model and optimizer on the device |
    | `update_weights` | `weight_sync` if slime reads the model for it; none if it sends its own host copy |

    Attributes:
        placement: the manager; None before `init`, and where slime builds no model (`--debug-rollout-only`).
    """

    placement: Manager | None = None
    _placed_model: torch.nn.Module
    _placed_handle: Handle | None = None

    def make_manager(self) -> Manager:
        """The manager of this process. Override it to give it a device, a policy or a group of your own.

        Raises:
            ValueError: a setting is invalid.
            CoordinatorLost: the store of the ranks does not answer.
        """
        return manager_of_this_rank()

    def init(self, args: Any, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int | None:
        """slime's `init`, then the registration.

        Raises:
            RegistrationError: slime is to offload the model itself, the policy has `optimizer_in="optimizer_step"`, or the model cannot be
                registered. In the first case slime's own `init` has not begun.
            HostMemoryError, DeviceMemoryError: there is not enough memory to register it.
            ValueError, CoordinatorLost: see `make_manager`.
        """
        if args.offload_train and not args.debug_rollout_only:
            raise RegistrationError(
                "slime itself offloads this actor: pass --no-offload-train; with a critic set args.offload_train = False after parse_args()"
            )
        start_rollout_id = super().init(args, role, with_ref, with_opd_teacher)
        if not args.debug_rollout_only:
            manager = self.make_manager()
            if self.optimizer is not None:
                refuse_steps_apart(manager, role, "slime")
            # Pipeline stages of one rank are one handle: their optimizer steps all of them.
            self._placed_model = self.model[0] if len(self.model) == 1 else torch.nn.ModuleList(self.model)
            self._placed_handle = manager.register(role, self._placed_model, role=role)
            if self.optimizer is not None:
                manager.register(f"{role}.optimizer", self.optimizer)
            self.placement = manager
        return start_rollout_id

    def train(self, rollout_id: int, rollout_data_ref: Any, external_data: Any = None) -> Any:
        """slime's `train`, in the phase `train`."""
        with self._phase("train"):
            return super().train(rollout_id, rollout_data_ref, external_data=external_data)

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        """slime's `save_model`, in the phase `restore`: Megatron gathers model and optimizer on the device."""
        with self._phase("restore"):
            super().save_model(rollout_id, force_sync=force_sync)

    def update_weights(self) -> None:
        """slime's `update_weights`, in the phase `weight_sync` where that reads the model.

        slime reads the parameters themselves. So a policy that publishes from the host copy (`stream_sync=True`) loads the model here.
        """
        manager, model = self.placement, self._placed_handle
        if manager is None or model is None or not self.reads_model_for_sync():
            super().update_weights()
            return
        with sync_of_parameters(manager, model):
            super().update_weights()

    def reads_model_for_sync(self) -> bool:
        """Whether slime reads the model itself to publish it. If not, it sends the copy that `train` made in host memory.

        slime takes that copy only for engines on the same GPUs that it reaches by CUDA IPC, and reads the model even then where it
        keeps an older actor (`--keep-old-actor`).
        """
        args = self.args
        sends_host_copy = args.colocate and args.update_weight_transport != "disk"
        return not sends_host_copy or bool(getattr(args, "keep_old_actor", False))

    def _phase(self, name: str) -> AbstractContextManager[Any]:
        return nullcontext() if self.placement is None else self.placement.phase(name)


def train_actor_class() -> type[PlacedTrainActor]:
    """slime's `MegatronTrainRayActor` with placement, for `actor_cls=`. Imports slime, and with it Megatron.

    Raises:
        ImportError: slime is not installed here.
    """
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor

    class PlacedMegatronTrainRayActor(PlacedTrainActor, MegatronTrainRayActor):  # type: ignore[misc] # slime has no types
        """slime's Megatron actor, placed by placement."""

    return PlacedMegatronTrainRayActor
