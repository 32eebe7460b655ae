"""The shipped rules: every alert fires when it should, is silent when it should be, and says what
to do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from placement.observe.dashboards import FILES, export
from tests.observe.alert_cases import CASES, GIB, Case, of_handle, of_worker
from tests.observe.expressions import rules

RULES = FILES / "placement.rules.yml"
ALERTS = {
    where.removeprefix("alert "): rule
    for where, _, rule in rules(RULES)
    if where.startswith("alert ")
}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed"
)


def promtool(*arguments: str) -> str:
    """Its output; the test fails with it where promtool does."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_alert_is_shown_to_fire_and_to_be_silent() -> None:
    assert {case.alert for case in CASES if case.fires} == set(ALERTS)
    assert {case.alert for case in CASES if not case.fires} == set(ALERTS)


def scenario(case: Case) -> dict[str, Any]:
    """A test of promtool: whether `ALERTS` has the firing alert, once, at each moment."""
    matchers = "".join(f',{name}="{value}"' for name, value in case.labels.items())
    asked = f'count(ALERTS{{alertname="{case.alert}",alertstate="firing"{matchers}}})'
    moments = [(moment, [{"labels": "{}", "value": 1}]) for moment in case.fires] + [
        (moment, []) for moment in case.silent
    ]
    return {
        "interval": case.every,
        "input_series": [
            {"series": name, "values": values} for name, values in case.series.items()
        ],
        "promql_expr_test": [
            {"expr": asked, "eval_time": moment, "exp_samples": samples}
            for moment, samples in moments
        ],
    }


def rules_for(alert: str, folder: Path) -> Path:
    """The shipped file without the other alerts, which promtool would evaluate at each moment."""
    content = yaml.safe_load(RULES.read_text())
    for group in content["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert", alert) == alert]
    path = folder / "rules.json"
    path.write_text(json.dumps(content))
    return path


def run_scenarios(tmp_path: Path, *scenarios: Mapping[str, Any], rules: Path = RULES) -> None:
    path = tmp_path / "cases.json"  # JSON is YAML
    path.write_text(
        json.dumps({"rule_files": [str(rules)], "evaluation_interval": "30s", "tests": scenarios})
    )
    promtool("test", "rules", str(path))


@pytest.mark.sweep
@needs_promtool
@pytest.mark.parametrize("alert", ALERTS)
def test_alert(alert: str, tmp_path: Path) -> None:
    cases = [scenario(case) for case in CASES if case.alert == alert]
    run_scenarios(tmp_path, *cases, rules=rules_for(alert, tmp_path))


@pytest.mark.sweep
@needs_promtool
def test_what_is_said_of_bytes_left_behind_names_the_handles(tmp_path: Path) -> None:
    labels = 'run="r",instance="node0/rank4",handle="critic",kind="module",memory="device"'
    other = f"placement_resident_bytes{{{labels}}}"
    series = {
        **of_worker("placement_unpaired_bytes", f"{3 * GIB // 2}x30"),
        **of_handle("placement_resident_bytes", f"{3 * GIB // 2}x30", ',memory="device"'),
        **of_handle("placement_resident_bytes", f"{GIB}x30", ',memory="host"'),
        other: f"{GIB}x30",
    }
    annotations = said_of(Case("", "", series), "PlacementLeftResident", "10m", tmp_path)
    assert annotations["summary"] == "r node0/rank3: 1.5GiB left on the GPU by a phase that is over"
    assert "actor (1.5GiB)" in annotations["description"]
    assert "critic" not in annotations["description"]


def said_of(case: Case, alert: str, moment: str, tmp_path: Path) -> dict[str, str]:
    """The annotations of a firing alert: promtool prints them when it is told to expect none."""
    wrong = {
        **scenario(case),
        "alert_rule_test": [{"eval_time": moment, "alertname": alert, "exp_alerts": []}],
    }
    with pytest.raises(AssertionError) as caught:
        run_scenarios(tmp_path, wrong)
    found = re.search(r"Annotations:\{(.*?)\}\s*\]?$", str(caught.value), re.DOTALL | re.MULTILINE)
    assert found, str(caught.value)
    return {
        name: json.loads(value)
        for name, value in re.findall(r'(\w+)=("(?:[^"\\]|\\.)*")', found[1])
    }


@pytest.mark.sweep
@needs_promtool
def test_promtool_finds_nothing_wrong(tmp_path: Path) -> None:
    export(tmp_path)
    assert "SUCCESS" in promtool(
        "check",
        "rules",
        "--lint=all",
        "--lint-fatal",
        str(tmp_path / "prometheus/rules/placement.yml"),
    )
    assert "SUCCESS" in promtool("check", "config", str(tmp_path / "prometheus/prometheus.yml"))


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_what_it_is_and_what_to_do(name: str) -> None:
    rule = ALERTS[name]
    assert re.fullmatch(r"Placement([A-Z][a-z]+)+", name)
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"]["summary"].startswith("{{ $labels.run }} {{ $labels.instance }}: ")
    assert len(rule["annotations"]["description"]) > 80
    if "bytes" in rule["expr"] and "ratio" not in rule["expr"]:
        assert "humanize1024" in rule["annotations"]["summary"]


@pytest.mark.parametrize(
    ("alert", "panel"),
    [("PlacementStallShareHigh", "Stall share"), ("PlacementBudgetNearlyFull", "Of the budget")],
)
def test_an_alert_begins_where_the_page_turns_red(alert: str, panel: str) -> None:
    page = json.loads((FILES / "placement-worker.json").read_text())
    (shown,) = (each for each in page["panels"] if each["title"] == panel)
    red = shown["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]
    assert red["color"] == "red"
    assert re.search(rf"> {red['value']}(\s|$)", ALERTS[alert]["expr"])
