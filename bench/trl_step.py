"""A step of TRL's GRPO trainer with and without placement: how long does it take, and how many
device bytes do its models need?

The same job runs with TRL's own trainer and with the placed one under three policies, by turns in
one process: an actor, its reference, and Adam. In full size the actor has the shape of
SmolLM2-135M, with random weights. The step's time is the median from one step's begin to the next
one's, over all turns. `train()` is the whole call, registration included. The bytes are those of
the models, gradients and moments that are on the device, where TRL is about to use them; without
placement all are there from the first optimizer step on. On the simulated device the link has no
limit of speed, so the time that remains is that of the phase transitions themselves and of copies
within host memory.

TRL and what it needs have to be installed: tests/frameworks.txt names them.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import placement
from bench import _rig
from bench._results import Results
from bench._rig import Rig

_POLICIES = ("colocated", "colocated('optimizer_step')", "resident")
_WORDS = [*"0123456789+="]
_WARM_UP = 2


def _tokenizer() -> Any:
    """One token a character. It suffices for arithmetic, and needs no download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1} | {word: number for number, word in enumerate(_WORDS, start=2)}
    characters = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def _save_model(rig: Rig, folder: str) -> None:
    """TRL makes the reference from the folder that the actor comes from."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=rig.pick(36, 288, 576),
        intermediate_size=rig.pick(96, 768, 1536),
        num_hidden_layers=rig.pick(2, 15, 30),
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=rig.pick(64, 49152, 49152),
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [sum(map(ord, text)) / 100 for text in completions]


class _Job:
    """One training, and what is seen of it."""

    def __init__(
        self, rig: Rig, folder: str, make: Callable[..., Any], manager: placement.Manager | None
    ) -> None:
        from datasets import Dataset
        from transformers import LlamaForCausalLM, TrainerCallback
        from trl import GRPOConfig

        seen = self

        class Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                seen.begins.append(time.perf_counter())

            def on_train_end(self, *_: Any, **__: Any) -> None:
                seen.begins.append(time.perf_counter())

        self.begins: list[float] = []
        self.peaks: defaultdict[str, int] = defaultdict(int)
        self.manager = manager
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=not rig.is_cuda,
            bf16=False,
            activation_checkpointing=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            beta=0.1,
            num_generations=2,
            per_device_train_batch_size=4,
            max_completion_length=rig.pick(4, 16, 32),
            learning_rate=1e-3,
            logging_steps=1,
            max_steps=_WARM_UP + rig.pick(2, 4, 4),
        )
        prompts = Dataset.from_dict({"prompt": ["1+1=", "2+3=", "12+1=", "20+4="]})
        model = LlamaForCausalLM.from_pretrained(folder)
        how = {} if manager is None else {"manager": manager}
        self.trainer = make(
            model=model,
            reward_funcs=_reward,
            args=config,
            train_dataset=prompts,
            processing_class=_tokenizer(),
            callbacks=[Clock()],
            **how,
        )
        self._look_before("rollout", self.trainer, "_generate_single_turn")
        self._look_before("log_prob", self.trainer.ref_model, "forward")
        self._look_before("train", self.trainer, "_clip_grad_norm")  # the gradients are there
        # right after the step
        self._look_before("optimizer_step", self.trainer, "_get_learning_rate")
        self._look_before("between steps", self.trainer, "log")

    def _look_before(self, what: str, owner: Any, method: str) -> None:
        call = getattr(owner, method)

        def looking(*args: Any, **keywords: Any) -> Any:
            self.peaks[what] = max(self.peaks[what], self._resident_bytes())
            return call(*args, **keywords)

        setattr(owner, method, looking)

    def _resident_bytes(self) -> int:
        gradients = sum(
            each.grad.nbytes for each in self.trainer.model.parameters() if each.grad is not None
        )
        if self.manager is not None:
            # A gradient lies in torch's own memory until its module is offloaded with it, which
            # here never happens.
            return gradients + sum(
                handle.resident_bytes for handle in self.manager.handles.values()
            )
        models = [*self.trainer.model.parameters(), *self.trainer.ref_model.parameters()]
        states = self.trainer.optimizer.state.values() if self.trainer.optimizer is not None else ()
        moments = [
            value for state in states for value in state.values() if isinstance(value, torch.Tensor)
        ]
        return gradients + sum(each.nbytes for each in [*models, *moments])

    def train(self) -> float:
        """Train. Returns the seconds that it took."""
        began = time.perf_counter()
        self.trainer.train()
        return time.perf_counter() - began

    def step_seconds(self) -> list[float]:
        return [after - before for before, after in itertools.pairwise(self.begins)][_WARM_UP:]

    def logged(self) -> list[dict[str, float]]:
        times = ("runtime", "per_second", "step_time")
        rows = [
            {key: value for key, value in row.items() if not key.startswith("placement/")}
            for row in self.trainer.state.log_history
        ]
        return [
            {key: value for key, value in row.items() if not key.endswith(times)} for row in rows
        ]


class _System:
    """TRL, or placement under one policy: what all its turns have shown."""

    def __init__(self, rig: Rig, name: str, policy: str | None) -> None:
        self.rig = rig
        self.name = name
        self.policy = policy
        self.step_seconds: list[float] = []
        self.train_seconds: list[float] = []
        self.logged: list[dict[str, float]] = []
        self.bytes: dict[str, float] = {}

    def take_turn(self, folder: str) -> None:
        from trl import GRPOTrainer

        from placement.integrations.trl import PlacedGRPOTrainer

        manager = None
        if self.policy is not None:
            device = self.rig.device if self.rig.is_cuda else "simulated:8GiB"
            manager = placement.Manager(device=device, policy=self.policy)
        make = GRPOTrainer if manager is None else PlacedGRPOTrainer
        job = _Job(self.rig, folder, make, manager)
        self.train_seconds.append(job.train())
        self.step_seconds += job.step_seconds()
        self.logged = job.logged()
        self.bytes = {f"peak bytes, {phase}": peak for phase, peak in job.peaks.items()}
        if manager is not None:
            counters = [handle.counters for handle in manager.handles.values()]
            steps = job.trainer.state.global_step
            loaded, offloaded = (
                sum(getattr(each, moved) for each in counters) / steps
                for moved in ("loaded_bytes", "offloaded_bytes")
            )
            self.bytes |= {
                "bytes to the device, a step": loaded,
                "bytes to the host, a step": offloaded,
            }
            manager.close()

    def report(self, results: Results, scenario: str, own: _System) -> None:
        """Add the rows of this system; `own` is TRL's own trainer."""
        medians = {
            "step": (statistics.median(self.step_seconds), statistics.median(own.step_seconds)),
            "train()": (
                statistics.median(self.train_seconds),
                statistics.median(own.train_seconds),
            ),
        }
        for what, (seconds, _) in medians.items():
            results.add(scenario, self.name, what, seconds, "s")
        if self is not own:
            for what, (seconds, own_seconds) in medians.items():
                results.add(
                    scenario, self.name, f"{what}, of TRL's", seconds / own_seconds, "times"
                )
            results.add(scenario, self.name, "bit-exact", self.logged == own.logged, "yes=1")
        for what, nbytes in self.bytes.items():
            results.add(scenario, self.name, what, nbytes, "bytes")


def measure(rig: Rig, results: Results) -> None:
    own = _System(rig, "TRL", None)
    placed = [_System(rig, f"placement, {policy}", policy) for policy in _POLICIES]
    systems = [own, *(each for each in placed if rig.wants(each.name))]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # TRL's defaults name arguments that transformers calls deprecated
        warnings.simplefilter("ignore")
        _save_model(rig, folder)
        nbytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        scenario = f"TRL's GRPO step, actor of {nbytes / 1e6:,.1f} MB in float32"
        for _ in range(rig.pick(1, 3, 3)):
            for system in systems:
                system.take_turn(folder)
                rig.clean()
    for system in systems:
        with results.system(scenario, system.name):
            system.report(results, scenario, own)


def main(arguments: Sequence[str] | None = None) -> None:
    _rig.run("trl_step", __doc__, measure, arguments)


if __name__ == "__main__":
    main()
