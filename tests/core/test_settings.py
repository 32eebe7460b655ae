"""Settings from every source; every mistake names its key and where it stands."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import ValidationError

from placement.core.settings import TURNS_FOLDER, Settings, SettingsKeywords, parse_bytes
from placement.manager import Manager, ManagerKeywords


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "placement.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("12GiB", 12 << 30),
        ("1.5TiB", 3 << 39),
        ("512mib", 512 << 20),
        (" 0.5 KiB ", 512),
        ("1.9GiB", 2_040_109_465),
    ],
)
def test_bytes_with_units(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1GiB", "12 gigabytes", "1e9", "1iB", "1 2GiB", "12GiBB", "0x10", "inf"],
)
def test_bytes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="bytes"):
        parse_bytes(text)


EVERYTHING: dict[str, Any] = {
    "device": "cuda:1",
    "policy": "my.module:Mine",
    "budget_bytes": "12GiB",
    "pinned_limit_bytes": "96GiB",
    "worker_role": "trainer",
    "phases": {
        "distill": ["actor", "teacher"],
        "update_ref": {"actor": "GPU_RESIDENT", "ref": "TRAINING"},
    },
    "strict": True,
    "verify": "always",
    "discovery": "/shared/targets",
    "turns": "/shared/turns",
    "turn_deadline_seconds": 30.5,
}
PARSED = Settings(
    **(
        EVERYTHING
        | {
            "budget_bytes": 12 << 30,
            "pinned_limit_bytes": 96 << 30,
        }
    )
)


def test_from_a_mapping() -> None:
    assert Settings.from_any(EVERYTHING) == PARSED
    assert Settings.from_any(PARSED) is PARSED


def test_from_toml(tmp_path: Path) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in EVERYTHING.items() if key != "phases"]
    phases = (
        '[phases]\ndistill = ["actor", "teacher"]\nupdate_ref = {actor = '
        '"GPU_RESIDENT", '
        "ref "
        "= "
        '"TRAINING"}'
    )
    path = toml(tmp_path, "\n".join([*lines, phases]))
    assert Settings.from_any(path) == Settings.from_any(str(path)) == PARSED


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in EVERYTHING.items():
        monkeypatch.setenv(
            f"PLACEMENT_{key.upper()}", json.dumps(value) if key == "phases" else str(value)
        )
    assert Settings.from_any(None) == PARSED


def test_what_kubernetes_sets_for_a_service_called_placement_is_no_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for suffix in (
        "SERVICE_HOST",
        "SERVICE_PORT",
        "SERVICE_PORT_HTTP",
        "PORT",
        "PORT_8000_TCP",
        "PORT_8000_TCP_ADDR",
    ):
        monkeypatch.setenv(f"PLACEMENT_{suffix}", "tcp://10.0.0.1:8000")
    assert Settings.from_any(None) == Settings()


def test_an_unquoted_off_of_yaml_is_off() -> None:
    settings = Settings.from_any({"verify": False})
    assert settings.verify == "off"
    with pytest.raises(ValueError, match="verify: Input should be 'always' or 'off'"):
        Settings.from_any({"verify": True})


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        (True, TURNS_FOLDER),
        ("1", TURNS_FOLDER),
        (Path("/shared/turns"), "/shared/turns"),
        ("Off", None),
        (None, None),
    ],
)
def test_turns_are_on_off_or_in_a_folder(
    given: Any, folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Settings.from_any({"turns": given}).turns == folder
    if given is not None:
        monkeypatch.setenv("PLACEMENT_TURNS", str(given))
        assert Settings.from_any(None).turns == folder


@pytest.mark.parametrize("given", ["ture", "some/folder", "", 7, 0.5, ["/a"]])
def test_turns_that_are_none_of_these(given: Any) -> None:
    with pytest.raises(ValueError, match=r"turns: .*on, off, or the absolute path of a folder"):
        Settings.from_any({"turns": given})


def test_settings_are_frozen_and_go_through_json() -> None:
    with pytest.raises(ValidationError):
        PARSED.policy = "resident"
    assert Settings.model_validate_json(PARSED.model_dump_json()) == PARSED
    for each in (PARSED, Settings()):
        with pytest.raises(TypeError, match="read-only"):
            each.phases["mine"] = ("actor",)
        assert pickle.loads(pickle.dumps(each)) == copy.deepcopy(each) == each


def test_an_unknown_key_names_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"unknown key 'polcy', did you mean 'policy'\?"):
        Settings(polcy="resident")  # type: ignore[call-arg]
    with pytest.raises(
        ValueError,
        match=r"^settings: unknown key 'budget', did you mean 'budget_bytes'\?",
    ):
        Settings.from_any({"budget": 1})
    with pytest.raises(
        ValueError,
        match=r"placement\.toml: unknown key 'worker', "
        r"did "
        r"you "
        r"mean "
        r"'worker_role'\?",
    ):
        Settings.from_any(toml(tmp_path, 'worker = "trainer"'))
    monkeypatch.setenv("PLACEMENT_STRICTT", "1")
    with pytest.raises(
        ValueError,
        match=r"environment: unknown "
        r"variable "
        r"'PLACEMENT_STRICTT', "
        r"did "
        r"you mean 'PLACEMENT_STRICT'\?",
    ):
        Settings.from_any(None)


BAD_VALUES = [
    ("device", ""),
    ("policy", ""),
    ("budget_bytes", 0),
    ("budget_bytes", True),
    ("budget_bytes", 1.5),
    ("worker_role", "learner"),
    ("phases", {"train": ["actor"]}),
    ("phases", {"my phase": ["actor"]}),
    ("phases", {"distill": ["techer"]}),
    ("phases", {"distill": "actor"}),
    ("phases", {"distill": {"ref": "CPU_OFFLOADED"}}),
    ("phases", ["distill"]),
    ("strict", "perhaps"),
    ("turn_deadline_seconds", 0.0),
    ("turn_deadline_seconds", float("nan")),
    ("host_limit_bytes and disk_directory belong together", "1GiB"),
    ("disk_directory", "here"),
    ("host_limit_bytes", True),
]


@pytest.mark.parametrize(("key", "value"), BAD_VALUES)
def test_a_bad_value_names_its_key_and_source(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^settings: {key}\b") as caught:
        Settings.from_any({key.partition(" ")[0]: value})
    assert not isinstance(caught.value, ValidationError)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PLACEMENT_BUDGET_BYTES", "lots"),
        ("PLACEMENT_STRICT", "perhaps"),
        ("PLACEMENT_PHASES", "{"),
        ("PLACEMENT_PHASES", "[]"),
    ],
)
def test_a_bad_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=rf"^environment: {variable}\b"):
        Settings.from_any(None)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"placement\.toml: not a TOML file"):
        Settings.from_any(toml(tmp_path, "policy = "))
    with pytest.raises(ValueError, match=r"placement\.toml: strict"):
        Settings.from_any(toml(tmp_path, "strict = 3"))
    (tmp_path / "latin").write_bytes(b'policy = "\xff"')
    with pytest.raises(ValueError, match="latin: not a TOML file"):
        Settings.from_any(tmp_path / "latin")
    with pytest.raises(FileNotFoundError, match=r"absent\.toml"):
        Settings.from_any(tmp_path / "absent.toml")
    with pytest.raises(TypeError, match="settings must be"):
        Settings.from_any(7)  # type: ignore[arg-type]


def test_the_keywords_are_the_fields_of_settings() -> None:
    named = {
        name
        for name, parameter in inspect.signature(Manager.__init__).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    others = SettingsKeywords.__annotations__.keys()
    assert named.isdisjoint(others)
    assert (named | others) - {"group"} == Settings.model_fields.keys()
    assert ManagerKeywords.__annotations__.keys() == named | others
    assert ManagerKeywords.__required_keys__ == frozenset()
    fields, keywords = get_type_hints(Settings), get_type_hints(SettingsKeywords)
    words = "verify strict discovery turn_deadline_seconds"
    for name in words.split():
        assert keywords[name] == fields[name], name
