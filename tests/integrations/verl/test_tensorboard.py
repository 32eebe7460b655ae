"""What verl's own tracker writes into TensorBoard of placement, read from its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.integrations.verl.subject import pair
from tests.integrations.verl.worker import batch
from tests.support.frameworks import needs
from tests.support.ranks import on_ranks
from tests.support.scalars import as_written, scalars

needs("tensorboard")
needs("verl")
pytestmark = pytest.mark.sweep


def logged(worker: Any, seed: int) -> dict[str, float]:
    """The metrics of an actor's step of two mini-batches, as verl's trainer reduces them."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import rename_dict

    data = batch(seed)
    tu.assign_non_tensor(data, mini_batch_size=2, epochs=1, seed=1)
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    return dict(reduce_metrics(rename_dict(metrics, "actor/")))


@on_ranks("one_rank")
def test_verl(model: Path, tmp_path: Path) -> None:
    own, placed = pair(model)
    manager = placed.manager
    manager.metrics()
    before = manager.snapshot()
    with mock.patch.dict("os.environ", {"TENSORBOARD_DIR": str(tmp_path)}):
        from verl.utils.tracking import Tracking

        tracking = Tracking("project", "run", default_backend=["tensorboard"])
    steps = []
    for seed in range(2):
        theirs = logged(own.worker, seed)
        steps.append(logged(placed.worker, seed))
        assert {name for name in steps[-1] if "placement/" not in name} == set(theirs)
        tracking.log(steps[-1], step=seed)
    tracking.finish()
    read = scalars(tmp_path)
    names = [name for name in steps[0] if "placement/" in name]
    assert "actor/placement/stall_seconds" in names
    for name in names:
        assert read[name] == [as_written(step[name]) for step in steps]
    after = manager.snapshot()
    loaded = sum(handle.loaded_bytes for handle in after.handles) - sum(
        handle.loaded_bytes for handle in before.handles
    )
    total = sum(step["actor/placement/to_device_gb"] for step in steps)
    assert total == pytest.approx(loaded / 1e9)  # once, not the mean over the mini-batches
    peak = max(step["actor/placement/peak_device_gb/train"] for step in steps)
    assert peak == after.phase_peak_bytes["train"] / 1e9
