"""Workers, trainer and dispatch in the shape of SkyRL's (SkyRL a9564572, 0.3.0, skyrl/backends/skyrl_train/workers).

The dispatch keeps SkyRL's book of what is on the GPU, and calls `backload_to_gpu` and `offload_to_cpu` as SkyRL does where all models
share the GPUs. What the workers compute is a `Job`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import torch

from tests.integrations.jobs import Job, as_bytes, made, plain
from tests.support.seeds import seed


class Worker:
    """Everything that leaves it is in `seen`, as bytes; `moves` is what it was told to move."""

    trains: ClassVar[bool] = True
    build: ClassVar[Callable[[], Job]] = staticmethod(plain)

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.moves: list[tuple[str, bool, bool]] = []

    def init_model(self, model_path: str, num_training_steps: int | None = None) -> None:
        self.job = type(self).build()
        (self.model,) = self.job.parts
        self.optimizer = self.job.optimizer if self.trains else None

    def _get_module_for_offload(self) -> Any:
        return self.model

    def offload_to_cpu(self, offload_optimizer: bool = True, offload_model: bool = True) -> None:
        self.moves.append(("cpu", offload_optimizer, offload_model))

    def backload_to_gpu(self, backload_optimizer: bool = True, backload_model: bool = True) -> None:
        self.moves.append(("gpu", backload_optimizer, backload_model))

    def forward(self, number: int) -> None:
        with torch.no_grad():
            self.seen.append(as_bytes(self.job.loss(number)))

    def forward_backward(self, number: int) -> None:
        self.seen.append(as_bytes(self.job.loss(number)))
        self.job.loss(number).backward()

    def optim_step(self) -> None:
        self.job.optimizer.step()
        self.job.optimizer.zero_grad()

    async def broadcast_to_inference_engines(self) -> None:
        self.save_checkpoint()

    def save_checkpoint(self) -> None:
        self.seen += [as_bytes(each) for each in self.model.state_dict().values()]


class FSDPPolicyWorkerBase(Worker):
    pass


class FSDPCriticWorkerBase(Worker):
    pass


class FSDPRefWorkerBase(Worker):
    trains = False

    def init_model(self, model_path: str) -> None:  # type: ignore[override]
        super().init_model(model_path)


class Dispatch:
    """SkyRL's `WorkerDispatch`, with one worker a model."""

    def __init__(self, workers: dict[str, Any]) -> None:
        self.workers = workers
        self.on: dict[str, set[str]] = {name: set() for name in workers}

    def ensure(self, name: str, *, optimizer: bool = True, model: bool = True) -> Any:
        for other in self.workers:
            if other != name and self.on[other]:
                self.offload(other)
        needs_model, needs_optimizer = model and "model" not in self.on[name], optimizer and "optimizer" not in self.on[name]
        if needs_model or needs_optimizer:
            self.workers[name].backload_to_gpu(backload_optimizer=needs_optimizer, backload_model=needs_model)
        self.on[name] |= ({"model"} if needs_model else set()) | ({"optimizer"} if needs_optimizer else set())
        return self.workers[name]

    def offload(self, name: str, *, optimizer: bool = True, model: bool = True) -> None:
        self.workers[name].offload_to_cpu(offload_optimizer=optimizer, offload_model=model)
        self.on[name] -= ({"model"} if model else set()) | ({"optimizer"} if optimizer else set())

    def sync(self) -> None:
        policy = self.ensure("policy", optimizer=False)
        if "optimizer" in self.on["policy"]:
            self.offload("policy", model=False)
        asyncio.run(policy.broadcast_to_inference_engines())
        self.offload("policy")


def run(policy: Any, critic: Any, ref: Any, steps: int = 2) -> list[bytes]:
    """The calls of `RayPPOTrainer`: models are built one after the other, then steps with all of them on the same GPUs."""
    seed(0)
    workers = {"ref": ref(), "policy": policy(), "critic": critic()}
    for worker in workers.values():
        worker.init_model("path")
        worker.offload_to_cpu()
    dispatch = Dispatch(workers)
    dispatch.sync()
    for step in range(steps):
        for name in workers:
            dispatch.ensure(name, optimizer=False).forward(step)
        for name in ("critic", "policy"):
            dispatch.ensure(name).forward_backward(step)
            dispatch.ensure(name).optim_step()
        dispatch.ensure("policy").save_checkpoint()
        dispatch.sync()
    return [each for worker in workers.values() for each in worker.seen]


class RayPPOTrainer:
    """Keeps the worker classes that it was told to build."""

    def __init__(self, **parts: Any) -> None:
        self.parts = parts

    def build_models(self, PolicyWorker: Any, CriticWorker: Any, RefWorker: Any) -> None:  # noqa: N803 - SkyRL's names
        self.workers = PolicyWorker, CriticWorker, RefWorker


class BasePPOExp:
    """Sets up a trainer, as SkyRL's does."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg

    def get_trainer(
        self,
        cfg: Any,
        tracker: Any,
        tokenizer: Any,
        train_dataset: Any,
        eval_dataset: Any,
        inference_engine_client: Any,
        generator: Any,
        colocate_pg: Any,
    ) -> Any:
        raise AssertionError("the recipe makes the trainer")

    def run(self) -> Any:
        names = ("tracker", "tokenizer", "train_dataset", "eval_dataset", "inference_engine_client", "generator", "colocate_pg")
        trainer = self.get_trainer(cfg=self.cfg, **dict.fromkeys(names))
        trainer.build_models(FSDPPolicyWorkerBase, FSDPCriticWorkerBase, FSDPRefWorkerBase)
        return trainer


def modules() -> dict[str, ModuleType]:
    """SkyRL's modules as far as the recipe looks into them."""
    workers = {each.__name__: each for each in (FSDPPolicyWorkerBase, FSDPCriticWorkerBase, FSDPRefWorkerBase)}
    packages = ("", ".backends", ".backends.skyrl_train", ".backends.skyrl_train.workers", ".backends.skyrl_train.workers.fsdp")
    contents: dict[str, dict[str, Any]] = {f"skyrl{package}": {} for package in (*packages, ".train", ".train.entrypoints")}
    contents["skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker"] = workers
    contents["skyrl.train.trainer"] = {"RayPPOTrainer": RayPPOTrainer}
    contents["skyrl.train.entrypoints.main_base"] = {"BasePPOExp": BasePPOExp}
    return {name: made(name, names) for name, names in contents.items()}
