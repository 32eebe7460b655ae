"""A framework that placement has never heard of is one class: everything that placement asks of frameworks is answered by it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import placement
from placement.frameworks import known
from placement.frameworks.base import Advised, Framework, Named, Wrapper
from placement.tensors.plain import Owned
from placement.testing import SimulatedDevice, assert_nothing_resident


class Crate(nn.Module):
    """The framework's wrapper. It keeps a tensor where no walk of parameters, buffers and attributes finds it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.packed = inner
        tensor = torch.arange(6.0)
        self.hidden = lambda: tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed(x)


class Frozen(nn.Module):
    """A module that the framework refuses to have moved."""


class OwnShards(nn.Module):
    """A module that only the framework can publish."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class FarAway(torch.optim.SGD):
    """An optimizer whose state the framework places."""


class Masters(torch.optim.Optimizer):
    """An optimizer that steps float64 copies of the model's parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.models = list(parameters)
        super().__init__([each.detach().double().requires_grad_() for each in self.models], {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for master, model in zip(group["params"], self.models, strict=True):
                master.data -= model.grad.double()
                model.data.copy_(master)


class Crates(Framework):
    """One file, one class: this is all that a new framework takes."""

    wrappers = (Wrapper(Named(__name__, "Crate"), "packed"),)
    refused_modules = (Advised(Named(__name__, "Frozen"), "thaw it first"),)
    external_optimizers = (Advised(Named(__name__, "FarAway"), "Crates keeps its state elsewhere"),)
    with_own_export = (Named(__name__, "OwnShards"),)

    def __init__(self, crates: Sequence[Crate]) -> None:
        self._crates = crates

    @classmethod
    def find(cls, root: nn.Module) -> Framework | None:
        crates = [part for part in root.modules() if isinstance(part, Crate)]
        return cls(crates) if crates else None

    def tensors(self) -> Iterator[Owned]:
        return (Owned(f"crates.{index}.hidden", crate.hidden()) for index, crate in enumerate(self._crates))

    @classmethod
    def stepped_for(cls, objects: Sequence[object]) -> Mapping[int, torch.Tensor]:
        masters = [each for each in objects if isinstance(each, Masters)]
        return {id(own): model for each in masters for own, model in zip(each.param_groups[0]["params"], each.models, strict=True)}

    @classmethod
    def refuse_optimizer(cls, optimizer: Any) -> tuple[str, str] | None:
        return (" in a bad mood,", "wait") if getattr(optimizer, "is_moody", False) else None

    @classmethod
    def hidden_tensors(cls, optimizer: object, path: str) -> Iterator[Owned] | None:
        return None


@pytest.fixture
def crates() -> Iterator[type[Framework]]:
    sys.modules[__name__] = sys.modules.get(__name__) or _this_module()
    known.add(Crates)
    yield Crates
    known.remove(Crates)


def _this_module() -> Any:
    """Under pytest's importlib mode a test file is no module that `sys.modules` always has."""
    import types

    module = types.ModuleType(__name__)
    vars(module).update(globals())
    return module


@pytest.fixture
def manager() -> placement.Manager:
    return placement.Manager(device=SimulatedDevice(1 << 20, chunk_bytes=4096))


def test_it_is_asked_about_modules(crates: type[Framework], manager: placement.Manager) -> None:
    model = Crate(nn.Linear(2, 3))
    actor = manager.register("actor", model, role="actor")
    assert torch.isnan(model.hidden()).all(), "the tensor that only the framework knows was not offloaded"
    with manager.phase("weight_sync"):
        published = {name: tensor.clone() for bucket in actor.weights() for name, tensor in bucket}
        assert model.hidden().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert published.keys() == {"weight", "bias"}
    assert_nothing_resident(manager)


def test_it_refuses_and_says_what_to_do(crates: type[Framework], manager: placement.Manager) -> None:
    with pytest.raises(placement.RegistrationError, match=r"Frozen is not supported now.*thaw it first"):
        manager.register("actor", nn.Sequential(nn.Linear(2, 2), Frozen()), role="actor")
    model = nn.Linear(2, 2)
    manager.register("actor", model, role="actor")
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.is_moody = True  # type: ignore[attr-defined]
    refused = r"SGD in a bad mood, is not supported now.*wait, or register it with external=True"
    with pytest.raises(placement.RegistrationError, match=refused):
        manager.register("actor.optimizer", optimizer)


def test_what_it_places_is_never_moved(crates: type[Framework], manager: placement.Manager) -> None:
    model = nn.Linear(2, 2)
    manager.register("actor", model, role="actor")
    optimizer = manager.register("actor.optimizer", FarAway(model.parameters()))
    assert optimizer.external
    assert manager.snapshot().handles[1].external == "Crates keeps its state elsewhere"


def test_an_optimizer_of_copies_belongs_to_the_model_that_they_are_of(crates: type[Framework], manager: placement.Manager) -> None:
    model = nn.Linear(2, 2)
    actor = manager.register("actor", model, role="actor")
    optimizer = manager.register("actor.optimizer", Masters(list(model.parameters())))
    assert optimizer.owners == (actor,)


def test_only_its_own_export_publishes(crates: type[Framework], manager: placement.Manager) -> None:
    model = OwnShards()
    actor = manager.register("actor", model, role="actor")
    with manager.phase("weight_sync"), pytest.raises(placement.RegistrationError, match=r"OwnShards shards its parameters.*its own export"):
        actor.weights()


def test_what_is_no_framework_is_refused() -> None:
    with pytest.raises(TypeError, match=r"subclass of placement\.frameworks\.base\.Framework, not <class 'int'>"):
        known.add(int)  # type: ignore[arg-type]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for packages, as if they were installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    monkeypatch.undo()
    known._forget()


def install(folder: Path, source: str) -> None:
    (folder / "boxes.py").write_text(source)
    info = folder / "boxes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: boxes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[placement.frameworks]\nboxes = boxes:Boxes\n")


def test_an_installed_package_brings_its_framework(installed: Path) -> None:
    install(installed, "from placement.frameworks.base import Framework\nclass Boxes(Framework):\n    pass\n")
    known._forget()
    assert [each.__name__ for each in known.frameworks()][-1] == "Boxes"


@pytest.mark.parametrize(("source", "why"), [("Boxes = int", "is no subclass"), ("import no_such_package", "No module named")])
def test_a_package_that_does_not_work_is_named(installed: Path, source: str, why: str) -> None:
    sys.modules.pop("boxes", None)
    install(installed, source + "\n")
    with pytest.raises(placement.RegistrationError, match=rf"entry point 'boxes' of the group 'placement.frameworks'.*{why}"):
        known._forget()
