"""OpenTelemetry spans of requests, training runs and swaps, where the operator turns them on.

Spans are not called traces here: a trace is what the draft learns from.  Off, nothing of OpenTelemetry is loaded, and
nothing listens to requests.  The packages come with the extra ``otel``; where spans go is up to OpenTelemetry's own
variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``, …) or to a provider that the process has set up.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from adaptive_spec.core import FinishedRequest
from adaptive_spec.errors import SettingsError
from adaptive_spec.settings import SpanSettings
from adaptive_spec.version import package_version

OWN = "adaptive_spec."  # prefix of attributes that no convention has a name for
_BROKEN = frozenset({"error", "deadline"})


class Spans:
    """Makes spans.  Without a provider it makes none.

    Args:
        provider: a TracerProvider.
        owned: whether to shut it down at the end.
    """

    def __init__(self, provider: Any = None, *, owned: bool = False) -> None:
        self._provider = provider if owned else None
        self._tracer = None if provider is None else provider.get_tracer("adaptive_spec", package_version())

    @property
    def on(self) -> bool:
        """Whether spans are made."""
        return self._tracer is not None

    def on_finish(self, request: FinishedRequest) -> None:
        """Make the spans of a request that has ended: the whole, and within it queue, prefill and decode.

        Names of usage are those of the conventions for generative AI.
        """
        if self._tracer is None:
            return
        from opentelemetry import trace

        ended = request.finished_at.timestamp()
        began = ended - request.queue_seconds - request.decode_seconds
        admitted, first = began + request.queue_seconds, began + request.time_to_first_token_seconds
        whole = self._tracer.start_span(
            "request",
            context=_context(request.traceparent),
            kind=trace.SpanKind.SERVER,
            start_time=_nanoseconds(began),
            attributes={
                "gen_ai.response.id": request.request_id,
                "gen_ai.response.finish_reasons": [request.finish_reason],
                "gen_ai.usage.input_tokens": request.prompt_tokens,
                "gen_ai.usage.output_tokens": request.completion_tokens,
                OWN + "domain": request.domain,
                OWN + "releases": list(request.releases),
                OWN + "policy": request.policy,
            },
        )
        if request.finish_reason in _BROKEN:
            whole.set_status(trace.Status(trace.StatusCode.ERROR, request.finish_reason))
        within = trace.set_span_in_context(whole)
        self._part(within, "queue", began, admitted)
        if request.num_steps:  # it has had a row, and a first token
            self._part(within, "prefill", admitted, first)
            steps = {
                OWN + "num_steps": request.num_steps,
                OWN + "num_draft_tokens": request.num_draft_tokens,
                OWN + "num_accepted_draft_tokens": request.num_accepted_draft_tokens,
            }
            self._part(within, "decode", first, ended, steps)
        whole.end(_nanoseconds(ended))

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[None]:
        """Make a span of what happens within; an exception that leaves it is noted."""
        if self._tracer is None:
            yield
            return
        with self._tracer.start_as_current_span(name, attributes=_own(attributes)):
            yield

    def note(self, **attributes: Any) -> None:
        """Add to the span that this thread is in."""
        if self._tracer is not None:
            from opentelemetry import trace

            trace.get_current_span().set_attributes(_own(attributes))

    def close(self) -> None:
        """Send what waits to be sent."""
        if self._provider is not None:
            self._provider.shutdown()

    def _part(
        self, within: Any, name: str, began: float, ended: float, attributes: Mapping[str, Any] | None = None
    ) -> None:
        assert self._tracer is not None
        start = _nanoseconds(began)
        self._tracer.start_span(name, context=within, start_time=start, attributes=attributes).end(_nanoseconds(ended))


def open_spans(settings: SpanSettings) -> Spans:
    """Prepare what the settings ask for.

    Raises:
        SettingsError: spans are wanted, and the packages are missing.
    """
    if not settings.enabled:
        return Spans()
    try:
        from opentelemetry import trace

        found = trace.get_tracer_provider()
        if not isinstance(found, trace.ProxyTracerProvider):
            return Spans(found)  # the process has its own
        return Spans(_exporting_provider(), owned=True)
    except ImportError as error:
        raise SettingsError(
            f"spans.enabled needs OpenTelemetry ({error}). Install the extra: pip install 'adaptive-spec[otel]'."
        ) from error


def _exporting_provider() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "adaptive-spec")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _context(traceparent: str) -> Any:
    """The context of the span that asked; a fresh one where none did, or its name cannot be read."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, context=Context())


def _own(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {OWN + name: value for name, value in attributes.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
