"""The output of the GRPO examples: a line for each update, the reward as a curve, and the bits."""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import struct
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from placement.cli.demo import digest_of

BLOCKS = " ▁▂▃▄▅▆▇█"
STALLS, PEAK = "placement/stall_seconds", "placement/total/peak_device_gb/"


def options_from(arguments: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """Read the options. Without a GPU the device is a simulated one, unless the user has chosen
    another. It has room for each phase, 1.6 GB at most, and not for the whole job, 2.2 GB."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=_even, default=20, help="two for each batch of answers")
    parser.add_argument("--png", type=Path, default=Path("build/reward.png"), help="the curve")
    parser.add_argument(
        "--without-placement", action="store_true", help="everything resident: the same bits"
    )
    if not torch.cuda.is_available():
        os.environ.setdefault("PLACEMENT_DEVICE", "simulated:2050MB")
    options = parser.parse_args(arguments)
    device = os.environ.get("PLACEMENT_DEVICE", "the GPU")
    options.how = "without placement" if options.without_placement else f"placed on {device}"
    return options


def _even(text: str) -> int:
    if not text.isdecimal() or int(text) == 0 or int(text) % 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an even number of at least 2: two updates learn from each batch"
        )
    return int(text)


def silence_frameworks() -> None:
    """No warnings, no progress bars, and no hub. Call it before the frameworks are imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


@dataclass
class Report:
    """The course of one training, printed as it goes."""

    title: str
    losses: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """The mean reward of each batch of answers."""
    seconds: list[float] = field(default_factory=list)
    stall_seconds: float = 0.0
    weights_sha256: str = ""

    def __post_init__(self) -> None:
        print(f"{self.title}\n")
        self._clock = time.perf_counter()

    def add(self, loss: float, reward: float | None, figures: Mapping[str, float]) -> None:
        """Add an update. `reward` is None where it learns from the answers of the one before;
        `figures` are those of `Manager.metrics`, among others or alone; none without placement."""
        if not self.losses:
            moves = "   of it moves" if STALLS in figures else ""
            print(f"update   reward      loss   seconds{moves}")
        now = time.perf_counter()
        self.seconds.append(now - self._clock)
        self._clock = now
        self.losses.append(loss)
        if reward is not None:
            self.rewards.append(reward)
        shown = "" if reward is None else f"{reward:.3f}"
        moves = f"{figures[STALLS]:11.2f} s" if STALLS in figures else ""
        self.stall_seconds += figures.get(STALLS, 0.0)
        print(
            f"{len(self.losses):6}   {shown:>6}   {loss:+.4f}   {self.seconds[-1]:5.1f} s{moves}",
            flush=True,
        )

    def close(self, weights: Mapping[str, Tensor], figures: Mapping[str, float], png: Path) -> None:
        """Print the curve, the peaks and the bits. `figures` have the totals of the run."""
        self.weights_sha256 = digest_of(weights)
        print(f"\n{curve(self.rewards)}\n")
        for name, gigabytes in figures.items():
            if name.startswith(PEAK) and gigabytes:
                print(f"peak in {name.removeprefix(PEAK):<15} {gigabytes:.2f} GB")
        total, count = sum(self.seconds), len(self.seconds)
        print(f"{'an update took':<23} {total / count:.1f} s", end="")
        print(f", {self.stall_seconds / count:.2f} s of it moves" if STALLS in figures else "")
        print(f"bits of the losses      {_digest(self.losses)}")
        print(f"bits of the rewards     {_digest(self.rewards)}")
        print(f"bits of the weights     {self.weights_sha256[:16]}")
        if find_spec("matplotlib") is not None:
            _draw(self.title, self.rewards, png)
            print(f"the curve               {png}")
        else:
            print('a PNG of the curve needs matplotlib: pip install -e ".[bench]"')


def curve(rewards: Sequence[float], rows: int = 8) -> str:
    """A chart of rewards from 0 to 1 for a terminal, a bar for each."""
    lines = []
    for row in reversed(range(rows)):
        bars = ""
        for value in rewards:
            eighths = round(value * rows * 8) - row * 8
            bars += BLOCKS[min(max(eighths, 0), 8)] * 2 + " "
        label = {rows - 1: "reward 1.0", rows // 2 - 1: "0.5"}.get(row, "")
        lines.append(f"{label:>10} │{bars}".rstrip())
    lines.append(f"{'0.0':>10} └{'─' * 3 * len(rewards)}")
    lines.append(f"{'first':>17} {'last batch of answers':>{max(3 * len(rewards) - 6, 0)}}")
    return "\n".join(lines)


def _draw(title: str, rewards: Sequence[float], png: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    axes.plot(range(1, len(rewards) + 1), rewards, marker="o")
    axes.set(title=title, xlabel="batch of answers", ylabel="mean reward", ylim=(0, 1))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=150)
    pyplot.close(figure)


def _digest(values: Sequence[float]) -> str:
    return hashlib.sha256(struct.pack(f"{len(values)}d", *values)).hexdigest()[:16]
