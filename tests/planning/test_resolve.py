"""How a name becomes a policy, and who may import whom."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import placement
import placement.policies
from placement import Plan, PolicyError, View
from placement.planning.policy_lookup import GROUP, SHIPPED, policy_names, resolve_policy
from placement.policies import AsyncRollout, Colocated, Cyclic, Policy, Resident


class Mine(Colocated):
    name = "mine"


class NoPlan:
    name = "no_plan"


class NoName:
    def plan(self, view: View) -> Plan:
        return view.total_plan({})


class NeedsAnArgument(NoName):
    name = "needs_an_argument"

    def __init__(self, size: int) -> None:
        self.size = size


THIRD_PARTY = """
from placement.policies import Colocated

class Mine(Colocated):
    name = "mine"
"""


POINTS = {"mine": "Mine", "lost": "Lost", "twice": "Mine"}


def install(folder: Path, name: str, group: str, **points: str) -> None:
    """A distribution with entry points, as pip leaves it in a folder."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "\n".join([f"[{group}]", *(f"{point} = {place}" for point, place in points.items())])
    )


class TestResolve:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("colocated", Colocated),
            ("resident", Resident),
            ("async_rollout", AsyncRollout),
            ("cyclic", Cyclic),
        ],
    )
    def test_shipped_names(self, name: str, kind: type[Policy]) -> None:
        policy = resolve_policy(name)
        assert type(policy) is kind
        assert isinstance(policy, Policy)
        assert policy.name == name
        assert name in policy_names()

    def test_a_checkout_and_an_installation_know_the_same_names(self) -> None:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
        assert project["project"]["entry-points"][GROUP] == SHIPPED

    def test_path_class_and_instance(self) -> None:
        for spec in (f"{__name__}:Mine", Mine, Mine(stream_sync=True)):
            assert isinstance(resolve_policy(spec), Mine)

    def test_entry_points(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "thirdparty_policies.py").write_text(THIRD_PARTY)
        install(
            tmp_path,
            "thirdparty",
            GROUP,
            **{name: f"thirdparty_policies:{cls}" for name, cls in POINTS.items()},
        )
        install(tmp_path, "fourthparty", GROUP, twice="elsewhere:Mine", colocated="elsewhere:Mine")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert resolve_policy("mine").name == "mine"
        assert "mine" in policy_names()
        assert type(resolve_policy("colocated")) is Colocated, (
            "nobody else can register a shipped name"
        )
        with pytest.raises(
            PolicyError,
            match=r"'twice' is registered more "
            r"than "
            r"once: "
            r"elsewhere:Mine, "
            r"thirdparty_policies:Mine",
        ):
            resolve_policy("twice")
        with pytest.raises(
            PolicyError,
            match=r"'lost' cannot be "
            r"imported "
            r"from "
            r"thirdparty_policies:Lost: "
            r"AttributeError",
        ):
            resolve_policy("lost")

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (
                "residant",
                (
                    r"no policy 'residant', did you mean "
                    r"'resident'\? "
                    r"Registered: "
                    r"async_rollout, "
                    r"colocated, cyclic, resident"
                ),
            ),
            ("os:system('true')", "no policy"),
            (
                "no_such_module:Mine",
                ("cannot be imported from no_such_module:Mine: ModuleNotFoundError"),
            ),
            (
                "json:dumps",
                (
                    r"'json:dumps' has no method plan\(view\): write a class with "
                    r"a "
                    r"`name` "
                    r"and that "
                    r"method"
                ),
            ),
            (NoPlan, "NoPlan has no method plan"),
            (NoName, "NoName needs a name"),
            (NeedsAnArgument, "NeedsAnArgument cannot be constructed without arguments"),
            (
                "colocated(drop_gradients=true)",
                ("options are literals.*: true is not a literal; write True, False"),
            ),
            (
                "colocated(optimizer_step)",
                (
                    "options are literals.*: optimizer_step is not a literal; .* a word in quotes: "
                    "'optimizer_step'"
                ),
            ),
            ("colocated(__import__('os').getpid())", "options are literals"),
            ("colocated(stream_sync=True", "options are literals"),
            (
                "colocated(stream=True)",
                (
                    r"'colocated\(stream=True\)' cannot "
                    r"be "
                    r"constructed "
                    r"with "
                    r"these options.*'stream'"
                ),
            ),
            (
                "colocated(drop_grad=True)",
                (
                    r"no option 'drop_grad', did you "
                    r"mean "
                    r"'drop_gradients'\? "
                    r"\(its options: "
                    r"optimizer_in, stream"
                ),
            ),
            (f"{__name__}:NoName(size=1)", r"no option 'size' \(its options: none\)"),
            (
                "colocated('step')",
                (
                    r"cannot be constructed with these options: "
                    r"optimizer_in "
                    r"must "
                    r"be one of train, "
                    r"optimizer_step"
                ),
            ),
            ("colocated(drop_gradients='False')", "drop_gradients must be True or False"),
            (
                f"{__name__}:THIRD_PARTY(1)",
                ("no policy .* only a class takes options, and .* is a str"),
            ),
        ],
    )
    def test_what_is_no_policy_or_has_options_that_are_none(self, spec: Any, message: str) -> None:
        with pytest.raises(PolicyError, match=message):
            resolve_policy(spec)

    def test_options_as_literals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        policy = resolve_policy("colocated(drop_gradients=True, optimizer_in='optimizer_step')")
        assert isinstance(policy, Colocated)
        assert (policy.drop_gradients, policy.optimizer_in, policy.stream_sync) == (
            True,
            "optimizer_step",
            False,
        )
        assert resolve_policy("cyclic(cycle=('rollout', 'train'))").cycle == ("rollout", "train")  # type: ignore[attr-defined]
        assert resolve_policy('resident("optimizer_step")').optimizer_in == "optimizer_step"  # type: ignore[attr-defined]
        assert type(resolve_policy("colocated()")) is Colocated
        assert resolve_policy(f"{__name__}:NeedsAnArgument(-3)").size == -3  # type: ignore[attr-defined]
        monkeypatch.setenv("PLACEMENT_POLICY", "colocated(stream_sync=True)")
        manager = placement.Manager.from_settings(device=placement.testing.SimulatedDevice(1 << 20))
        assert manager.policy.stream_sync


def test_policies_import_only_what_placement_exports() -> None:
    files = sorted((Path(placement.policies.__file__).parent).glob("*.py"))
    assert len(files) >= 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                if node.module == "placement":
                    assert {alias.name for alias in node.names} <= set(placement.__all__), (
                        f"{file.name}: {ast.unparse(node)}"
                    )
                else:
                    assert str(node.module).split(".")[0] in sys.stdlib_module_names, (
                        f"{file.name}: {ast.unparse(node)}"
                    )
            elif isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= {
                    "placement",
                    *sys.stdlib_module_names,
                }, file.name
