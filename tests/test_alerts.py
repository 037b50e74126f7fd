"""The dashboard and the alerts name what a service exports, and lead to docs that exist."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from adaptive_spec.service import Service
from adaptive_spec.serving.app import create_app
from adaptive_spec.settings import Settings
from tests.test_service import settings

__all__ = ["settings"]  # of a service on tiny models

ROOT = Path(__file__).parent.parent
METRIC = r"adaptive_spec_[a-z0-9_]+"
TARGET_LABELS = {"instance", "job"}  # that Prometheus adds


@pytest.fixture
def exported(settings: Settings) -> Iterator[dict[str, Metric]]:
    """Sample name -> metric, of a service that has decoded, relaxed and exactly, and has lived through something."""
    verification = settings.verification.model_copy(
        update={"domain_verifiers": {"a": "typical"}, "divergence_budget": 0.5}
    )
    service = Service(settings.model_copy(update={"verification": verification}))
    service.start()
    with TestClient(create_app(service)) as client:
        for domain in ("a", "b"):
            body = {"prompt": "ab", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "seed": 1}
            more = {"metadata": {"domain": domain}, "speculation": {"chain_length": 3}}
            assert client.post("/v1/completions", json={**body, **more}).status_code == 200
        assert service.writer.flush(10)
        service.telemetry.learning.run_ended("passed", 1.0, 0.1)
        service.telemetry.learning.drifted("a", "acceptance", "down")
        found = {}
        for metric in text_string_to_metric_families(client.get("/metrics").text):
            found |= {sample.name: metric for sample in metric.samples}
        yield found
    service.stop()


def labels_of(metric: Metric) -> set[str]:
    return {label for sample in metric.samples for label in sample.labels}


def check(expression: str, exported: dict[str, Metric], spoken_of: str = "") -> None:
    """Fail unless every metric, label and fixed value of a query exists.

    Args:
        spoken_of: text in which labels stand as ``{{label}}`` or ``{{ $labels.label }}``.
    """
    names = re.findall(METRIC, expression)
    assert names, expression
    known = set(TARGET_LABELS)
    for name in names:
        assert name in exported, f"{name} of {expression}"
        known |= labels_of(exported[name])
    for name, selector in re.findall(rf"({METRIC})\{{([^}}]*)\}}", expression):
        for label, operator, value in re.findall(r'(\w+)(=~|=|!=|!~)"([^"]*)"', selector):
            assert label in labels_of(exported[name]), f"{label} of {name} in {expression}"
            if operator == "=":
                assert value in {sample.labels.get(label) for sample in exported[name].samples}, expression
    for grouped in re.findall(r"\bby \(([^)]*)\)", expression):
        assert set(grouped.replace(" ", "").split(",")) <= known, expression
    assert set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", spoken_of)) <= known, spoken_of
    assert expression.count("(") == expression.count(")"), expression


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "adaptive-spec.json").read_text())
    return found


def test_dashboard_and_alerts_name_what_is_exported_and_all_of_it(exported: dict[str, Metric]) -> None:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            check(target["expr"], exported, target["legendFormat"])
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(rf"label_values\(({METRIC}), (\w+)\)", variable["query"]["query"]).groups()
            assert label in labels_of(exported[metric]) and variable["name"] == label
    for annotation in dashboard()["annotations"]["list"]:
        check(annotation["expr"], exported)
    for rule in rules():
        check(rule["expr"], exported, rule["annotations"]["summary"])
    shown = set(re.findall(METRIC, json.dumps(dashboard()) + json.dumps(rules())))
    assert not {metric.name for metric in exported.values()} - {exported[name].name for name in shown}


def test_the_dashboard_is_laid_out() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert [panel["title"] for panel in panels if panel["type"] == "row"] == [
        "Traffic",
        "Speculation",
        "Latency",
        "Learning",
        "Health",
    ]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24 and not cells & taken, panel["title"]
        taken |= cells
    variables = {variable["name"] for variable in dashboard()["templating"]["list"]}
    assert variables == {"datasource", "domain", "release"}
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(panels)))
    assert used <= variables | {"__rate_interval"} and variables <= used


def test_alerts_lead_to_what_to_do() -> None:
    text = (ROOT / "docs" / "observability.md").read_text()
    headings = {
        re.sub(r"[^a-z ]", "", line.lower()).strip().replace(" ", "-")
        for line in text.splitlines()
        if line[:3] == "###"
    }
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/observability.md" and anchor in headings, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")
