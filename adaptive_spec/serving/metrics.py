"""GET /metrics: Prometheus text, read from the database and the engine at each scrape.

Counters come from the records, so they go on across restarts.  A database that is down loses them from the scrape
and shows as ``adaptive_spec_database_up 0``; the engine's own metrics stay.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.decoding.budget import Budget
from adaptive_spec.errors import RecordsError
from adaptive_spec.records.canaries import canary_counts
from adaptive_spec.records.drifts import drift_counts
from adaptive_spec.records.statistics import DomainStatistics, domain_statistics
from adaptive_spec.records.trace_statistics import TraceStatistics, trace_statistics
from adaptive_spec.serving.ports import Service

logger = logging.getLogger(__name__)

PREFIX = "adaptive_spec_"
# Name without prefix and _total -> help.  Each is an attribute of DomainStatistics, summed per domain.
DOMAIN_COUNTERS = {
    "num_requests": "Requests that were decoded.",
    "num_spec_steps": "Steps that drafted at least one token.",
    "num_draft_tokens": "Tokens proposed by the draft.",
    "num_accepted_draft_tokens": "Proposed tokens that the target kept.",
    "num_emitted_tokens": "Tokens emitted.",
    "num_divergent_tokens": "Emitted tokens that exact verification would have refused.",
    "num_cached_requests": "Requests answered out of the cache, without decoding.",
}
DOMAIN_GAUGES = {
    "draft_acceptance_rate": "Accepted over proposed tokens, over all records.",
    "mean_acceptance_length": "1 + accepted tokens per step that drafted, over all records.",
    "divergence_share": "Divergent over emitted tokens, over all records.",
}


class ServiceCollector(Collector):
    """Makes the metrics of one service at each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        try:
            rows = domain_statistics(self._service.database)
            drifts = drift_counts(self._service.database)
            traces = trace_statistics(self._service.database)
            canaries = canary_counts(self._service.database)
        except (RecordsError, SQLAlchemyError):
            logger.warning("The database did not answer a scrape of /metrics", exc_info=True)
            rows, drifts, traces, canaries = None, {}, [], {}
        yield _gauge("database_up", "1 when the database answered this scrape.", rows is not None)
        yield from _domain_metrics(rows or [])
        yield _drift_metric(drifts)
        yield _canary_metric(canaries)
        yield from _trace_metrics(traces)
        yield from self._engine_metrics()
        yield from _budget_metrics(self._service.engine.budgets)

    def _engine_metrics(self) -> Iterator[Metric]:
        engine, writer = self._service.engine, self._service.writer
        yield _counter("records_written", "Rows written since the start.", writer.num_written)
        yield _counter("records_dropped", "Rows dropped on a full queue since the start.", writer.num_dropped)
        yield _gauge("records_queue_depth", "Rows waiting to be written.", writer.queue_depth)
        yield _gauge("live_release", "Version of the release the decoder runs.", engine.release.version)
        canary = engine.canary.version if engine.canary else 0
        yield _gauge("canary_release", "Version of the release on trial in this decoder; 0: none.", canary)
        yield _gauge("num_active_requests", "Requests being decoded.", engine.num_active)
        yield _gauge("request_queue_depth", "Requests waiting for a slot.", engine.queue_depth)
        yield _counter("recalled_prompt_tokens", "Prompt tokens out of the prefix cache.", engine.num_recalled_tokens)
        yield _counter("listener_failures", "Outcomes that a listener raised on.", engine.num_listener_failures)
        pauses = engine.pauses
        yield _gauge("swap_pause_seconds", "How long decoding stood still in the last swap.", pauses.last_seconds)
        yield _gauge("longest_swap_pause_seconds", "The same of the longest since the start.", pauses.longest_seconds)
        yield _counter("swap_pauses_seconds", "The same of all together.", pauses.total_seconds)
        yield _counter("swaps", "Exchanges of releases since the start.", pauses.num_swaps)


def metrics_router(service: Service) -> APIRouter:
    """Serve /metrics for a service."""
    router = APIRouter()
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service))

    @router.get("/metrics")
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router


def _domain_metrics(rows: Iterable[DomainStatistics]) -> Iterator[Metric]:
    rows = list(rows)
    for name, text in DOMAIN_COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=["domain"])
        for row in rows:
            counter.add_metric([row.domain], getattr(row, name))
        yield counter
    for name, text in DOMAIN_GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=["domain"])
        for row in rows:
            value = getattr(row, name)
            if value is not None:
                gauge.add_metric([row.domain], value)
        yield gauge


def _drift_metric(counts: Mapping[tuple[str, str, str], int]) -> Metric:
    labels = ["domain", "stream", "direction"]
    counter = CounterMetricFamily(PREFIX + "drifts", "Changes found in acceptance and calibration.", labels=labels)
    for key, number in counts.items():
        counter.add_metric(list(key), number)
    return counter


def _canary_metric(counts: Mapping[str, int]) -> Metric:
    counter = CounterMetricFamily(PREFIX + "canaries", "Trials of releases that have ended.", labels=["outcome"])
    for outcome, number in counts.items():
        counter.add_metric([outcome], number)
    return counter


def _trace_metrics(rows: Iterable[TraceStatistics]) -> Iterator[Metric]:
    held = GaugeMetricFamily(PREFIX + "num_traces", "Traces that are stored.", labels=["domain"])
    text = "Traces that were not kept, or not any longer."
    dropped = CounterMetricFamily(PREFIX + "traces_dropped", text, labels=["domain", "reason"])
    for row in rows:
        held.add_metric([row.domain], row.num_traces)
        for reason, number in row.dropped.items():
            dropped.add_metric([row.domain, reason], number)
    yield from (held, dropped)


def _budget_metrics(budgets: Mapping[str, Budget]) -> Iterator[Metric]:
    budgets = dict(budgets)
    share = GaugeMetricFamily(PREFIX + "divergence_budget", "Largest share of divergent tokens.", labels=["domain"])
    fallen = GaugeMetricFamily(
        PREFIX + "divergence_fallback", "1 while the budget is spent and verification is exact.", labels=["domain"]
    )
    for domain, budget in budgets.items():
        share.add_metric([domain], budget.share)
        fallen.add_metric([domain], float(budget.fallen_back))
    yield from (share, fallen)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=float(value))
