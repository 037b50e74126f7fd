"""Metrics while they are counted, and as Prometheus reads them.

prometheus_client's own counters take a lock for each increment and look for a bucket one by one: some twenty
microseconds for a step of the decoder.  Here one thread counts in plain numbers, and families are made when asked for.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

PREFIX = "adaptive_spec_"  # of every metric's name
Labelled = Iterable[tuple[Sequence[str], float]]  # values of the labels, and of the metric


class Histogram:
    """Counts by bucket, not cumulative.  One thread observes; others may read meanwhile."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value into the first bucket whose bound it does not exceed."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        """Add what is counted to a family."""
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(names, accumulate(self._counts), strict=True)), self._sum)


def counter(name: str, text: str, labels: Sequence[str], values: Labelled) -> Metric:
    """A family of counters."""
    family = CounterMetricFamily(PREFIX + name, text, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def gauge(name: str, text: str, labels: Sequence[str], values: Labelled) -> Metric:
    """A family of gauges."""
    family = GaugeMetricFamily(PREFIX + name, text, labels=labels)
    for of, value in values:
        family.add_metric(of, value)
    return family


def histogram(name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], Histogram]]) -> Metric:
    """A family of histograms."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for of, value in values:
        value.add_to(family, of)
    return family
