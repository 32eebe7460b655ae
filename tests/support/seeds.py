"""The same random numbers, again and again."""

from __future__ import annotations

import torch


def seed(number: int) -> None:
    """As torch.manual_seed, which notes the caller's stack for each kind of device that may be used
    one day: slow, where there is none."""
    if torch.cuda.is_available():
        torch.manual_seed(number)
    else:
        torch.default_generator.manual_seed(number)
