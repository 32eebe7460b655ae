"""What a manager can be told from outside the code. The one place that reads the environment."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from placement.core.states import PHASES, ROLES, ReadOnly

PREFIX = "PLACEMENT_"
LEASES_FOLDER = f"/dev/shm/placement-{os.getuid()}"  # noqa: S108 - the ledger checks whose it is
"""Where the processes of one user on one node agree on the bytes of each GPU, unless told otherwise."""

WorkerRole = Literal["trainer", "rollout", "hybrid"]
Verify = Literal["always", "sample", "off"]
Annotate = Literal["off", "profiler", "nvtx"]

_ON, _OFF = ("on", "true", "yes", "1"), ("off", "false", "no", "0")
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B?)", re.IGNORECASE)
# A Kubernetes service called "placement" puts these into every pod of its namespace.
_KUBERNETES = re.compile(r"(SERVICE_(HOST|PORT)|PORT)(_.*)?")


def parse_bytes(text: str) -> int:
    """A number of bytes from "12GiB" (2**30), "12GB" (10**9), "1.5 TiB", "512MiB" or "4096".

    Raises:
        ValueError: it is none of these, or not a whole number of bytes.
    """
    match = _BYTES.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no number of bytes; write 12GiB, 12GB, 512MiB or 12884901888")
    exponent = " KMGT".index(match[2].upper() or " ")
    size = Decimal(match[1]) * (1024 if match[3] else 1000) ** exponent
    if size != int(size):
        raise ValueError(f"{text!r} is {size} bytes, which is no whole number")
    return int(size)


class Settings(BaseModel):
    """A manager's keywords as data. Frozen; an unknown key is an error that names the nearest known one.

    Raises:
        ValueError: on construction, naming each field that is wrong (pydantic's `ValidationError` is one).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = Field(default="auto", min_length=1)
    """"auto", "cuda:0", ..."""
    policy: str = Field(default="colocated", min_length=1)
    """An entry point's name or "package.module:Class"; either with options as literals: "colocated(drop_gradients=True)"."""
    budget_bytes: int | None = Field(default=None, gt=0)
    """Device bytes that the handles may hold together; also written "12GiB". None: measured."""
    pinned_limit_bytes: int | None = Field(default=None, ge=0)
    """Host bytes that may be pinned for the device at a time; also written "12GiB". What is beyond stays pageable. None: no limit."""
    worker_role: WorkerRole = "hybrid"
    phases: dict[str, tuple[str, ...]] = Field(default_factory=ReadOnly)
    """Phases of the user's own: the roles that each needs on the device. Cannot be changed afterwards."""
    strict: bool = False
    """Raise where a reference to offloaded memory is found, instead of reporting it."""
    verify: Verify = "off"
    """Compare what a move brought with what was sent. "always": every chunk, a mode for finding bad memory. "sample": one chunk of each
    handle that moves. Both make a load wait for its last byte, so neither is the default: links and server memory check themselves."""
    headroom: float = Field(default=0.2, ge=0, lt=1)
    """Part of the free memory left to others in a phase that has not run yet."""
    journal_length: int = Field(default=4096, ge=1)
    """Transitions remembered."""
    annotate: Annotate = "off"
    """Marks around moves: for torch's profiler, or NVTX ranges."""
    discovery: str | None = None
    """Folder for Prometheus' file discovery, where `Manager.serve` announces the worker."""
    run: str | None = None
    """The name of the run there; None: as torchrun or Slurm say."""
    leases: str | None = None
    """Processes that share the GPU agree on its bytes before they load: True (in the environment: on), or the folder where they do, the
    same for all of them. None or off: this process takes what is free."""
    lease_capacity_bytes: int | None = Field(default=None, gt=0)
    """What all of them may use together; also written "70GiB". None: what the device has."""
    lease_priority: int = 0
    """Higher is served first; among equals, who came first."""
    lease_deadline_seconds: float = Field(default=600.0, gt=0)
    """How long a phase waits for the bytes that it needs."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        unknown = [str(key) for key in data if key not in cls.model_fields] if isinstance(data, Mapping) else []
        if unknown:
            raise ValueError("; ".join(_unknown_key(key, cls.model_fields) for key in unknown))
        return data

    @field_validator("leases", mode="before")
    @classmethod
    def _leases_folder(cls, value: Any) -> Any:
        word = str(value).lower()
        if value is None or word in _OFF:
            return None
        if word in _ON:
            return LEASES_FOLDER
        if not isinstance(value, str | os.PathLike) or not Path(value).is_absolute():
            raise ValueError('on, off, or the absolute path of a folder is wanted, such as "/dev/shm/placement"')
        return os.fspath(value)

    @field_validator("budget_bytes", "pinned_limit_bytes", "lease_capacity_bytes", mode="before")
    @classmethod
    def _bytes_with_unit(cls, value: Any) -> Any:
        if isinstance(value, bool):  # bool is an int, and a limit of one byte is nobody's wish
            raise ValueError("a number of bytes is wanted, not true or false")  # noqa: TRY004 - pydantic reports ValueErrors only
        return parse_bytes(value) if isinstance(value, str) else value

    @field_validator("verify", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # what YAML makes of an unquoted off

    @field_validator("phases")
    @classmethod
    def _own_phases(cls, phases: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        for name, roles in phases.items():
            if not _NAME.fullmatch(name):
                raise ValueError(f"phase name {name!r} must match {_NAME.pattern}")
            if name in PHASES:
                raise ValueError(f"phase {name!r} has a meaning already; choose a name of your own")
            for role in roles:
                if role not in ROLES:
                    raise ValueError(f"phase {name!r}: unknown role {role!r}{_nearest(role, ROLES)}; known roles: {', '.join(ROLES)}")
        return ReadOnly(phases)

    @classmethod
    def from_any(cls, source: Settings | Mapping[str, Any] | str | os.PathLike[str] | None = None) -> Settings:
        """Settings from a mapping, the path of a TOML file, or, for None, environment variables `PLACEMENT_<FIELD>`.

        `PLACEMENT_PHASES` is JSON: `{"distill": ["actor", "teacher"]}`. An empty variable counts as unset. An OmegaConf
        node goes through `OmegaConf.to_container(node, resolve=True)` first.

        Raises:
            ValueError: a key is unknown or a value does not fit; names the key and where it was found.
            OSError: the file cannot be read.
            TypeError: `source` is something else.
        """
        if isinstance(source, Settings):
            return source
        if source is None:
            return cls._checked(_from_environment(os.environ), "environment")
        if isinstance(source, Mapping):
            return cls._checked(dict(source), "settings")
        if isinstance(source, str | os.PathLike):
            return cls._checked(_from_toml(Path(source)), str(source))
        raise TypeError(f"settings come from a mapping, a path, a Settings or None, not {type(source).__name__}")

    @classmethod
    def _checked(cls, values: dict[str, Any], source: str) -> Self:
        try:
            return cls.model_validate(values)
        except ValidationError as exc:
            problems = []
            for error in exc.errors(include_url=False):
                where = ".".join(map(str, error["loc"]))
                if where and source == "environment":
                    where = PREFIX + where.upper()
                value = f" (got {error['input']!r})" if where else ""
                problems.append(f"{where}: {error['msg']}{value}" if where else error["msg"].removeprefix("Value error, "))
            raise ValueError(f"{source}: {'; '.join(problems)}") from exc


class SettingsKeywords(TypedDict, total=False):
    """The fields of `Settings` that `Manager` has no parameter of its own for, as they may be written; `Settings` says what they mean."""

    pinned_limit_bytes: int | str | None
    phases: Mapping[str, Sequence[str]]
    strict: bool
    verify: Verify
    headroom: float
    journal_length: int
    annotate: Annotate
    discovery: str | None
    run: str | None
    leases: bool | str | os.PathLike[str] | None
    lease_capacity_bytes: int | str | None
    lease_priority: int
    lease_deadline_seconds: float


def _nearest(word: str, known: Iterable[str]) -> str:
    nearest = difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.5)
    return f", did you mean {nearest[0]!r}?" if nearest else ""


def _unknown_key(key: str, known: Iterable[str]) -> str:
    return f"unknown key {key!r}{_nearest(key, known)} (known keys: {', '.join(known)})"


def _from_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ValueError(f"{path}: not a TOML file: {exc}") from exc


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        key = variable.removeprefix(PREFIX)
        if key == variable or not text or _KUBERNETES.fullmatch(key):
            continue
        if key.lower() not in Settings.model_fields:
            known = [PREFIX + field.upper() for field in Settings.model_fields]
            nearest = difflib.get_close_matches(variable, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"environment: unknown variable {variable!r}, did you mean {nearest!r}? (known: {', '.join(known)})")
        values[key.lower()] = text
    if "phases" in values:
        try:
            values["phases"] = json.loads(values["phases"])
        except json.JSONDecodeError as exc:
            raise ValueError(f"environment: {PREFIX}PHASES is not JSON: {exc}") from exc
    return values
