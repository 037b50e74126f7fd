"""All that one process counts, in one object: the service makes it, and hands its parts to those who count."""

from prometheus_client.registry import Collector

from adaptive_spec.settings import Settings
from adaptive_spec.telemetry.labels import DomainLabels
from adaptive_spec.telemetry.learning import LearningMetrics
from adaptive_spec.telemetry.traffic import TrafficMetrics


class Telemetry:
    """Of one process."""

    def __init__(self, settings: Settings) -> None:
        self.domains = DomainLabels(settings.metrics.max_domains)
        self.traffic = TrafficMetrics(self.domains)
        self.learning = LearningMetrics(self.domains)

    @property
    def collectors(self) -> tuple[Collector, ...]:
        """What is counted, for a registry."""
        return (self.traffic, self.learning)
