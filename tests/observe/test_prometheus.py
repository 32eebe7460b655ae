"""A real Prometheus that scrapes two workers: it finds them, and what the pages and rules ask for
is there."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from placement.cli import main
from tests.observe import prometheus_worker
from tests.observe.expressions import expressions
from tests.observe.managed import get
from tests.support.forked import processes

WORKERS = (
    {"RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "demo"},
    {"SLURM_PROCID": "3", "SLURM_NODEID": "1", "SLURM_JOB_ID": "demo"},
)
"""One as torchrun starts it, one as Slurm does, on another node of the same shared folder."""
SCRAPES = 16
"""How often each worker has been scraped before anything is asked; twice a second."""

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus (Debian: prometheus) is not installed",
    ),
]


class Prometheus:
    """A server of its own, with the rules that are exported to a folder, and workers that announce
    themselves in another one."""

    def __init__(self, exported: Path, targets: Path) -> None:
        assert main(["dashboards", "export", str(exported)]) == 0
        configuration = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(exported / "prometheus/rules/*.yml")],
            "scrape_configs": [
                {
                    "job_name": "placement",
                    "file_sd_configs": [{"files": [f"{targets}/*.json"], "refresh_interval": "1s"}],
                }
            ],
        }
        path = exported / "test.yml"
        path.write_text(json.dumps(configuration))  # JSON is YAML
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.url = f"http://{address}"
        options = [
            f"--config.file={path}",
            f"--storage.tsdb.path={exported / 'data'}",
            f"--web.listen-address={address}",
        ]
        self.process = subprocess.Popen(
            ["prometheus", *options, "--log.level=warn"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, expression: str) -> list[dict[str, Any]]:
        try:
            answer = get(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def has_scraped(self) -> bool:
        try:
            counts = [
                int(series["value"][1])
                for series in self.ask("count_over_time(placement_worker_info[10m])")
            ]
        except (OSError, AssertionError):  # it does not answer yet
            return False
        return len(counts) == len(WORKERS) and min(counts) >= SCRAPES


def until(condition: Callable[[], Any], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} within {seconds} s"
        time.sleep(0.25)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def prometheus(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    targets = tmp_path_factory.mktemp("targets")
    server = Prometheus(exported, targets)
    workers: list[Any] = [
        processes.Process(
            target=prometheus_worker.main, args=(str(targets), environment), daemon=True
        )
        for environment in WORKERS
    ]
    try:
        for worker in workers:
            worker.start()
        until(server.has_scraped, f"{SCRAPES} scrapes of every worker", 120)
        yield server
    finally:
        server.process.terminate()
        server.process.wait(30)
        for worker in workers:
            worker.kill()
            worker.join()


def test_workers_are_found_by_name(prometheus: Prometheus) -> None:
    found = get(f"{prometheus.url}/api/v1/targets")["data"]["activeTargets"]
    assert {target["labels"]["instance"]: target["health"] for target in found} == {
        "node0/rank0": "up",
        "node1/rank3": "up",
    }
    (series,) = prometheus.ask('placement_worker_info{instance="node1/rank3"}')
    assert series["metric"]["run"] == "demo"
    assert series["metric"]["node"] == "node1"
    assert not [
        label for label in series["metric"] if label.startswith("__") and label != "__name__"
    ]


def test_every_panel_and_rule_has_data_and_a_healthy_run_raises_no_alarm(
    prometheus: Prometheus, exported: Path
) -> None:
    asked = expressions(exported, run="demo", rate_interval="4s", time_range="1m")
    empty = [
        where
        for where, promql in asked
        if not prometheus.ask(promql) and not where.startswith("alert")
    ]
    assert empty == []
    assert sum(where.startswith("panel") for where, _ in asked) >= 10
    assert sum(where.startswith("alert") for where, _ in asked) >= 8
    rules = [
        rule
        for group in get(f"{prometheus.url}/api/v1/rules")["data"]["groups"]
        for rule in group["rules"]
    ]
    assert {rule["health"] for rule in rules} == {"ok"}
    assert get(f"{prometheus.url}/api/v1/alerts")["data"]["alerts"] == []
