"""A state dict shows tensors that came after registration and cannot be moved as they are, whatever torch says about their bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from placement import RegistrationError
from tests.support.worker import Worker, assert_same

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.empty(10, device="meta"),
    "csr": lambda: torch.eye(5).to_sparse_csr(),
    "coo": lambda: torch.eye(5).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.strided),
}


@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta state", "ignore:The PyTorch API of nested tensors is in prototype stage"
)
@pytest.mark.parametrize("as_parameter", [False, True])
@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_that_cannot_be_moved_is_shown_as_it_is(kind: str, as_parameter: bool) -> None:
    worker, odd = Worker(), TENSORS[kind]()
    if as_parameter:
        worker.net.odd = nn.Parameter(odd)
    else:
        worker.net.register_buffer("odd", odd)
    for found in (worker.net.state_dict(), worker.actor.state_dict(), worker.net.state_dict(keep_vars=True)):
        assert (found["odd"].layout, found["odd"].device) == (odd.layout, odd.device)
        assert_same({name: found[name].detach() for name in worker.values}, dict(worker.values))
    with pytest.raises(RegistrationError, match="'odd'"), worker.manager.phase("log_prob"):
        pass
    del worker.net.odd
    with worker.manager.phase("log_prob"):
        assert_same(dict(worker.net.state_dict()), dict(worker.values))


def test_a_lazy_layer_is_shown_as_it_is() -> None:
    worker = Worker()
    worker.net.append(nn.LazyLinear(3))
    assert isinstance(worker.net.state_dict()["3.weight"], nn.UninitializedParameter)
    assert_same({name: worker.actor.state_dict()[name] for name in worker.values}, dict(worker.values))
    del worker.net[3]
