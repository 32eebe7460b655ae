"""What a rank does whose manager could not be announced at first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist

from placement import PlacementError
from placement.devices.simulated.device import SimulatedDevice
from placement.integrations import verl
from tests.integrations.verl.worker import CAPACITY


def at_the_second_try(folder: Path, later: Path) -> list[str]:
    """The second rank's folder is a file at first. The phases that both enter afterwards, and with the managers of the next round."""
    verl.close_manager()
    os.environ.update(PLACEMENT_DEVICE=f"simulated:{CAPACITY}", PLACEMENT_DISCOVERY=str(folder if dist.get_rank() == 0 else later))
    try:
        if dist.get_rank() == 1:
            later.write_text("")
            with pytest.raises(PlacementError):
                verl.manager()
            later.unlink()
        entered = []
        for _ in range(2):
            with verl.manager().phase("log_prob"):
                entered.append(verl.manager().phase_name)
            assert isinstance(verl.manager().device, SimulatedDevice)
            verl.close_manager()
        return entered
    finally:
        del os.environ["PLACEMENT_DEVICE"], os.environ["PLACEMENT_DISCOVERY"]
