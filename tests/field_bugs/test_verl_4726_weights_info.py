"""verl 4726 (issue 4657): names and shapes of the weights were asked for while the parameters were
offloaded.

`get_actor_weights_info` went through FSDP1's state dict, which unshards and wants the parameters on
the GPU ("Expects tensor to be on the compute device"); the fix loaded them and left them there.
`weights_info()` answers from what the framework knows: in every state, on one rank alone, without a
value, a move or a collective. Real FSDP1, both ways of showing its parameters.
"""

from __future__ import annotations

import pytest
import torch

from placement.testing import assert_nothing_resident
from tests.sharded.publish_worker import BUILDS, Model, placed, tokens, wanted_of
from tests.support.ranks import no_collectives, on_ranks


@pytest.mark.parametrize("build", ["fsdp1_flat", "fsdp1_original", "fsdp2", "fsdp2_external"])
@on_ranks("two_ranks")
def test_names_and_shapes_in_every_state_without_a_move_or_a_collective(build: str) -> None:
    wanted = [(name, tuple(value.shape), value.dtype) for name, value in wanted_of(Model()).items()]
    module = BUILDS[build](Model())
    sgd = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    manager, actor = placed(module)
    manager.register("sgd", sgd)

    def ask() -> None:
        records, resident = len(manager.journal), actor.resident_bytes
        with no_collectives():
            found = actor.weights_info()
        assert [(info.name, info.shape, info.dtype) for info in found] == wanted
        assert (len(manager.journal), actor.resident_bytes) == (records, resident)

    ask()  # offloaded, before the first step
    assert_nothing_resident(manager)
    with manager.phase("log_prob") as phase:
        ask()
        with torch.no_grad():
            module(tokens())
        ask()  # the root is unsharded
        phase.switch("train")
        ask()
        module(tokens()).square().nanmean().backward()
        ask()
        sgd.step()
        sgd.zero_grad()
        phase.switch("weight_sync")
        ask()
        phase.switch("checkpoint")
        ask()
    ask()
    assert_nothing_resident(manager)
    actor.broken = "a sticky error in the middle of a move"
    ask()
