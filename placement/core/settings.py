"""The settings of a manager, and the code that reads them from the environment."""

from __future__ import annotations

import difflib
import json
import operator
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Self, SupportsIndex, TypedDict

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_serializer,
    field_validator,
    model_validator,
)

from placement.core.errors import PlacementError
from placement.core.states import PHASES, ROLES, OwnPhases, ReadOnly, State

PREFIX = "PLACEMENT_"
TURNS_FOLDER = f"/dev/shm/placement-{os.getuid()}"  # noqa: S108 - `Turn` checks the folder's owner
"""The default folder of the lock files by which one user's processes on one node take turns."""

WorkerRole = Literal["trainer", "rollout", "hybrid"]
Verify = Literal["always", "off"]

_WANTED = (State.GPU_RESIDENT, State.SYNCING, State.TRAINING)
_ON, _OFF = ("on", "true", "yes", "1"), ("off", "false", "no", "0")
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")  # what names of phases and of handles match
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B?)", re.IGNORECASE)
# Kubernetes sets these variables in every pod of a namespace that has a service called "placement".
_KUBERNETES = re.compile(r"(SERVICE_(HOST|PORT)|PORT)(_.*)?")


def parse_bytes(text: str) -> int:
    """Parse a number of bytes: "12GiB" (2**30), "12GB" (10**9), "1.9 TiB" (rounded down), "512MiB"
    or "4096".
    Raises ValueError: the text is none of these."""
    match = _BYTES.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(
            f"{text!r} is not a number of bytes; write 12GiB, 12GB, 512MiB or 12884901888"
        )
    exponent = " KMGT".index(match[2].upper() or " ")
    return int(Decimal(match[1]) * (1024 if match[3] else 1000) ** exponent)


def bytes_of(name: str, value: SupportsIndex | str) -> int:
    """The number of bytes that the argument `name` was given as a number or as text ("1GiB").
    Raises TypeError: the value is neither a whole number nor text. Raises ValueError: the text is
    no number of bytes."""
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(
            f"{name}={value!r} is not a number of bytes; write a whole number, or text such as "
            '"512MiB"'
        )
    return operator.index(value)


def device_of_environment() -> str:
    """The name of the device that the environment wants for "auto"; "auto" if it names none."""
    return os.environ.get(f"{PREFIX}DEVICE") or "auto"


def control_token(given: str | None = None) -> str | None:
    """The token for `Manager.serve`: the given one, else that of the environment. It is no setting:
    no dump of settings shows it. Raises PlacementError: it is empty or not visible ASCII."""
    token = (os.environ.get(f"{PREFIX}CONTROL_TOKEN") or None) if given is None else given
    if token is not None and not re.fullmatch("[!-~]+", token):  # a later error would show it
        raise PlacementError("the control token must be visible ASCII characters, no blanks")
    return token


def nearest(word: str, permitted: Iterable[str]) -> str:
    """The end of an error message that proposes the permitted word that is most like a wrong one;
    empty if none is."""
    matches = difflib.get_close_matches(word.lower(), list(permitted), n=1, cutoff=0.5)
    return f", did you mean {matches[0]!r}?" if matches else ""


def _bytes_with_unit(value: Any) -> Any:
    if isinstance(value, bool):  # bool is an int, and a limit of one byte is not meant
        raise ValueError("write a number of bytes, not true or false")  # noqa: TRY004 - pydantic reports ValueErrors only
    return parse_bytes(value) if isinstance(value, str) else value


def _folder(
    value: Any, advice: str = 'write the absolute path of a folder such as "/mnt/nvme/placement"'
) -> str:
    if not isinstance(value, str | os.PathLike) or not Path(value).is_absolute():
        raise ValueError(advice)
    return os.fspath(value)


Bytes = Annotated[int, BeforeValidator(_bytes_with_unit)]


class Settings(BaseModel):
    """The keyword arguments of a manager as data. Frozen; an unknown key is an error that names the
    nearest known key.

    Raises:
        ValueError: on construction; names each wrong field (pydantic's `ValidationError` is a
            ValueError).

    Example:
        ::

            settings = Settings(policy="cyclic", phases={"distill": ["actor", "teacher"]})
            manager = placement.Manager.from_settings(settings)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = Field(default="auto", min_length=1)
    """The device: "auto", "cuda:0", ... "auto" is the device of `PLACEMENT_DEVICE` where that is
    set, else this process's accelerator."""
    policy: str = Field(default="colocated", min_length=1)
    """A policy: an entry point's name or "package.module:Class". Either may carry literal options:
    "colocated(drop_gradients=True)"."""
    budget_bytes: Bytes | None = Field(default=None, gt=0)
    """Device bytes that the handles may hold together; "12GiB" works too. None: derived from
    measured free memory."""
    pinned_limit_bytes: Bytes | None = Field(default=None, ge=0)
    """Host bytes that may be pinned for the device at a time; "12GiB" works too. A host copy beyond
    it stays pageable. None: no limit."""
    host_limit_bytes: Bytes | None = Field(default=None, gt=0)
    """Host bytes that the host copies of this manager may hold; "200GiB" works too. A host copy
    that has no room within it is in a file of `disk_directory` for its life. None: no limit."""
    disk_directory: Annotated[str, BeforeValidator(_folder)] | None = None
    """An existing folder on a local disk, for the host copies that `host_limit_bytes` has no room
    for."""
    worker_role: WorkerRole = "hybrid"
    phases: dict[str, tuple[str, ...] | dict[str, State]] = Field(default_factory=ReadOnly)
    """The user's own phases: for each name the roles that it needs on the device, as a list, or as
    a table with a state for each role: `{"distill": ["actor", "teacher"], "update_ref": {"actor":
    "GPU_RESIDENT", "ref": "TRAINING"}}`. Read-only."""
    strict: bool = False
    """Whether a reference to offloaded memory raises an error instead of being reported."""
    verify: Verify = "off"
    """Whether moved bytes are compared with the bytes that were sent, to find bad memory. "always"
    makes a load wait for its last byte, so it is not the default: links and server memory check
    themselves."""
    discovery: str | None = None
    """The folder of Prometheus' file discovery in which `Manager.serve` announces the worker."""
    trainer_log: bool = True
    """Whether the integrations add `Manager.metrics` to the log of their trainer."""
    incidents: Annotated[str, BeforeValidator(_folder)] | None = None
    """Where incidents (of memory, bytes, or a broken handle) get a folder each; None: nowhere."""
    incidents_kept: int = Field(default=8, ge=1)
    """The number of folders of a manager's incidents that are kept; the oldest goes."""
    turns: str | None = None
    """Whether managers on one GPU take turns: each has it from the entry of its outermost phase
    until everything has left the device. True ("on" in the environment) uses the default folder for
    the lock files; a path names the folder, the same for all of them. None or "off": this process
    takes all memory that is free."""
    turn_deadline_seconds: float = Field(default=600.0, gt=0)
    """The longest time in seconds that a phase waits for its turn."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        fields = cls.model_fields
        problems = []
        for key in map(str, data):
            if key not in fields:
                problems.append(
                    f"unknown key {key!r}{nearest(key, fields)} (known keys: {', '.join(fields)})"
                )
        if problems:
            raise ValueError("; ".join(problems))
        return data

    @field_validator("turns", mode="before")
    @classmethod
    def _turns_folder(cls, value: Any) -> Any:
        word = str(value).lower()
        if value is None or word in _OFF:
            return None
        if word in _ON:
            return TURNS_FOLDER
        return _folder(
            value, 'write on, off, or the absolute path of a folder such as "/dev/shm/placement"'
        )

    @model_validator(mode="after")
    def _limit_and_folder(self) -> Self:
        if (self.host_limit_bytes is None) is not (self.disk_directory is None):
            raise ValueError(
                "host_limit_bytes and disk_directory belong together: give both, or neither"
            )
        return self

    @field_validator("verify", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML parses an unquoted off as false

    @field_validator("phases", mode="plain")
    @classmethod
    def _own_phases(cls, phases: object) -> OwnPhases:
        if not isinstance(phases, Mapping):
            raise ValueError("write a table with a name for each phase")  # noqa: TRY004 - pydantic reports ValueErrors only
        return ReadOnly({name: _own_phase(name, wanted) for name, wanted in phases.items()})

    @field_serializer("phases")
    def _plain_phases(self, phases: OwnPhases) -> dict[str, Any]:
        plain: dict[str, Any] = {}
        for name, wanted in phases.items():
            plain[name] = dict(wanted) if isinstance(wanted, Mapping) else wanted
        return plain

    @classmethod
    def from_any(
        cls, source: Settings | Mapping[str, Any] | str | os.PathLike[str] | None = None
    ) -> Settings:
        """Make settings from a mapping, from the path of a TOML file, or, for None, from
        environment variables `PLACEMENT_<FIELD>`.

        `PLACEMENT_PHASES` is JSON: `{"distill": ["actor", "teacher"]}`. An empty variable counts as
        unset. Convert an OmegaConf node with `OmegaConf.to_container(node, resolve=True)` first.

        Raises:
            ValueError: a key is unknown or a value is wrong; the message names the key and its
                source.
            OSError: the file cannot be read.
            TypeError: `source` has another type.
        """
        if isinstance(source, Settings):
            return source
        if source is None:
            return cls._checked(_from_environment(os.environ), "environment")
        if isinstance(source, Mapping):
            return cls._checked(dict(source), "settings")
        if isinstance(source, str | os.PathLike):
            try:
                values = tomllib.loads(Path(source).read_text(encoding="utf-8"))
            except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
                raise ValueError(f"{source}: not a TOML file: {exc}") from exc
            return cls._checked(values, str(source))
        raise TypeError(
            f"settings must be a mapping, a path, a Settings or None, not {type(source).__name__}"
        )

    @classmethod
    def _checked(cls, values: dict[str, Any], source: str) -> Self:
        try:
            return cls.model_validate(values)
        except ValidationError as exc:
            problems = []
            for error in exc.errors(include_url=False):
                # pydantic's words before those of a validator
                problem = error["msg"].removeprefix("Value error, ")
                field = ".".join(map(str, error["loc"]))
                if field:
                    name = PREFIX + field.upper() if source == "environment" else field
                    problem = f"{name}: {problem} (got {error['input']!r})"
                problems.append(problem)
            raise ValueError(f"{source}: {'; '.join(problems)}") from exc


class SettingsKeywords(TypedDict, total=False):
    """The fields of `Settings` that `Manager` has no parameter of its own for, as they may be
    written; see `Settings` for their meaning."""

    pinned_limit_bytes: int | str | None
    host_limit_bytes: int | str | None
    disk_directory: str | os.PathLike[str] | None
    phases: Mapping[str, Sequence[str] | Mapping[str, State | str]]
    strict: bool
    verify: Verify
    discovery: str | None
    trainer_log: bool
    incidents: str | os.PathLike[str] | None
    incidents_kept: int
    turns: bool | str | os.PathLike[str] | None
    turn_deadline_seconds: float


def _own_phase(
    name: object,
    wanted: object,
) -> tuple[str, ...] | Mapping[str, State]:
    """Check one of the user's own phases: its name, and the roles or the states of roles that it
    wants. Raises ValueError: names the mistake, with advice."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"phase name {name!r} must match {NAME.pattern}")
    if name in PHASES:
        raise ValueError(f"phase {name!r} is a phase of placement's own; choose another name")
    if isinstance(wanted, str) or not isinstance(wanted, Iterable):
        raise ValueError(  # noqa: TRY004
            f"phase {name!r}: write a list of roles, or a table with a state for each role"
        )
    for role in wanted:
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(
                f"phase {name!r}: unknown role {role!r}{nearest(str(role), ROLES)}; known roles: "
                f"{', '.join(ROLES)}"
            )
    if not isinstance(wanted, Mapping):
        return tuple(wanted)
    for role, state in wanted.items():
        if state not in _WANTED:
            raise ValueError(
                f"phase {name!r}: {role!r} cannot be {state!r}; write one of {', '.join(_WANTED)}, "
                f"or leave {role!r} out"
            )
    return ReadOnly({role: State(state) for role, state in wanted.items()})


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        key = variable.removeprefix(PREFIX)
        if key in (variable, "CONTROL_TOKEN") or not text or _KUBERNETES.fullmatch(key):
            continue
        if key.lower() not in Settings.model_fields:
            variables = [PREFIX + field.upper() for field in Settings.model_fields]
            matches = difflib.get_close_matches(variable, variables, n=1, cutoff=0.0)
            raise ValueError(
                f"environment: unknown variable {variable!r}, did you mean {matches[0]!r}? (known: "
                f"{', '.join(variables)})"
            )
        values[key.lower()] = text
    if "phases" in values:
        try:
            values["phases"] = json.loads(values["phases"])
        except json.JSONDecodeError as exc:
            raise ValueError(f"environment: {PREFIX}PHASES is not JSON: {exc}") from exc
    return values
