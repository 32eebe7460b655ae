"""The exported pages: what they ask exists, they fit, they are what the code makes; the export
itself."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from placement.cli import main
from placement.core.errors import PlacementError
from placement.core.states import State
from placement.observe.collector import SnapshotCollector
from placement.observe.dashboards import FILES, export
from tests.observe.expressions import expressions, substituted
from tests.observe.managed import make_handle, make_snapshot

PAGES = {path.name: json.loads(path.read_text()) for path in sorted(FILES.glob("*.json"))}
EVERY_PANEL = [
    pytest.param(page, panel, id=f"{page['uid']}: {panel['title']}")
    for page in PAGES.values()
    for panel in page["panels"]
]
TARGET_LABELS = {"job", "instance", "run", "node", "rank", "gpu_uuid"}


def test_shipped_pages_are_what_the_code_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is not installed")
    from tools.dashboards.build import pages

    made = pages()
    assert made.keys() == PAGES.keys()
    for name, text in made.items():
        assert (FILES / name).read_text() == text, (
            f"{name} is out of date: python -m tools.dashboards.build"
        )


# What is asked


def test_every_expression_asks_metrics_and_labels_that_exist(tmp_path: Path) -> None:
    collector = SnapshotCollector(lambda: make_snapshot(make_handle()))
    known: dict[str, set[str]] = defaultdict(set)
    for sample in (sample for metric in collector.collect() for sample in metric.samples):
        known[sample.name] |= {*sample.labels, *TARGET_LABELS}
    export(tmp_path)
    asked = expressions(tmp_path)
    assert len(asked) > 40
    used: set[str] = set()
    for where, expr in asked:
        for name, matchers in re.findall(r"(?<![\w:])(placement_\w+)(?:\{([^}]*)\})?", expr):
            assert name in known, f"{where} asks for {name}, which the collector does not have"
            labels = set(re.findall(r"(\w+)(?:=~|!~|!=|=)\"", matchers))
            assert labels <= known[name], f"{where}: {name} has no label {labels - known[name]}"
            used.add(name)
    assert {"placement_transition_duration_seconds_bucket", "placement_worker_info"} <= used


def test_label_values_that_are_asked_for_exist(tmp_path: Path) -> None:
    from placement.core.journal import REASONS
    from placement.observe.collector import DECISIONS

    possible = {
        "memory": {"device", "host"},
        "operation": {"load", "offload", "sync"},
        "state": {state.value for state in State},
        "reason": set(REASONS),
        "decision": set(DECISIONS),
    }
    export(tmp_path)
    seen: set[str] = set()
    for where, expr in expressions(tmp_path):
        for label, value in re.findall(r"(\w+)(?:=~|!~|!=|=)\"([^\"]*)\"", expr):
            if label in possible:
                assert set(value.split("|")) <= possible[label], (
                    f"{where}: {label} is never {value!r}"
                )
                seen.add(label)
    assert seen == possible.keys()


@pytest.mark.parametrize(("page", "panel"), EVERY_PANEL)
def test_a_panel_asks_only_for_what_is_chosen(page: dict[str, Any], panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        for selector in re.findall(r"\{([^{}]*=[^{}]*)\}", target["expr"]):
            assert 'run="$run"' in selector
            assert (
                'instance=~"$instance"'
                if page["uid"] == "placement-fleet"
                else 'instance="$instance"'
            ) in selector
        assert not re.search(r"(placement_\w+|\bup|ALERTS)(?![\w{])", target["expr"]), (
            "a metric without a selector"
        )


# How it is laid out


def test_the_pages_lead_to_each_other() -> None:
    fleet, worker = PAGES["placement-fleet.json"], PAGES["placement-worker.json"]
    (to_worker,), (to_fleet,) = fleet["links"], worker["links"]
    assert to_worker["url"].startswith(f"/d/{worker['uid']}?")
    assert to_fleet["url"].startswith(f"/d/{fleet['uid']}?")
    from_values = [url for url in urls_in(fleet["panels"]) if url]
    assert len(from_values) == 4  # each GPU's bar, both lists of worst ranks, each row of the table
    values = {"datasource": "D", "run": "R", "__url_time_range": "from=1&to=2"}
    for url in from_values:
        plain = re.sub(
            r"\$\{(__data\.fields\.Worker|__field\.labels\.instance):percentencode\}", "I", url
        )
        assert (
            substituted(plain, values)
            == f"/d/{worker['uid']}?var-datasource=D&var-run=R&var-instance=I&from=1&to=2"
        )
    for link in (to_worker, to_fleet):
        assert link["keepTime"] is True
        assert substituted(link["url"], values).endswith("?var-datasource=D&var-run=R")


def urls_in(node: Any) -> list[str]:
    if isinstance(node, dict):
        return ([node["url"]] if "url" in node else []) + [
            url for value in node.values() for url in urls_in(value)
        ]
    return [url for each in node for url in urls_in(each)] if isinstance(node, list) else []


# The export


def test_the_tree_is_what_grafana_and_prometheus_read(tmp_path: Path) -> None:
    root = tmp_path / "not" / 'it\'s "odd": {braces}'
    written = export(
        root, prometheus_url="http://prom:1/x", discovery='/a "b": {c}', scrape_interval="5s"
    )
    assert {str(path.relative_to(root)) for path in written} == {
        "grafana/provisioning/datasources/placement.yml",
        "grafana/provisioning/dashboards/placement.yml",
        "grafana/dashboards/placement-fleet.json",
        "grafana/dashboards/placement-worker.json",
        "prometheus/prometheus.yml",
        "prometheus/rules/placement.yml",
    }
    assert sorted(path for path in root.rglob("*") if path.is_file()) == sorted(written)
    (source,) = yaml.safe_load(
        (root / "grafana/provisioning/datasources/placement.yml").read_text()
    )["datasources"]
    assert (source["url"], source["type"], source["jsonData"]["timeInterval"]) == (
        "http://prom:1/x",
        "prometheus",
        "5s",
    )
    (provider,) = yaml.safe_load(
        (root / "grafana/provisioning/dashboards/placement.yml").read_text()
    )["providers"]
    assert provider["options"]["path"] == str(root / "grafana/dashboards")
    prometheus = yaml.safe_load((root / "prometheus/prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job == {
        "job_name": "placement",
        "file_sd_configs": [{"files": ['/a "b": {c}/*.json'], "refresh_interval": "15s"}],
    }
    assert prometheus["global"] == {"scrape_interval": "5s", "evaluation_interval": "5s"}
    assert [(root / "prometheus" / name).is_file() for name in prometheus["rule_files"]] == [True]


def test_targets_by_url_and_grafana_in_a_container(tmp_path: Path) -> None:
    export(tmp_path, discovery="http://head:9400/targets", grafana_path="/pages")
    (job,) = yaml.safe_load((tmp_path / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert job["http_sd_configs"] == [
        {"url": "http://head:9400/targets", "refresh_interval": "15s"}
    ]
    (provider,) = yaml.safe_load(
        (tmp_path / "grafana/provisioning/dashboards/placement.yml").read_text()
    )["providers"]
    assert provider["options"]["path"] == "/pages"


def test_a_second_export_changes_nothing_and_somebodys_edits_are_kept(tmp_path: Path) -> None:
    written = export(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in written}
    assert export(tmp_path) == written
    assert {path: path.stat().st_mtime_ns for path in written} == before
    config = tmp_path / "prometheus/prometheus.yml"
    config.write_text("mine")
    with pytest.raises(
        PlacementError,
        match=r"prometheus\.yml would change; nothing was written.*--force",
    ):
        export(tmp_path, prometheus_url="http://other:9090")
    assert config.read_text() == "mine"
    assert "other" not in (tmp_path / "grafana/provisioning/datasources/placement.yml").read_text()
    export(tmp_path, prometheus_url="http://other:9090", overwrite=True)
    assert "placement" in config.read_text()
    assert "other" in (tmp_path / "grafana/provisioning/datasources/placement.yml").read_text()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"prometheus_url": "localhost:9090"},
            ("prometheus_url is 'localhost:9090'; it must be a URL like"),
        ),
        ({"prometheus_url": 'http://x"\n  evil: 1'}, "prometheus_url"),
        ({"scrape_interval": "15"}, "scrape_interval is '15'; it must be a number and a unit"),
        ({"scrape_interval": "0s"}, "scrape_interval"),
        ({"discovery": "http:/targets"}, "discovery is 'http:/targets', which is not a valid URL"),
        ({"discovery": ""}, "discovery is ''"),
        ({"discovery": "runs/*"}, "discovery is 'runs/\\*'"),
        ({"grafana_path": "pages"}, "grafana_path is 'pages'; it must be an absolute path"),
    ],
)
def test_a_wrong_option_is_named(wrong: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=message):
        export(tmp_path, **wrong)
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "grafana").write_text("")
    with pytest.raises(PlacementError, match=f"cannot write dashboards to {tmp_path}"):
        export(tmp_path)


def test_the_command_writes_and_says_what_is_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dashboards", "export", str(tmp_path), "--scrape-interval", "1s"]) == 0
    said = capsys.readouterr().out
    assert str(tmp_path / "grafana/dashboards/placement-fleet.json") in said
    assert f"prometheus --config.file={tmp_path}/prometheus/prometheus.yml" in said
    assert f'manager.serve(discovery="{tmp_path}/prometheus/discovery")' in said
    assert main(["dashboards", "export", str(tmp_path)]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["dashboards", "export", str(tmp_path), "--force"]) == 0
