"""A stand-in of vLLM's `LLM` that generates with the weights that it was given, and refuses what
would corrupt or kill the real one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.engines.test_in_process import LLM
from tests.support import huggingface as hf


class GeneratingLLM(LLM):
    """vllm/entrypoints/llm.py, 0.33.0: the calls of `LLM` above, and `generate` with per-token
    log-probabilities.

    Weights that are discarded become NaN. The model samples with random numbers of its own.
    """

    def __init__(self, shared: Path, folder: str) -> None:
        super().__init__(shared)
        self.model: Any = hf.model_from(folder).eval().requires_grad_(False)
        self.model.load_weights = self._load_weights
        runner = SimpleNamespace(model=self.model)
        self.llm_engine.model_executor = SimpleNamespace(
            driver_worker=SimpleNamespace(model_runner=runner)
        )
        self._random = torch.Generator().manual_seed(0)
        self.accidents: list[str] = []

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        if level and self.sleeping:
            self.accidents.append(f"sleep(level={level}) although {sorted(self.sleeping)} sleep")
        super().sleep(level, mode)
        if level == 2:
            for weight in self.model.parameters():
                weight.fill_(float("nan"))

    def wake_up(self, tags: list[str] | None = None) -> bool:
        if not set(tags or ()) <= self.sleeping:
            self.accidents.append(f"wake_up({tags}) although only {sorted(self.sleeping)} sleep")
        return super().wake_up(tags)

    def _load_weights(self, pairs: Any) -> set[str]:
        weights = dict(self.model.named_parameters())
        if "weights" not in self.memory.tags:
            self.accidents.append("weights written to memory that was given away")
        for name, value in pairs:
            weights[name].copy_(value)
        self.calls.append(("load_weights", len(pairs)))
        return {name for name, _ in pairs}

    @torch.no_grad()
    def generate(
        self, prompts: list[dict[str, list[int]]], sampling_params: Any, use_tqdm: bool = True
    ) -> list[Any]:
        self.calls.append(("generate", len(prompts)))
        if self.memory.tags != {"weights", "kv_cache"} or self.paused:
            self.accidents.append(f"generate with {sorted(self.memory.tags)} on the device")
        if not all(weight.isfinite().all() for weight in self.model.parameters()):
            self.accidents.append("generate with weights that were never filled")
        return [
            self._complete(prompt["prompt_token_ids"], sampling_params.max_tokens)
            for prompt in prompts
        ]

    def _complete(self, prompt: list[int], most: int) -> Any:
        tokens: list[int] = []
        log_probs: list[dict[int, Any]] = []
        while len(tokens) < most and tokens[-1:] != [1]:
            ahead = self.model(torch.tensor([prompt + tokens])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(ahead.exp(), 1, generator=self._random))
            tokens.append(token)
            log_probs.append({token: SimpleNamespace(logprob=float(ahead[token]), rank=1)})
        return SimpleNamespace(
            prompt_token_ids=prompt, outputs=[SimpleNamespace(token_ids=tokens, logprobs=log_probs)]
        )
