"""Installed frameworks still have the doors that pages and mixins rely on; the stand-ins and the mixins have them too."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from placement.integrations.nemo_rl import PlacedPolicyWorker
from placement.integrations.slime import PlacedTrainActor
from tests.integrations import nemo_rl_standin, slime_standin
from tests.integrations.doors import DOORS, Door, installed, parameters

PAGES = Path(__file__).parents[2] / "docs" / "integrations"
STANDINS: dict[str, Any] = {
    "MegatronTrainRayActor": slime_standin.TrainActor,
    "TrainRayActor": slime_standin.TrainActor,
    "DTensorPolicyWorkerV2Impl": nemo_rl_standin.DTensorWorker,
    "MegatronPolicyWorkerImpl": nemo_rl_standin.MegatronWorker,
    "AbstractPolicyWorker": nemo_rl_standin.DTensorWorker,
}


@pytest.mark.parametrize("framework", DOORS)
def test_an_installed_framework_has_the_doors(framework: str) -> None:
    """The sources are read and not imported: most of these frameworks cannot be imported without a GPU."""
    root = installed(framework)
    if root is None:
        pytest.skip(f"{framework} is not installed here")
    found = {str(door): parameters(root, door) for door in DOORS[framework]}
    assert found == {str(door): door.parameters for door in DOORS[framework]}


def test_a_door_that_is_gone_or_changed_is_found(tmp_path: Path) -> None:
    door = Door("a/b.py", "A", "run", ("x", "*rest", "y", "**more"))
    assert parameters(tmp_path, door) is None
    (tmp_path / "a").mkdir()
    source = tmp_path / "a" / "b.py"
    source.write_text("class A:\n    async def run(self, x, *rest, y=1, **more): ...\n\n\ndef run(z): ...\n")
    assert parameters(tmp_path, door) == door.parameters
    assert parameters(tmp_path, Door("a/b.py", "", "run", ())) == ("z",)
    assert parameters(tmp_path, Door("a/b.py", "A", "walk", ())) is None
    assert parameters(tmp_path, Door("a/b.py", "B", "run", ())) is None


@pytest.mark.parametrize("door", [door for doors in DOORS.values() for door in doors if door.owner in STANDINS], ids=str)
def test_the_standins_take_the_same_arguments(door: Door) -> None:
    found = inspect.signature(getattr(STANDINS[door.owner], door.name)).parameters
    named = [name for name in door.parameters if not name.startswith("*")]
    takes_more = any(each.kind is each.VAR_KEYWORD for each in found.values())
    assert [name for name in found if name in named] == [name for name in named if not takes_more or name in found]


@pytest.mark.parametrize("mixin", [PlacedTrainActor, PlacedPolicyWorker])
def test_the_mixins_override_only_what_is_recorded(mixin: Any) -> None:
    """A method that the framework no longer has would never be called, and nobody would notice."""
    recorded = {door.name for doors in DOORS.values() for door in doors if door.owner in STANDINS}
    own = {name for name, each in vars(mixin).items() if inspect.isfunction(each) and not name.startswith("_")}
    assert own - recorded == {"make_manager"} | ({"reads_model_for_sync"} if mixin is PlacedTrainActor else set())


@pytest.mark.parametrize("framework", DOORS)
def test_the_page_names_every_door(framework: str) -> None:
    text = (PAGES / f"{framework}.md").read_text(encoding="utf-8")
    missing = [str(door) for door in DOORS[framework] if f"`{door.name}`" not in text and f"{door.name}(" not in text]
    files = [door.file for door in DOORS[framework] if door.file not in text]
    assert (missing, files) == ([], [])
