"""TRL's online trainers under placement. In a training script one import changes, and nothing else:

    from placement.integrations.trl import PlacedGRPOTrainer as GRPOTrainer

During `train()` the actor, its optimizer, the reference, reward models and a colocated vLLM take
turns on the device. One phase stays open and switches as TRL goes on: rollout, log_prob, reward,
train, optimizer_step. Checked against TRL 1.16.0 (trl/trainer/grpo_trainer.py, rloo_trainer.py,
trl/generation/vllm_generation.py) and transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate import DistributedDataParallelKwargs
from transformers import TrainerCallback
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.callbacks import SyncRefModelCallback

from placement.core.errors import DeviceMemoryError, GroupError
from placement.core.journal import logger
from placement.engines.vllm import VllmInProcess
from placement.integrations.transformers import PlacedTrainer, Turns, give_back, manager_with_phases
from placement.manager import Manager

__all__ = ["PHASES", "PlacedGRPOTrainer", "PlacedRLOOTrainer"]

PHASES = {"sync_ref": {"actor": "GPU_RESIDENT", "ref": "TRAINING"}}
"""The phases of a placed trainer that placement does not ship: `sync_ref`, in which TRL mixes the
actor's weights into the reference."""

_ACTOR, _OPTIMIZER, _REF, _ROLLOUT = "actor", "actor.optimizer", "ref", "rollout"


class _PlacedTrainer(PlacedTrainer):
    """The part that both trainers share. It comes before TRL's trainer among the bases.

    `manager` is the manager of this process. None: `Manager.from_settings()`, which reads the
    environment variables `PLACEMENT_*`; that manager has the models only during `train()` and
    `evaluate()`. If the trainer keeps `sync_ref_model`, a manager of yours needs the phase
    `sync_ref`: `Manager(phases=PHASES)`. Raises ValueError: FSDP, DeepSpeed or transformers'
    continuous batching is switched on, which is not covered; or `manager` lacks that phase.
    """

    # Defaults for a trainer that a test makes without __init__. It places nothing.
    _is_set_up = False
    _made_manager = False
    _is_prepared = False  # whether accelerate has wrapped the model
    _engine: VllmInProcess | None = None
    _ref_phase = "log_prob"

    def __init__(
        self,
        *args: Any,
        manager: Manager | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*args, **keywords)
        self._refuse_what_is_not_covered()
        if manager is None:
            self._made_manager = True
            manager = manager_with_phases(PHASES)
        elif self.args.sync_ref_model and "sync_ref" not in manager.settings.phases:
            raise ValueError(
                "sync_ref_model=True needs a phase in which the reference may change, and this "
                "manager has none: make it with Manager(phases=placement.integrations.trl.PHASES)"
            )
        self.manager = manager
        self._turns = Turns(manager)
        self.accelerator.ddp_handler = ddp = (
            self.accelerator.ddp_handler or DistributedDataParallelKwargs()
        )
        # else DDP keeps a second copy of all gradients on the device, which cannot be moved
        ddp.gradient_as_bucket_view = True
        self.add_callback(_BeforeOptimizerStep(self._turns))
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SyncRefModelCallback):
                callback.sync_target_model = partial(self._sync_ref, callback.sync_target_model)
        self._is_set_up = True

    def _refuse_what_is_not_covered(self) -> None:
        names = [cls.__name__ for cls in type(self).__mro__ if cls.__module__.startswith("trl.")]
        own = f"use TRL's own {names[0]}"
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
        self._is_prepared = True
        before = set(self.manager.handles)
        try:
            self._place_all()
        except BaseException:
            for name in reversed([name for name in self.manager.handles if name not in before]):
                self.manager.unregister(name)
            raise
        logger.info(
            "%s trains under policy %r on %s, with the handles %s",
            type(self).__name__,
            self.manager.policy.name,
            self.manager.device.name,
            ", ".join(self.manager.handles),
        )
        # Generation needs the actor first anyway, and callbacks copy its weights in
        # `on_train_begin` (TRL's BEMACallback).
        self._turns.to("log_prob", only=[_ACTOR])
        return prepared

    def _place_all(self) -> None:
        self._take_engine()
        for name, target, keywords in self._targets():
            # with a manager of the user's, a second train() has it already
            self.manager.register(name, target, replace=True, **keywords)

    def _targets(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Each object that is registered, apart from an engine: name, object and keywords."""
        yield _ACTOR, self.model_wrapped, {"role": "actor"}
        yield _OPTIMIZER, self.optimizer, {}
        if self.ref_model is not None:
            yield _REF, self.ref_model, {"role": "ref", "readonly": not self.args.sync_ref_model}
        modules = {}
        for function in self.reward_funcs:
            if isinstance(function, torch.nn.Module):
                modules[id(function)] = function
        for number, module in enumerate(modules.values()):
            name = f"reward.{number}" if number else "reward"
            yield name, module, {"role": "reward", "readonly": True}

    @contextmanager
    def _taking_turns(self) -> Iterator[None]:
        """The models take turns in this block. After it, also after an exception, the manager that
        the trainer made has none of them any more."""
        try:
            with self._turns:
                yield
        except BaseException as error:
            try:
                self._let_go()
            except Exception as failure:
                error.add_note(f"placement: while the models were given back: {failure}")
            raise
        self._let_go()

    def _let_go(self) -> None:
        """Leave the models on the device, as TRL has them. The optimizer waits in host memory: only
        training needs it."""
        if not self._made_manager:
            return
        for name in (_OPTIMIZER, _ROLLOUT):
            if name in self.manager.handles:
                self.manager.unregister(name)
        self._give_engine_back()
        give_back(self.manager, [name for name, *_ in self._targets()])

    @property
    def _is_placed(self) -> bool:
        """Whether the models are the manager's now."""
        if not self._is_set_up:
            return False
        actor = self.manager.handles.get(_ACTOR)
        return actor is not None and actor.object is self.model_wrapped

    def _take_engine(self) -> None:
        """Register the colocated vLLM, which sleeps now, and keep TRL from sleeping and waking it
        by itself."""
        is_colocated = self.use_vllm and self.vllm_mode == "colocate"
        if not is_colocated or not self.args.vllm_enable_sleep_mode:
            return
        if self._engine is None:
            self._engine = VllmInProcess(
                self.vllm_generation.llm, weights="discard", offloaded=("weights", "kv_cache")
            )
        self.manager.register(_ROLLOUT, self._engine, role="rollout", replace=True)
        self.vllm_generation.enable_sleep_mode = False
        self.vllm_generation._llm_weights_sleeping = False

    def _give_engine_back(self) -> None:
        """Let TRL sleep and wake vLLM again: the manager has it no more."""
        if self._engine is not None:
            self.vllm_generation.enable_sleep_mode = True
            self.vllm_generation._llm_weights_sleeping = bool(self._engine.residency.offloaded_tags)
            self._last_loaded_step = -1  # publish again: the engine may have other weights
            self._engine = None

    def _inner_training_loop(self, batch_size: Any = None, *args: Any, **keywords: Any) -> Any:
        """Train. The open phase ends here and not with each step: handles that the next step needs
        stay on the device."""
        with self._taking_turns():
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
        if not self._is_placed:
            return compute(model, *args, **keywords)
        if torch.is_grad_enabled() and self._turns.phase == "train":  # it is part of the loss
            return compute(model, *args, **keywords)
        if model is self.ref_model:
            with self._turn_of_reference():
                return compute(model, *args, **keywords)
        with self._turn("log_prob", only=[_ACTOR]):
            return compute(model, *args, **keywords)

    @contextmanager
    def _turn_of_reference(self) -> Iterator[None]:
        """The reference is on the device beside the actor, which is needed before and after. Where
        the two do not fit together, it is there alone, from then on."""
        with ExitStack() as turn:
            try:
                turn.enter_context(self._turn(self._ref_phase))
            except (DeviceMemoryError, GroupError):  # a group raises one error on all its ranks
                if self._ref_phase == "ref_log_prob":
                    raise
                self._ref_phase = "ref_log_prob"
                turn.enter_context(self._turn(self._ref_phase))
            yield

    def _calculate_rewards(self, *args: Any, **keywords: Any) -> Any:
        # TRL's, or one that the user registered
        has_models = self._is_placed and any(
            handle.role == "reward" for handle in self.manager.handles.values()
        )
        with self._turn("reward") if has_models else nullcontext():
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
    def _turn(
        self,
        phase: str,
        only: list[str] | None = None,
    ) -> Iterator[Callable[[str], None]]:
        """Be in a phase of the present step, and give a function that switches to another. Outside
        `train()` nothing is placed, and nothing happens. Where the step has gradients already, the
        phase goes inside its training phase: they are not dropped there."""
        if not self._is_placed:
            yield lambda _: None
        elif self._turns.phase == "train":
            with self.manager.phase(phase, only=only) as inner:
                yield inner.switch
        else:
            self._turns.to(phase, only=only)
            yield self._turns.to

    def _manager_to_log(self) -> Manager | None:
        return self.manager if self._is_placed else None

    def evaluation_loop(self, *args: Any, **keywords: Any) -> Any:
        """Evaluate. Inside `train()` the actor stays on the device, for callbacks and savers."""
        if not self._is_set_up or self._turns.phase is not None:
            return super().evaluation_loop(*args, **keywords)
        with self._taking_turns():
            if self._made_manager and self._is_prepared:
                self._place_all()
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
        if not self._is_placed or self.manager.phase_name == phase:
            return nullcontext()
        return self.manager.phase(phase)


class _BeforeOptimizerStep(TrainerCallback):  # type: ignore[misc] # transformers is not followed by mypy
    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_pre_optimizer_step(self, *args: Any, **keywords: Any) -> None:
        """Forward and backward are over and the gradients are clipped."""
        self._turns.to("optimizer_step")


class PlacedGRPOTrainer(_PlacedTrainer, GRPOTrainer):  # type: ignore[misc] # TRL is not followed by mypy
    """TRL's `GRPOTrainer`, whose models take turns on the device. Arguments are those of TRL's, and
    `manager`.

    Example:
        ::

            trainer = PlacedGRPOTrainer("Qwen/Qwen3-0.6B", reward_funcs=reward, args=args)
            trainer.train()
    """


class PlacedRLOOTrainer(_PlacedTrainer, RLOOTrainer):  # type: ignore[misc] # TRL is not followed by mypy
    """TRL's `RLOOTrainer`, whose models take turns on the device. Arguments are those of TRL's, and
    `manager`."""
