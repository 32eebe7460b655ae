"""TRL's online trainers under placement. In a training script one import changes, and nothing else:

    from placement.integrations.trl import PlacedGRPOTrainer as GRPOTrainer

During `train()` the actor, its optimizer, the reference, reward models and a colocated vLLM take
turns on the device. One phase stays open and switches as TRL goes on: rollout, log_prob, reward,
train, optimizer_step. Checked against TRL 1.16.0 (trl/trainer/grpo_trainer.py, rloo_trainer.py,
trl/generation/vllm_generation.py) and transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import DistributedDataParallelKwargs
from transformers import Trainer, TrainerCallback
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from placement.engines.vllm import VllmInProcess
from placement.integrations.transformers import Turns, manager_with_phases
from placement.manager import Manager

__all__ = ["PHASES", "PlacedGRPOTrainer", "PlacedRLOOTrainer"]

PHASES = {"sync_ref": {"actor": "GPU_RESIDENT", "ref": "TRAINING"}}
"""The phases of a placed trainer that placement does not ship: `sync_ref`, in which TRL mixes the
actor's weights into the reference."""

_ACTOR, _OPTIMIZER, _REF, _ROLLOUT = "actor", "actor.optimizer", "ref", "rollout"


class _PlacedTrainer(Trainer):  # type: ignore[misc] # transformers is not followed by mypy
    """The part that both trainers share. It comes before TRL's trainer among the bases.

    `manager` is the manager of this process. None: `Manager.from_settings()`, which reads the
    environment variables `PLACEMENT_*`. If the trainer keeps `sync_ref_model`, a manager of yours
    needs the phase `sync_ref`: `Manager(phases=PHASES)`. Raises ValueError: FSDP, DeepSpeed or
    transformers' continuous batching is switched on, which is not covered; or `manager` lacks that
    phase.
    """

    def __init__(self, *args: Any, manager: Manager | None = None, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._refuse_what_is_not_covered()
        if manager is None:
            manager = manager_with_phases(PHASES)
        elif self.args.sync_ref_model and "sync_ref" not in manager.settings.phases:
            raise ValueError(
                "sync_ref_model=True needs a phase in which the reference may change, and this "
                "manager has none: make it with Manager(phases=placement.integrations.trl.PHASES)"
            )
        self.manager = manager
        self._logged = manager.snapshot()
        self._turns = Turns(manager)
        self.accelerator.ddp_handler = ddp = (
            self.accelerator.ddp_handler or DistributedDataParallelKwargs()
        )
        # else DDP keeps a second copy of all gradients on the device, which cannot be moved
        ddp.gradient_as_bucket_view = True
        self._engine: VllmInProcess | None = None
        self.add_callback(_BeforeOptimizerStep(self._turns))
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SyncRefModelCallback):
                callback.sync_target_model = partial(self._sync_ref, callback.sync_target_model)

    def _refuse_what_is_not_covered(self) -> None:
        names = (each.__name__ for each in type(self).__mro__ if each.__module__.startswith("trl."))
        own = f"use TRL's own {next(names)}"
        if self.is_deepspeed_enabled:
            raise ValueError(
                f"DeepSpeed places the models itself: {own}, with DeepSpeed's own offload, or run "
                "without DeepSpeed"
            )
        if self.is_fsdp_enabled:
            raise ValueError(
                f"accelerate's FSDP is not covered by a placed trainer: {own} with it, or run one "
                "process or DDP without FSDP"
            )
        if self.use_transformers_continuous_batching:
            raise ValueError(
                "use_transformers_continuous_batching is not covered: it may cast the actor, which "
                "moves its tensors. Leave it out, or use vLLM (use_vllm=True, "
                "vllm_mode='colocate', vllm_enable_sleep_mode=True)"
            )

    def _prepare_for_training(self, *args: Any, **keywords: Any) -> Any:
        """Register everything, once accelerate has wrapped the model and a checkpoint's optimizer
        state is loaded."""
        # accelerate loads the optimizer's own state into it; a second train() may load a checkpoint
        with self._alone("restore"):
            prepared = super()._prepare_for_training(*args, **keywords)
        before = set(self.manager.handles)
        try:
            self._place_all()
        except BaseException:
            for name in reversed([name for name in self.manager.handles if name not in before]):
                self.manager.unregister(name)
            raise
        # Generation needs the actor first anyway, and callbacks copy its weights in
        # `on_train_begin` (TRL's BEMACallback).
        self._turns.to("log_prob", only=[_ACTOR])
        return prepared

    def _place_all(self) -> None:
        register = self.manager.register
        self._take_engine()
        # a second train() has it already
        register(_ACTOR, self.model_wrapped, role="actor", replace=True)
        register(_OPTIMIZER, self.optimizer, replace=True)
        if self.ref_model is not None:
            register(
                _REF,
                self.ref_model,
                role="ref",
                readonly=not self.args.sync_ref_model,
                replace=True,
            )
        modules = {
            id(each): each for each in self.reward_funcs if isinstance(each, torch.nn.Module)
        }
        for number, module in enumerate(modules.values()):
            register(
                f"reward.{number}" if number else "reward",
                module,
                role="reward",
                readonly=True,
                replace=True,
            )

    @property
    def _is_placed(self) -> bool:
        """Whether the models take turns: not before the first `train()`, and not after
        `manager.close()`."""
        actor = self.manager.handles.get(_ACTOR)
        return actor is not None and actor.object is self.model_wrapped

    def _take_engine(self) -> None:
        """Register the colocated vLLM, which sleeps now, and keep TRL from sleeping and waking it
        by itself."""
        if (
            not self.use_vllm
            or self.vllm_mode != "colocate"
            or not self.args.vllm_enable_sleep_mode
        ):
            return
        if self._engine is None:
            self._engine = VllmInProcess(
                self.vllm_generation.llm, weights="discard", offloaded=("weights", "kv_cache")
            )
        self.manager.register(_ROLLOUT, self._engine, role="rollout", replace=True)
        self.vllm_generation.enable_sleep_mode = False
        self.vllm_generation._llm_weights_sleeping = False

    def _give_engine_back(self) -> None:
        """Let TRL sleep and wake vLLM again: the manager was closed."""
        if self._engine is not None:
            self.vllm_generation.enable_sleep_mode = True
            self.vllm_generation._llm_weights_sleeping = bool(self._engine.residency.offloaded_tags)
            self._last_loaded_step = -1  # publish, whatever the engine has now
            self._engine = None

    def _inner_training_loop(self, batch_size: Any = None, *args: Any, **keywords: Any) -> Any:
        """Train. The open phase ends here and not with each step: what the next step needs stays on
        the device."""
        with self._turns:
            return super()._inner_training_loop(batch_size, *args, **keywords)

    def _generate(self, *args: Any, **keywords: Any) -> Any:
        """Generate, tool calls included, in the phase `rollout`; with a colocated vLLM after a
        `weight_sync`."""
        if self._engine is None:
            with self._turn("rollout"):
                return super()._generate(*args, **keywords)
        if not self._is_placed:
            self._give_engine_back()
            return super()._generate(*args, **keywords)
        with self._turn("weight_sync") as switch:
            for bucket in self.manager.handles[_ACTOR].weights():
                self._engine.update_weights(bucket)
            # so that TRL does not publish them again
            self._last_loaded_step = self.state.global_step
            switch("rollout")
            return super()._generate(*args, **keywords)

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **keywords: Any) -> Any:
        compute = super()._get_per_token_logps_and_entropies
        if torch.is_grad_enabled() and self._turns.phase == "train":
            return compute(model, *args, **keywords)  # a part of the loss
        # The actor stays beside the reference: it is needed before and after, and the training
        # phase needs more memory than both.
        with self._turn("log_prob", only=None if model is self.ref_model else [_ACTOR]):
            return compute(model, *args, **keywords)

    def _calculate_rewards(self, *args: Any, **keywords: Any) -> Any:
        # TRL's, or one that the user registered
        if not any(handle.role == "reward" for handle in self.manager.handles.values()):
            return super()._calculate_rewards(*args, **keywords)
        with self._turn("reward"):
            return super()._calculate_rewards(*args, **keywords)

    def compute_loss(self, model: Any, *args: Any, **keywords: Any) -> Any:
        if self._is_placed and self._turns.phase != "train":
            if self.model.training:
                self._turns.to("train")
            else:
                self._turns.to("log_prob", only=[_ACTOR])
        return super().compute_loss(model, *args, **keywords)

    def _sync_ref(self, sync: Any, *args: Any, **keywords: Any) -> None:
        self._turns.to("sync_ref")
        sync(*args, **keywords)

    @contextmanager
    def _turn(self, phase: str, only: list[str] | None = None) -> Iterator[Callable[[str], None]]:
        """Be in a phase of the present step, and give what switches to another. Outside `train()`
        nothing is placed, and nothing happens. Where the step has gradients already, the phase goes
        inside its training phase: they are not dropped there."""
        if not self._is_placed:
            yield lambda _: None
        elif self._turns.phase == "train":
            with self.manager.phase(phase, only=only) as inner:
                yield inner.switch
        else:
            self._turns.to(phase, only=only)
            yield self._turns.to

    def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        """Log with placement's figures since the last line of the training: torch's own do not see
        its memory."""
        if self.model.training:
            last, self._logged = self._logged, self.manager.snapshot()
            logs.update(self._logged.since(last))
        super().log(logs, *args, **keywords)  # which adds to these logs, for the caller to read

    def evaluation_loop(self, *args: Any, **keywords: Any) -> Any:
        is_inside = self._turns.phase == "train"  # a callback evaluates between two backward passes
        with nullcontext() if is_inside else self._turns:
            return super().evaluation_loop(*args, **keywords)

    def _load_from_checkpoint(self, *args: Any, **keywords: Any) -> Any:
        with self._alone("restore"):
            return super()._load_from_checkpoint(*args, **keywords)

    def _load_best_model(self) -> None:
        with self._alone("restore"):
            super()._load_best_model()

    def _save_checkpoint(self, *args: Any, **keywords: Any) -> None:
        with self._alone("checkpoint"):
            super()._save_checkpoint(*args, **keywords)

    def _alone(self, phase: str) -> AbstractContextManager[Any]:
        """A phase outside every step. `_prepare_for_training` enters one inside another."""
        return (
            self.manager.phase(phase)
            if self._is_placed and self.manager.phase_name != phase
            else nullcontext()
        )


class _BeforeOptimizerStep(TrainerCallback):  # type: ignore[misc] # transformers is not followed by mypy
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_pre_optimizer_step(self, *args: Any, **keywords: Any) -> None:
        """Forward and backward are over and the gradients are clipped."""
        self._turns.to("optimizer_step")


class PlacedGRPOTrainer(_PlacedTrainer, GRPOTrainer):  # type: ignore[misc] # TRL is not followed by mypy
    """TRL's `GRPOTrainer`, whose models take turns on the device. Arguments are those of TRL's, and
    `manager`."""


class PlacedRLOOTrainer(_PlacedTrainer, RLOOTrainer):  # type: ignore[misc] # TRL is not followed by mypy
    """TRL's `RLOOTrainer`, whose models take turns on the device. Arguments are those of TRL's, and
    `manager`."""
