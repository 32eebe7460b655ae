"""A callback for transformers' `Trainer`: the model, its optimizer and frozen models take turns on
the device.

A frozen model is on the device during forward and backward, and not while the optimizer steps. The
optimizer is not on the device while the trainer evaluates. Checked against transformers 5.23.0
(transformers/trainer.py, transformers/trainer_callback.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.training_args import ParallelMode

from placement.core.errors import DeviceMemoryError
from placement.core.journal import logger
from placement.core.settings import Settings
from placement.core.states import State
from placement.manager import Manager
from placement.phases.hold import Hold

__all__ = ["PHASES", "PlacedTrainer", "PlacementCallback"]

PHASES = {"frozen": ("ref", "reward", "teacher")}
"""The phase of the callback that placement does not ship: `frozen`, in which models that are not
trained are on the device."""

_MODEL, _OPTIMIZER = "actor", "actor.optimizer"


def manager_with_phases(
    phases: Mapping[str, Sequence[str] | Mapping[str, State | str]],
) -> Manager:
    """A manager of this process alone with the settings of the environment. `PLACEMENT_PHASES` adds
    to `phases` and takes precedence."""
    return Manager.from_settings(phases={**phases, **Settings.from_any(None).phases})


def give_back(manager: Manager, names: Iterable[str]) -> None:
    """Unregister these handles, as far as they are registered, in this order.

    Each is on the device then, as without placement. A handle that does not fit there beside those
    before it stays in host memory, with a warning.
    """
    for name in names:
        if name not in manager.handles:
            continue
        try:
            manager.unregister(name, on_device=True)
        except DeviceMemoryError as no_room:
            logger.warning(
                "after the training %r does not fit on the device any more, so it is in host "
                "memory: %s",
                name,
                no_room,
            )
            manager.unregister(name)


class Turns:
    """One phase of a manager that stays open over several calls of a framework, and switches from
    one purpose to the next. A `with` block leaves it at its end."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self._hold: Hold | None = None
        self._only: Sequence[str] | None = None

    @property
    def phase(self) -> str | None:
        """The name of the open phase; None while none is open."""
        return self._hold.name if self._hold is not None and self._hold.is_open else None

    def to(self, phase: str, *, only: Sequence[str] | None = None) -> None:
        """Switch to a phase, or open it where none is open. Errors are those of `Manager.phase`;
        then the phase before stays open."""
        if self._hold is None or not self._hold.is_open:
            self._hold = self.manager.hold(phase, only=only)
        elif (self._hold.name, self._only) != (phase, only):
            self._hold.switch(phase, only=only)
        self._only = only

    def over(self, error: BaseException | None = None) -> None:
        """Leave the open phase, if there is one. After an error, failures of leaving become notes
        on it."""
        if self._hold is not None:
            self._hold.release(error)

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.over(error)


class PlacementCallback(TrainerCallback):  # type: ignore[misc] # transformers is not followed by mypy
    """Places the models of one `Trainer` from the beginning of `train()` to its end. Before and
    after, they are as the trainer has them.

    Add it after callbacks of your own that ask for an evaluation. Use it in a `with` statement, or
    call `close` after an exception: transformers tells callbacks nothing of one.

    Args:
        manager: the manager of this process. None: `Manager.from_settings()`, which reads the
            environment variables `PLACEMENT_*`.
        frozen: modules that are used in the loss and not trained, by their roles: `ref=`,
            `reward=`, `teacher=`. Keep a reference to them.

    Raises:
        ValueError: a role is none of these three, or `manager` lacks the phase `frozen`: make it
            with `Manager(phases=PHASES)`.

    Example:
        ::

            with PlacementCallback(teacher=teacher) as callback:
                trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
                trainer.train()
    """

    def __init__(self, manager: Manager | None = None, **frozen: torch.nn.Module) -> None:
        unknown = set(frozen) - set(PHASES["frozen"])
        if unknown:
            raise ValueError(
                f"unknown role {', '.join(sorted(unknown))} of a frozen model: it is one of "
                f"{', '.join(PHASES['frozen'])}"
            )
        if manager is None:
            manager = manager_with_phases(PHASES)
        elif frozen and "frozen" not in manager.settings.phases:
            raise ValueError(
                "a manager for frozen models needs the phase 'frozen': make it with "
                "Manager(phases=placement.integrations.transformers.PHASES)"
            )
        self.manager = manager
        self._frozen = frozen
        self._turns = Turns(manager)
        self._around_frozen = Turns(manager)

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        model: Any,
        optimizer: Any,
        **keywords: Any,
    ) -> None:
        """Register everything; accelerate has wrapped the optimizer, and a checkpoint is loaded.

        Raises:
            ValueError: several ranks or GPUs train together, or DeepSpeed does.
            RegistrationError: a model cannot be registered; everything is as before.
        """
        if args.parallel_mode is not ParallelMode.NOT_PARALLEL or args.deepspeed:
            raise ValueError(
                "PlacementCallback is for a trainer of one process: it is not given the module "
                "that DDP, FSDP or DeepSpeed has made. Register trainer.model_wrapped and "
                "trainer.optimizer with a Manager yourself, or leave the callback out"
            )
        self.close()  # an earlier train() raised
        try:
            self.manager.register(_MODEL, model, role="actor")
            self.manager.register(_OPTIMIZER, optimizer)
            for role, module in self._frozen.items():
                self.manager.register(role, module, role=role, readonly=True)
            self._evaluate()  # a trainer may evaluate before its first step
        except BaseException as error:
            self.close(error)
            raise

    def on_step_begin(self, *args: Any, **keywords: Any) -> None:
        """Forward and backward come next."""
        self._to("train", with_frozen=True)

    def on_pre_optimizer_step(self, *args: Any, **keywords: Any) -> None:
        """The gradients are complete and clipped."""
        self._to("optimizer_step")

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        """The step is over. Without an evaluation everything stays for the next one."""
        if control.should_evaluate:
            self._evaluate()

    on_epoch_end = on_step_end

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        *,
        logs: Any = None,
        **keywords: Any,
    ) -> None:
        """The last lines of a training are logged before the best model is loaded."""
        if (
            args.load_best_model_at_end
            and "train_runtime" in (logs or {})
            and _MODEL in self.manager.handles
        ):
            self._to("restore")

    def on_train_end(self, *args: Any, **keywords: Any) -> None:
        """Give everything back, as the trainer had it: on the device."""
        self.close()

    def _evaluate(self) -> None:
        self._to("log_prob", only=[_MODEL], with_frozen=True)

    def _to(
        self, phase: str, *, only: Sequence[str] | None = None, with_frozen: bool = False
    ) -> None:
        self._around_frozen.over()
        self._turns.to(phase, only=only)
        frozen = [role for role in self._frozen if role in self.manager.handles]
        if with_frozen and frozen:
            self._around_frozen.to("frozen", only=frozen)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the open phases and unregister what the callback has registered. Idempotent.

        Everything is on the device then, as without placement. Handles that do not fit there
        together stay in host memory, with a warning.

        Args:
            error: the exception that ended the training, if any. Failures of leaving become notes
                on it.
        """
        self._around_frozen.over(error)
        self._turns.over(error)
        give_back(self.manager, (_OPTIMIZER, _MODEL, *self._frozen))

    def __enter__(self) -> PlacementCallback:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(error)


class PlacedTrainer(Trainer):  # type: ignore[misc] # transformers is not followed by mypy
    """transformers' `Trainer`, whose log has the figures of the `PlacementCallback` among its
    callbacks (`Manager.metrics`). A callback alone cannot: those that write the log come first.

    Example:
        ::

            trainer = PlacedTrainer(model, args, callbacks=[PlacementCallback()])
    """

    def log(self, logs: dict[str, float], *args: Any, **keywords: Any) -> None:
        """Log with placement's figures. The last line of a training has the totals, and one of an
        evaluation has none."""
        manager, is_last = self._manager_to_log(), "train_runtime" in logs
        is_logged = is_last or self.model.training
        if manager is not None and is_logged and manager.settings.trainer_log:
            logs.update(manager.metrics(totals=is_last))
        super().log(logs, *args, **keywords)  # which adds to these logs, for the caller to read

    def _manager_to_log(self) -> Manager | None:
        """The manager that places the models now."""
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, PlacementCallback) and _MODEL in callback.manager.handles:
                return callback.manager
        return None
