"""Let Prometheus, `placement status` and `placement trace` find the workers of a run, whose ports
are chosen by the system, and ask them.

A folder has one file for each worker, with its target in Prometheus' own format
(`file_sd_configs`). Workers of one node, or of many nodes with a shared folder, write their files
themselves. A worker removes its file when it ends. The file of a killed worker stays: Prometheus
and `placement status` see that it does not answer. Where there is no shared folder, one process
gathers the targets of all and writes them as one file, see `as_json`.

Format: Prometheus documentation, "file_sd_config".
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from placement.core.errors import PlacementError
from placement.observe.trace import replacing

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of a worker in its run; it becomes the labels of the worker's target."""

    run: str = "default"
    node: str = "node0"
    rank: int = 0
    gpu_uuid: str = ""
    """The GPU's UUID as in `nvidia-smi -L`, to join with DCGM's metrics; empty without a GPU."""

    @classmethod
    def from_launcher(
        cls,
        environment: Mapping[str, str] = os.environ,
        *,
        gpu_uuid: str = "",
    ) -> Identity:
        """Read torchrun's variables (RANK, GROUP_RANK, TORCHELASTIC_RUN_ID) or Slurm's
        (SLURM_PROCID, SLURM_NODEID, SLURM_JOB_ID). Raises PlacementError: the rank is not a
        number."""

        def first(*names: str, default: str) -> str:
            return next((environment[name] for name in names if environment.get(name)), default)

        rank = first("RANK", "SLURM_PROCID", default="0")
        if not rank.isdecimal():
            raise PlacementError(
                f"RANK is {rank!r}, which is not a number; set it to this worker's rank, which "
                "names it in Prometheus"
            )
        node = first("GROUP_RANK", "SLURM_NODEID", default="0")
        return cls(
            run=first("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", default="default"),
            node=f"node{node}" if node.isdecimal() else node,
            rank=int(rank),
            gpu_uuid=gpu_uuid,
        )

    @property
    def instance(self) -> str:
        """The worker's name, `node0/rank3`. It is the same after a restart on another port, so the
        worker's series continue."""
        return f"{self.node}/rank{self.rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The address at which Prometheus scrapes one worker, and the worker's labels."""

    address: str  # the address as host:port
    labels: Mapping[str, str]

    @classmethod
    def of(cls, address: str, identity: Identity) -> Target:
        labels = {
            "instance": identity.instance,
            "run": identity.run,
            "node": identity.node,
            "rank": str(identity.rank),
        }
        if identity.gpu_uuid:
            labels["gpu_uuid"] = identity.gpu_uuid
        return cls(address=address, labels=labels)

    @property
    def name(self) -> str:
        return self.labels.get("instance", self.address)

    @property
    def url(self) -> str:
        return f"http://{self.address}"


def as_json(targets: Iterable[Target]) -> str:
    """Targets as Prometheus reads them from a file or by HTTP (`file_sd_configs`,
    `http_sd_configs`)."""
    groups = []
    for target in targets:
        groups.append({"targets": [target.address], "labels": dict(target.labels)})
    return json.dumps(groups, indent=1) + "\n"


def from_json(text: str | bytes, source: object) -> list[Target]:
    """Read targets in Prometheus' format. The PlacementError for another format names `source`."""
    targets = []
    try:
        for group in json.loads(text):
            for address in group["targets"]:
                targets.append(Target(address=str(address), labels=dict(group["labels"])))
        return targets
    except (ValueError, TypeError, KeyError) as error:
        raise PlacementError(f"{source} is not a list of Prometheus targets: {error!r}") from error


class Announcement:
    """One worker's file in a discovery folder, from now until `close()` or the end of the process.

    Args:
        folder: the folder; created if missing.
        target: its `instance` and `run` name the file, so a restarted worker replaces its own file.

    Raises:
        PlacementError: the folder or file cannot be written.
    """

    def __init__(self, folder: str | os.PathLike[str], target: Target) -> None:
        run = _UNSAFE.sub("-", target.labels["run"])
        instance = _UNSAFE.sub("-", target.labels["instance"])
        # No subfolders: Prometheus accepts a pattern only in the last part of a path.
        self.path = Path(folder) / f"{run}.{instance}.json"
        self._pid = os.getpid()
        self._text = as_json([target])
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self.path) as file:  # Prometheus must never see half of it
                file.write(self._text.encode())
        except OSError as error:
            raise PlacementError(
                f"cannot announce this worker in {self.path.parent}: {error}"
            ) from error
        atexit.register(self.close)

    def close(self) -> None:
        """Remove the file, unless a later worker of the same name has replaced it. Idempotent; does
        nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):
            if self.path.read_text() == self._text:
                self.path.unlink()
        atexit.unregister(self.close)


def targets_in(folder: str | os.PathLike[str]) -> list[Target]:
    """The targets in a discovery folder, without files that vanish meanwhile. Raises
    PlacementError: a file is not a list of targets."""
    targets: list[Target] = []
    for path in sorted(Path(folder).glob("*.json")):
        with contextlib.suppress(FileNotFoundError):
            targets += from_json(path.read_bytes(), path)
    return targets


# --- workers that are asked how they are

ASK_SECONDS = 2.0  # how many seconds a worker may take to answer

# a worker is never behind a proxy
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(
    url: str, *, timeout_seconds: float = ASK_SECONDS, post: bytes | None = None, token: str = ""
) -> bytes:
    """GET a page of a worker; with `post` POST that, with the token. Raises PlacementError: no
    worker answers at the URL, or it refuses; the message has the reason."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(url, post, headers)  # noqa: S310 - a `Target` has http
    try:
        with _OPENER.open(request, timeout=timeout_seconds) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        text = "is this the address of a placement worker?"
        if post is not None:
            with contextlib.suppress(OSError, http.client.HTTPException):  # it may be cut
                text = " ".join(error.read(10_000).decode(errors="replace").split())
        if error.code == http.HTTPStatus.UNAUTHORIZED:
            text = "PLACEMENT_CONTROL_TOKEN is not the token of this worker"
        raise PlacementError(f"{url} answers {error.code} {error.reason}: {text}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)  # the error that urllib has wrapped, if it has
        raise PlacementError(
            f"{url} does not answer: {getattr(reason, 'strerror', None) or reason}"
        ) from error


def view_of(target: Target, timeout_seconds: float = ASK_SECONDS) -> dict[str, Any]:
    """The view of one worker (see `worker_view`), under the name and the labels of its target.
    Raises PlacementError: it does not answer, or another process does than the one that a discovery
    file names. The file of a killed worker stays, and its port may be taken again."""
    answer = ask(f"{target.url}/workers", timeout_seconds=timeout_seconds)
    expected = dict(target.labels)
    try:
        (view,) = json.loads(answer)
        labels = dict(view["labels"])
    except (ValueError, TypeError, KeyError) as error:
        raise PlacementError(f"{target.url} is no placement worker: {error!r}") from error
    if any(labels.get(name, value) != value for name, value in expected.items()):
        raise PlacementError(
            f"{target.url} is another worker now: {labels}, not {expected}. Remove the file of the "
            "worker that has ended from the discovery folder"
        )
    return {**view, "name": target.name, "labels": expected}


def find_targets(places: Iterable[str]) -> list[Target]:
    """The workers at these places: URLs of workers, and discovery folders. Raises PlacementError: a
    place is neither."""
    targets: list[Target] = []
    for place in places:
        url = place.rstrip("/")
        if url.startswith("http://"):  # a worker serves no TLS
            targets.append(Target(address=url.removeprefix("http://"), labels={}))
        elif Path(place).is_dir():
            targets += targets_in(place)
        else:
            raise PlacementError(
                f"{place!r} is no worker's URL (http://host:port) and no discovery folder (workers "
                "create it when they announce themselves)"
            )
    return targets


def views_of(places: Iterable[str]) -> list[dict[str, Any]]:
    """The view of every worker at these places. A worker that does not answer has an `error` in its
    place."""

    def view_or_error(target: Target) -> dict[str, Any]:
        try:
            return view_of(target)
        except PlacementError as error:
            return {"name": target.name, "labels": dict(target.labels), "error": str(error)}

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(view_or_error, find_targets(places)))
