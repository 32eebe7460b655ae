"""Every PromQL expression of an exported tree, ready to be asked: for tests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")
_LABEL_VALUES = re.compile(r"label_values\((.*),\s*(\w+)\)")


def expressions(
    directory: Path,
    run: str = "default",
    instance: str = "node0/rank0",
    *,
    rate_interval: str = "1m",
    time_range: str = "5m",
) -> list[tuple[str, str]]:
    """(where, PromQL) of the pages and rules below a directory that `placement dashboards export`
    wrote.

    `where` begins with "panel", "variable", "record" or "alert". An alert's expression returns
    nothing while all is well; every other one returns something as soon as a worker of that run and
    instance has moved something. `rate_interval`: of four scrapes.
    """
    values = {"run": run, "__rate_interval": rate_interval, "__range": time_range}
    found = []
    for path in sorted(directory.glob("grafana/dashboards/*.json")):
        page = json.loads(path.read_text())
        many = any(
            each["name"] == "instance" and each.get("includeAll")
            for each in page["templating"]["list"]
        )
        found += list(_of_page(page, {**values, "instance": ".*" if many else instance}))
    for path in sorted(directory.glob("prometheus/rules/*.yml")):
        found += [(where, expr) for where, expr, _ in rules(path)]
    return found


def rules(path: Path) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """(where, PromQL, the rule) of a file of rules."""
    for group in yaml.safe_load(path.read_text())["groups"]:
        for rule in group["rules"]:
            kind = "alert" if "alert" in rule else "record"
            yield f"{kind} {rule[kind]}", rule["expr"], rule


def _of_page(page: Mapping[str, Any], values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for variable in page["templating"]["list"]:
        asked = _LABEL_VALUES.fullmatch(variable.get("definition", ""))
        if asked:
            yield f"variable {page['title']}: {variable['name']}", substituted(asked[1], values)
    for panel in page["panels"]:
        for target in panel["targets"]:
            yield (
                (f"panel {page['title']}: {panel['title']} {target['refId']}"),
                substituted(target["expr"], values),
            )


def substituted(text: str, values: Mapping[str, str]) -> str:
    """The text with every `$name`, `${name}` and `${name:format}` replaced."""
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], text)
