"""The scalars of a TensorBoard folder, read as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def scalars(folder: Path) -> dict[str, list[float]]:
    """The values of each scalar in the order of their steps, from all files below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read: dict[str, list[float]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            read.setdefault(name, []).extend(event.value for event in events.Scalars(name))
    return read


def as_written(value: float) -> float:
    """A figure as a TensorBoard file has it: in 32 bits."""
    return float(np.float32(value))
