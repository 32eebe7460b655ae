"""A GRPO recipe for verl's driver with everything that it reads: a model of random values, a
tokenizer, prompts, a reward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

STANDIN = "standin"
"""The name of the rollout that stands in for vLLM on the CPU."""
# U+010A is how Qwen writes the end of a line
_WORDS = ("<pad>", "<|im_start|>", "<|im_end|>", *"\u010a0123456789+=")
_ACTOR, _REF, _ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout"))
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.content + '<|im_end|>\n"
    "' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> float:
    """The reward of an answer; any function will do that tells answers apart."""
    return sum(map(ord, solution_str)) % 97 / 97


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Qwen's tokenizer with a token for each character that a prompt has, and one for each other
    number of the vocabulary."""
    from transformers import Qwen2Tokenizer

    words = {word: number for number, word in enumerate(_WORDS)}
    words |= {f"<{number}>": number for number in range(len(words), vocabulary)}
    special = {
        "pad_token": "<pad>",
        "unk_token": "<pad>",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    tokenizer = Qwen2Tokenizer(vocab=words, merges=[], **special)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


def write_prompts(file: Path, number: int) -> None:
    """Sums, each prompt longer than the one before."""
    from datasets import Dataset

    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{10**at}+{at}="}],
            "reward_model": {"style": "rule", "ground_truth": str(10**at + at)},
            "extra_info": {"index": at},
        }
        for at in range(number)
    ]
    Dataset.from_list(rows).to_parquet(str(file))


def write_inputs(folder: Path, vocabulary: int, prompts: int) -> None:
    """What a run reads beside the model: its tokenizer, in the same folder, and the prompts."""
    write_tokenizer(folder, vocabulary)
    write_prompts(folder / "prompts.parquet", prompts)


def options(folder: Path, given: Mapping[str, Any]) -> list[str]:
    """The recipe as arguments of `python -m verl.trainer.main_ppo`; `given` comes last and may
    replace any."""
    recipe: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "prompts.parquet",
        "data.val_files": folder / "prompts.parquet",
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": folder,
        "actor_rollout_ref.model.use_remove_padding": False,
        f"{_ACTOR}.strategy": "fsdp2",
        f"{_ACTOR}.use_kl_loss": True,
        f"{_ACTOR}.fsdp_config.param_offload": True,
        f"{_ACTOR}.fsdp_config.optimizer_offload": True,
        f"{_REF}.fsdp_config.param_offload": True,
        f"{_REF}.strategy": "fsdp2",
        f"{_ROLLOUT}.tensor_model_parallel_size": 1,
        f"{_ROLLOUT}.agent.num_workers": 1,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": Path(__file__),
        "trainer.logger": "[file]",
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": 3,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "+ray_kwargs.ray_init.address": "local",
        "+ray_kwargs.ray_init.include_dashboard": False,
        "trainer.v1.sampler.custom_sampler.path": Path(__file__).with_name("driver_samples.py"),
        "trainer.v1.sampler.custom_sampler.name": "SortedSamples",
    }
    return [f"{name}={value}" for name, value in (recipe | dict(given)).items()]


def tiny() -> dict[str, Any]:
    """The options for a tiny model on the CPU, with the rollout that stands in for vLLM."""
    recipe: dict[str, Any] = {
        "data.train_batch_size": 2,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{_ACTOR}.ppo_mini_batch_size": 2,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": 2,
        f"{_ACTOR}.use_torch_compile": False,
        f"{_ACTOR}.optim.lr": 0.01,
        f"{_ROLLOUT}.name": STANDIN,
        f"{_ROLLOUT}.n": 2,
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": 2,
        f"{_ROLLOUT}.calculate_log_probs": False,
        f"{_REF}.log_prob_micro_batch_size_per_gpu": 2,
        # as many as verl's actors ask for, whatever the machine has
        "ray_kwargs.ray_init.num_cpus": 32,
        "+ray_kwargs.ray_init.num_gpus": 1,
    }
    for engine in (_ACTOR, _REF):
        recipe[f"{engine}.fsdp_config.use_torch_compile"] = False
        recipe |= {
            f"+{engine}.fsdp_config.mixed_precision.{name}_dtype": "fp32"
            for name in ("param", "reduce", "buffer")
        }
    return recipe
