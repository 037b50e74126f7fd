"""Every policy says what plain decoding says, the live rules are those of the simulation, and the figures add up."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from adaptive_spec import cli
from adaptive_spec.bench.compare import Cell
from adaptive_spec.bench.compare_report import describe
from adaptive_spec.bench.ours import OurRunner, measured_cost, start_engine
from adaptive_spec.bench.policies import (
    FIXED,
    LOGISTIC,
    OFF,
    OURS,
    POOLED_THRESHOLDS,
    SIDES,
    TRANSFORMERS,
    TRANSFORMERS_CAPPED,
    Policies,
    measure_policies,
)
from adaptive_spec.bench.policies_chart import draw_policies
from adaptive_spec.bench.policies_figures import Ratio, best_on_mix, mixed, rates, ratio, tokens_per_second
from adaptive_spec.bench.policies_report import BEST_FIXED, MIX, all_identical, policy_records, print_report
from adaptive_spec.bench.policy_proposers import LogisticProposer, SteadyProposer, TransformersProposer
from adaptive_spec.bench.sides import DecodePhase, OurSide, Task, Turn
from adaptive_spec.bench.workloads import Plan, Workload, domain_workloads
from adaptive_spec.calibration.baselines import transformers_rule
from adaptive_spec.calibration.cost import CostModel
from adaptive_spec.calibration.logistic import Estimator, Verification
from adaptive_spec.core import POOLED, Release, Request, SamplingParams, StepCost, Thresholds
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.decoding.propose import Chains, Proposer
from adaptive_spec.decoding.sampling import Sampling
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.errors import NotEnoughDataError, SettingsError
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.records.observations import Observations
from adaptive_spec.settings import DecoderSettings, Settings
from tests.calibration.planted import chains, record

SETTINGS = Settings()
LONGEST = 5
COST = StepCost(0.1, (1.0, 1.3, 1.5, 1.7, 1.9, 2.1), "made up")
RELEASE = Release(
    version=3,
    thresholds={
        "code": Thresholds(4.0, stop_below=0.3, max_chain_length=4, survival=(0.8, 0.7, 0.6, 0.5)),
        POOLED: Thresholds(4.0, stop_below=0.4, max_chain_length=2, survival=(0.6, 0.5)),
    },
)


def earlier() -> dict[str, Observations]:
    known = chains(300, 4, 0.1, 1.0)
    return {"code": record(known, Thresholds(stop_below=0.2, max_chain_length=4), 0.1)}


# ---- all sides


def test_all_sides_on_real_models(pair: ModelPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Plan(("code", "math"), (), 1, 24, 1, (1,), growth=False)
    told: list[str] = []
    found = measure_policies(
        pair, SETTINGS, made, RELEASE, list(earlier().values()), lambda title, text: told.append(title)
    )
    assert not found.skipped and found.num_observations > 300
    records = policy_records(found, describe(SETTINGS, "3", found.cost))
    assert all_identical(records)
    rows = {(row["side"], row["domain"]): row for row in records if row["part"] == "side"}
    assert set(rows) == {(side, domain) for side in SIDES for domain in ("code", "math", MIX)}
    for (side, _), row in rows.items():
        assert row["identical"] + row["ties"] == row["num_answers"] > 0
        assert row["ratio_to_off"] > 0 and row["tokens_per_second"] > 0
        assert row["ratio_to_off_low"] is row["ratio_to_off_high"] is None  # of one turn a domain
        assert 1 <= row["tokens_per_step"] <= 1 + row["mean_chain_length"]
        assert row["mean_chain_length"] <= FIXED.get(side, 20)
    for row in (rows[OFF, domain] for domain in ("code", "math", MIX)):
        assert (row["mean_chain_length"], row["tokens_per_step"], row["ratio_to_off"]) == (0, 1, pytest.approx(1))
    assert rows["fixed 3", "code"]["mean_chain_length"] > rows["fixed 1", "code"]["mean_chain_length"] > 0.9
    assert rows["threshold", "code"]["mean_chain_length"] > rows[POOLED_THRESHOLDS, "code"]["mean_chain_length"]
    assert rows["threshold", "math"]["mean_chain_length"] == rows[POOLED_THRESHOLDS, "math"]["mean_chain_length"]
    contests = {(row["side"], row["against"]) for row in records if row["part"] == "contest"}
    others = (BEST_FIXED, TRANSFORMERS, TRANSFORMERS_CAPPED, LOGISTIC, POOLED_THRESHOLDS)
    assert contests == {(ours, other) for ours in OURS for other in others}
    assert "turns" in told

    json.dumps(records)
    print_report(records)
    said = capsys.readouterr().out
    assert "ours against the others" in said and "token by token" in said
    draw_policies(records, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_in_batches_and_without_earlier_traffic(pair: ModelPair, capsys: pytest.CaptureFixture[str]) -> None:
    made = Plan(("code",), (), 2, 16, 1, (2,), growth=False)
    found = measure_policies(pair, SETTINGS, made, Release(), [])
    assert set(found.skipped) == {LOGISTIC, POOLED_THRESHOLDS}
    records = policy_records(found, describe(SETTINGS, None, found.cost))
    assert all_identical(records)
    assert {row["num_answers"] for row in records if row["part"] == "side"} == {2}
    print_report(records)
    assert "left out: logistic" in capsys.readouterr().out
    with pytest.raises(SettingsError, match="whole batches"):
        domain_workloads(pair, made, batch=3)


def test_every_side_keeps_the_cost_it_was_given(pair: ModelPair) -> None:
    cost = CostModel({1: StepCost(1.0, (1.0, 2.0, 3.0), "made up")})
    for make, moves in ((SteadyProposer, False), (lambda proposer: proposer, True)):
        engine = engine_with(pair, make, explore_share=0.0)
        engine.price(cost)
        answer(engine, pair, 300, chain_length=1)
        assert (engine.cost is not cost) == moves
        engine.stop()


def test_a_new_engine_is_prepared(pair: ModelPair) -> None:
    prepared: list[Proposer] = []
    cost = measured_cost(pair, SETTINGS, 1, None)
    side = OurSide("a", {"drafter": "model"}, {"explore_share": 0.0})
    runner = OurRunner(side, pair, SETTINGS.decoder, Release(), cost, lambda decoder: prepared.append(decoder.proposer))
    task = Task("code", (pair.encode("one"),), 8, True, 64)
    assert runner.run(task).num_draft_tokens > 0
    runner.run(task)
    runner.close()
    assert len(prepared) == 1
    assert not side.chooses and OurSide("b").chooses


# ---- the live rules


def engine_with(pair: ModelPair, make: Callable[[Proposer], Proposer], **changes: Any) -> Engine:
    shape = {"slots": 2, "max_context_tokens": 512, "max_chain_length": LONGEST, "prefix_cache_tokens": 0}
    engine = start_engine(pair, DecoderSettings(), {**shape, **changes})
    decoder = engine.decoder
    engine.call(lambda: setattr(decoder, "proposer", make(decoder.proposer))).result()
    return engine


def answer(engine: Engine, pair: ModelPair, max_tokens: int, text: str = "one, two, ", **params: Any) -> list[int]:
    asked = SamplingParams(max_tokens=max_tokens, drafter="model", ignore_eos=True, record=False, **params)
    return engine.submit(Request(text, pair.encode(text), asked, "code")).collect()[1]


class WatchedRule(TransformersProposer):
    """Writes down every chain: its request, room, confidences and accepted tokens."""

    def __init__(self, other: Proposer) -> None:
        super().__init__(other)
        self.seen: list[tuple[str, int, list[float], int]] = []
        self.rooms: dict[str, int] = {}

    def floors(self, slot: Slot, room: int, cost: StepCost | None, rows: int) -> tuple[float, ...]:
        self.rooms[slot.request.request_id] = room
        return super().floors(slot, room, cost, rows)

    def learn(self, slot: Slot, chains: Chains, row: int, length: int, accepted: int) -> None:
        request = slot.request.request_id
        if length:
            self.seen.append((request, self.rooms[request], chains.confidences[row, :length].tolist(), accepted))
        super().learn(slot, chains, row, length, accepted)


def test_the_live_rule_of_transformers_is_that_of_the_simulation(pair: ModelPair) -> None:
    engine = engine_with(pair, WatchedRule, explore_share=0.0)
    plain = engine_with(pair, lambda proposer: proposer)
    texts = ["one, two, ", "def f(x):", "SELECT", "zebra"]
    for text in texts:
        assert answer(engine, pair, 60, text) == answer(plain, pair, 60, text, chain_length=0)
    engine.stop()
    plain.stop()
    watched = engine.decoder.proposer
    assert isinstance(watched, WatchedRule)
    steps = [step for step in watched.seen if step[1] == LONGEST]  # those at an answer's end have less room
    assert {request for request, *_ in steps} == set(texts)
    confidence = np.ones((len(steps), LONGEST))  # what was not drafted would have gone on
    accepted = np.zeros((len(steps), LONGEST), np.bool_)
    for row, (_, _, confidences, kept) in enumerate(steps):
        confidence[row, : len(confidences)] = confidences
        accepted[row, :kept] = True
    expected = transformers_rule(confidence, accepted, np.array([texts.index(step[0]) for step in steps]))
    lengths = [len(step[2]) for step in steps]
    assert expected.drafted.tolist() == lengths
    assert len(set(lengths)) > 2
    assert not watched._rules  # a finished request is forgotten


class WatchedPlan(LogisticProposer):
    """Writes down every chain as it was drafted, and how much of it is verified."""

    drafted: list[list[float]]
    verified: list[int]

    def _verified(self, confidence: Any) -> int:
        self.drafted.append(confidence.tolist())
        self.verified.append(super()._verified(confidence))
        return self.verified[-1]

    def propose(self, slots: list[Slot], sampling: Sampling | None, compares: bool = False) -> Chains:
        chains = super().propose(slots, sampling, compares)
        assert chains.lengths.tolist() == self.verified[-len(slots) :]
        assert [slot.draft_length for slot in slots if slot.tokens_left > 1] == [
            len(slot.tokens) for slot in slots if slot.tokens_left > 1
        ]
        return chains


def test_the_live_estimator_verifies_what_the_plan_says(pair: ModelPair) -> None:
    plan = Verification(Estimator(1.5, (3.8, 6.0, 7.0)), depth=4, rate=1.15)

    def make(proposer: Proposer) -> WatchedPlan:
        made = WatchedPlan(proposer, plan, COST)
        made.drafted, made.verified = [], []
        return made

    engine = engine_with(pair, make, explore_share=0.0)
    plain = engine_with(pair, lambda proposer: proposer)
    for text in ("one, two, ", "def f(x):", "zebra"):
        assert answer(engine, pair, 60, text) == answer(plain, pair, 60, text, chain_length=0)
    engine.stop()
    plain.stop()
    watched = engine.decoder.proposer
    assert isinstance(watched, WatchedPlan)
    whole = [place for place, confidences in enumerate(watched.drafted) if len(confidences) == plan.depth]
    assert len(whole) > 30
    choice = plan.choose(np.array([watched.drafted[place] for place in whole]), COST)
    assert choice.verified.tolist() == [watched.verified[place] for place in whole]
    assert {0, 4} < set(watched.verified)  # nothing, all, and something between
    with pytest.raises(AssertionError, match="greedy"):
        watched.propose([], object())  # type: ignore[arg-type]


# ---- the figures


def turn(rate: float, num_tokens: int = 11, num_draft_tokens: int = 6, steps: int = 6) -> Turn:
    decode = DecodePhase(num_tokens - 1, (num_tokens - 1) / rate)
    return Turn([[1] * num_tokens], 9.0, 0.1, steps, decode, num_draft_tokens)


def cell(side: str, domain: str, by_round: list[list[float]], **counts: int) -> Cell:
    tasks = tuple(Task(domain, ((1, 2),), 11, False, 64) for _ in by_round[0])
    turns = [turn(rate) for of_round in by_round for rate in of_round]
    return Cell(side, Workload("domains", domain, 1, 2, tasks), turns, turns, num_identical=len(turns), **counts)


def hand_made() -> list[Cell]:
    """In "a" the threshold is twice as fast as "off", in "b" as fast; "fixed 1" half as fast and one and a half."""
    off = {"a": [[10.0, 20.0], [12.0, 24.0]], "b": [[4.0, 5.0], [4.0, 5.0]]}
    factors = {OFF: (1, 1), "fixed 1": (0.5, 1.5), "fixed 2": (0.25, 0.5), LOGISTIC: (1, 2), "threshold": (2, 1)}
    factors["stopping"] = (1, 1)
    return [
        cell(side, domain, [[factor * rate for rate in of_round] for of_round in off[domain]])
        for side, by_domain in factors.items()
        for domain, factor in zip(off, by_domain, strict=True)
    ]


def test_figures_by_hand() -> None:
    shown = rates(hand_made())
    assert shown[OFF]["a"].tolist() == [[10, 20], [12, 24]]
    assert ratio(shown["threshold"]["a"], shown[OFF]["a"]).value == 2
    # Of "a" a token takes "off" 1 / 10, 12, 20, 24 s, in the median (1/12 + 1/20) / 2; of "b" (1/4 + 1/5) / 2.
    a, b = (1 / 12 + 1 / 20) / 2, (1 / 4 + 1 / 5) / 2
    assert mixed(shown["threshold"], shown[OFF]).value == pytest.approx((a + b) / (a / 2 + b))
    assert mixed(shown["fixed 1"], shown[OFF]).value == pytest.approx((a + b) / (2 * a + b / 1.5))
    assert tokens_per_second(shown[OFF].values()) == pytest.approx(2 / (a + b))
    assert best_on_mix(shown, [OFF, "fixed 1", "fixed 2"], OFF) == "fixed 1"
    assert best_on_mix(shown, ["fixed 2", OFF], OFF) == OFF


def test_intervals_hold_what_prompts_and_rounds_differ_by() -> None:
    off = np.full((3, 8), 10.0)
    mine = off * np.linspace(0.9, 1.3, 8)
    found = ratio(mine, off)
    assert 0.9 < found.low < found.value < found.high < 1.3
    assert ratio(2 * off, off) == Ratio(2, 2, 2)
    both = mixed({"a": mine, "b": 2 * off}, {"a": off, "b": off})
    assert found.low < both.low < both.value < both.high < 2
    assert ratio(mine, mine) == Ratio(1, 1, 1)
    assert ratio(mine[:1, :1], off[:1, :1]) == Ratio(0.9, None, None)
    assert mixed({"a": mine, "b": mine[:1, :1]}, {"a": off, "b": off[:1, :1]}).low is None
    assert not ratio(mine[:1, :1], off[:1, :1]).is_slower and ratio(0.9 * off, off).is_slower


def test_records_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    cells = hand_made()
    cells[2].num_identical, cells[2].num_ties = 3, 1
    found = Policies(cells, COST, Verification(Estimator(1.0, (0.0,)), 2, 1.0), 77)
    records = policy_records(found, describe(SETTINGS, "3", COST))
    rows = {(row["side"], row["domain"]): row for row in records if row["part"] == "side"}
    row = rows["threshold", "a"]
    assert (row["ratio_to_off"], row["num_turns"], row["num_answers"], row["ours"]) == (2, 4, 4, True)
    assert row["mean_chain_length"] == 6 / 5  # the first of six steps is the prompt's
    assert row["tokens_per_step"] == 10 / 5
    parted = rows["fixed 1", "a"]
    assert (parted["identical"], parted["ties"], rows["fixed 1", MIX]["num_answers"]) == (3, 1, 8)
    assert all_identical(records)
    assert {row["best_fixed"] for row in records} == {1}
    contests = {(r["side"], r["against"], r["domain"]): r for r in records if r["part"] == "contest"}
    assert contests["threshold", BEST_FIXED, "a"]["ratio"] == 4
    lost = contests["threshold", LOGISTIC, "b"]
    assert (lost["ratio"], lost["slower"]) == (0.5, True)
    assert not contests["stopping", LOGISTIC, "a"]["slower"]
    print_report(records)
    said = " ".join(capsys.readouterr().out.split())
    assert "0.50 (0.50-0.50) slower" in said and "the same for all domains; here 1" in said
    assert "Of 40 answers 39 are plain decoding's, token by token; 1 part at a tie" in said
    cells[2].num_ties = 0
    records = policy_records(found, describe(SETTINGS, "3", COST))
    assert not all_identical(records)
    print_report(records)
    assert "WARNING: only 39 of 40" in capsys.readouterr().out


def test_answers_of_one_token_are_left_out() -> None:
    cells = hand_made()[:2]
    cells[0].turns[1] = Turn([[1]], 1.0, 0.1, 1, DecodePhase())
    assert rates(cells)[OFF]["a"].tolist() == [[10], [12]]
    cells[0].turns[0] = cells[0].turns[1]
    with pytest.raises(NotEnoughDataError, match="first token"):
        rates(cells)


def test_the_command_says_what_is_wrong_before_it_loads_anything(tmp_path: Path) -> None:
    nowhere = f"sqlite:///{tmp_path}/none.db"
    for arguments, said in (
        (["--domain", "law"], "no prompts of law"),
        (["--json", str(tmp_path / "none" / "a.json")], "does not exist"),
        (["--chart", "a.jpg"], ".png"),
        (["--database", nowhere], "There is no database"),
    ):
        result = CliRunner().invoke(cli.app, ["bench-policies", "--release", "1", *arguments])
        assert result.exit_code == 2 and said in " ".join(result.stderr.replace("│", "").split())
