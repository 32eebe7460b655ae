"""The samples of a step, as verl's driver takes them, without what would differ from run to run."""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class SortedSamples(ReplayBuffer):  # type: ignore[misc, unused-ignore]
    """Sorts by the lengths of prompt and response, and looks for new samples more often than every
    two seconds."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(poll_interval=0.05, **keywords)

    def sample(self, *arguments: Any, **keywords: Any) -> tuple[Any, dict[str, Any]]:
        batch, metrics = super().sample(*arguments, **keywords)
        pairs = sorted(
            zip(batch.keys, batch.tags, strict=True),
            key=lambda pair: (pair[1]["prompt_len"], pair[1]["response_len"]),
        )
        batch.keys, batch.tags = ([pair[at] for pair in pairs] for at in (0, 1))
        return batch, metrics
