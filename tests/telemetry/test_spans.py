"""Spans, read out of OpenTelemetry's exporter in memory."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from adaptive_spec.errors import SettingsError
from adaptive_spec.settings import SpanSettings
from adaptive_spec.telemetry.spans import OWN, Spans, open_spans
from tests.records.rows import make_finish

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def memory() -> Any:
    export = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs the extra otel"
    )
    return export.InMemorySpanExporter()


@pytest.fixture
def spans(memory: Any) -> Spans:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    return Spans(provider)


def seconds(span: Any) -> float:
    return (span.end_time - span.start_time) / 1e9


def test_a_request_and_its_parts(spans: Spans, memory: Any) -> None:
    asked_by = f"00-{TRACE}-{PARENT}-01"
    spans.on_finish(replace(make_finish(), queue_seconds=0.06, traceparent=asked_by))  # first token after .1, end 2.06
    queue, prefill, decode, request = memory.get_finished_spans()
    assert [span.name for span in (queue, prefill, decode, request)] == ["queue", "prefill", "decode", "request"]
    for span, expected in ((queue, 0.06), (prefill, 0.04), (decode, 1.96), (request, 2.06)):
        assert seconds(span) == pytest.approx(expected, abs=1e-5), span.name
        assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{request.parent.span_id:016x}" == PARENT
    assert {span.parent.span_id for span in (queue, prefill, decode)} == {request.context.span_id}
    assert queue.end_time == prefill.start_time and prefill.end_time == decode.start_time
    assert request.attributes["gen_ai.usage.input_tokens"] == 5 and request.attributes[OWN + "domain"] == "code"
    counts = {name: decode.attributes[OWN + name] for name in ("num_steps", "num_draft_tokens")}
    assert (
        counts == {"num_steps": 2, "num_draft_tokens": 6} and decode.attributes[OWN + "num_accepted_draft_tokens"] == 4
    )
    assert request.status.is_ok


def test_what_never_got_a_row_has_no_such_parts(spans: Spans, memory: Any) -> None:
    late = replace(make_finish(num_steps=0, completion_tokens=0, decode_seconds=0.0), finish_reason="deadline")
    spans.on_finish(replace(late, traceparent="nonsense"))
    queue, request = memory.get_finished_spans()
    assert (queue.name, request.name, request.parent) == ("queue", "request", None)
    assert not request.status.is_ok


def test_what_happens_within(spans: Spans, memory: Any) -> None:
    with spans.span("training run", run_id=3):
        with spans.span("swap", release=2):
            spans.note(pause_seconds=0.01)
        spans.note(outcome="passed")
    with pytest.raises(ValueError), spans.span("swap", release=4):
        raise ValueError("broken")
    swap, run, failed = memory.get_finished_spans()
    assert dict(swap.attributes) == {OWN + "release": 2, OWN + "pause_seconds": 0.01}
    assert dict(run.attributes) == {OWN + "run_id": 3, OWN + "outcome": "passed"}
    assert swap.parent.span_id == run.context.span_id and not failed.status.is_ok


def test_off_loads_nothing() -> None:
    program = """
import sys
from adaptive_spec.settings import Settings
from adaptive_spec.telemetry.telemetry import Telemetry
from tests.records.rows import make_finish
telemetry = Telemetry(Settings())
assert not telemetry.spans.on
telemetry.spans.on_finish(make_finish())
with telemetry.spans.span("swap"):
    telemetry.spans.note(release=1)
telemetry.spans.close()
assert "opentelemetry" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_wanted_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SettingsError, match=r"adaptive-spec\[otel\]"):
        open_spans(SpanSettings(enabled=True))
