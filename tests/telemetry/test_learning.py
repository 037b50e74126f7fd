from prometheus_client import CollectorRegistry

from adaptive_spec.telemetry.labels import OTHER, DomainLabels
from adaptive_spec.telemetry.learning import LearningMetrics


def test_runs_trials_and_drifts() -> None:
    learning, registry = LearningMetrics(DomainLabels(1)), CollectorRegistry()
    registry.register(learning)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"adaptive_spec_{name}", labels)

    assert value("runs_total", outcome="failed") == 0  # or the first failure would be no increase
    assert value("canaries_total", outcome="rolled_back") == 0
    assert value("last_run_seconds") is None and value("last_run_gain_share") is None
    learning.run_ended("refused", 3.0, -0.01)
    learning.run_ended("failed", 5.0, None)
    learning.run_ended("refused", 4.0, None)
    assert value("gate_refusals_in_a_row") == 2  # a failure says nothing of the gate
    assert value("last_run_seconds") == 4 and value("last_run_gain_share") == -0.01
    learning.run_ended("passed", 2.0, 0.1)
    assert value("gate_refusals_in_a_row") == 0 and value("last_run_gain_share") == 0.1
    assert [value("runs_total", outcome=name) for name in ("passed", "refused", "failed", "cancelled")] == [1, 2, 1, 0]
    learning.canary_ended("rolled_back")
    assert value("canaries_total", outcome="rolled_back") == 1
    for domain in ("a", "b", "c"):
        learning.drifted(domain, "acceptance", "down")
    assert value("drifts_total", domain="a", stream="acceptance", direction="down") == 1
    assert value("drifts_total", domain=OTHER, stream="acceptance", direction="down") == 2
    learning.swap_refused()
    assert value("swaps_refused_total") == 1
