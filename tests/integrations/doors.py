"""The doors of frameworks that pages rely on: files, classes, methods and their parameters, as they were read in the sources."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Door:
    """A method of a class, or a function of a module, with its parameters in order."""

    file: str
    owner: str
    """The class; empty for a function of the module."""
    name: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return ".".join(filter(None, (self.owner, self.name)))


def _doors(file: str, owner: str, **names: str) -> tuple[Door, ...]:
    return tuple(Door(file, owner, name, tuple(parameters.split())) for name, parameters in names.items())


_SLIME = "slime/backends/megatron_utils/actor.py"
_NEMO_RL = "nemo_rl/models/policy/workers"
_NEMO_RL_HOOKS = {
    "prepare_for_training": "*args **kwargs",
    "prepare_for_lp_inference": "keep_train_buffers",
    "offload_before_refit": "",
    "offload_after_refit": "",
    "prepare_refit_info": "",
    "stream_weights_via_ipc_zmq": "buffer_size_bytes kv_scales",
    "broadcast_weights_for_collective": "kv_scales buffer_size_bytes num_buffers",
}
_SKYRL = "skyrl/backends/skyrl_train/workers"
_ROLL = "roll/distributed/strategy"
_ROLL_STATES = {"load_states": "include non_blocking", "offload_states": "include non_blocking"}

DOORS: dict[str, tuple[Door, ...]] = {
    "slime": (
        *_doors(
            _SLIME,
            "MegatronTrainRayActor",
            init="args role with_ref with_opd_teacher",
            train="rollout_id rollout_data_ref external_data",
            save_model="rollout_id force_sync",
            update_weights="",
        ),
        *_doors("slime/ray/train_actor.py", "TrainRayActor", __init__="world_size rank master_addr master_port", clear_memory=""),
        *_doors(
            "slime/ray/placement_group.py",
            "",
            create_training_models="args pgs rollout_manager actor_cls",
            create_actor_model="args pgs rollout_manager actor_cls",
            allocate_train_group="args num_nodes num_gpus_per_node pg role with_ref with_opd_teacher actor_cls",
        ),
    ),
    "nemo_rl": (
        *_doors(
            f"{_NEMO_RL}/dtensor_policy_worker_v2.py",
            "DTensorPolicyWorkerV2Impl",
            **_NEMO_RL_HOOKS,
            finish_inference="",
            stream_weights_via_http="rollout_engine_urls buffer_size_bytes",
            save_checkpoint="weights_path optimizer_path tokenizer_path checkpointing_cfg",
            load_checkpoint="weights_path optimizer_path",
            move_to_device="model device",
            move_buffer_to_device="model device",
            move_optimizer_to_device="device",
        ),
        *_doors(
            f"{_NEMO_RL}/megatron_policy_worker.py",
            "MegatronPolicyWorkerImpl",
            **_NEMO_RL_HOOKS,
            finish_inference="",
            save_checkpoint="weights_path optimizer_path **kwargs",
            load_checkpoint="weights_path optimizer_path",
            move_model="model device move_params move_grads",
            move_optimizer="device",
        ),
        *_doors(f"{_NEMO_RL}/base_policy_worker.py", "AbstractPolicyWorker", finish_training="*args **kwargs"),
        *_doors("nemo_rl/models/policy/utils.py", "", get_runtime_env_for_policy_worker="policy_worker_name"),
        *_doors("nemo_rl/distributed/ray_actor_environment_registry.py", "", get_actor_python_env="actor_class_fqn"),
    ),
    "skyrl": (
        *_doors(
            f"{_SKYRL}/worker.py",
            "Worker",
            init_model="*args **kwargs",
            offload_to_cpu="offload_optimizer offload_model",
            backload_to_gpu="backload_optimizer backload_model",
            _get_module_for_offload="",
        ),
        *_doors(f"{_SKYRL}/fsdp/fsdp_worker.py", "FSDPPolicyWorkerBase", init_model="model_path num_training_steps"),
        *_doors("skyrl/train/trainer.py", "RayPPOTrainer", build_models="PolicyWorker CriticWorker RefWorker"),
        *_doors(
            "skyrl/train/entrypoints/main_base.py",
            "BasePPOExp",
            get_trainer="cfg tracker tokenizer train_dataset eval_dataset inference_engine_client generator colocate_pg",
        ),
    ),
    "roll": (
        *_doors("roll/pipeline/base_worker.py", "ActorWorker", initialize="pipeline_config"),
        *_doors(f"{_ROLL}/fsdp2_strategy.py", "FSDP2StrategyBase", **_ROLL_STATES),
        *_doors(
            f"{_ROLL}/megatron_strategy.py",
            "MegatronTrainStrategy",
            **(_ROLL_STATES | {"offload_states": "include non_blocking pin_memory"}),
        ),
        *_doors("roll/utils/context_managers.py", "", state_offload_manger="strategy metrics metric_infix is_offload_states load_kwargs"),
    ),
    "openrlhf": (
        *_doors(
            "openrlhf/trainer/ray/ppo_actor.py",
            "PolicyModelActor",
            init_model_from_pretrained="strategy pretrain max_steps vllm_engines",
            fit="kl_ctl",
            forward="sequences action_mask attention_mask packed_seq_lens mm_train_inputs_list",
            reload_states="",
            offload_states="",
        ),
        *_doors("openrlhf/utils/deepspeed/deepspeed_utils.py", "", offload_deepspeed_states="model pin_memory non_blocking"),
    ),
}
"""By the name under which each framework is imported."""


def installed(framework: str) -> Path | None:
    """The folder around an installed framework's package, found without importing it; None where it is not installed."""
    spec = importlib.util.find_spec(framework)
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))).parent if places else None


def parameters(root: Path, door: Door) -> tuple[str, ...] | None:
    """The parameters that a door has in these sources, without `self`; None where it is not there."""
    file = root / door.file
    if not file.is_file():
        return None
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    if door.owner:
        body = [each for part in body if isinstance(part, ast.ClassDef) and part.name == door.owner for each in part.body]
    for each in body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == door.name:
            return _parameters(each.args)[1 if door.owner else 0 :]
    return None


def _parameters(arguments: ast.arguments) -> tuple[str, ...]:
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    names += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    names += [each.arg for each in arguments.kwonlyargs]
    return tuple(names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else []))
