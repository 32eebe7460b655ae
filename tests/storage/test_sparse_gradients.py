"""Gradients in coordinate layout (`nn.Embedding(sparse=True)`), what optimizers make of them, and
gradients that cannot be moved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import placement
from placement import RegistrationError
from placement.policies import Colocated
from placement.testing import assert_nothing_resident
from tests.sharded import training
from tests.support.worker import OFF, make_manager

WORDS, WIDTH = 37, 6


class Program(training.Program):
    """Of a sparse tensor its indices and values are compared."""

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().values():
            if tensor.layout is torch.sparse_coo:
                yield f"{name}.indices", tensor._indices()
                yield f"{name}.values", tensor._values()
            else:
                yield name, tensor


class Bag(nn.Module):
    """Two ways to look words up, and a dense layer that is stepped by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0, sparse=True)
        self.bag = nn.EmbeddingBag(WORDS, WIDTH, mode="sum", sparse=True)
        self.head = nn.Linear(WIDTH, 3).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.words(tokens).sum(1) + self.bag(tokens))
        return out


def tokens_of(number: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (4, 5), generator=torch.Generator().manual_seed(number))


def distinct_tokens_of(number: int) -> torch.Tensor:
    return torch.randperm(WORDS, generator=torch.Generator().manual_seed(number))[:20].view(4, 5)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SparseAdam": functools.partial(torch.optim.SparseAdam, lr=1e-2),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2),
    "SGD": functools.partial(torch.optim.SGD, lr=1e-2),
    # its state is sparse, too
    "momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


def build(optimizer: str, device: str = "cpu") -> Program:
    model = Bag().to(training.here(device))
    stepped = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # a GPU adds what is there several times in any order
    tokens = tokens_of if device == "cpu" else distinct_tokens_of
    return Program(
        model,
        OPTIMIZERS[optimizer](stepped),
        lambda number: model(tokens(number).to(device)).square().mean(),
    )


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of Adagrad's own step
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_with_everything_offloaded_in_between_do_not_differ_by_a_bit(optimizer: str) -> None:
    """Gradients of one backward pass cross a phase transition, those of the next are added to
    them."""
    outcome = training.compare(functools.partial(build, optimizer))
    assert outcome.offloaded_bytes["actor"] > 0


class Case:
    """An embedding as the actor, its optimizer, and a critic beside it."""

    def __init__(self, **policy: Any) -> None:
        self.model = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.optimizer = torch.optim.SparseAdam(self.model.parameters(), lr=1e-2)
        self.critic = nn.Linear(4, 4)
        self.critic.register_buffer("tokens", tokens_of(4))
        self.manager = make_manager(policy=Colocated(**policy))
        self.actor = self.manager.register("actor", self.model, role="actor")
        self.manager.register("actor.optimizer", self.optimizer)
        self.manager.register("critic", self.critic, role="critic")
        self.critic_optimizer = torch.optim.SGD(self.critic.parameters())
        self.manager.register("critic.optimizer", self.critic_optimizer)

    @property
    def gradient(self) -> torch.Tensor:
        assert self.model.weight.grad is not None
        return self.model.weight.grad

    def backward(self, tokens: torch.Tensor | None = None) -> None:
        self.model(tokens_of(0) if tokens is None else tokens).square().sum().backward()

    def states(self) -> set[placement.State]:
        return {handle.state for handle in self.manager.handles.values()}


def parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
    return tensor._indices().clone(), tensor._values().clone(), tensor.is_coalesced()


def assert_parts(tensor: torch.Tensor, wanted: tuple[torch.Tensor, torch.Tensor, bool]) -> None:
    assert training.as_bytes(tensor._indices()) == training.as_bytes(wanted[0])
    assert training.as_bytes(tensor._values()) == training.as_bytes(wanted[1])
    assert tensor.is_coalesced() is wanted[2]


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_sparse_gradient_survives_any_number_of_offloads(data: st.DataObject) -> None:
    case = Case()
    sparse_dim, nnz = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 9))
    shape = (WORDS, WIDTH)
    indices = torch.stack([torch.randint(0, shape[dim], (nnz,)) for dim in range(sparse_dim)])
    values = torch.randn(nnz, *shape[sparse_dim:])
    if nnz and data.draw(st.booleans()):
        values.view(-1)[0] = float("nan")
    gradient = torch.sparse_coo_tensor(indices, values, shape)
    if data.draw(st.booleans()):
        gradient = gradient.coalesce()
    with case.manager.phase("train"):
        case.model.weight.grad = gradient
        wanted = parts(gradient)
    del gradient, indices, values
    for phase in data.draw(
        st.lists(st.sampled_from(["train", "values", "log_prob", "rollout"]), max_size=4)
    ):
        with case.manager.phase(phase):
            if phase in {"train", "log_prob"}:
                assert_parts(case.gradient, wanted)
        assert_nothing_resident(case.manager)
    case.manager.close()
    assert_parts(case.gradient, wanted)


def test_tokens_that_the_gradient_has_taken_for_its_indices_stay_the_users() -> None:
    case, tokens = Case(), tokens_of(3)
    wanted = tokens.clone()
    with case.manager.phase("train"):
        case.backward(tokens)
        assert case.gradient._indices().data_ptr() == tokens.data_ptr(), (
            "torch copies them by now: the case is gone"
        )
    assert torch.equal(tokens, wanted)
    assert case.actor.stray_references == 0
    with case.manager.phase("train"):
        tokens.zero_()
        assert torch.equal(case.gradient._indices().reshape(4, 5), wanted)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_phases_drops_it_for_good(set_to_none: bool) -> None:
    case = Case()
    with case.manager.phase("train"):
        case.backward()
    case.optimizer.zero_grad(set_to_none=set_to_none)
    for phase in ("log_prob", "train"):
        with case.manager.phase(phase):
            gradient = case.model.weight.grad
            assert (
                gradient is None if set_to_none else gradient is not None and gradient._nnz() == 0
            )
    assert case.manager.snapshot().wrong_writes == 0
    assert len(case.actor.holding.ranges) == 1  # type: ignore[union-attr]
    with case.manager.phase("train"):
        case.backward(tokens_of(1))
        case.optimizer.step()
    assert case.manager.audit().ok


def test_momentum_is_saved_as_it_is_now_in_every_state() -> None:
    program = build("momentum")
    manager = make_manager()
    program.register(manager)
    with manager.phase("train"):
        program.learn(0)
        wanted = [parts(entry["momentum_buffer"]) for entry in program.optimizer.state.values()]
        resident = manager.handles["actor.optimizer"].state_dict()
    offloaded = manager.handles["actor.optimizer"].state_dict()
    with manager.phase("train"):
        program.learn(1)  # another value: what was saved stays what it was
    for saved in (resident, offloaded):
        for index, each in enumerate(wanted):
            assert_parts(saved["state"][index]["momentum_buffer"], each)
    with manager.phase("restore"):
        program.optimizer.load_state_dict(offloaded)
    with manager.phase("train"):
        for entry, each in zip(program.optimizer.state.values(), wanted, strict=True):
            assert_parts(entry["momentum_buffer"], each)
    assert_nothing_resident(manager)


def test_a_gradient_that_cannot_be_moved_keeps_nothing_on_the_device_and_is_not_lost() -> None:
    case = Case()
    stays = r"'critic': 'weight\.grad' is an inference tensor.*this tensor stays"
    with pytest.raises(RegistrationError, match=stays), case.manager.phase("train"):  # noqa: PT012 - what its end refuses
        case.backward()
        with torch.inference_mode():  # no other storage can be put under it
            case.critic.weight.grad = torch.full((4, 4), 7.0)
    gradient = case.critic.weight.grad
    assert gradient is not None
    assert case.states() == {OFF}
    assert case.critic.weight.isnan().all()
    assert "foreign: critic: weight.grad (Tensor) (64 bytes)" in case.manager.audit().report
    for phase in ("log_prob", "rollout", "eval"):  # nothing of it moves, so nobody complains
        with case.manager.phase(phase):
            pass
    with pytest.raises(RegistrationError, match="'critic'"), case.manager.phase("values"):  # noqa: PT012 - the same
        assert case.critic(torch.ones(4)).isfinite().all()
        assert case.critic.weight.grad is gradient
        assert bool((gradient == 7).all())
    assert case.states() == {OFF}
    case.critic.zero_grad()
    for phase in ("values", "train", "rollout"):
        with case.manager.phase(phase):
            pass
    assert_nothing_resident(case.manager)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_module_that_is_refused_keeps_the_memory_of_its_gradients() -> None:
    tokens, model = torch.tensor([[1, 2]]), nn.Embedding(8, 4)
    model.weight.grad = torch.sparse_coo_tensor(
        tokens, torch.ones(2, 4), (8, 4), check_invariants=False
    )
    model.table = torch.ones(2).share_memory_()
    with pytest.raises(RegistrationError, match="shared memory"):
        make_manager().register("actor", model)
    assert model.weight.grad._indices().data_ptr() == tokens.data_ptr()
