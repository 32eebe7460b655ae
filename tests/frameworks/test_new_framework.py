"""A framework that placement has never heard of is one class. Its other hooks are shown with
frameworks that need them (tests/sharded)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement.frameworks import base
from placement.frameworks.base import Advised, Framework, Named, Wrapper
from placement.tensors.plain import Owned
from placement.testing import SimulatedDevice, assert_nothing_resident
from tests.planning.test_resolve import install


class Crate(nn.Module):
    """The framework's wrapper. It keeps a tensor where no walk of parameters, buffers and
    attributes finds it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.packed = inner
        tensor = torch.arange(6.0)
        self.hidden = lambda: tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed(x)


class Frozen(nn.Module):
    """A module that the framework refuses to have moved."""


class Crates(Framework):
    """What a new framework takes."""

    wrappers = (Wrapper(Named(__name__, "Crate"), "packed"),)
    refused_modules = (Advised(Named(__name__, "Frozen"), "thaw it first"),)

    def __init__(self, crates: Sequence[Crate]) -> None:
        self._crates = crates

    @classmethod
    def find(cls, root: nn.Module) -> Framework | None:
        crates = [part for part in root.modules() if isinstance(part, Crate)]
        return cls(crates) if crates else None

    def tensors(self) -> Iterator[Owned]:
        return (
            Owned(f"crates.{index}.hidden", crate.hidden())
            for index, crate in enumerate(self._crates)
        )

    @classmethod
    def refuse_optimizer(cls, optimizer: Any) -> tuple[str, str] | None:
        return (" in a bad mood,", "wait") if getattr(optimizer, "is_moody", False) else None


@pytest.fixture
def crates() -> Iterator[type[Framework]]:
    base.add(Crates)
    yield Crates
    base.remove(Crates)


@pytest.fixture
def manager() -> placement.Manager:
    return placement.Manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))


def test_it_is_asked_about_modules(crates: type[Framework], manager: placement.Manager) -> None:
    model = Crate(nn.Linear(2, 3))
    actor = manager.register("actor", model, role="actor")
    assert torch.isnan(model.hidden()).all(), (
        "the tensor that only the framework knows was not offloaded"
    )
    with manager.phase("weight_sync"):
        published = {name: tensor.clone() for bucket in actor.weights() for name, tensor in bucket}
        assert model.hidden().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert published.keys() == {"weight", "bias"}
    assert_nothing_resident(manager)


def test_it_refuses_and_says_what_to_do(
    crates: type[Framework], manager: placement.Manager
) -> None:
    with pytest.raises(
        placement.RegistrationError,
        match=r"Frozen is not supported now.*thaw it first",
    ):
        manager.register("actor", nn.Sequential(nn.Linear(2, 2), Frozen()), role="actor")
    model = nn.Linear(2, 2)
    manager.register("actor", model, role="actor")
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.is_moody = True  # type: ignore[attr-defined]
    refused = r"SGD in a bad mood, is not supported now.*wait, or register it with external=True"
    with pytest.raises(placement.RegistrationError, match=refused):
        manager.register("actor.optimizer", optimizer)


def test_what_is_no_framework_is_refused() -> None:
    with pytest.raises(
        TypeError,
        match=r"subclass of placement\.frameworks\.base\.Framework, not <class 'int'>",
    ):
        base.add(int)  # type: ignore[arg-type]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages, as if they were installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    monkeypatch.undo()
    base._forget()


def test_it_is_asked_for_scalars_from_its_import_on(
    manager: placement.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    scalars = classmethod(lambda cls, objects: [("scale", torch.ones(3))])
    late = type(
        "LateCrates", (Framework,), {"packages": ("late_crates",), "optimizer_scalars": scalars}
    )
    base.add(late)
    model = nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    manager.register("actor", model, role="actor")
    handle = manager.register("adam", optimizer)
    monkeypatch.setitem(sys.modules, "late_crates", sys)
    with manager.phase("train"):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    base.remove(late)
    assert handle.foreign_bytes == 12


def install_boxes(folder: Path, source: str) -> None:
    (folder / "boxes.py").write_text(source)
    install(folder, "boxes", "placement.frameworks", boxes="boxes:Boxes")


def test_an_installed_package_brings_its_framework(installed: Path) -> None:
    install_boxes(
        installed,
        "from placement.frameworks.base import Framework\nclass Boxes(Framework):\n    pass\n",
    )
    base._forget()
    assert [each.__name__ for each in base.frameworks()][-1] == "Boxes"


@pytest.mark.parametrize(
    ("source", "why"),
    [("Boxes = int", "is no subclass"), ("import no_such_package", "No module named")],
)
def test_a_package_that_does_not_work_is_named(installed: Path, source: str, why: str) -> None:
    sys.modules.pop("boxes", None)
    install_boxes(installed, source + "\n")
    with pytest.raises(
        placement.RegistrationError,
        match=rf"entry point 'boxes' of the group 'placement.frameworks'.*{why}",
    ):
        base._forget()
