"""Policy workers in the shape of NeMo-RL's (NeMo-RL 7ea279abf, nemo_rl/models/policy/workers), and the calls that its algorithms make.

The hooks, their parameters, what they read of the configuration, and which of the moving methods they call with what are NeMo-RL's. On a
CPU these move nothing; they write down in `moves` that they were called. What the workers compute is a `Job`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.integrations.jobs import Job, as_bytes, made


class _Worker:
    """What both kinds have alike. Everything that leaves a worker is in `seen`, as bytes."""

    def __init__(self, config: Mapping[str, Any], init_optimizer: bool = True, init_reference_model: bool = True, **kwargs: Any) -> None:
        self.cfg = config
        self.seen: list[bytes] = []
        self.moves: list[tuple[str, str]] = []
        build: Callable[[], Job] = config["build"]
        self.job = build()
        (self.model,) = self.job.parts
        self.optimizer = self.job.optimizer if init_optimizer else None
        if init_reference_model:
            self.reference = {name: 0.5 * self._local(weight).detach().clone() for name, weight in self._weights()}

    def train(self, number: int) -> None:
        with self.job.within():
            self._see(self.job.learn(number))

    def get_logprobs(self, number: int) -> None:
        with self.job.within(), torch.no_grad():
            self._see(self.job.loss(number))

    def get_reference_policy_logprobs(self, number: int) -> None:
        with self.use_reference_model():
            self.get_logprobs(number)

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """The reference's weights are copied into the policy's model for a while."""
        own = {name: self._local(weight).detach().clone() for name, weight in self._weights()}
        for name, weight in self._weights():
            self._local(weight).data.copy_(self.reference[name])
        yield
        for name, weight in self._weights():
            self._local(weight).data.copy_(own[name])

    def prepare_refit_info(self) -> dict[str, torch.Size]:
        info = {}
        for name, weight in self._weights():
            self._see(weight)
            info[name] = weight.shape
        return info

    def stream_weights_via_ipc_zmq(self, buffer_size_bytes: int = 0, kv_scales: dict[str, float] | None = None) -> None:
        self.prepare_refit_info()

    def stream_weights_via_http(self, rollout_engine_urls: list[str], buffer_size_bytes: int) -> None:
        self.prepare_refit_info()

    def broadcast_weights_for_collective(
        self, kv_scales: dict[str, float] | None = None, *, buffer_size_bytes: int | None = None, num_buffers: int | None = None
    ) -> None:
        self.prepare_refit_info()

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None, **kwargs: Any) -> None:
        for _, weight in self._weights():
            self._see(weight)
        for each in self.job.state():
            self._see(each)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        for _, weight in self._weights():
            self._local(weight).data.mul_(0.5)
        for each in self.job.state():
            self._local(each).mul_(0.5)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """NeMo-RL has nothing to do here."""

    def _weights(self) -> list[tuple[str, torch.Tensor]]:
        """NeMo-RL reads and writes its model through state dicts."""
        return [(name, each) for name, each in self.model.state_dict().items() if isinstance(each, torch.Tensor)]

    @staticmethod
    def _local(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def _see(self, tensor: torch.Tensor) -> None:
        self.seen.append(as_bytes(tensor))


class DTensorWorker(_Worker):
    """`DTensorPolicyWorkerV2Impl`."""

    def __init__(self, config: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.cpu_offload = bool(config.get("cpu_offload"))
        self.offload_optimizer_for_logprob = True

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        self._onload()
        self.model.eval()
        if not keep_train_buffers and self.optimizer is not None and self.offload_optimizer_for_logprob:
            self.move_optimizer_to_device("cpu")

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        self._onload()
        self.model.train()
        if self.optimizer is not None and not self.cpu_offload:
            self.move_optimizer_to_device("cuda")

    def finish_inference(self) -> None:
        self.model = self.move_to_cpu(self.model)
        self.model.eval()

    def offload_before_refit(self) -> None:
        if self.optimizer is not None:
            self.move_optimizer_to_device("cpu")

    def offload_after_refit(self) -> None:
        self.model = self.move_to_cpu(self.model)
        self.model.eval()
        self.offload_before_refit()

    def _onload(self) -> None:
        if self.cpu_offload:
            self.model = self.move_buffer_to_device(self.model, "cuda")
        else:
            self.move_to_cuda(self.model)

    def move_to_cuda(self, model: torch.nn.Module) -> torch.nn.Module:
        return self.move_to_device(model, "cuda")

    def move_to_cpu(self, model: torch.nn.Module) -> torch.nn.Module:
        return self.move_to_device(model, "cpu")

    def move_to_device(self, model: torch.nn.Module, device: str | torch.device) -> torch.nn.Module:
        model = self.move_buffer_to_device(model, device)
        self.moves.append(("model", str(device)))
        return model

    def move_buffer_to_device(self, model: torch.nn.Module, device: str | torch.device) -> torch.nn.Module:
        self.moves.append(("buffers", str(device)))
        return model

    def move_optimizer_to_device(self, device: str | torch.device) -> None:
        self.moves.append(("optimizer", str(device)))


class MegatronWorker(_Worker):
    """`MegatronPolicyWorkerImpl`."""

    def __init__(self, config: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.model = self.move_model(self.model, "cpu")  # to make room while the reference is loaded
        self.model = self.move_model(self.model, "cuda")
        self.num_finalized = 0

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        self.model = self.move_model(self.model, "cuda", move_grads=False)
        self.model.eval()
        if not keep_train_buffers:
            self.model = self.move_model(self.model, "cpu", move_params=False, move_grads=True)
            if self.optimizer is not None:
                self.move_optimizer("cpu")

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        self.model = self.move_model(self.model, "cuda", move_grads=True, move_params=True)
        self.model.train()
        if self.optimizer is not None:
            self.move_optimizer("cuda")

    def finish_inference(self) -> None:
        self.model = self.move_model(self.model, "cpu", move_params=True, move_grads=False)
        self.model.eval()

    def offload_before_refit(self) -> None:
        self.finalize_async_save()
        self.model = self.move_model(self.model, "cpu", move_params=False, move_grads=True)
        if self.optimizer is not None:
            self.move_optimizer("cpu")

    def offload_after_refit(self) -> None:
        self.finalize_async_save()
        self.model = self.move_model(self.model, "cpu")
        self.model.eval()
        self.offload_before_refit()

    def save_checkpoint(self, weights_path: str, optimizer_path: str | None = None, **kwargs: Any) -> None:
        self.model = self.move_model(self.model, "cuda", move_params=True, move_grads=False)
        if optimizer_path is not None and self.optimizer is not None:
            self.move_optimizer("cuda")
        super().save_checkpoint(weights_path, optimizer_path, **kwargs)

    def finalize_async_save(self) -> None:
        self.num_finalized += 1

    def move_model(self, model: torch.nn.Module, device: str, move_params: bool = True, move_grads: bool = True) -> torch.nn.Module:
        self.moves.append((f"params={move_params} grads={move_grads}", device))
        return model

    def move_optimizer(self, device: str) -> None:
        self.moves.append(("optimizer", device))


def grpo(worker: Any, steps: int = 3) -> list[bytes]:
    """The calls of `grpo_train` with an engine on the same GPUs, from the refit before generation to the checkpoint."""
    worker.prepare_refit_info()
    for step in range(steps):
        refit(worker)
        if step == 1:  # weights that are still fresh are not sent again before a validation
            worker.offload_after_refit()
        worker.prepare_for_lp_inference(keep_train_buffers=False)
        worker.get_logprobs(step)
        worker.get_reference_policy_logprobs(step)
        worker.prepare_for_training()
        worker.train(2 * step)
        worker.train(2 * step + 1)
        if step == 1:
            worker.prepare_for_training()
            worker.save_checkpoint("weights", optimizer_path="optimizer")
    refit(worker)
    seen: list[bytes] = worker.seen
    return seen


def refit(worker: Any) -> None:
    """The calls of `refit_policy_generation`."""
    worker.offload_before_refit()
    worker.stream_weights_via_ipc_zmq(buffer_size_bytes=1 << 20, kv_scales=None)
    worker.offload_after_refit()


def ppo(worker: Any, steps: int = 2) -> list[bytes]:
    """The calls of `ppo_train`: the value model, in a process of its own, takes the GPU in between."""
    for step in range(steps):
        refit(worker)
        worker.prepare_for_lp_inference(keep_train_buffers=False)
        worker.get_logprobs(step)
        worker.finish_inference()
        worker.prepare_for_training()
        worker.train(step)
        worker.finish_training()
        worker.offload_after_refit()
    seen: list[bytes] = worker.seen
    return seen


def single_controller(worker: Any, steps: int = 2) -> list[bytes]:
    """The calls of the asynchronous controller: log-probabilities while a train step is open, engines on other GPUs."""
    worker.broadcast_weights_for_collective(kv_scales=None)
    for step in range(steps):
        for chunk in range(2):
            worker.prepare_for_lp_inference(keep_train_buffers=chunk > 0)
            worker.get_logprobs(step)
            worker.prepare_for_training()
            worker.train(2 * step + chunk)
        worker.broadcast_weights_for_collective(kv_scales=None)
    worker.save_checkpoint("weights", "optimizer")
    seen: list[bytes] = worker.seen
    return seen


def modules() -> dict[str, ModuleType]:
    """NeMo-RL's modules as far as a driver looks into them. Its `Policy` says what it was made with, and `setup` returns one."""
    workers = "nemo_rl.models.policy.workers"
    known = {
        f"{workers}.dtensor_policy_worker.DTensorPolicyWorker": "uv fsdp",
        f"{workers}.dtensor_policy_worker_v2.DTensorPolicyWorkerV2": "uv automodel",
        f"{workers}.megatron_policy_worker.MegatronPolicyWorker": "uv mcore",
    }

    def setup(config: Any, tokenizer: Any, dataset: Any, val_dataset: Any, policy_factory: Any = None) -> Any:
        return policy_factory(cluster=None, config=config, tokenizer=tokenizer, init_optimizer=True, init_reference_model=True)

    contents: dict[str, dict[str, Any]] = {
        "nemo_rl": {},
        "nemo_rl.algorithms": {},
        "nemo_rl.algorithms.grpo": {"setup": setup},
        "nemo_rl.distributed": {},
        "nemo_rl.distributed.ray_actor_environment_registry": {"ACTOR_ENVIRONMENT_REGISTRY": known},
        "nemo_rl.models": {},
        "nemo_rl.models.policy": {},
        "nemo_rl.models.policy.lm_policy": {"Policy": SimpleNamespace},
        "nemo_rl.models.policy.utils": {"get_runtime_env_for_policy_worker": lambda name: {"env_vars": {"FOR": name}}},
        workers: {},
        f"{workers}.dtensor_policy_worker_v2": {"DTensorPolicyWorkerV2Impl": DTensorWorker},
        f"{workers}.megatron_policy_worker": {"MegatronPolicyWorkerImpl": MegatronWorker},
    }
    return {name: made(name, names) for name, names in contents.items()}
