"""SmolLM2-135M-Instruct learns to add, with TRL's GRPO trainer on a device too small for its job.

make example                               # or: python -m examples.grpo_trl
make example ARGS=--without-placement      # TRL's own trainer: the same bits
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from examples import _addition, _report


def rewards_of(completions: list[str], total: list[int], **_: Any) -> list[float]:
    """The reward function, as TRL calls it."""
    return [_addition.reward(*pair) for pair in zip(completions, total, strict=True)]


def main(arguments: Sequence[str] | None = None) -> _report.Report:
    """Train, and print how the reward rises."""
    options = _report.options_from(arguments, __doc__)
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig

    if options.without_placement:
        from trl import GRPOTrainer
    else:
        from placement.integrations.trl import PlacedGRPOTrainer as GRPOTrainer

    class Progress(TrainerCallback):  # type: ignore[misc] # transformers is not followed by mypy
        def on_log(self, args: Any, state: Any, control: Any, *, logs: Any, **_: Any) -> None:
            if "loss" in logs:
                report.add(logs["loss"], logs.get("reward"), logs)

    sums = [(first, second) for first in range(1, 10) for second in range(1, 10)]
    trainer = GRPOTrainer(
        model=_addition.model_folder(),
        processing_class=_addition.load_tokenizer(),
        reward_funcs=rewards_of,
        train_dataset=Dataset.from_list(
            [{"prompt": _addition.prompt(*pair), "total": sum(pair)} for pair in sums]
        ),
        args=GRPOConfig(
            max_steps=options.updates,
            num_iterations=2,
            per_device_train_batch_size=24,
            num_generations=6,
            max_completion_length=_addition.NEW_TOKENS,
            beta=0.02,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            model_init_kwargs={"dtype": "float32"},
            bf16=False,
            activation_checkpointing=False,
            use_cpu=not torch.cuda.is_available(),
            seed=0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            output_dir="build/grpo_trl",
        ),
        callbacks=[Progress()],
    )
    trainer.remove_callback(PrinterCallback)
    report = _report.Report(f"GRPO with TRL, {options.how}")
    trainer.train()
    report.close(trainer.model.state_dict(), trainer.state.log_history[-1], options.png)
    return report


if __name__ == "__main__":
    _report.silence_frameworks()
    main()
