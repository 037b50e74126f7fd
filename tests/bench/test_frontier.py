"""The replay keeps what the verifiers keep, the frontier is one, and what is decoded for real is what was asked for."""

import gzip
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies
from torch import Tensor
from typer.testing import CliRunner

from adaptive_spec import cli
from adaptive_spec.bench.compare_report import describe
from adaptive_spec.bench.frontier import FrontierPlan, Tasks, frontier_plan, live_points, measure_frontier
from adaptive_spec.bench.frontier_chart import draw_frontier
from adaptive_spec.bench.frontier_record import Recording, joined, observe, record
from adaptive_spec.bench.frontier_replay import (
    Point,
    best_within,
    frontier,
    passes,
    replay,
    replayed_kept,
    rules,
    sweep,
)
from adaptive_spec.bench.frontier_report import BUDGETS, frontier_records, print_frontier
from adaptive_spec.core import VERIFIERS, Release, Request, Rule, SamplingParams, Step, StepCost
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.errors import SettingsError
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.settings import DecoderSettings, Settings
from adaptive_spec.verification.divergence import within_allowance
from adaptive_spec.verification.exact import accepts_greedy, kept
from adaptive_spec.verification.relaxed import Evidence, rule_passes

SETTINGS = Settings()
COST = StepCost(0.2, (1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5), "made up")
EVERY_RULE = list(rules())


def drawn(seed: int, chains: int = 24, length: int = 5, vocab: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """Chains of a draft that knows the target roughly; its distribution lacks a token."""
    generator = torch.Generator().manual_seed(seed)
    target = 3 * torch.randn(chains, length + 1, vocab, generator=generator)
    draft = target[:, :-1] + torch.randn(chains, length, vocab, generator=generator)
    draft[..., seed % vocab] = -torch.inf
    return draft.argmax(-1), target, draft.log_softmax(-1)


def really_kept(rule: Rule, chain: Tensor, target: Tensor, draft: Tensor, length: int) -> Tensor:
    own, lengths = target.argmax(-1)[:, : length + 1], torch.full((len(chain),), length)
    chain, log_probs = chain[:, :length], target[:, :length].log_softmax(-1)
    strict = accepts_greedy(own, chain)
    evidence = Evidence(chain, own[:, :-1], lengths, lambda rows: log_probs[rows], lambda rows: draft[rows, :length])
    passed = strict if rule.verifier == "exact" else rule_passes(rule, list(range(len(chain))), evidence)
    return kept(within_allowance(strict, passed, lengths), lengths)


@settings(max_examples=12, deadline=None)
@given(seed=strategies.integers(0, 10_000), length=strategies.integers(1, 5))
def test_the_replay_keeps_what_the_verifiers_keep(seed: int, length: int) -> None:
    chain, target, draft = drawn(seed)
    recorded = observe(chain, target, draft)
    for rule in EVERY_RULE[seed % 5 :: 5]:
        mine, theirs = replayed_kept(rule, recorded, length), really_kept(rule, chain, target, draft, length)
        assert mine.tolist() == theirs.tolist(), rule


def test_the_grid_has_every_verifier_and_no_rule_twice() -> None:
    assert {rule.verifier for rule in EVERY_RULE} == set(VERIFIERS)
    assert len({(rule.verifier, str(rule.numbers)) for rule in EVERY_RULE}) == len(EVERY_RULE)


def test_chains_count_up_to_the_end_of_the_answer() -> None:
    chain = torch.tensor([[1, 2, 3], [7, 2, 7], [1, 7, 3], [1, 2, 7]])
    recorded = observe(chain, torch.randn(4, 4, 9), torch.randn(4, 3, 9).log_softmax(-1), ends=(7, 8))
    assert recorded.lengths.tolist() == [3, 1, 2, 3]
    assert replayed_kept(Rule("ngram", min_overlap=0.0), recorded, 3).tolist() == [3, 1, 2, 3]


def test_a_point_by_hand() -> None:
    target = torch.full((2, 3, 4), -2.0)
    target[:, :, 0] = 1.0  # the target's own token is 0 everywhere
    target[0, 0, 1] = 0.5  # and 1 is 0.5 nats behind it at the first place of the first chain
    chain = torch.tensor([[1, 0], [0, 3]])
    draft = torch.full((2, 2, 4), 0.25).log()
    recorded = observe(chain, target, draft)
    point = replay(Rule("topk_relaxed", relaxed_top_k=2, relaxed_delta=0.5), recorded, 2, COST)
    assert point.tokens_per_step == (3 + 2) / 2  # both of the first chain, one of the second, and the target's own
    assert (point.num_divergent, point.divergence_share) == (1, 1 / 5)
    assert point.given_up_nats == pytest.approx(0.5)
    probs = target[0, 0].softmax(-1)
    assert point.total_variation == pytest.approx(1 - float(torch.minimum(probs, torch.tensor(0.25)).sum()))
    assert point.speed == pytest.approx(2.5 / (2 * 0.2 + 1.1) * 1.0)
    exact = replay(Rule(), recorded, 2, COST)
    assert (exact.tokens_per_step, exact.num_divergent, exact.given_up_nats) == ((1 + 2) / 2, 0, 0.0)


def test_the_frontier_rises_and_nothing_lies_above_it() -> None:
    points = [p for its in sweep(observe(*drawn(3)), COST).values() for p in its]
    best = frontier(points)
    for before, after in pairwise(best):
        assert before.divergence_share < after.divergence_share and before.speed < after.speed
    for point in points:
        within = best_within(best, point.divergence_share)
        assert within is not None and within.speed >= point.speed
    assert best_within(points, -1.0) is None


def test_live_points_stand_for_the_shares() -> None:
    def point(verifier: str, share: float, speed: float) -> Point:
        return Point(Rule(verifier), 2, 2.0, share, 1, 0.0, 0.0, speed)

    points = {
        "exact": [point("exact", 0.0, 1.1)],
        "ngram": [point("ngram", 0.011, 1.2), point("ngram", 0.3, 2.0)],
        "logits": [point("logits", 0.009, 1.3), point("logits", 0.02, 1.4), point("logits", 0.06, 1.5)],
    }
    shares = [p.divergence_share for p in live_points(points, 3)]
    assert shares == [0.0, 0.009, 0.02, 0.06]
    assert [p.divergence_share for p in live_points(points, 9)] == [0.0, 0.009, 0.011, 0.02, 0.06]
    assert live_points(points, 0) == points["exact"]


def prompts_of(pair: ModelPair, count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(pair.encode(f"{number} and what comes after it") for number in range(count))


def test_exact_on_the_record_is_what_exact_decoding_emitted(pair: ModelPair) -> None:
    heard: list[Step] = []
    decoder = DecoderSettings(max_chain_length=3, slots=3, max_context_tokens=256)
    made = record(pair, decoder, Release(), {"code": prompts_of(pair, 5)}, 24, 3)
    engine = Engine(pair, decoder, Listeners(on_step=heard.append))
    engine.start()
    params = SamplingParams(max_tokens=27, chain_length=3, drafter="model")
    for row, ids in enumerate(prompts_of(pair, 5)):
        engine.submit(Request(str(row), ids, params, "code")).collect()
    engine.stop()
    whole = [step for step in heard if step.chain_length == 3]
    recorded = made.recordings["code"]
    assert len(recorded) == len(whole) > 20
    num_kept = replayed_kept(Rule(), recorded, 3)
    assert sorted(num_kept.tolist()) == sorted(step.num_accepted for step in whole)
    assert len(set(num_kept.tolist())) > 1
    assert made.num_tokens == sum(step.num_emitted for step in heard)


def test_recordings_are_joined() -> None:
    one, two = observe(*drawn(1, chains=2)), observe(*drawn(2, chains=3))
    both = joined([one, two])
    assert isinstance(both, Recording) and len(both) == 5 and both.chain_length == 5
    assert both.similarity["js"][2:].tolist() == two.similarity["js"].tolist()
    assert passes(Rule("typical"), both, 2).shape == (5, 2)


def test_the_whole_report_on_real_models(pair: ModelPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [{"id": str(n), "prompt": f"{n} and 1?", "expected": f"{n + 1}"} for n in range(2)]
    heads = [
        {"task_id": str(n), "prompt": "def f():\n", "entry_point": "f", "test": "def check(f):\n    pass"}
        for n in range(2)
    ]
    (tmp_path / "words.jsonl").write_text("\n".join(map(json.dumps, words)))
    (tmp_path / "heads.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, heads)).encode()))
    plan = FrontierPlan(("code", "math"), 2, 16, 3, 1, 2, live=2, num_tasks=2)
    tasks = Tasks(tmp_path / "heads.jsonl.gz", tmp_path / "words.jsonl")
    told: list[str] = []
    found = measure_frontier(pair, SETTINGS, plan, Release(), tasks, lambda title, text: told.append(title))
    records = frontier_records(found, plan, describe(SETTINGS, None, found.cost))
    assert {"recording", "replaying", "decoding code"} < set(told)
    best = [row for row in records if row["part"] == "best"]
    assert len(best) == 2 * len(VERIFIERS) * len(BUDGETS)
    assert all(row["divergence_share"] <= row["budget"] for row in best if "speed" in row)
    live = [row for row in records if row["part"] == "live"]
    for row in live:
        assert row["live_tokens_per_second"] > 0
        if row["verifier"] == "exact":
            assert row["live_divergence_share"] == 0 == row["divergence_share"]
            assert row["live_tokens_per_step"] > 1
        if row["verifier"] != "plain":
            assert row["mean_log_prob_nats"] < 0
            assert row["num_cases"] == 2 and row["task_set"] == {"code": "humaneval", "math": "gsm8k"}[row["domain"]]
            assert 0 <= row["share_right_low"] < row["share_right_high"] <= 1
    assert {row["verifier"] for row in live} > {"plain", "exact"}

    json.dumps(records)
    print_frontier(records)
    said = capsys.readouterr().out
    assert "within a share" in said and "for real" in said
    draw_frontier(records, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_point_diverges_live_is_what_its_rule_lets_through(pair: ModelPair) -> None:
    """A rule that keeps every token: all that is emitted is the draft's, save one token a step."""
    from adaptive_spec.bench.frontier_live import Contest, decode_live

    loose = Point(Rule("ngram", min_overlap=0.0), 3, 4.0, 0.5, 1, 0.0, 0.0, 2.0)
    exact = replace(loose, rule=Rule())
    contest = Contest("code", prompts_of(pair, 4), 33, 2, 1)
    plain, strict, relaxed = decode_live(pair, SETTINGS.decoder, Release(), contest, [exact, loose])
    assert (plain.point, plain.num_emitted) == (None, 0)
    assert strict.num_divergent == 0 < strict.num_emitted
    assert relaxed.divergence_share is not None and relaxed.divergence_share > 0.05
    assert relaxed.log_prob_nats / relaxed.num_scored < strict.log_prob_nats / strict.num_scored


def test_plans() -> None:
    assert frontier_plan() == FrontierPlan()
    quick = frontier_plan(quick=True, live=0, domains=())
    assert (quick.live, len(quick.domains), quick.num_tasks) == (0, 2, 0)
    assert frontier_plan(num_prompts=1).timed_prompts == 1 and frontier_plan(batch=4).timed_prompts == 4
    with pytest.raises(SettingsError, match="choose of: code"):
        frontier_plan(domains=("law",))


def test_the_command_says_what_is_wrong_before_it_loads_anything(tmp_path: Path) -> None:
    for arguments, said in (
        (["--domain", "law"], "no prompts of law"),
        (["--json", str(tmp_path / "none" / "a.json")], "does not exist"),
        (["--chart", "a.jpg"], ".png"),
    ):
        result = CliRunner().invoke(cli.app, ["frontier", *arguments])
        assert result.exit_code == 2 and said in " ".join(result.stderr.replace("│", "").split())
