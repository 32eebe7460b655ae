"""An actor worker and its strategy in the shape of ROLL's (ROLL 8eb27cc2, roll/pipeline/base_worker.py, roll/distributed/strategy).

All moves go through `load_states` and `offload_states` of the strategy, from one context manager around each piece of work, with the
parts that this work needs; Megatron's strategy has the optimizer's state for the step alone. What it computes is a `Job`'s.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from tests.integrations.jobs import Job, as_bytes, made, plain
from tests.support.seeds import seed


class OffloadStateType(str, enum.Enum):  # noqa: UP042 - as ROLL has it
    model_params = "model_params"
    optimizer_states = "optimizer_states"
    other_params = "other_params"


Include = Sequence[OffloadStateType] | None


class Dispatch(enum.Enum):
    ONE_TO_ALL = enum.auto()


def register(dispatch_mode: Dispatch) -> Callable[[Any], Any]:
    """Marks a method that the driver calls."""

    def mark(function: Any) -> Any:
        function.dispatch_mode = dispatch_mode
        return function

    return mark


class Strategy:
    """ROLL's strategy for FSDP2."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, Include]] = []

    def initialize(self) -> None:
        self.job: Job = plain()
        (self.model,) = self.job.parts
        self.optimizer = self.job.optimizer

    def train_step(self, number: int) -> torch.Tensor:
        return self.job.learn(number)

    def load_states(self, include: Include = None, non_blocking: bool = False) -> None:
        self.moves.append(("load", include))

    def offload_states(self, include: Include = None, non_blocking: bool = False) -> None:
        self.moves.append(("offload", include))


class MegatronStrategy(Strategy):
    """ROLL's strategy for Megatron."""

    def initialize(self) -> None:
        self.job = plain(2)
        self.models_wrapped = self.job.parts
        self.optimizer = self.job.optimizer

    def train_step(self, number: int) -> torch.Tensor:
        self.job.zero_grad()
        loss = self.job.loss(number)
        loss.backward()
        self.load_states(include=[OffloadStateType.optimizer_states])
        self.optimizer.step()
        self.offload_states(include=[OffloadStateType.optimizer_states], non_blocking=True)
        self.job.zero_grad()
        return loss.detach()

    def offload_states(self, include: Include = None, non_blocking: bool = False, pin_memory: bool = True) -> None:
        self.moves.append(("offload", include))


class ActorWorker:
    """Everything that leaves it is in `seen`, as bytes."""

    def __init__(self, strategy: type[Strategy]) -> None:
        self.seen: list[bytes] = []
        self._strategy = strategy

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        seed(0)
        self.strategy = self._strategy()
        self.strategy.initialize()
        self.strategy.offload_states()

    def compute_log_probs(self, number: int) -> None:
        with self._states(OffloadStateType.model_params), torch.no_grad():
            self.seen.append(as_bytes(self.strategy.job.loss(number)))

    def train_step(self, number: int) -> None:
        with self._states(OffloadStateType.model_params, OffloadStateType.other_params):
            for epoch in range(2):
                self.seen.append(as_bytes(self.strategy.train_step(2 * number + epoch)))

    def start_model_update(self, model_update_name: str) -> None:
        with self._states(OffloadStateType.model_params):
            self.seen += [as_bytes(each) for _, each in self.strategy.job.weights()]

    def do_checkpoint(self, global_step: int) -> None:
        self.strategy.load_states()
        self.seen += [as_bytes(each) for _, each in self.strategy.job.weights()]
        self.seen += [as_bytes(each) for each in self.strategy.job.state()]

    @contextmanager
    def _states(self, *include: OffloadStateType) -> Iterator[None]:
        """ROLL's `state_offload_manger`."""
        self.strategy.load_states(include=list(include))
        self.strategy.offload_states(include=[each for each in OffloadStateType if each not in include])
        yield
        self.strategy.offload_states()


def run(worker: Any, steps: int = 2) -> list[bytes]:
    """The calls of ROLL's pipeline."""
    worker.initialize(None)
    for step in range(steps):
        worker.strategy.offload_states()
        worker.start_model_update(model_update_name="update")
        worker.compute_log_probs(step)
        worker.train_step(step)
        worker.do_checkpoint(step)
    worker.strategy.offload_states()
    seen: list[bytes] = worker.seen
    return seen


def modules() -> dict[str, ModuleType]:
    """ROLL's modules as far as the recipe looks into them."""
    packages = ("", ".distributed", ".distributed.scheduler", ".pipeline", ".pipeline.rlvr", ".utils")
    contents: dict[str, dict[str, Any]] = {f"roll{package}": {} for package in packages}
    contents["roll.distributed.scheduler.decorator"] = {"Dispatch": Dispatch, "register": register}
    contents["roll.pipeline.rlvr.actor_worker"] = {"ActorWorker": ActorWorker}
    contents["roll.utils.offload_states"] = {"OffloadStateType": OffloadStateType}
    return {name: made(name, names) for name, names in contents.items()}
