"""The tests under other versions of Python and torch: `make matrix`, with .ci/matrix.toml saying
which.

Each combination gets an environment of its own with nothing in it but the wheel of this project,
its extra `test` and that torch, and runs the tests that the source distribution carries: what is
tested is what users install. A combination that cannot be had here is named with the reason, and is
no failure.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import os
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / ".venv" / "matrix"
"""Where environments are made; git and the linters look past it."""
NEEDED_BYTES = 8 << 30
"""For one environment: torch for CUDA brings libraries of five GB, in files of two."""
THIS = f"{sys.version_info.major}.{sys.version_info.minor}"
_VERSION = "import sys, ensurepip; print('%d.%d' % sys.version_info[:2])"
_TORCH = "import platform, torch; print(platform.python_version(), torch.__version__)"


class CannotBeHadError(Exception):
    """A combination that this machine cannot make, with the reason in one line."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    python: str
    torch: str
    result: str
    seconds: str = ""
    failed: bool = False


def run(*command: str | Path, seconds: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command, with what it says on both streams as text.

    Raises:
        CannotBeHadError: it took longer.
    """
    try:
        return subprocess.run(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=seconds,
            **options,
        )
    except subprocess.TimeoutExpired:
        raise CannotBeHadError(
            f"{Path(command[0]).name} {command[1]} {command[2]} took more than {seconds:.0f} s"
        ) from None


def interpreters(version: str) -> Iterator[str]:
    """Where a Python of this version may be: this one, on PATH, with pyenv, with uv (which can also
    fetch it)."""
    if version == THIS:
        yield sys.executable
    yield f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))
    if uv := shutil.which("uv"):
        found = run(uv, "python", "find", version, seconds=60)
        if found.returncode and run(uv, "python", "install", version, seconds=300).returncode == 0:
            found = run(uv, "python", "find", version, seconds=60)
        yield found.stdout.strip()


@functools.cache
def interpreter(version: str) -> str:
    """A Python of this version that can make environments.

    Raises:
        CannotBeHadError: there is none.
    """
    for path in interpreters(version):
        if shutil.which(path):
            # pyenv has commands that only say that they are not it
            asked = run(path, "-c", _VERSION, seconds=60)
            if asked.returncode == 0 and asked.stdout.strip() == version:
                return path
    raise CannotBeHadError(f"no Python {version} on PATH, with pyenv or with uv")


def distributions(place: Path) -> tuple[Path, Path]:
    """The wheel of this tree, built from its source distribution, and the folder with the tests of
    that."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    build = (
        "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + "
        "sys.argv[1])(sys.argv[2])"
    )
    for kind, where in (("sdist", ROOT), ("wheel", place / "source")):
        done = run(sys.executable, "-c", build, kind, place, seconds=300, cwd=where)
        if done.returncode:
            raise SystemExit(f"{done.stdout}\nthe {kind} cannot be built")
        if kind == "sdist":
            with tarfile.open(next(place.glob("*.tar.gz"))) as archive:
                archive.extractall(place, filter="data")
            next(path for path in place.iterdir() if path.is_dir()).rename(place / "source")
    # so that the tests import what is installed
    for folder in ("placement", "placement_rl.egg-info", "policies", "build"):
        shutil.rmtree(place / "source" / folder)
    return next(place.glob("*.whl")), place / "source"


def make_environment(place: Path, python: str, torch: str, wheel: Path, seconds: float) -> Path:
    """The interpreter of a new environment.

    Raises:
        CannotBeHadError: a package cannot be installed; the reason is pip's.
    """
    PLACE.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(PLACE).free < NEEDED_BYTES:
        raise CannotBeHadError(
            f"an environment needs up to {NEEDED_BYTES >> 30} GiB of disk, and less is free"
        )
    made = run(interpreter(python), "-m", "venv", "--clear", place, seconds=120)
    if made.returncode:
        raise CannotBeHadError(made.stdout.strip().splitlines()[-1])
    # As development runs, but for torch and what follows from it.
    pins = [
        pin
        for pin in (ROOT / "constraints.txt").read_text().splitlines()
        if not pin.startswith(("torch==", "cuda-bindings=="))
    ]
    constraints = place / "constraints.txt"
    constraints.write_text("\n".join(pins))
    pip = (
        place / "bin" / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-compile",
    )
    done = run(*pip, "-c", constraints, f"torch=={torch}.*", f"{wheel}[test]", seconds=seconds)
    if done.returncode:
        errors = [
            line.removeprefix("ERROR: ")
            for line in done.stdout.splitlines()
            if line.startswith("ERROR:")
        ]
        raise CannotBeHadError(
            (errors or done.stdout.strip().splitlines() or [("pip failed without a word")])[-1]
        )
    return place / "bin" / "python"


def selection(configuration: dict[str, Any], torch: str, *, quick: bool) -> list[str]:
    """pytest's arguments: the tests, and those of them that are left out."""
    left_out = [
        test
        for entry in configuration["left_out"]
        if torch in entry["torch"]
        for test in entry["tests"]
    ]
    if quick:
        left_out += configuration["slow"]
    return [*configuration["tests"], *(f"--deselect={test}" for test in left_out)]


def run_tests(python: Path, folder: Path, arguments: list[str], seconds: float) -> tuple[str, bool]:
    """pytest's closing line, and whether a test failed; then its report is printed."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    }
    done = run(
        *(
            python,
            "-m",
            "pytest",
            "-q",
            "-n",
            str(len(os.sched_getaffinity(0))),
            "--dist",
            "loadfile",
            "--no-loadscope-reorder",
        ),
        *("-p", "no:cacheprovider"),
        *arguments,
        seconds=seconds,
        cwd=folder,
        env={
            **environment,
            "MALLOC_MMAP_THRESHOLD_": "4294967296",
            "MALLOC_TRIM_THRESHOLD_": "4294967296",
        },
    )
    if done.returncode:
        print(done.stdout, flush=True)
    return (done.stdout.strip().splitlines() or ["pytest said nothing"])[-1].strip(
        "= "
    ), done.returncode != 0


def run_combination(
    python: str,
    torch: str,
    wheel: Path,
    folder: Path,
    options: argparse.Namespace,
    configuration: dict[str, Any],
) -> Row:
    """Make the environment, run the tests, and remove it unless it is to be kept."""
    place = PLACE / f"{python}-{torch}"
    begin = time.monotonic()
    try:
        own = make_environment(place, python, torch, wheel, options.install_seconds)
        versions = run(own, "-c", _TORCH, seconds=300)
        if versions.returncode:
            raise CannotBeHadError(
                f"this torch cannot be imported here: {versions.stdout.strip().splitlines()[-1]}"
            )
        python, torch = versions.stdout.split()[-2:]
        made = time.monotonic()
        arguments = [
            *selection(configuration, place.name.split("-")[1], quick=options.quick),
            *options.pytest,
        ]
        result, failed = run_tests(own, folder, arguments, options.test_seconds)
        seconds = f"{made - begin:.0f} + {time.monotonic() - made:.0f}"
        return Row(python, torch, result, seconds, failed)
    except CannotBeHadError as reason:
        return Row(python, torch, f"not run: {reason}", f"{time.monotonic() - begin:.0f}")
    finally:
        if not options.keep:
            shutil.rmtree(place, ignore_errors=True)


def table(rows: list[Row]) -> str:
    """The rows under headings, in columns."""
    lines = [
        ("Python", "torch", "seconds, set-up + tests", "result"),
        *((row.python, row.torch, row.seconds, row.result) for row in rows),
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return "\n".join(
        "  ".join(
            (*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[3])
        )
        for line in lines
    )


def main() -> int:
    configuration = tomllib.loads((ROOT / ".ci" / "matrix.toml").read_text())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        default="*",
        help='which combinations, as "3.12-2.11", "*-2.11" or "this-2.11" (the '
        "Python "
        "that "
        "runs "
        "this), separated by commas",
    )
    parser.add_argument("--quick", action="store_true", help="without the tests that take long")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="leave the environments in .venv/matrix, of up to five GB each",
    )
    parser.add_argument(
        "--install-seconds",
        type=float,
        default=900,
        help="how long one environment may take to install",
    )
    parser.add_argument(
        "--test-seconds", type=float, default=3600, help="how long its tests may take"
    )
    parser.add_argument("pytest", nargs="*", help="further arguments of pytest, after --")
    options = parser.parse_args()
    wanted = options.only.replace("this", THIS).split(",")
    pythons = dict.fromkeys(
        [*configuration["python"], THIS] if "this" in options.only else configuration["python"]
    )
    chosen = [
        (python, torch)
        for python in pythons
        for torch in configuration["torch"]
        if any(fnmatch.fnmatch(f"{python}-{torch}", each) for each in wanted)
    ]
    if not chosen:
        parser.error(
            f"no combination is called {options.only!r}; .ci/matrix.toml has those of "
            f"{list(pythons)} and {configuration['torch']}"
        )
    wheel, folder = distributions(PLACE / "distributions")
    rows = []
    for python, torch in chosen:
        print(f"Python {python}, torch {torch} ...", flush=True)
        rows.append(run_combination(python, torch, wheel, folder, options, configuration))
    print(table(rows))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
