"""NeMo-RL's shapes with and without placement, for this process or for ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from placement import Manager
from placement.integrations.nemo_rl import PlacedPolicyWorker
from placement.integrations.rank import manager_of_this_rank
from placement.testing import assert_nothing_resident
from tests.integrations import jobs, nemo_rl_standin
from tests.support.seeds import seed


class Watched(PlacedPolicyWorker):
    """`phases` is where each value was seen."""

    def __init__(self, config: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self.phases: list[str] = []
        super().__init__(config, *args, **kwargs)

    def make_manager(self) -> Manager:
        return manager_of_this_rank(device=jobs.device())

    def _see(self, tensor: torch.Tensor) -> None:
        super()._see(tensor)  # type: ignore[misc]
        self.phases.append(self.placement.phase_name if self.placement is not None else "none")

    def offload_after_refit(self) -> None:
        super().offload_after_refit()
        assert self.placement is not None
        assert_nothing_resident(self.placement, allow_foreign=True)

    def finish_inference(self) -> None:
        super().finish_inference()
        assert self.placement is not None
        assert_nothing_resident(self.placement, allow_foreign=True)


class PlacedDTensorWorker(Watched, nemo_rl_standin.DTensorWorker):
    """The DTensor worker with placement."""


class PlacedMegatronWorker(Watched, nemo_rl_standin.MegatronWorker):
    """The Megatron worker with placement."""


PLACED = {nemo_rl_standin.DTensorWorker: PlacedDTensorWorker, nemo_rl_standin.MegatronWorker: PlacedMegatronWorker}


def plain_and_placed(kind: type[Any], calls: Callable[[Any], list[bytes]], build: Callable[[], jobs.Job]) -> Any:
    """An algorithm's calls on both. Every bit that leaves them is the same."""
    seed(0)
    plain = kind({"build": build})
    expected = calls(plain)
    assert expected
    seed(0)
    placed = PLACED[kind]({"build": build})
    assert len(plain.moves) > len(placed.moves)
    built = len(placed.moves)
    assert calls(placed) == expected
    assert len(placed.moves) == built, "NeMo-RL moved what placement places"
    return placed


def compare(kind: type[Any], calls: Callable[[Any], list[bytes]], build: Callable[[], jobs.Job]) -> dict[str, int]:
    """The same on a rank. How many bytes each handle moved to the host."""
    with jobs.served_by_another():
        placed = plain_and_placed(kind, calls, build)
    placed.offload_after_refit()
    placed.placement.check_integrity()
    moved = {name: handle.counters.offloaded_bytes for name, handle in placed.placement.handles.items()}
    placed.placement.close()
    return moved
