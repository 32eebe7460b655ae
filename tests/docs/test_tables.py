"""Tables of the pages agree with the code: states, rooms, names of classes, errors, figures, public
names."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

import placement
import placement.checkpoint
import placement.engines
import placement.errors
import placement.group
import placement.policies
import placement.ray
import placement.testing
from bench import report
from bench._results import FOLDER, read
from placement.cli import COMMANDS
from placement.core.states import NO_TAGS, HandleView, State, View
from placement.devices.base import Device
from placement.engines.base import Engine
from placement.frameworks.base import Framework
from placement.observe.collector import SnapshotCollector
from placement.testing import SimulatedDevice
from tests.docs.pages import DOCS, PAGES, README, ROOT, between, prose_with_code, rows
from tests.project.test_architecture import ROOMS

PACKAGE = Path(placement.__file__).parent
CONCEPTS, ARCHITECTURE, TROUBLESHOOTING = (
    DOCS / "concepts.md",
    DOCS / "architecture.md",
    DOCS / "troubleshooting.md",
)
REFERENCE = {
    name
    for page in (DOCS / "reference").glob("*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(), flags=re.MULTILINE)
}


# --- states


def test_the_table_of_transitions_is_that_of_the_code() -> None:
    shown = [tuple(row[:3]) for row in rows(between(CONCEPTS, "transitions"))]
    assert shown == [tuple(map(str, row)) for row in placement.TRANSITIONS]


def test_the_diagram_is_that_of_the_code() -> None:
    rows = [
        (f"    {source} --> {target}: {trigger}")
        for trigger, source, target in placement.TRANSITIONS
    ]
    diagram = "\n".join(["stateDiagram-v2", f"    [*] --> {State.CPU_OFFLOADED}", *rows])
    assert between(CONCEPTS, "states").strip() == f"```mermaid\n{diagram}\n```"


def test_every_state_and_phase_is_explained() -> None:
    text = CONCEPTS.read_text()
    assert [
        name for name in (*placement.State, *placement.PHASES) if f"| `{name}` |" not in text
    ] == []


@pytest.mark.parametrize("page", [README, CONCEPTS], ids=lambda page: page.name)
def test_the_table_of_what_is_on_the_device_is_the_default_policys(page: Path) -> None:
    words = {
        State.CPU_OFFLOADED: "",
        State.GPU_RESIDENT: "yes",
        State.TRAINING: "trained",
        State.SYNCING: "published",
    }
    roles = ("actor", "actor", "ref", "critic", "critic", "reward", "rollout")
    handles = {}
    for number, role in enumerate(roles):
        name, kind = (
            f"{number}",
            "optimizer" if number in (1, 4) else "engine" if role == "rollout" else "module",
        )
        owners = (f"{number - 1}",) if kind == "optimizer" else ()
        tags = {"weights": 1, "kv_cache": 1} if kind == "engine" else NO_TAGS
        handles[name] = HandleView(
            name=name,
            kind=kind,
            role=role,
            state=State.CPU_OFFLOADED,
            num_bytes=2,
            owners=owners,
            tags=tags,
        )
    shown = rows(between(page, "residency"))
    for phases, *cells in shown:
        for phase in re.findall(r"\w+", phases):
            view = View(
                phase=phase, handles=handles, budget_bytes=100, worker_role="hybrid", phases={}
            )
            plan = placement.policies.Colocated().plan(view)
            found = [words[plan[name]] for name in handles]
            if plan.parts.get("6") == frozenset({"weights"}):
                found[-1] = "its weights"
            assert found == cells, phase
    assert {phase for row in shown for phase in re.findall(r"\w+", row[0])} == set(
        placement.PHASES
    ) - {"optimizer_step"}


# --- architecture


def test_the_rooms_are_in_the_order_of_imports() -> None:
    assert tuple(row[0] for row in rows(between(ARCHITECTURE, "rooms"))) == ROOMS


@cache
def classes(room: str) -> dict[str, str]:
    place = PACKAGE / room
    files = sorted(place.rglob("*.py")) if place.is_dir() else [place.with_suffix(".py")]
    found = {}
    for file in files:
        module = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        )
        found |= {
            node.name: module
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.ClassDef)
        }
    return found


_WHERE = ARCHITECTURE.read_text().partition("## Where to look for")[2].partition("\n## ")[0]
BEGIN_AT = [(row[2], row[1]) for row in rows(_WHERE)]


@pytest.mark.parametrize(
    ("name", "room"), [pytest.param(*each, id="-".join(each)) for each in dict.fromkeys(BEGIN_AT)]
)
def test_the_names_in_the_code_are_there(name: str, room: str) -> None:
    assert name in classes(room), (
        f"placement/{room} has no class {name}: was it renamed, or did it move to another room?"
    )
    found = getattr(importlib.import_module(classes(room)[name]), name)
    assert inspect.isclass(found)


# --- errors


@cache
def sources() -> str:
    """Every text of the sources, a line each, with … in place of what is filled in."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        part.value if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def test_every_public_exception_has_a_section() -> None:
    shown = re.findall(r"^## (\w+)$", TROUBLESHOOTING.read_text(), flags=re.MULTILINE)
    assert sorted(shown) == sorted(placement.errors.__all__)


@pytest.mark.parametrize("name", placement.errors.__all__)
def test_every_section_says_what_to_do(name: str) -> None:
    section = re.split(
        r"^## ", TROUBLESHOOTING.read_text().partition(f"## {name}\n")[2], flags=re.MULTILINE
    )[0]
    assert "**Do:**" in section or "| do |" in section or "what to do |" in section


PHRASES = [
    phrase
    for line in TROUBLESHOOTING.read_text().splitlines()
    if line.startswith("| `")
    for phrase in re.findall(r"`([^`]+)`", line.split(" | ")[0])
]


@pytest.mark.parametrize("phrase", PHRASES)
def test_messages_that_are_quoted_exist(phrase: str) -> None:
    assert phrase in sources(), (
        f"docs/troubleshooting.md quotes {phrase!r}, and no message of placement says so any more"
    )


# --- figures


def test_the_figures_are_those_of_the_result_files() -> None:
    results = read(FOLDER)
    for name, write in report.PAGES.items():
        assert report.shown_in(DOCS / "performance.md", name).strip() == write(results).strip()
    on_h200 = read(FOLDER / report.H200_FOLDER)
    told, steps = report.forecasts(on_h200), report.verl_at_size(on_h200)
    assert report.shown_in(DOCS / "which_model.md", "forecasts").strip() == told.strip()
    assert report.shown_in(DOCS / "integrations" / "verl.md", "verl").strip() == steps.strip()
    assert report.shown_in(README, "one_gpu").strip() == report.whole_job(results).strip()
    assert report.shown_in(README, "performance").strip() == report.headline(results).strip()


# --- reference

_EXTRA = {
    "placement.devices.base.Device": "the contract of who writes a device",
    **{f"placement.engines.vllm.{name}": "an engine" for name in ("VllmServer", "VllmInProcess")},
    **{
        f"placement.engines.sglang.{name}": "an engine"
        for name in ("SglangServer", "SglangInProcess")
    },
    "placement.publish.VllmWeightSource": "for one engine",
}


def public_names() -> set[str]:
    found = set()
    packages = [
        placement,
        placement.checkpoint,
        placement.engines,
        placement.forecasting,
        placement.group,
    ]
    packages += [placement.policies, placement.ray, placement.testing]
    for package in packages:
        found |= {
            f"{package.__name__}.{name}"
            for name in package.__all__
            if not inspect.ismodule(getattr(package, name))
        }
    return found


def test_the_reference_has_every_public_name_and_nothing_else() -> None:
    shown = {name.rpartition(".")[2] for name in REFERENCE}
    assert {name for name in public_names() if name.rpartition(".")[2] not in shown} == set()
    assert REFERENCE - public_names() == set(_EXTRA) & REFERENCE == set(_EXTRA)


def test_members_that_are_chosen_exist() -> None:
    chosen = {}
    for page in (DOCS / "reference").glob("*.md"):
        for name, members in re.findall(
            r"^::: (\S+)\n    options:\n      members:\n((?:        - \w+\n?)+)",
            page.read_text(),
            re.MULTILINE,
        ):
            module, _, cls = name.rpartition(".")
            chosen[name] = re.findall(r"- (\w+)", members)
            known = getattr(importlib.import_module(module), cls)
            source = inspect.getsource(known)
            assert [
                each
                for each in chosen[name]
                if not hasattr(known, each) and f"self.{each}" not in source
            ] == [], name
    assert "placement.Handle" in chosen


# --- contracts that users implement


@pytest.mark.parametrize(
    ("page", "contract"),
    [
        ("framework", Framework),
        ("device", Device),
        ("engine", Engine),
        ("policy", placement.Policy),
    ],
)
def test_a_contract_has_nothing_that_its_page_leaves_out(page: str, contract: type) -> None:
    names = {
        name for name in [*vars(contract), *contract.__annotations__] if not name.startswith("_")
    }
    text = (DOCS / "extend" / f"{page}.md").read_text()
    assert len(names) > 1
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()


# --- names of metrics, commands and settings, wherever a page has them


def test_metrics_that_are_named_exist() -> None:
    families = list(
        SnapshotCollector(
            lambda: placement.Manager(device=SimulatedDevice(1 << 20)).snapshot()
        ).collect()
    )
    known = {
        family.name
        + ("_total" if family.type == "counter" else "_info" if family.type == "info" else "")
        for family in families
    }
    named = {
        name
        for page in PAGES
        for name in re.findall(r"\bplacement_[a-z][a-z_]+\b(?!\.)", prose_with_code(page))
    }
    assert len(named) > 20
    assert named - known == set()


def test_commands_that_are_named_exist() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:`|\$ )placement ([a-z]+)", page.read_text(encoding="utf-8"))
    }
    assert len(named) >= 5
    assert named - set(COMMANDS) == set()


def test_settings_that_are_named_exist() -> None:
    named = {
        name
        for page in PAGES
        for name in re.findall(r"\bPLACEMENT_([A-Z_]+)\b", page.read_text(encoding="utf-8"))
    }
    assert len(named) >= 3
    known = {*placement.Settings.model_fields, "control_token"}  # the token is no setting
    assert {name.lower() for name in named} - known == set()
    table = (DOCS / "operator.md").read_text().partition("## Settings for operators")[2]
    shown = {name for row in rows(table) for name in re.findall(r"(?:^|, )([a-z_]+)", row[0])}
    assert {"budget_bytes", "verify"} <= shown <= set(placement.Settings.model_fields)


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {
        name
        for page in PAGES
        for name in re.findall(
            r"(?:`|^\$ |^)make ([a-z]+)", page.read_text(encoding="utf-8"), re.MULTILINE
        )
    }
    assert {"demo", "test", "docs"} <= named <= targets
