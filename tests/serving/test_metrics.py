"""What is exported, what the docs say of it, and that neither hangs on the database."""

import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from adaptive_spec.core import Release
from adaptive_spec.records.database import Database
from tests.records.rows import make_finish, make_step, make_trace

DOCS = Path(__file__).parents[2] / "docs" / "observability.md"


@pytest.fixture
def told(service: Any) -> Any:
    """A service of which every metric has something to tell."""
    traffic, learning = service.telemetry.traffic, service.telemetry.learning
    traffic.on_step(make_step())
    traffic.on_step(make_step("a", 1))
    traffic.on_finish(make_finish())
    learning.run_ended("refused", 61.0, 0.02)
    learning.drifted("code", "acceptance", "down")
    service.traces.add([make_trace(1), make_trace(2, domain="law", completion=(3,) * 20)])
    return service


def exported(client: TestClient) -> list[Metric]:
    """What a scrape tells, read as Prometheus reads it."""
    return list(text_string_to_metric_families(client.get("/metrics").text))


def name_of(metric: Metric) -> str:
    return metric.name + ("_total" if metric.type == "counter" else "")


def labels_of(metric: Metric) -> set[str]:
    return {label for sample in metric.samples for label in sample.labels} - {"le"}


def test_the_docs_list_what_is_exported(client: TestClient, told: Any) -> None:
    client.get("/livez")
    rows = re.findall(r"^\| `(adaptive_spec_\w+)` \| (\w+) \| ([^|]*) \| (.*) \|$", DOCS.read_text(), re.MULTILINE)
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels)), re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).strip())
        for name, kind, labels, text in rows
    }
    assert len(documented) == len(rows)
    assert documented == {
        name_of(metric): (metric.type, labels_of(metric), metric.documentation) for metric in exported(client)
    }


def test_the_state_of_the_parts(client: TestClient, service: Any) -> None:
    service.engine.canary, service.engine.canary_share = replace(Release(version=8)), 0.2
    text = client.get("/metrics").text
    for line in (
        "records_dropped_total 3.0",
        "records_queue_depth 4.0",
        "records_lag_seconds 1.5",
        "live_release 7.0",
        "canary_release 8.0",
        "canary_share 0.2",
        "listener_failures_total 5.0",
        "recalled_prompt_tokens_total 96.0",
        "num_requests_running 1.0",
        "num_requests_waiting 2.0",
        "swap_pause_seconds 0.25",
        "longest_swap_pause_seconds 0.5",
        "swap_pauses_seconds_total 0.75",
        "swaps_total 2.0",
        "database_up 1.0",
        "leads 1.0",
        "ready 1.0",
        'divergence_budget{domain="code"} 0.02',
        'divergence_fallback{domain="prose"} 1.0',
        'divergence_fallbacks_total{domain="prose"} 1.0',
        f'divergence_share{{domain="prose"}} {5 / 60}',
    ):
        assert f"adaptive_spec_{line}\n" in text, line
    service.ready = False
    assert "adaptive_spec_ready 0.0\n" in client.get("/metrics").text


def test_traces_are_counted_where_they_are_stored(client: TestClient, told: Any) -> None:
    text = client.get("/metrics").text
    assert 'adaptive_spec_traces_stored_total{domain="code"} 1.0' in text
    assert 'adaptive_spec_traces_dropped_total{domain="law",reason="loop"} 1.0' in text


def test_no_label_grows_with_the_domains_of_clients(client: TestClient, service: Any) -> None:
    most = service.settings.metrics.max_domains
    for index in range(3 * most):
        domain = f"d{index}"
        service.telemetry.traffic.on_finish(make_finish(domain, domain=domain))
        service.telemetry.learning.drifted(domain, "acceptance", "down")
        service.traces.num_stored[domain] += 1
        service.traces.num_dropped[domain, "loop"] += 1
        service.engine.budgets[domain] = service.engine.budgets["code"]
    for metric in exported(client):
        samples = [sample for sample in metric.samples if "domain" in sample.labels]
        assert len({sample.labels["domain"] for sample in samples}) <= most + 1, metric.name
        seen = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in samples]
        assert len(seen) == len(set(seen)), metric.name
    dropped = next(m for m in exported(client) if m.name == "adaptive_spec_traces_dropped")
    assert sum(sample.value for sample in dropped.samples) == 3 * most


def test_a_scrape_asks_nothing_of_the_database(client: TestClient, told: Any, tmp_path: Path) -> None:
    told.database = Database(f"sqlite:///{tmp_path / 'empty.db'}")
    text = client.get("/metrics").text
    assert told.database.num_errors == 0
    assert 'adaptive_spec_generation_tokens_total{domain="code",drafter="model",release="0"} 4.0' in text
    told.database.close()


def test_releases_of_a_service_without_a_canary(client: TestClient, service: Any) -> None:
    service.engine.release = Release(version=9, thresholds=MappingProxyType({}))
    text = client.get("/metrics").text
    assert "adaptive_spec_live_release 9.0" in text and "adaptive_spec_canary_release 0.0" in text
