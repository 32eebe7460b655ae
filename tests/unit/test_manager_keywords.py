"""The keywords of `Manager`: an editor knows them, mypy refuses a wrong one, and so does the manager where nobody ran mypy."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

import placement
from placement.core.settings import Settings, SettingsKeywords
from placement.manager import Manager, ManagerKeywords
from placement.testing import SimulatedDevice

ROOT = Path(placement.__file__).parent.parent
# What placement imports is skipped: the keywords are its own, and torch alone would take longer than everything else.
CONFIGURATION = """
[mypy]
strict = true
follow_imports = silent
[mypy-torch.*,transitions.*,prometheus_client.*,transformers.*,pydantic.*]
follow_imports = skip
ignore_missing_imports = true
"""
SNIPPET = """\
import placement
from placement.testing import SimulatedDevice

placement.Manager(device=SimulatedDevice(1 << 20), policy=placement.policies.Colocated(), budget_bytes="12GiB", strict=True, leases=True)
placement.Manager(device="auto", policy=placement.policies.Resident, phases={"distill": ["teacher"]}, worker_role="trainer")
placement.Manager.from_settings({}, device="cuda:0", headroom=0.1)
placement.Manager(hedroom=0.1)
placement.Manager(headroom="much")
placement.Manager(worker_role="trianer")
placement.Manager(policy=3)
placement.Manager.from_settings({}, polciy="resident")
placement.Manager.from_settings({}, verify="allways")
"""
ERRORS = {
    7: 'Unexpected keyword argument "hedroom"',
    8: 'Argument "headroom"',
    9: 'Argument "worker_role"',
    10: 'Argument "policy"',
    11: 'Unexpected keyword argument "polciy"',
    12: 'Argument "verify"',
}


def test_the_keywords_are_the_fields_of_settings() -> None:
    named = {name for name, parameter in inspect.signature(Manager.__init__).parameters.items() if parameter.kind is parameter.KEYWORD_ONLY}
    others = SettingsKeywords.__annotations__.keys()
    assert named.isdisjoint(others)
    assert (named | others) - {"group"} == Settings.model_fields.keys()
    assert ManagerKeywords.__annotations__.keys() == named | others
    assert ManagerKeywords.__required_keys__ == frozenset()


def test_every_word_that_a_field_takes_is_in_the_keyword_too() -> None:
    fields, keywords = get_type_hints(Settings), get_type_hints(SettingsKeywords)
    words = "verify annotate strict call_deadline_seconds headroom journal_length discovery run lease_priority lease_deadline_seconds"
    for name in words.split():
        assert keywords[name] == fields[name], name


@pytest.mark.slow
@pytest.mark.timeout(300)  # mypy begins with an empty cache
def test_mypy_refuses_a_misspelled_keyword_and_a_wrong_type(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(CONFIGURATION)
    (tmp_path / "snippet.py").write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "snippet.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True, check=False, timeout=290
    )
    errors = [line.split(":", 3) for line in done.stdout.splitlines() if ": error: " in line]
    assert {int(number): text.strip() for path, number, _, text in errors if path == "snippet.py"}.keys() == ERRORS.keys(), done.stdout
    for _, number, _, text in errors:
        assert text.strip().startswith(ERRORS[int(number)]), text
    assert done.returncode == 1, done.stderr


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hedroom": 0.1}, "unknown key 'hedroom', did you mean 'headroom'"),
        ({"headroom": "much"}, "headroom: .*got 'much'"),
        ({"worker_role": "trianer"}, "worker_role: .*'trainer', 'rollout' or 'hybrid'"),
    ],
)
def test_the_manager_refuses_them_too(wrong: dict[str, object], message: str) -> None:
    device = SimulatedDevice(1 << 20)
    with pytest.raises(ValueError, match=message):
        Manager(device=device, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Manager.from_settings({}, device=device, **wrong)  # type: ignore[arg-type]
