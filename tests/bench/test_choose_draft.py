"""Choosing a draft: goodput from known numbers, honest recommendations, tiny candidates measured from end to end."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from adaptive_spec import cli
from adaptive_spec.bench.choose_draft import choose_draft
from adaptive_spec.bench.choose_draft_report import told
from adaptive_spec.bench.draft_choice import OFF, MeasuredDraft, prospects, recommend
from adaptive_spec.core import POOLED
from adaptive_spec.errors import ModelError, SettingsError
from adaptive_spec.learning.acceptance import sums_of
from adaptive_spec.learning.evaluate import JudgedTrace
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import Settings, load_settings, placed_at
from tests.conftest import byte_tokenizer, tiny_model
from tests.learning.judged import domain_of, judged
from tests.learning.toy import toy_traces

VERIFY = (1.0, 1.1, 1.2, 1.3)


def measured(name: str, rows: list[JudgedTrace], seconds: float) -> MeasuredDraft:
    return MeasuredDraft(name, name, 2, 0, tuple(sums_of(rows, length) for length in range(4)), seconds, (seconds,))


def test_goodput_is_emitted_tokens_over_seconds() -> None:
    rows = [judged("a", [True, True, True, False] * 5)]
    (found,) = prospects([measured("d", rows, 0.1)], VERIFY, POOLED)
    assert found.lengths == pytest.approx((1.0, 2.0, 2.0, 4.0))
    assert found.goodput == pytest.approx((1.0, 2.0 / 1.2, 2.0 / 1.4, 4.0 / 1.6))
    assert found.best == 3 and found.interval.low is None
    (batch,) = prospects([measured("d", rows, 0.1)], VERIFY, POOLED, rows=4)
    assert batch.goodput == pytest.approx([4 * goodput for goodput in found.goodput])
    sampled = [judged("a", [True] * 6, [0.5] * 6)]
    (found,) = prospects([measured("d", sampled, 0.1)], VERIFY, POOLED, kind="sampled")
    assert 1.4 < found.lengths[1] <= 1.5, "half of the chains of one token are kept; the last step is cut"


def test_the_cheaper_of_equals_and_the_better_of_equally_dear_ones_are_recommended() -> None:
    worse, better = domain_of([0.4, 0.8], 40, seed=1)
    cheap, dear = measured("cheap", worse, 0.02), measured("dear", worse, 0.3)
    best = recommend(prospects([dear, cheap], VERIFY, "code"))
    assert (best.draft, best.certain) == ("cheap", True)
    good = measured("good", better, 0.02)
    best = recommend(prospects([cheap, good], VERIFY, "code"))
    assert (best.draft, best.runner_up, best.certain) == ("good", "cheap", True)
    assert best.gain_share.low is not None and 0 < best.gain_share.low < best.gain_share.value
    slow_but_right = measured("slow", better, 5.0)
    assert recommend(prospects([slow_but_right, cheap], VERIFY, "code")).draft == "cheap"


def test_no_speculation_is_recommended_when_it_is_fastest() -> None:
    worse, better = domain_of([0.05, 0.1], 40, seed=2)
    best = recommend(prospects([measured("a", worse, 1.0), measured("b", better, 1.0)], VERIFY, "code"))
    assert (best.draft, best.chain_length, best.runner_up) == (OFF, 0, "b")
    assert best.goodput == 1.0 and best.certain


def test_drafts_that_hardly_differ_are_not_told_apart() -> None:
    certain = 0
    for seed in range(30):
        one, other = domain_of([0.6, 0.6], 30, seed)
        certain += recommend(prospects([measured("a", one, 0.05), measured("b", other, 0.05)], VERIFY, "code")).certain
    assert certain <= 5, "the better by chance would be certain one time in twenty"
    few = domain_of([0.2, 0.9], 3, seed=1)
    best = recommend(
        prospects([measured(name, rows, 0.05) for name, rows in zip("ab", few, strict=True)], VERIFY, "code")
    )
    assert best.draft == "b" and not best.certain
    row = {"draft": "b", "chain_length": 3, "runner_up": "a", "gain_share": 0.5, "gain_share_low": None}
    assert "too few requests" in told(row)


def save(folder: Path, seed: int, layers: int = 2, vocab: int = 258) -> str:
    tiny_model(seed, layers=layers, vocab=vocab).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = save(tmp_path / "target", 0)
    (tmp_path / "settings.toml").write_text(f'[model]\ntarget = "{folder}"\nthreads = 1\n')
    monkeypatch.setenv("ADAPTIVE_SPEC_CONFIG", str(tmp_path / "settings.toml"))
    (tmp_path / "traces").mkdir()
    database = Database(f"sqlite:///{tmp_path / 'service.db'}")
    database.upgrade()
    store = TraceStore(database, tmp_path / "traces", 0.5)
    store.add([*toy_traces(30, seed=4, states=64), *toy_traces(30, seed=5, step=5, states=64, domain="sql")])
    database.close()
    return folder


def settings_at(folder: Path) -> Settings:
    return load_settings(placed_at(str(folder)))


def test_the_command_measures_judges_and_recommends(target: str, tmp_path: Path) -> None:
    drafts = [save(tmp_path / "small", 1, layers=1), save(tmp_path / "large", 2, layers=3)]
    asked = ["models", "choose-draft", *drafts, "--traces", str(tmp_path), "--depth", "2", "--chain-length", "2"]
    asked += ["--vocabulary", "0", "--vocabulary", "64", "--batch", "2"]
    files = ["--json", str(tmp_path / "found.json"), "--chart", str(tmp_path / "found.svg")]
    result = CliRunner().invoke(cli.app, [*asked, *files])
    assert result.exit_code == 0, result.output
    records = json.loads((tmp_path / "found.json").read_text())
    shallow = f"{drafts[1]}, first 2 of 3 layers"
    names = [drafts[0], drafts[1], shallow]
    rows = [row for row in records if row["part"] == "draft"]
    assert {row["draft"] for row in rows} == {*names, *(f"{name}, 64 tokens" for name in names)}
    assert {(row["domain"], row["kind"]) for row in rows} == {
        (domain, kind) for domain in (POOLED, "code", "sql") for kind in ("greedy", "sampled")
    }
    for row in rows:
        assert row["draft_seconds"] > 0 and len(row["verify_seconds"]) == 3 and row["rows"] == 2
        expected = [
            2 * tokens / (length * row["draft_seconds"] + row["verify_seconds"][length])
            for length, tokens in enumerate(row["acceptance_lengths"])
        ]
        assert row["goodputs"] == pytest.approx(expected)
        assert row["goodput"] == max(row["goodputs"][1:])
    assert {row["num_layers"] for row in rows} == {1, 2, 3}
    recommended = next(row for row in records if row["part"] == "recommended" and row["domain"] == "sql")
    assert re.sub(r"\s", "", told(recommended)) in re.sub(r"\s", "", result.stdout)
    assert "small" in (tmp_path / "found.svg").read_text()


def test_a_draft_that_does_not_fit_is_told_by_name(target: str, tmp_path: Path) -> None:
    settings = settings_at(tmp_path)
    with pytest.raises(ModelError, match=r"vocabulary of draft .*wide"):
        choose_draft(settings, [save(tmp_path / "wide", 1, vocab=300)])
    foreign = save(tmp_path / "foreign", 1)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["foreign"])
    tokenizer.save_pretrained(foreign)
    with pytest.raises(ModelError, match=r"Draft .*foreign and target .* different tokenizers"):
        choose_draft(settings, [foreign])
    with pytest.raises(SettingsError, match="more than 2 layers"):
        choose_draft(settings, [target], depths=[2])
    with pytest.raises(SettingsError, match="twice"):
        choose_draft(settings, [target, target])


def test_only_the_domain_asked_for_is_judged(target: str, tmp_path: Path) -> None:
    found = choose_draft(settings_at(tmp_path), [target], max_chain_length=1, domain="code")
    (draft,) = found.drafts
    assert set(draft.sums[0].domains) == {"code"} and len(found.verify_seconds) == 2
    assert draft.sums[0].num_steps.tolist() == draft.sums[0].num_tokens.tolist(), "no chain: a step for every token"
    assert np.all(draft.sums[1].num_steps <= draft.sums[0].num_steps)
