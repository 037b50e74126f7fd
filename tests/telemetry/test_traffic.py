from dataclasses import replace

from prometheus_client import CollectorRegistry

from adaptive_spec.telemetry.labels import OTHER, DomainLabels
from adaptive_spec.telemetry.traffic import MOST_RELEASES, NO_DRAFTER, TrafficMetrics
from tests.records.rows import make_finish, make_step

ACCEPTED_TWO = ((0.9, 0.8, True), (0.8, 0.7, True), (0.5, 0.4, False))


def metrics(most_domains: int = 10) -> tuple[TrafficMetrics, CollectorRegistry]:
    traffic, registry = TrafficMetrics(DomainLabels(most_domains)), CollectorRegistry()
    registry.register(traffic)
    return traffic, registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"adaptive_spec_{name}", labels)


def test_steps_are_counted_as_vllm_counts_them() -> None:
    traffic, registry = metrics()
    source = {"domain": "code", "release": "3", "drafter": "model"}
    traffic.on_step(make_step(release=3, chain_length=0, positions=()))  # the prompt
    assert value(registry, "generation_tokens_total", **source | {"drafter": NO_DRAFTER}) == 1
    assert value(registry, "spec_decode_num_drafts_total", **source | {"drafter": NO_DRAFTER}) is None
    traffic.on_step(make_step("a", 1, release=3))  # 1 of 3 accepted
    traffic.on_step(make_step("a", 2, release=3, positions=ACCEPTED_TWO))
    traffic.on_step(make_step("a", 3, release=3, positions=((0.5, 0.4, False),)))
    assert value(registry, "spec_decode_num_drafts_total", **source) == 3
    assert value(registry, "spec_decode_num_draft_tokens_total", **source) == 9
    assert value(registry, "spec_decode_num_accepted_tokens_total", **source) == 3
    positions = [value(registry, "spec_decode_num_accepted_tokens_per_pos_total", **source, position=p) for p in "012"]
    assert positions == [2, 1, None]
    assert value(registry, "generation_tokens_total", **source) == 2 + 3 + 1
    assert value(registry, "num_divergent_tokens_total", **source) == 0
    traffic.on_step(replace(make_step("a", 4, release=3), num_divergent=1))
    assert value(registry, "num_divergent_tokens_total", **source) == 1


def test_a_step_over_several_rows_is_one_step() -> None:
    traffic, registry = metrics()
    for index in range(3):
        for row in ("a", "b"):
            traffic.on_step(replace(make_step(row, index), verify_seconds=0.02 + index * 1e-3))
    assert value(registry, "step_seconds_count", phase="verify") == 2  # the first were prompts
    assert value(registry, "step_seconds_bucket", phase="verify", le="0.025") == 2
    assert value(registry, "step_seconds_bucket", phase="verify", le="0.01") == 0
    assert value(registry, "step_seconds_sum", phase="draft") == 0.02
    assert value(registry, "inter_token_latency_seconds_count", domain="code") == 4


def test_requests_are_timed_from_their_submission() -> None:
    traffic, registry = metrics()
    traffic.on_finish(replace(make_finish(), queue_seconds=0.06))  # first token after .1, end after 2.06
    for name, seconds in (
        ("request_queue_time_seconds", 0.06),
        ("request_prefill_time_seconds", 0.04),
        ("time_to_first_token_seconds", 0.1),
        ("request_decode_time_seconds", 1.96),
        ("request_time_per_output_token_seconds", 1.96 / 5),
        ("e2e_request_latency_seconds", 2.06),
    ):
        assert abs((value(registry, f"{name}_sum", domain="code") or 0) - seconds) < 1e-9, name
        assert value(registry, f"{name}_count", domain="code") == 1
    assert value(registry, "prompt_tokens_total", domain="code") == 5
    assert value(registry, "request_success_total", domain="code", finished_reason="length") == 1


def test_what_was_not_decoded_has_no_first_token() -> None:
    traffic, registry = metrics()
    traffic.on_finish(make_finish("cached", policy="cache", decode_seconds=0.0, finish_reason="stop"))
    traffic.on_finish(make_finish("late", completion_tokens=0, num_steps=0, finish_reason="deadline"))
    assert value(registry, "num_cached_requests_total", domain="code") == 1
    assert value(registry, "prompt_tokens_total", domain="code") == 0
    assert value(registry, "time_to_first_token_seconds_count", domain="code") == 0
    assert value(registry, "e2e_request_latency_seconds_count", domain="code") == 2
    assert value(registry, "request_success_total", domain="code", finished_reason="deadline") == 1


def test_domains_beyond_the_limit_share_a_label() -> None:
    traffic, registry = metrics(most_domains=2)
    for index in range(20):
        domain = f"d{index}"
        traffic.on_step(make_step(domain, domain=domain))
        traffic.on_step(make_step(domain, 1, domain=domain))
        traffic.on_finish(make_finish(domain, domain=domain))
    for name in ("generation_tokens_total", "prompt_tokens_total", "inter_token_latency_seconds_count"):
        labels = [sample.labels for metric in registry.collect() for sample in metric.samples]
        found = {of["domain"] for of in labels if "domain" in of}
        assert found == {"d0", "d1", OTHER}, name
    assert value(registry, "prompt_tokens_total", domain=OTHER) == 18 * 5


def test_releases_that_serve_nobody_are_forgotten() -> None:
    traffic, registry = metrics()

    def exported() -> set[str]:
        samples = [sample for metric in registry.collect() for sample in metric.samples]
        return {sample.labels["release"] for sample in samples if "release" in sample.labels}

    for release in range(1, 30):
        traffic.on_step(make_step(f"new-{release}", release=release))
        traffic.on_step(make_step(f"old-{release}", release=0))  # a rollback: the oldest goes on serving
    assert exported() == {"0", *(str(release) for release in range(31 - MOST_RELEASES, 30))}
    assert value(registry, "generation_tokens_total", domain="code", release="0", drafter="model") == 29 * 2
