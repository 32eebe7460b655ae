"""What tests of TRL's trainers share: the smallest jobs, run by TRL's own trainer and by the placed one, and the comparison of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from placement import Manager
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support import huggingface as hf
from tests.support.frameworks import Later

trl = Later("trl")
placed = Later("placement.integrations.trl")

QUIET = ("ignore", r"error:::placement\.")
"""The frameworks warn of one another: TRL's defaults name arguments that transformers calls deprecated."""
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables by which a launcher tells each rank who it is."""


def digits(completions: list[str], **_: Any) -> list[float]:
    return [sum(ord(character) for character in text) / 100 for text in completions]


def manager_for(**settings: Any) -> Manager:
    return Manager(device=SimulatedDevice(capacity_bytes=16 << 20, chunk_bytes=4096), phases=placed.PHASES, **settings)


def config_of(kind: str, out: Path, **changes: Any) -> Any:
    options = {**COMMON, "beta": 0.1, "num_iterations": 2, "max_steps": 4, **changes}
    return getattr(trl, f"{kind}Config")(**options, output_dir=str(out))


def grpo_config(out: Path, **changes: Any) -> Any:
    return config_of("GRPO", out, **changes)


COMMON: dict[str, Any] = {
    "use_cpu": True,
    "report_to": "none",
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "num_generations": 2,
    "max_completion_length": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "activation_checkpointing": False,
    "bf16": False,
    "seed": 7,
}


def make(cls: Any, config: Any, folder: str, **keywords: Any) -> Any:
    how = {"reward_funcs": digits, "train_dataset": hf.prompts(), "processing_class": hf.tokenizer(), "model": hf.model_from(folder)}
    return cls(args=config, **{**how, **keywords})


def train(trainer: Any, **keywords: Any) -> None:
    """Train again. The random numbers of sampling go on from where they are, so they are set."""
    from transformers import set_seed

    set_seed(11)
    trainer.train(**keywords)


def assert_same(ours: Any, own: Any) -> None:
    """What was logged (losses, rewards, KL, lengths), and every weight and moment."""
    assert hf.logged(ours) == hf.logged(own)
    hf.assert_same_bytes(hf.weights_of(ours.model), hf.weights_of(own.model))
    if own.ref_model is not None:
        hf.assert_same_bytes(hf.weights_of(ours.ref_model), hf.weights_of(own.ref_model))
    hf.assert_same_bytes(hf.moments_of(ours.optimizer), hf.moments_of(own.optimizer))


def train_both(
    folder: str,
    out: Path,
    keywords: Callable[[], dict[str, Any]] = dict,
    manager: Manager | None = None,
    kind: str = "GRPO",
    before: Callable[[Any], None] = id,
    **changes: Any,
) -> tuple[Any, Any]:
    """The placed trainer and TRL's own one, which have computed the same.

    Args:
        keywords: makes those of each trainer.
        before: called with the placed trainer before it trains.
    """
    manager = manager or manager_for()
    own = make(getattr(trl, f"{kind}Trainer"), config_of(kind, out / "own", **changes), folder, **keywords())
    own.train()
    ours = make(getattr(placed, f"Placed{kind}Trainer"), config_of(kind, out / "ours", **changes), folder, manager=manager, **keywords())
    before(ours)
    ours.train()
    if manager.policy.name == "colocated":
        assert_nothing_resident(manager)
    assert_same(ours, own)
    return ours, own


class Watch:
    """What is on the device when TRL calls, by the names of handles."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.seen: dict[str, set[frozenset[str]]] = {}

    def look(self, at: str) -> None:
        there = frozenset(name for name, handle in self.manager.handles.items() if handle.resident_bytes)
        self.seen.setdefault(at, set()).add(there)

    def around(self, trainer: Any, *methods: str) -> None:
        for method in methods:
            setattr(trainer, method, self._looking(method, getattr(trainer, method)))

    def _looking(self, at: str, call: Any) -> Any:
        def looking(*args: Any, **keywords: Any) -> Any:
            self.look(at)
            return call(*args, **keywords)

        return looking
