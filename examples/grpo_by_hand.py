"""SmolLM2-135M-Instruct learns to add, with GRPO by hand on a device too small for the job.

`train` and its two helpers are plain PyTorch. They declare phases, and move nothing.

    python -m examples.grpo_by_hand
    python -m examples.grpo_by_hand --without-placement      # the same bits
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import placement
from examples import _addition, _report
from placement.cli.demo import EverythingResident


def train(manager: Any, actor: Any, ref: Any, tokenizer: Any, batches: int) -> Iterator[Any]:
    """Yields the loss of each update, with the rewards [24] of the answers that it learns from."""
    optimizer = torch.optim.AdamW(actor.parameters(), lr=1e-5, weight_decay=0.0)
    manager.register("actor", actor, role="actor")
    manager.register("actor.optimizer", optimizer)
    manager.register("ref", ref, role="ref", readonly=True)
    draw = random.Random(0)  # noqa: S311 - repeatable on purpose
    with manager.phase("rollout") as phase:
        for _ in range(batches):
            phase.switch("rollout")
            sums = [(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(4)]
            ids, mask, rewards = sample(actor, tokenizer, sums)
            groups = rewards.view(4, 6)
            spread = groups.std(1, keepdim=True) + 1e-4
            advantages = ((groups - groups.mean(1, keepdim=True)) / spread).view(24, 1)

            phase.switch("log_prob")
            with torch.no_grad():
                old, fixed = log_probs(actor, ids, mask), log_probs(ref, ids, mask)

            phase.switch("train")
            for _ in range(2):
                new = log_probs(actor, ids, mask)
                ratio = torch.exp(new - old)
                gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                distance = torch.exp(fixed - new) - (fixed - new) - 1
                loss = ((0.02 * distance - gain) * mask).sum() / mask.sum()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(actor.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                yield loss.item(), rewards


def sample(actor: Any, tokenizer: Any, sums: list[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Answer each question six times. Returns ids [24, prompt + answer], the mask of the answers'
    tokens [24, answer], up to the first end token and with it, and rewards [24]."""
    asked = tokenizer([_addition.prompt(*pair) for pair in sums], return_tensors="pt")
    prompts = asked.input_ids.repeat_interleave(6, dim=0).to(actor.device)
    ids = actor.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        max_new_tokens=_addition.NEW_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
    )
    answers = ids[:, prompts.shape[1] :]
    ended = answers == tokenizer.eos_token_id
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    totals = [sum(pair) for pair in sums for _ in range(6)]
    rewards = [_addition.reward(*pair) for pair in zip(texts, totals, strict=True)]
    return ids, ended.cumsum(1) - ended.int() == 0, torch.tensor(rewards, device=ids.device)


def log_probs(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """Log-probability of each token of the answers, [24, answer]."""
    length = mask.shape[1]
    logits = model(input_ids=ids, logits_to_keep=length + 1).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, ids[:, -length:, None]).squeeze(2)


def main(arguments: Sequence[str] | None = None) -> _report.Report:
    """Train, and print how the reward rises."""
    options = _report.options_from(arguments, __doc__)
    from transformers import AutoModelForCausalLM

    folder = _addition.model_folder()
    actor, ref = (AutoModelForCausalLM.from_pretrained(folder).eval() for _ in range(2))
    tokenizer = _addition.load_tokenizer()
    placed = None if options.without_placement else placement.Manager.from_settings()
    manager = placed or EverythingResident(
        torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )

    torch.manual_seed(0)
    report = _report.Report(f"GRPO by hand, {options.how}")
    course = train(manager, actor, ref, tokenizer, options.updates // 2)
    for number, (loss, rewards) in enumerate(course):
        reward = rewards.mean().item() if number % 2 == 0 else None
        report.add(loss, reward, placed.metrics() if placed else {})
    report.close(actor.state_dict(), placed.metrics(totals=True) if placed else {}, options.png)
    return report


if __name__ == "__main__":
    _report.silence_frameworks()
    main()
