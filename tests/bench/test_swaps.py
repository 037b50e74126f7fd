"""The bench of swaps on tiny models."""

from rich.console import Console

from adaptive_spec.bench.swaps import SwapTimes, measure_swaps
from adaptive_spec.bench.swaps_report import build_records, print_report
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.settings import load_settings


def test_every_swap_is_timed_under_a_full_batch(pair: ModelPair) -> None:
    settings = load_settings({"decoder": {"max_context_tokens": 128, "max_chain_length": 3}, "model": {"threads": 1}})
    told: list[int] = []
    times = measure_swaps(pair, settings, swaps=6, rows=3, rank=2, tell=told.append)
    assert told == [1, 2, 3, 4, 5, 6]
    assert len(times.pauses) == len(times.preparations) == 6
    assert 1 <= len(times.first_steps) <= 7 and times.steps
    assert min(times.pauses) > 0 and min(times.steps) > 0


def test_the_report_says_whether_the_aim_is_met(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import adaptive_spec.bench.swaps_report as report

    console = Console(record=True, width=120)
    monkeypatch.setattr(report, "Console", lambda: console)
    times = SwapTimes(8, [0.1, 0.2, 0.3], [0.001, 0.002], [0.5], [0.4], [])
    assert [row["what"] for row in build_records(times)] == ["step", "pause", "first step after a swap", "preparation"]
    print_report(times)
    print_report(SwapTimes(8, [0.1], [0.3]))
    text = console.export_text()
    assert "0.010 of the median step: within" in text and "3.000 of the median step: ABOVE" in text
