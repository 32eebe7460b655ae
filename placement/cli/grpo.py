"""GRPO in one file: a complete, small worker as a user would write it, with placement.

Each step is one open phase that switches: rollout, log_prob, train, weight_sync. Between those
calls there is only ordinary PyTorch. The code moves no tensor by hand, and never asks where a
tensor is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from placement.engines import TorchEngine


class Characters:
    """A tokenizer with one id for each character. It suffices for arithmetic, and needs no
    download."""

    pad, eos = 0, 1
    _alphabet = "0123456789+="
    vocabulary_size = 2 + len(_alphabet)

    def encode(self, texts: Sequence[str]) -> Tensor:
        """The ids of texts of one length, int64 [texts, length]."""
        return torch.tensor([list(map(self._id_of, text)) for text in texts])

    def _id_of(self, character: str) -> int:
        return 2 + self._alphabet.index(character)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._alphabet[index - 2] for index in ids if index >= 2)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The hyperparameters of a run."""

    steps: int = 3
    prompts: int = 16
    completions: int = 16  # completions for each prompt. Their mean reward is the group's baseline.
    new_tokens: int = 5
    temperature: float = 1.0
    minibatches: int = 4  # optimizer steps in each step of the loop
    learning_rate: float = 1e-3
    clip: float = 0.2
    kl_weight: float = 0.02
    gradient_norm: float = 1.0
    bucket_bytes: int = 1 << 20
    seed: int = 0


@dataclass(frozen=True)
class Rollouts:
    """Sampled completions. The ids behind an end token are padding, which no token before it
    attends to."""

    ids: Tensor  # int64 [samples, prompt + completion]
    # float32 [samples, completion]: 1 up to and including the end token of the completion
    answer_mask: Tensor
    rewards: Tensor  # float32 [samples]


@dataclass(frozen=True)
class StepResult:
    """The results of one step of the loop."""

    loss: float
    reward: float
    kl: float
    correct: float


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The objects of the job. The loop uses them; the manager decides where their bytes are."""

    actor: nn.Module
    optimizer: torch.optim.Optimizer
    reference: nn.Module
    engine: TorchEngine
    tokenizer: Characters
    device: torch.device
    recipe: Recipe

    def train(self, manager: Any) -> Iterator[StepResult]:
        """Register everything, then run the loop. Yields one result a step. `manager`: a
        `placement.Manager`, or an object with its `register` and `phase`."""
        actor = manager.register("actor", self.actor, role="actor")
        manager.register("actor.optimizer", self.optimizer)
        manager.register("ref", self.reference, role="ref", readonly=True)
        manager.register("rollout", self.engine, role="rollout")

        recipe = self.recipe
        questions = random.Random(recipe.seed)  # noqa: S311 - repeatable on purpose
        generator = torch.Generator(self.device).manual_seed(recipe.seed)
        for _ in range(recipe.steps):
            # A phase for each step, so that the demo can show an empty device after it. One around
            # the loop keeps the engine's weights on the device from step to step.
            with manager.phase("rollout") as step:
                sums = [
                    (questions.randint(0, 9), questions.randint(0, 9))
                    for _ in range(recipe.prompts)
                ]
                rollouts, correct = self.rollout(sums, generator)

                step.switch("log_prob", only=["actor", "ref"])
                with torch.no_grad():
                    old = self.log_probs(self.actor, rollouts)
                    ref = self.log_probs(self.reference, rollouts)

                step.switch("train")
                loss, kl = self.update(rollouts, old, ref)

                step.switch("weight_sync")
                for bucket in actor.weights(bucket_bytes=recipe.bucket_bytes):
                    self.engine.update_weights(bucket)
            yield StepResult(loss, rollouts.rewards.mean().item(), kl, correct)

    @torch.no_grad()
    def rollout(
        self, sums: Sequence[tuple[int, int]], generator: torch.Generator
    ) -> tuple[Rollouts, float]:
        """Sample `completions` answers to each sum from the engine and judge them. Also returns the
        fraction of correct answers."""
        completions = self.recipe.completions
        questions = self.tokenizer.encode([f"{a}+{b}=" for a, b in sums]).to(self.device)
        prompts = questions.repeat_interleave(completions, dim=0)
        answers, answer_mask = self.sample(prompts, generator)

        rewards = []
        correct = 0
        for index, ids in enumerate(answers.tolist()):
            a, b = sums[index // completions]
            text = self.tokenizer.decode(ids)
            rewards.append(judge(text, self.tokenizer.eos in ids, a + b))
            correct += text == str(a + b)
        rollouts = Rollouts(
            torch.cat([prompts, answers], dim=1),
            answer_mask,
            torch.tensor(rewards).to(self.device),
        )
        return rollouts, correct / len(rewards)

    def sample(self, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Continue [samples, length] prompts by `new_tokens` ids with a KV cache. Returns ids and
        mask, [samples, new_tokens]."""
        tokenizer = self.tokenizer
        model = self.engine.module
        ids, cache = prompts, None
        running = torch.ones(len(prompts), dtype=torch.bool, device=prompts.device)
        answers = []
        answer_mask = []
        for _ in range(self.recipe.new_tokens):
            output = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logits = output.logits[:, -1].float() / self.recipe.temperature
            probabilities = torch.softmax(logits, dim=-1)
            sampled = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
            ids = torch.where(running, sampled, tokenizer.pad).unsqueeze(1)
            answers.append(ids)
            answer_mask.append(running.float().unsqueeze(1))
            running = running & (ids.squeeze(1) != tokenizer.eos)
        return torch.cat(answers, dim=1), torch.cat(answer_mask, dim=1)

    def log_probs(self, model: nn.Module, rollouts: Rollouts) -> Tensor:
        """Log-probability of each sampled token, [samples, completion], float32."""
        length = rollouts.answer_mask.shape[1]
        output = model(input_ids=rollouts.ids, use_cache=False)
        logits = output.logits[:, -length - 1 : -1].float()
        logits = logits / self.recipe.temperature
        log_probs: Tensor = logits.log_softmax(dim=-1)
        sampled = rollouts.ids[:, -length:, None]
        return log_probs.gather(2, sampled).squeeze(2)

    def update(self, rollouts: Rollouts, old: Tensor, ref: Tensor) -> tuple[float, float]:
        """One pass over the samples, one optimizer step a minibatch. Returns the mean loss and the
        mean KL to the reference."""
        recipe = self.recipe
        groups = rollouts.rewards.view(-1, recipe.completions)
        centred = groups - groups.mean(1, keepdim=True)
        scale = groups.std(1, keepdim=True) + 1e-4
        advantages = (centred / scale).view(-1, 1)
        losses, kls = [], []
        # Strided, so that every minibatch has completions of every prompt.
        for part in range(recipe.minibatches):
            pick = slice(part, None, recipe.minibatches)
            batch = Rollouts(rollouts.ids[pick], rollouts.answer_mask[pick], rollouts.rewards[pick])
            loss, kl = grpo_loss(
                self.log_probs(self.actor, batch),
                old[pick],
                ref[pick],
                advantages[pick],
                batch.answer_mask,
                recipe,
            )
            self.optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(self.actor.parameters(), recipe.gradient_norm)
            self.optimizer.step()
            losses.append(loss.detach())
            kls.append(kl.detach())
        self.optimizer.zero_grad()  # else the gradients would be offloaded together with the actor
        loss = torch.stack(losses).mean()
        kl = torch.stack(kls).mean()
        return loss.item(), kl.item()


def judge(text: str, ended: bool, target: int) -> float:
    """The reward of one answer: 1 if correct; else up to 0.4 for its form (digits, then the end),
    so that training has a gradient."""
    if ended and text == str(target):
        return 1.0
    digits = sum(map(str.isdigit, text)) / max(len(text), 1)
    is_number = ended and text.isdigit() and len(text) <= 2
    return 0.1 * digits + 0.1 * ended + 0.2 * is_number


def grpo_loss(
    new: Tensor, old: Tensor, ref: Tensor, advantages: Tensor, mask: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """Clipped policy loss with the k3 estimate of the KL to the reference, a mean over tokens. All
    inputs [samples, completion]."""
    ratio = torch.exp(new - old)
    clipped = ratio.clamp(1 - recipe.clip, 1 + recipe.clip)
    policy = -torch.minimum(ratio * advantages, clipped * advantages)
    kl = torch.exp(ref - new) - (ref - new) - 1
    tokens = mask.sum()
    mean_kl = (kl * mask).sum() / tokens
    return (policy * mask).sum() / tokens + recipe.kl_weight * mean_kl, mean_kl


def build_actor(tokenizer: Characters, seed: int) -> nn.Module:
    """A Qwen2 of 1.6 million parameters, float32, on the CPU."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=tokenizer.vocabulary_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attn_implementation="eager",
        pad_token_id=tokenizer.pad,
        bos_token_id=None,
        eos_token_id=tokenizer.eos,
    )
    model: nn.Module = Qwen2ForCausalLM(config)
    return model.eval()
