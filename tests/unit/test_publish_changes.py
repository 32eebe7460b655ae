"""`handle.weight_changes()`: receivers that write the changes have the bits of a whole publication, whatever came in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from placement import Manager, PhaseError
from placement.policies import Colocated, Resident
from placement.publish.changes import WeightChange
from placement.testing import SimulatedDevice, assert_nothing_resident

CHUNK = 16 << 10


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.frozen = nn.Linear(256, 256)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(64, 64, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embed(words)
        for layer in self.layers:
            found = torch.tanh(layer(found))
        self.steps += 1
        return self.head(found).square().mean()


class Receiver:
    """Has full weights of its own, and writes what comes."""

    def __init__(self, actor: Any, **how: Any) -> None:
        self.actor, self.how = actor, how
        self.version: int | None = None
        self.weights = {info.name: torch.zeros(info.shape, dtype=info.dtype) for info in actor.weights_info(**how)}

    def sync(self, bucket_bytes: int = 1 << 16) -> dict[str, WeightChange]:
        """Take one publication. Returns its changes, with tensors of their own."""
        got: dict[str, WeightChange] = {}
        for bucket in self.actor.weight_changes(since=self.version, bucket_bytes=bucket_bytes, **self.how):
            assert bucket.nbytes <= bucket_bytes or len(bucket) == 1
            assert bucket.base in (None, self.version)
            for change in bucket:
                change.write_into(self.weights[change.name])
                got[change.name] = copy.deepcopy(change)
            version = bucket.version
        self.version = version
        return got

    def check(self) -> None:
        """Compare with a whole publication, bit by bit."""
        seen = {}
        for bucket in self.actor.weights(**self.how):
            seen |= {name: tensor.clone() for name, tensor in bucket}
        assert seen.keys() == self.weights.keys()
        for name, tensor in seen.items():
            assert tensor.view(-1).view(torch.uint8).equal(self.weights[name].view(-1).view(torch.uint8)), name


class Job:
    """One actor with AdamW, a step of which changes few elements of the bf16 weights."""

    def __init__(self, dtype: torch.dtype = torch.float32, policy: Any = None, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model: Any = Model().to(dtype)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)
        device = SimulatedDevice(64 << 20, chunk_bytes=CHUNK)
        self.manager = Manager(device=device, policy=policy or Colocated(), **settings)
        self.actor = self.manager.register("actor", self.model, role="actor")
        self.manager.register("adam", self.optimizer)

    def step(self, seed: int = 0) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(seed))).backward()
        self.optimizer.step()


def wholes(got: dict[str, WeightChange]) -> set[str]:
    return {name for name, change in got.items() if change.positions is None}


def test_twenty_steps_send_what_has_changed_and_receivers_have_every_bit() -> None:
    job = Job(torch.bfloat16)
    receiver = Receiver(job.actor)
    for index in range(20):
        with job.manager.phase("train") as phase:
            job.step(index)
            phase.switch("weight_sync")
            got = receiver.sync()
            receiver.check()
        whole = sum(t.nbytes for t in receiver.weights.values())
        sent = sum(change.nbytes for change in got.values())
        assert (wholes(got) == set(receiver.weights)) is (index == 0)
        assert sent == whole if index == 0 else sent < whole / 2
        if index:
            assert got["frozen.weight"].values.numel() == 0
    assert_nothing_resident(job.manager)


def test_a_model_that_stays_on_the_device() -> None:
    job = Job(torch.bfloat16, Resident())
    receiver = Receiver(job.actor)
    for index in range(5):
        with job.manager.phase("weight_sync"):
            got = receiver.sync()
            receiver.check()
        assert wholes(got) == set(receiver.weights) if index == 0 else wholes(got) <= {"steps"}
        offloaded = job.actor.counters.offloaded_bytes
        with job.manager.phase("train"):
            job.step(index)
        assert job.actor.counters.offloaded_bytes == offloaded
    assert job.actor.resident_bytes


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_what_counts_is_the_published_dtype(dtype: torch.dtype | None) -> None:
    job = Job(torch.float32)
    receiver = Receiver(job.actor, dtype=dtype)
    for index in range(3):
        with job.manager.phase("train") as phase:
            job.step(index)
            phase.switch("weight_sync")
            got = receiver.sync()
            receiver.check()
    compared = got["layers.0.weight"]
    if dtype is None:  # AdamW changes every element in fp32
        assert compared.positions is None
    else:
        assert compared.positions is not None
        assert 0 < compared.positions.numel() < compared.values.numel() + 64 * 64 / 2


def test_bits_are_compared_not_values() -> None:
    job = Job(torch.bfloat16)
    receiver = Receiver(job.actor)
    for value in (0.0, -0.0, float("nan"), float("nan")):
        with job.manager.phase("train") as phase:
            with torch.no_grad():
                job.model.layers[1].weight[3, 5] = value
            phase.switch("weight_sync")
            change = receiver.sync()["layers.1.weight"]
            receiver.check()
        last = change
    assert last.values.numel() == 0  # the same NaN


def test_steps_without_a_publication_and_one_that_nothing_changed_in() -> None:
    job = Job(torch.bfloat16)
    receiver = Receiver(job.actor)
    with job.manager.phase("weight_sync"):
        receiver.sync()
    with job.manager.phase("weight_sync"):  # nothing changed
        assert all(change.values.numel() == 0 for change in receiver.sync().values())
    with job.manager.phase("train"):
        job.step(1)  # not published, and offloaded: the host copy is ahead of the receivers
    with job.manager.phase("train") as phase:
        job.step(2)
        phase.switch("weight_sync")
        got = receiver.sync()
        receiver.check()
    assert {"layers.0.weight", "embed.weight"} <= wholes(got)
    with job.manager.phase("train") as phase:
        job.step(3)
        phase.switch("weight_sync")
        assert wholes(receiver.sync()) <= {"steps"}
        receiver.check()


def test_training_between_a_publication_and_the_offload() -> None:
    job = Job(torch.bfloat16)
    receiver = Receiver(job.actor)
    for index in range(4):
        with job.manager.phase("weight_sync") as phase:
            got = receiver.sync()
            receiver.check()
            phase.switch("train")
            job.step(index)
    assert "layers.0.weight" in wholes(got)


def test_offloaded_between_training_and_publication() -> None:
    for policy in (Colocated(), Colocated(stream_sync=True)):
        job = Job(torch.bfloat16, policy)
        receiver = Receiver(job.actor)
        for index in range(3):
            with job.manager.phase("train"):
                job.step(index)
            with job.manager.phase("weight_sync"):
                receiver.sync()
                receiver.check()


@pytest.mark.parametrize("how", ["missed", "unknown", "early end", "another dtype", "restart"])
def test_a_receiver_that_lacks_the_version_gets_everything(how: str) -> None:
    job = Job(torch.bfloat16)
    receiver, late = Receiver(job.actor), Receiver(job.actor)

    def publish(*receivers: Receiver) -> list[dict[str, WeightChange]]:
        with job.manager.phase("train") as phase:
            job.step()
            phase.switch("weight_sync")
            if how == "early end" and job.actor.published is not None:
                next(iter(job.actor.weight_changes(since=receiver.version, bucket_bytes=4096)))
            found = [each.sync() for each in receivers]
            for each in receivers:
                each.check()
        return found

    publish(receiver)
    if how == "missed":
        with job.manager.phase("weight_sync"):
            late.sync()
        publish(receiver)  # to the other alone: its version is not `late`'s
        assert wholes(publish(late)[0]) == set(late.weights)
    elif how == "unknown":
        receiver.version = 12345
        assert wholes(publish(receiver)[0]) == set(receiver.weights)
    elif how == "early end":
        assert wholes(publish(receiver)[0]) == set(receiver.weights)
    elif how == "another dtype":
        other = Receiver(job.actor, dtype="float32")
        other.version = receiver.version
        assert wholes(publish(other)[0]) == set(other.weights)
    else:
        job.manager.close()
        again = Manager(device=SimulatedDevice(64 << 20, chunk_bytes=CHUNK))
        receiver.actor = again.register("actor", job.model, role="actor")
        with again.phase("weight_sync"):
            assert wholes(receiver.sync()) == set(receiver.weights)


def test_a_host_copy_that_the_user_may_have_written_is_no_base() -> None:
    job = Job(torch.bfloat16)
    receiver = Receiver(job.actor)
    with job.manager.phase("weight_sync"):
        receiver.sync()
    state = job.actor.state_dict()
    state["layers.0.weight"][0] = 7.0  # into the host copy
    with job.manager.phase("weight_sync"):
        receiver.sync()
        receiver.check()
    assert (receiver.weights["layers.0.weight"][0] == 7.0).all()


def test_a_checkpoint_that_brings_the_host_copy_up_to_date_before_the_publication() -> None:
    job = Job(torch.bfloat16)
    receiver = Receiver(job.actor)
    for index in range(3):
        with job.manager.phase("train") as phase:
            job.step(index)
            with job.manager.phase("checkpoint"):
                job.actor.state_dict()
            phase.switch("weight_sync")
            receiver.sync()
            receiver.check()


def test_errors_are_those_of_weights_and_a_receiver_of_another_kind_is_told() -> None:
    job = Job(torch.bfloat16)
    with pytest.raises(PhaseError, match="weights are published while SYNCING"):
        job.actor.weight_changes(since=None)
    with job.manager.phase("weight_sync"):
        with pytest.raises(ValueError, match="bucket_bytes must be positive"):
            job.actor.weight_changes(since=None, bucket_bytes=0)
        (bucket,) = list(job.actor.weight_changes(since=None))
        with pytest.raises(ValueError, match=r"'embed\.weight' is torch\.bfloat16 of shape"):
            bucket[0].write_into(torch.zeros(64, 64))
        kept = job.actor.weight_changes(since=None, bucket_bytes=4096)
        next(kept)
    with pytest.raises(PhaseError):
        next(kept)
