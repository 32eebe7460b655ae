"""A real Prometheus that scrapes four workers: what the pages and rules ask for is there, and says what happened."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from placement.cli import main
from placement.observe.discovery import as_json, targets_in
from tests.observe import prometheus_worker
from tests.observe.expressions import expressions
from tests.observe.managed import get
from tests.support.forked import processes

WORKERS = 4
SCRAPES = 24
"""How often every worker has been scraped before anything is asked of the run; twice a second."""

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus (Debian: prometheus) is not installed"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def until(condition: Callable[[], Any], what: str, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} within {seconds} s"
        time.sleep(0.25)
    return value


class Prometheus:
    """A server of its own with the exported rules.

    Args:
        folder: for what it needs.
        discovery: how it finds the workers, in the words of its configuration.
    """

    def __init__(self, folder: Path, discovery: dict[str, Any]) -> None:
        assert main(["dashboards", "export", str(folder)]) == 0
        rules = folder / "prometheus/rules/placement.yml"
        rules.write_text(rules.read_text().replace("for: 1m", "for: 3s"))
        configuration = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(folder / "prometheus/rules/*.yml")],
            "scrape_configs": [{"job_name": "placement", **discovery}],
        }
        path = folder / "test.yml"
        path.write_text(json.dumps(configuration))  # JSON is YAML
        self.url = f"http://127.0.0.1:{free_port()}"
        self._process = subprocess.Popen(
            [
                "prometheus", f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}", "--log.level=warn",
            ],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def is_ready(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/-/ready", timeout=2).status == 200
        except OSError:
            return False

    def ask(self, expression: str) -> list[dict[str, Any]]:
        try:
            answer = get(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def targets(self) -> dict[str, str]:
        found = get(f"{self.url}/api/v1/targets")["data"]["activeTargets"]
        return {target["labels"]["instance"]: target["health"] for target in found}

    def alerts(self) -> dict[str, str]:
        found = get(f"{self.url}/api/v1/alerts")["data"]["alerts"]
        return {f"{each['labels']['alertname']} {each['labels'].get('instance', '')}": each["state"] for each in found}

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def instance(rank: int) -> str:
    """Two workers a node."""
    return f"node{rank // 2}/rank{rank}"


class Run:
    """Four workers and the Prometheus that watches them."""

    def __init__(self, folder: Path) -> None:
        self.targets = folder / "targets"
        self.exported = folder / "exported"
        self.workers: list[Any] = []
        self.urls: list[str] = []
        by_file = {"file_sd_configs": [{"files": [f"{self.targets}/*.json"], "refresh_interval": "1s"}]}
        self.prometheus = Prometheus(self.exported, by_file)

    def start(self) -> None:
        self.urls += [self._start(rank) for rank in range(WORKERS)]

    def _start(self, rank: int) -> str:
        """Two as torchrun starts them, two as Slurm does, on another node of the same shared folder. Returns where it answers."""
        node = rank // 2
        names = ("RANK", "GROUP_RANK") if node == 0 else ("SLURM_PROCID", "SLURM_NODEID")
        environment = dict(zip(names, (str(rank), str(node)), strict=True))
        ours, theirs = processes.Pipe()
        worker = processes.Process(target=prometheus_worker.main, args=(str(self.targets), environment, theirs), daemon=True)
        worker.start()
        self.workers.append(worker)
        theirs.close()
        url: str = ours.recv()
        return url

    def scrapes(self) -> int:
        """How often the worker with the fewest was scraped."""
        counts = [int(series["value"][1]) for series in self.prometheus.ask("count_over_time(placement_worker_info[10m])")]
        return min(counts) if len(counts) == WORKERS else 0

    def close(self) -> None:
        self.prometheus.close()
        for worker in self.workers:
            worker.kill()
            worker.join()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("run"))
    try:
        run.start()
        until(run.prometheus.is_ready, "Prometheus is ready", 30)
        until(lambda: list(run.prometheus.targets().values()) == ["up"] * WORKERS, "all targets are up", 30)
        until(lambda: run.scrapes() >= SCRAPES, f"{SCRAPES} scrapes of every worker", 120)
        yield run
    finally:
        run.close()


def test_workers_are_found_by_name(run: Run) -> None:
    assert run.prometheus.targets() == {instance(rank): "up" for rank in range(WORKERS)}
    (series,) = run.prometheus.ask('placement_worker_info{instance="node1/rank3"}')
    assert series["metric"]["run"] == "demo"
    assert series["metric"]["node"] == "node1"
    assert not [label for label in series["metric"] if label.startswith("__") and label != "__name__"]


def test_workers_are_found_by_http(run: Run, tmp_path: Path) -> None:
    """Where there is no shared folder: one process has the list, as a driver on Ray or rank 0 on Slurm."""
    gathered = targets_in(run.targets)
    listed = tmp_path / "served/grpo-7.json"
    listed.parent.mkdir()
    listed.write_text(as_json(gathered))
    files = partial(SimpleHTTPRequestHandler, directory=listed.parent)
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        by_http = {"http_sd_configs": [{"url": f"http://127.0.0.1:{server.server_port}/{listed.name}", "refresh_interval": "1s"}]}
        prometheus = Prometheus(tmp_path, by_http)
        try:
            until(prometheus.is_ready, "Prometheus is ready", 30)
            everybody = {instance(rank): "up" for rank in range(WORKERS)}
            until(lambda: prometheus.targets() == everybody, "all targets are up", 30)
            listed.write_text(as_json(gathered[1:]))
            until(lambda: "node0/rank0" not in prometheus.targets(), "a worker that is off the list goes away", 30)
        finally:
            prometheus.close()
            server.shutdown()


def test_every_panel_and_rule_has_data(run: Run) -> None:
    asked = expressions(run.exported, run="demo", rate_interval="4s", time_range="1m")
    empty = [where for where, promql in asked if not run.prometheus.ask(promql) and not where.startswith("alert")]
    assert empty == []
    assert sum(where.startswith("panel") for where, _ in asked) >= 10
    assert sum(where.startswith("alert") for where, _ in asked) >= 8
    rules = [rule for group in get(f"{run.prometheus.url}/api/v1/rules")["data"]["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}


def test_a_healthy_run_raises_no_alarm(run: Run) -> None:
    assert run.prometheus.alerts() == {}


def test_a_worker_that_is_killed_while_it_holds_bytes(run: Run) -> None:
    """The last of this file: it costs the run a worker."""
    until(lambda: "GPU_RESIDENT" in str(get(f"{run.urls[2]}/state")["handles"]), "the worker holds bytes", 10)
    run.workers[2].kill()
    name = "PlacementWorkerGone node1/rank2"
    until(lambda: run.prometheus.alerts().get(name) == "firing", "the alert fires", 60)
    until(lambda: "node1/rank2" not in run.prometheus.targets(), "the target goes away", 90)
    assert {alert for alert in run.prometheus.alerts() if alert.endswith("rank1")} == set()
