"""Sparse gradients on a real device, where torch may have no way to swap a storage's pointer and
gradients come back to the host."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import placement
from placement.testing import assert_nothing_resident
from tests.sharded import training
from tests.storage.test_sparse_gradients import WIDTH, WORDS, assert_parts, build, parts, tokens_of

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad's own step
# SGD does not coalesce, and a GPU adds what is there twice in any order
@pytest.mark.parametrize("optimizer", ["SparseAdam", "Adagrad"])
def test_steps_with_everything_offloaded_in_between(optimizer: str) -> None:
    outcome = training.compare(functools.partial(build, optimizer, "cuda"), device="cuda")
    assert outcome.offloaded_bytes["actor"] > 0


class Case:
    def __init__(self, born: str) -> None:
        self.model = nn.Embedding(WORDS, WIDTH, sparse=True).to(born)
        self.optimizer = torch.optim.SparseAdam(self.model.parameters())
        self.manager = placement.Manager(device="cuda:0")
        self.actor = self.manager.register("actor", self.model, role="actor")
        self.manager.register("actor.optimizer", self.optimizer)
        self.tokens = tokens_of(0).cuda()

    @property
    def gradient(self) -> torch.Tensor:
        assert self.model.weight.grad is not None
        return self.model.weight.grad

    def backward(self) -> None:
        self.model(self.tokens).square().sum().backward()


@pytest.fixture(params=["cuda", "cpu"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = Case(request.param)
    yield made
    made.manager.close()


def test_a_gradient_comes_back_to_the_device_as_the_same_object(case: Case) -> None:
    for _ in range(3):
        with case.manager.phase("train"):
            case.optimizer.zero_grad()
            case.backward()
            wanted, identity = parts(case.gradient), id(case.gradient)
        assert_nothing_resident(case.manager)
        assert torch.equal(case.tokens.cpu(), tokens_of(0)), (
            "the user's tokens left with the gradient that took them for its indices"
        )
        with case.manager.phase("train"):
            assert id(case.gradient) == identity
            assert case.gradient.is_cuda
            assert_parts(case.gradient, wanted)
            case.optimizer.step()


def test_close_gives_an_offloaded_gradient_back_on_the_host(case: Case) -> None:
    with case.manager.phase("train"):
        case.backward()
        wanted = parts(case.gradient)
    case.manager.close()
    assert case.model.weight.device.type == "cpu"
    assert case.gradient.device.type == "cpu"
    assert_parts(case.gradient, wanted)
    case.model(tokens_of(1)).sum().backward()  # it can be added to there
    assert case.gradient._nnz() > wanted[1].shape[0]


def test_a_sparse_gradient_on_the_cpu_is_refused_at_registration() -> None:
    model = nn.Embedding(WORDS, WIDTH, sparse=True)
    model(tokens_of(0)).sum().backward()
    manager = placement.Manager(device="cuda:0")
    with pytest.raises(
        placement.RegistrationError,
        match=r"'weight\.grad' is sparse and on the CPU",
    ):
        manager.register("actor", model, role="actor")
    model.zero_grad()
    manager.register("actor", model, role="actor")
    manager.close()
