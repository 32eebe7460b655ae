"""What the source distribution and the wheel carry. Both are built offline: the wheel, as pip does,
from the source distribution."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

import placement
from placement.core import __version__
from placement.planning.policy_lookup import SHIPPED

ROOT = Path(__file__).parents[2]
PACKAGE, POLICIES = ROOT / "placement", ROOT / "policies"
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + "
    "sys.argv[1])(sys.argv[2])"
)
pytestmark = [
    pytest.mark.sweep,
    pytest.mark.skipif(
        not PACKAGE.is_dir(), reason="placement is installed, and its source is not here"
    ),
]


def files_of(folder: Path) -> set[str]:
    """Relative paths of what git keeps of a folder of this tree."""
    leftovers = {"__pycache__", ".hypothesis", ".pytest_cache", ".ruff_cache", ".mypy_cache"}
    paths = [
        path
        for path in folder.rglob("*")
        if path.is_file()
        and leftovers.isdisjoint(path.parts)
        and path.suffix not in (".pyc", ".pyo")
    ]
    return {path.relative_to(ROOT).as_posix() for path in paths}


def build(kind: str, source: Path, target: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(target)],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    tree, target = tmp_path_factory.mktemp("checkout") / "tree", tmp_path_factory.mktemp("sdist")
    # A copy, because a build leaves files in the tree that it builds.
    tree.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
        elif path.name in ("placement", "policies", "tests", "docs", "bench", "examples", ".ci"):
            shutil.copytree(
                path, tree / path.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
    with tarfile.open(build("sdist", tree, target)) as archive:
        archive.extractall(target, filter="data")
    return target / f"placement_rl-{__version__}"


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build("wheel", source, tmp_path_factory.mktemp("wheel")))


def test_the_source_distribution_has_every_file(source: Path) -> None:
    for folder in ("placement", "policies", "tests", "docs", "bench", "examples", ".ci"):
        expected = files_of(ROOT / folder)
        assert expected
        assert {name for name in expected if not (source / name).is_file()} == set()
    for name in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
    ):
        assert (source / name).read_text() == (ROOT / name).read_text(), name
    leftovers = [
        path
        for path in source.rglob("*")
        if path.name == "__pycache__" or path.suffix in (".pyc", ".pyo")
    ]
    assert leftovers == []


def test_the_wheel_has_the_package_and_nothing_beside_it(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"placement"}
    # placement/policies is a link to policies/
    expected = files_of(PACKAGE) | {f"placement/{name}" for name in files_of(POLICIES)}
    assert names == expected
    for name in sorted(names):
        assert wheel.read(name) == (ROOT / name).read_bytes(), name


def test_the_wheel_says_who_made_what_under_which_licence(wheel: zipfile.ZipFile) -> None:
    said = email.message_from_bytes(wheel.read(f"placement_rl-{__version__}.dist-info/METADATA"))
    assert (said["Name"], said["Version"], said["License-Expression"]) == (
        "placement-rl",
        placement.__version__,
        "Apache-2.0",
    )
    assert said["Requires-Python"] == ">=3.11"
    assert said["Author"] == "The placement authors"
    assert {"test", "dev", "ray", "demo"} <= set(said.get_all("Provides-Extra", []))
    points = ConfigParser()
    points.read_string(
        wheel.read(f"placement_rl-{__version__}.dist-info/entry_points.txt").decode()
    )
    assert dict(points["console_scripts"]) == {"placement": "placement.cli:main"}
    assert dict(points["placement.policies"]) == SHIPPED


def test_the_wheel_works_where_it_lies(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Every file that it reads at run time is in it: a page is served, a dashboard is read, a
    policy is found by its name."""
    wheel.extractall(tmp_path)
    program = f"""
import sys, urllib.request
from pathlib import Path
import placement
from placement.observe.dashboards import export
from placement.testing import SimulatedDevice

assert placement.__file__.startswith({str(tmp_path)!r}), placement.__file__
manager = placement.Manager(device=SimulatedDevice(1 << 20), policy="resident")
server = manager.serve()
print("<html" in urllib.request.urlopen(server.url, timeout=60).read().decode().lower())
manager.close()
print(len(export(Path("dashboards"))))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "6"], done.stdout


@pytest.mark.parametrize(
    ("last", "code"),
    [
        ("ours", "import placement"),
        # their `__init__` is empty, and cannot speak
        ("openstack", "import placement.manager"),
        ("openstack", "import placement.integrations.verl.plugin"),
    ],
)
def test_files_of_openstacks_package_in_the_same_folder_are_named(
    wheel: zipfile.ZipFile, tmp_path: Path, last: str, code: str
) -> None:
    """pip puts the files of both distributions into one folder; of those with the same name the
    last installed stay."""
    theirs = dict.fromkeys(
        ("__init__.py", "deploy.py", "errors.py", "policies/__init__.py", "policies/base.py"), ""
    )
    if last == "ours":
        wheel.extractall(tmp_path)
    for name, text in theirs.items():
        path = tmp_path / "placement" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.exists() or path.write_text(text)
    if last == "openstack":
        wheel.extractall(
            tmp_path,
            [name for name in wheel.namelist() if name.removeprefix("placement/") not in theirs],
        )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert (
        "ImportError: OpenStack's openstack-placement has put files into the same folder "
        f"{tmp_path / 'placement'}"
    ) in done.stderr


def test_the_matrix_names_tests_that_there_are() -> None:
    configuration = tomllib.loads((ROOT / ".ci" / "matrix.toml").read_text())
    left_out = [test for entry in configuration["left_out"] for test in entry["tests"]]
    for test in [*configuration["tests"], *configuration["slow"], *left_out]:
        path, _, name = test.partition("::")
        assert (ROOT / path).exists(), test
        if name:
            assert f"def {name.split('[')[0]}(" in (ROOT / path).read_text(), test
    versions = set(configuration["torch"])
    for entry in configuration["left_out"]:
        assert set(entry["torch"]) <= versions
        assert entry["because"]
