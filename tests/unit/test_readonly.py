"""Readonly handles and their state dicts, frozen parts, and parameters that come later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from placement import IntegrityError
from placement.testing import assert_nothing_resident
from tests.support.early import Foresight
from tests.support.late_device import LateDevice
from tests.support.worker import CAPACITY, Worker, assert_same

# --- readonly


KEY = "0.weight"
VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "index": lambda tensor: tensor[0],
    "numpy": lambda tensor: tensor.numpy()[0],
    "alias": lambda tensor: tensor.data[0],  # keeps the storage alive, and not the tensor
}


def loaded_once(**keywords: Any) -> Worker:
    worker = Worker(**keywords)
    with worker.manager.phase("log_prob"):
        pass
    return worker


def check(worker: Worker, wanted: torch.Tensor) -> None:
    """Every later phase has these values and ends without an error, and a wrong write is still found."""
    for _ in range(3):
        assert_same(worker.ref.state_dict()[KEY], wanted)
        with worker.manager.phase("log_prob"):
            assert_same(worker.ref_net[0].weight.detach(), wanted)
    with pytest.raises(IntegrityError, match="'ref' is readonly"), worker.manager.phase("log_prob"):
        worker.ref_net[0].weight.data.fill_(3.0)
    assert_same(worker.ref.state_dict()[KEY], wanted)
    assert worker.manager.audit().ok, worker.manager.audit().report
    assert_nothing_resident(worker.manager)


@pytest.mark.parametrize(("verify", "is_held"), [("off", False), ("off", True), ("always", True)])
def test_writes_to_a_readonly_state_dict_while_offloaded_are_loaded(verify: str, is_held: bool) -> None:
    worker = loaded_once(verify=verify)
    shown = worker.ref_net.state_dict()
    shown[KEY][0].fill_(7.0)
    wanted = shown[KEY].clone()
    held = [shown] if is_held else []
    del shown
    check(worker, wanted)
    assert worker.ref.counters.offloaded_bytes == 0
    for each in held:
        assert_same(each[KEY], wanted)


def test_writes_to_a_readonly_state_dict_inside_a_phase_are_undone() -> None:
    worker = loaded_once()
    shown = worker.ref_net.state_dict()[KEY]
    wanted = shown.clone()
    with pytest.raises(IntegrityError, match="'ref' is readonly"), worker.manager.phase("log_prob"):
        shown.fill_(7.0)
    assert_same(shown, wanted)
    check(worker, wanted)


@pytest.mark.parametrize("take", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize(("is_kept", "phases_before"), [(False, 0), (True, 2)])
def test_writes_to_a_view_of_a_readonly_state_dict_are_loaded_from_then_on(
    take: Callable[[torch.Tensor], Any], is_kept: bool, phases_before: int
) -> None:
    worker = loaded_once()
    wanted = worker.ref_values[KEY].clone()
    wanted[0] = 7.0
    views = [take(worker.ref_net.state_dict()[KEY])]
    for _ in range(phases_before):
        with worker.manager.phase("log_prob"):
            pass
    with worker.manager.phase("log_prob"):
        views[0][:] = 7.0
        if not is_kept:
            views.clear()
        assert_same(worker.ref_net[0].weight.detach(), worker.ref_values[KEY])
    check(worker, wanted)
    assert worker.ref.counters.offloaded_bytes == 0


@pytest.mark.parametrize(
    ("name", "when", "take"),
    [
        *(("ref", "inside", take) for take in VIEWS.values()),
        ("ref", "dropped", VIEWS["alias"]),
        ("ref", "offloaded", VIEWS["numpy"]),
        ("actor", "offloaded", VIEWS["index"]),
    ],
)
def test_early_chunks_do_not_hide_what_is_written_to_a_view(name: str, when: str, take: Callable[[torch.Tensor], Any]) -> None:
    """What is written inside a phase to a view of the actor is lost, as the page says, because the actor is copied back."""
    worker = loaded_once(device=LateDevice(CAPACITY, chunk_bytes=1 << 12), policy=Foresight(in_idle=True))
    module, handle = (worker.ref_net, worker.ref) if name == "ref" else (worker.net, worker.actor)
    assert handle.prefetched_bytes
    views = [take(module.state_dict()[KEY])]
    for value in (1.0,) if when == "dropped" else (1.0, 2.0, 3.0):
        with worker.manager.phase("log_prob"):
            if when != "offloaded":
                views[0][:] = value
            if when == "dropped":
                views.clear()
        if when == "offloaded":
            views[0][:] = value
        with worker.manager.phase("log_prob"):
            assert_same(module[0].weight[0].detach(), torch.full((64,), value))
        assert_same(handle.state_dict()[KEY][0], torch.full((64,), value))
    worker.manager.close()
