"""GET /metrics: Prometheus text.  What the process counts, and the state of its parts at the scrape.

Nothing is asked of the database, so that a scrape costs the same however much is recorded, and is answered while the
database is away.
"""

from collections import Counter
from collections.abc import Iterator

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from adaptive_spec.serving.health import database_answers
from adaptive_spec.serving.ports import Service
from adaptive_spec.telemetry.families import Labelled, counter, gauge
from adaptive_spec.telemetry.labels import OTHER
from adaptive_spec.version import package_version


class ServiceCollector(Collector):
    """Reads the parts of one service at each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._labels = service.telemetry.domains

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        yield from self._process()
        yield from self._engine()
        yield from self._releases()
        yield from self._records()
        yield from self._budgets()

    def _process(self) -> Iterator[Metric]:
        service = self._service
        yield gauge("build_info", "1; the label is the version.", ("version",), [((package_version(),), 1)])
        yield gauge("ready", "1 while requests are taken.", (), [((), float(service.ready and service.engine.alive))])
        yield gauge("leads", "1 while this process leads.", (), [((), float(service.leads))])
        text = "1 while signs of life reach the database."
        yield gauge("database_up", text, (), [((), float(database_answers(service)))])
        text = "When a sign of life last reached the database, since the epoch."
        last = service.last_sign
        yield gauge("heartbeat_timestamp_seconds", text, (), [] if last is None else [((), last)])
        text = "Statements and connections that the database refused."
        yield counter("database_errors", text, (), [((), service.database.num_errors)])

    def _engine(self) -> Iterator[Metric]:
        engine = self._service.engine
        yield gauge("num_requests_running", "Requests that have a row of the batch.", (), [((), engine.num_active)])
        yield gauge("num_requests_waiting", "Requests that wait for a row.", (), [((), engine.queue_depth)])
        text = "Prompt tokens that came out of the prefix cache."
        yield counter("recalled_prompt_tokens", text, (), [((), engine.num_recalled_tokens)])
        text = "Outcomes that are lost because a listener raised."
        yield counter("listener_failures", text, (), [((), engine.num_listener_failures)])

    def _releases(self) -> Iterator[Metric]:
        engine = self._service.engine
        yield gauge("live_release", "Version of the live release here.", (), [((), engine.release.version)])
        canary = engine.canary.version if engine.canary else 0
        yield gauge("canary_release", "Version of the release on trial here; 0: none.", (), [((), canary)])
        text = "Share of requests that the release on trial gets here."
        yield gauge("canary_share", text, (), [((), engine.canary_share)])
        pauses = engine.pauses
        text = "Exchanges of releases: swaps, beginnings and ends of trials."
        yield counter("swaps", text, (), [((), pauses.num_swaps)])
        text = "How long decoding stood still in the last exchange."
        yield gauge("swap_pause_seconds", text, (), [((), pauses.last_seconds)])
        text = "How long it stood still in the longest since the start."
        yield gauge("longest_swap_pause_seconds", text, (), [((), pauses.longest_seconds)])
        text = "How long it stood still in all of them together."
        yield counter("swap_pauses_seconds", text, (), [((), pauses.total_seconds)])

    def _records(self) -> Iterator[Metric]:
        writer, traces = self._service.writer, self._service.traces
        yield counter("records_written", "Rows written.", (), [((), writer.num_written)])
        text = "Rows lost: the queue was full, or the database refused them."
        yield counter("records_dropped", text, (), [((), writer.num_dropped)])
        yield gauge("records_queue_depth", "Rows that wait to be written.", (), [((), writer.queue_depth)])
        text = "How long the row has waited that waits longest."
        yield gauge("records_lag_seconds", text, (), [((), writer.lag_seconds)])
        yield counter("traces_stored", "Traces kept to learn from.", ("domain",), self._by_domain(traces.num_stored))
        text = "Traces not kept, or not any longer."
        dropped: Counter[tuple[str, str]] = Counter()
        for (domain, reason), number in traces.num_dropped.copy().items():
            dropped[self._labels.of(domain), reason] += number
        yield counter("traces_dropped", text, ("domain", "reason"), list(dropped.items()))

    def _budgets(self) -> Iterator[Metric]:
        """Of domains that have a label of their own: budgets of different domains do not add up."""
        budgets = {d: b for d, b in dict(self._service.engine.budgets).items() if self._labels.of(d) != OTHER}
        by_domain = ("domain",)
        text = "Largest share of divergent tokens."
        yield gauge("divergence_budget", text, by_domain, [((d,), b.share) for d, b in budgets.items()])
        text = "Share of tokens under a relaxed verifier that diverged, since the start."
        shares = [((d,), b.num_divergent / b.num_emitted) for d, b in budgets.items() if b.num_emitted]
        yield gauge("divergence_share", text, by_domain, shares)
        text = "1 while the budget is spent and verification is exact."
        yield gauge("divergence_fallback", text, by_domain, [((d,), float(b.fallen_back)) for d, b in budgets.items()])
        text = "Times that the budget was spent."
        yield counter("divergence_fallbacks", text, by_domain, [((d,), b.num_fallbacks) for d, b in budgets.items()])

    def _by_domain(self, counts: Counter[str]) -> Labelled:
        found: Counter[str] = Counter()
        for domain, number in counts.copy().items():
            found[self._labels.of(domain)] += number
        return [((label,), number) for label, number in found.items()]


def registry_of(service: Service, *more: Collector) -> CollectorRegistry:
    """All that is exported of a service, and what else is counted around it."""
    registry = CollectorRegistry()
    for collector in (*service.telemetry.collectors, ServiceCollector(service), *more):
        registry.register(collector)
    return registry


def metrics_router(registry: CollectorRegistry) -> APIRouter:
    """Serve /metrics."""
    router = APIRouter()

    @router.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
