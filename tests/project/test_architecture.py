"""How the code is laid out: rooms of a readable size, imports that point down, no cycle."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tools.imports import ROOT, cycles, imports, modules

ROOMS = (
    "core",
    "observe",
    "devices",
    "tensors",
    "frameworks",
    "ownership",
    "storage",
    "publish",
    "engines",
    "group",
    "registration",
    "planning",
    "phases",
    "manager",
    "testing",
    "checkpoint",
    "integrations",
    "forecasting",
    "cli",
)
"""From the ground up. A module may import from its own room and from those before it, for
annotations and inside functions too."""
DOORS = {"errors", "ray", "__main__"}
"""Short public names of what lies in a room; nothing inside imports them."""
USERS = {"cli"}
"""They use placement as its users do: `import placement`."""
MOST_MODULES = 16


def room_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def test_every_module_is_in_a_room() -> None:
    assert {room_of(name) for name in modules()} == {"", *ROOMS, *DOORS}


def test_imports_point_down() -> None:
    height = {room: index for index, room in enumerate(ROOMS)} | dict.fromkeys(DOORS, len(ROOMS))
    known = modules()
    upward = {
        (name, other)
        for name, path in known.items()
        if name != "placement"
        for other in imports(path, known)
        if height.get(room_of(other), len(ROOMS)) > height[room_of(name)]
        and not (other == "placement" and room_of(name) in USERS)
    }
    assert upward == set()


def test_no_modules_import_one_another() -> None:
    assert cycles() == []


def test_a_folder_can_be_taken_in_at_a_glance() -> None:
    sizes = Counter(path.parent for path in modules().values())
    assert {folder: size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def test_every_folder_says_what_it_is_for() -> None:
    for folder in {path.parent for path in modules().values()}:
        assert (folder / "__init__.py").read_text().startswith('"""'), folder.relative_to(ROOT)


def test_the_search_for_cycles_finds_one(tmp_path: Path) -> None:
    """The same graph as above with one import added: what the two tests above would miss if they
    could not fail."""
    known = modules()
    changed = tmp_path / "states.py"
    changed.write_text(
        known["placement.core.states"].read_text() + "\nfrom "
        "placement.core.settings "
        "import Settings\n"
    )
    known["placement.core.states"] = changed
    assert "placement.core.settings" in set(imports(changed, known))
    assert ["placement.core.settings", "placement.core.states"] in cycles(known)


def test_an_import_by_a_literal_name_is_an_import(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text('import importlib\nimportlib.import_module("placement.core.settings")\n')
    assert list(imports(path, modules())) == ["placement.core.settings"]
