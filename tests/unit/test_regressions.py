"""Programs that once lost or spoilt a value, or were told the wrong thing. Each is named for what was wrong."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Generator

import pytest
import torch

from placement import Handle
from placement.devices.memory import Addresses
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.support.worker import Worker, assert_same, batch, make_manager, net


def test_new_weights_may_be_put_in_while_offloaded() -> None:
    worker = Worker()
    fresh = torch.nn.Linear(64, 8)
    wanted = copy.deepcopy(fresh.state_dict())
    worker.manager.unregister("actor.optimizer")  # it would go on stepping the old ones
    del worker.adam, worker.optimizer
    gc.collect()  # an optimizer is part of cycles, and holds the old weights as long as it lives
    worker.net[2] = fresh
    with worker.manager.phase("log_prob"):
        assert_same(dict(worker.net[2].state_dict()), dict(wanted))
    assert_nothing_resident(worker.manager)


class Watched(SimulatedDevice):
    """Calls `look` after memory was taken from behind addresses, where another thread may run."""

    look: Callable[[], None] = staticmethod(lambda: None)

    def unmap(self, addresses: Addresses, nbytes: int, start: int = 0) -> None:
        super().unmap(addresses, nbytes, start)
        self.look()


def test_a_thread_that_saved_a_state_dict_read_poison_while_the_object_was_being_offloaded() -> None:
    device = Watched(64 << 20, chunk_bytes=8192)
    worker = Worker(device=device)
    looks = []
    with worker.manager.phase("log_prob"):
        taken = worker.net.state_dict()

        def look() -> None:
            for shown in (taken, worker.net.state_dict()):
                assert_same(dict(shown), dict(worker.values))
            looks.append(True)

        device.look = look
    device.look = lambda: None
    assert looks
    with worker.manager.phase("log_prob"):
        assert_same(dict(taken), dict(worker.values))
    assert_nothing_resident(worker.manager)


def test_a_state_dict_that_was_assigned_back_no_longer_followed_the_weights() -> None:
    manager, model = make_manager(), net()
    manager.register("actor", model, role="actor")
    taken = model.state_dict()
    with manager.phase("log_prob"):
        model.load_state_dict(taken, assign=True)  # the old parameters die, and their range
    for _ in range(2):
        with manager.phase("log_prob"), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        assert_same(dict(taken), dict(model.state_dict()))


def test_a_generator_that_was_closed_took_the_phase_of_its_caller_with_it() -> None:
    worker = Worker()

    def batches() -> Generator[None, None, None]:
        with worker.manager.phase("train"):
            yield

    generator = batches()
    next(generator)
    with worker.manager.phase("log_prob"):
        generator.close()
        assert worker.manager.phase_name == "log_prob"
        worker.net(batch())
    assert worker.manager.phase_name == "idle"
    assert_nothing_resident(worker.manager)


def test_handles_themselves_were_refused_by_only_as_unknown_names() -> None:
    worker = Worker()
    with worker.manager.phase("train", only=[worker.critic]) as phase:
        assert worker.on_device() == {"critic"}
        both: list[str | Handle] = ["actor", worker.critic]
        phase.switch("train", only=iter(both))
        assert worker.on_device() == {"actor", "critic"}
    with pytest.raises(TypeError, match="names or handles"):
        worker.manager.phase("train", only=[3])  # type: ignore[list-item]


def test_a_state_dict_read_poison_after_the_parameters_got_other_storages() -> None:
    worker = Worker()
    with worker.manager.phase("train"):
        taken = worker.net.state_dict()
        worker.net.half().float()
    wanted = copy.deepcopy(worker.net.state_dict())
    assert_same(dict(taken), dict(worker.values))
    with worker.manager.phase("train"):
        assert_same(dict(taken), dict(worker.values))
        assert_same(dict(worker.net.state_dict()), dict(wanted))
    assert_same(dict(taken), dict(worker.values))
    with worker.manager.phase("restore"):
        worker.net.load_state_dict(taken)
    del taken
    with worker.manager.phase("log_prob"):
        pass
    assert_same(dict(worker.net.state_dict()), dict(worker.values))
    assert len(worker.actor.holding.ranges if worker.actor.holding else ()) == 1
    assert worker.manager.audit().ok


def test_another_storage_over_the_same_clean_memory_was_saved_as_poison() -> None:
    """Its chunks were known to be clean, and vacated before it was seen that something was to be taken in from there."""
    manager = make_manager(device=SimulatedDevice(capacity_bytes=1 << 24, chunk_bytes=1 << 12))
    model = torch.nn.Linear(64, 64)
    before = model.weight.detach().clone()
    manager.register("reward", model, role="reward")
    for _ in range(2):
        with manager.phase("reward"):
            model.weight.data = torch.from_numpy(model.weight.detach().numpy())
            model.bias = torch.nn.Parameter(torch.zeros(64))  # so that every tensor is looked at
        with manager.phase("reward"):
            assert torch.equal(model.weight, before)
    assert_nothing_resident(manager)


def test_the_state_dict_of_a_resident_model_read_poison_in_a_weight_of_an_offloaded_one() -> None:
    worker = Worker()
    own = worker.critic_net[0].weight
    with worker.manager.phase("values"):
        worker.critic_net[0].weight = worker.net[0].weight  # the phase's end would refuse this
        for ask in (worker.critic_net.state_dict, worker.critic_net[0].state_dict, worker.critic.state_dict):
            (shown,) = [tensor for name, tensor in ask().items() if name in ("weight", "0.weight")]
            assert_same([shown], [worker.values["0.weight"]])
        worker.critic_net[0].weight = own
        assert not any(tensor.isnan().any() for tensor in worker.critic_net.state_dict().values())
    assert_same(dict(worker.net.state_dict()), dict(worker.values))
