"""All that one process tells, in one object: the service makes it, and hands its parts to those who count."""

from prometheus_client.registry import Collector

from adaptive_spec.settings import Settings
from adaptive_spec.telemetry.labels import DomainLabels
from adaptive_spec.telemetry.learning import LearningMetrics
from adaptive_spec.telemetry.spans import open_spans
from adaptive_spec.telemetry.traffic import TrafficMetrics


class Telemetry:
    """Of one process.

    Raises:
        SettingsError: spans are wanted, and OpenTelemetry is not installed.
    """

    def __init__(self, settings: Settings) -> None:
        self.domains = DomainLabels(settings.metrics.max_domains)
        self.traffic = TrafficMetrics(self.domains)
        self.learning = LearningMetrics(self.domains)
        self.spans = open_spans(settings.spans)

    @property
    def collectors(self) -> tuple[Collector, ...]:
        """What is counted, for a registry."""
        return (self.traffic, self.learning)
