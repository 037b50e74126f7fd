"""Ablations: one change at a time, continued where they were interrupted, and reported against the base."""

import json
from pathlib import Path

import numpy as np
import pytest

from adaptive_spec.bench.ablation import BASE, cut, train_all, variations
from adaptive_spec.bench.ablation_report import summarise
from adaptive_spec.errors import SettingsError
from adaptive_spec.settings import LearningSettings
from tests.learning.toy import tiny_draft, toy_traces

LEARNING = LearningSettings(rank=4, max_epochs=2, batch_tokens=256, min_traces=2)


def test_variations_change_one_setting_each() -> None:
    found = variations(LEARNING, ["loss=kl,tv", "rank=8", "top_k=4"])
    assert [one.name for one in found] == [BASE, "loss=kl", "loss=tv", "rank=8", "top_k=4"]
    assert found[0].learning == LEARNING and found[2].learning.loss == "tv" and found[2].learning.rank == 4
    assert found[3].learning.rank == 8 and found[4].top_k == 4 and found[4].learning == LEARNING
    for wrong in ("losses=kl", "loss=hinge", "rank=0", "top_k=none"):
        with pytest.raises(SettingsError, match=wrong.partition("=")[0]):
            variations(LEARNING, [wrong])


def test_cutting_a_trace_moves_what_is_lost_to_the_tail() -> None:
    trace = toy_traces(1, seed=0)[0]
    short = cut(trace, 3)
    assert short.top_ids.shape[1] == 3 and cut(trace, 99) is trace
    before, after = (np.exp(one.top_log_probs).sum(-1) + one.tail_mass for one in (trace, short))
    np.testing.assert_allclose(after, before, rtol=1e-5)
    assert (short.top_ids[:, 0] == trace.top_ids[:, 0]).all()  # the most probable one stays


def test_what_the_file_holds_is_not_trained_again(tmp_path: Path) -> None:
    out, draft = tmp_path / "ablation.jsonl", tiny_draft()
    traces, held_out = toy_traces(12, seed=1), toy_traces(6, seed=2, domain="law")
    chosen = variations(LEARNING, ["rank=2"])
    first = train_all(draft, traces, held_out, chosen, 1, out)
    assert [(row["variation"], row["seed"]) for row in first] == [(BASE, 0), ("rank=2", 0)]
    lines = out.read_text().splitlines()
    out.write_text("\n".join([lines[0].replace(f'"seconds": {first[0]["seconds"]}', '"seconds": -1.0'), *lines[1:]]))
    again = train_all(draft, traces, held_out, chosen, 1, out)
    assert again[0]["seconds"] == -1.0 and again[1] == first[1]


def test_a_line_cut_short_does_not_spoil_what_is_appended(tmp_path: Path) -> None:
    out, draft = tmp_path / "ablation.jsonl", tiny_draft()
    traces, held_out = toy_traces(12, seed=1), toy_traces(6, seed=2, domain="law")
    train_all(draft, traces, held_out, variations(LEARNING, ()), 1, out)
    with out.open("a") as file:
        file.write('{"variation": "rank=2", "se')
    train_all(draft, traces, held_out, variations(LEARNING, ["rank=2"]), 1, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["variation"] for row in rows] == [BASE, "rank=2"]


def test_the_report_compares_with_the_base_of_the_same_seed() -> None:
    def row(variation: str, seed: int, gain: float) -> dict[str, object]:
        means = {"acceptance_length_before": 1.0, "acceptance_length_after": 1.0 + gain}
        return {"variation": variation, "seed": seed, "domains": {"*": means, "code": means}, "seconds": 10.0}

    rows = [row(BASE, 0, 0.3), row(BASE, 1, 0.5), row("rank=2", 0, 0.2), row("rank=2", 1, 0.5), row("loss=kl", 7, 0.9)]
    base, rank, loss = summarise(rows)
    assert base["gain"]["code"] == pytest.approx(0.4) and base["against_base"] == 0
    assert rank["against_base"] == pytest.approx(-0.05) and rank["against_base_error"] == pytest.approx(0.05)
    assert rank["gain_deviation"]["*"] == pytest.approx(0.15 * 2**0.5)
    assert loss["against_base"] is None and loss["num_seeds"] == 1
