"""Sides take turns in changing order on the same tasks; answers are compared; every figure has its record."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

from adaptive_spec import cli
from adaptive_spec.bench import compare as module
from adaptive_spec.bench.compare import best_sides, measure, order, put_on, rounds_of, take_turns
from adaptive_spec.bench.compare_chart import check_chart, draw
from adaptive_spec.bench.compare_report import all_ours_identical, build_records, describe, print_report
from adaptive_spec.bench.ours import OurRunner, decode_phase, measured_cost
from adaptive_spec.bench.peers import until_end
from adaptive_spec.bench.sides import NAMES, OURS, PEERS, PLAIN, REFERENCE, DecodePhase, Task, Turn, choose
from adaptive_spec.bench.workloads import Plan, Workload, domain_workloads, growth_workloads, plan
from adaptive_spec.core import Release, Step
from adaptive_spec.errors import SettingsError
from adaptive_spec.models.loading import ModelPair, pair_of
from adaptive_spec.settings import Settings
from tests.conftest import byte_tokenizer, tiny_model

SETTINGS = Settings()
TASK = Task("code", ((1, 2, 3), (4, 5, 6)), 8, True, 32)


class Fake:
    """A side that answers as told, and writes down that it was asked."""

    def __init__(self, name: str, rates: list[float], answer: list[int], asked: list[str]) -> None:
        self.name, self.rates, self.answer, self.asked = name, rates, answer, asked

    def refusal(self, task: Task) -> str | None:
        return None

    def run(self, task: Task) -> Turn:
        self.asked.append(self.name)
        seconds = len(task.prompts) * len(self.answer) / self.rates[0]
        if task.max_tokens == TASK.max_tokens:
            self.rates.pop(0)
        return Turn(
            [self.answer for _ in task.prompts], seconds, 0.1, 8, DecodePhase(6, seconds, seconds / 2, seconds / 4)
        )

    def close(self) -> None:
        pass


def fakes(answers: dict[str, list[int]] | None = None) -> tuple[dict[str, Any], list[str]]:
    asked: list[str] = []
    rates = {PLAIN: [10.0, 20.0, 10.0], "ours ngram": [20.0, 20.0, 30.0], REFERENCE: [5.0, 5.0, 5.0]}
    told = answers or {}
    return {name: Fake(name, list(its), told.get(name, [7, 8, 9, 10]), asked) for name, its in rates.items()}, asked


def workload(task: Task = TASK) -> Workload:
    return Workload("domains", "code", len(task.prompts), 3, (task,))


def test_the_order_turns_round_and_moves_on() -> None:
    assert [order("abc", turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["c", "b", "a"],
        ["b", "c", "a"],
        ["a", "c", "b"],
    ]
    assert {order("abcd", turn)[0] for turn in range(8)} == set("abcd")


def test_a_task_meets_another_order_in_each_round(pair: ModelPair) -> None:
    runners, asked = fakes()
    take_turns(runners, [workload()], 3, pair)
    assert [asked[first : first + 3] for first in (3, 6, 9)] == [order(list(runners), number) for number in (1, 2, 3)]


def test_the_first_round_warms_up() -> None:
    warm, *counted = rounds_of([workload()], 3)
    assert [task.max_tokens < TASK.max_tokens for _, task in warm] == [True]
    assert counted == [[(0, TASK)]] * 3


def test_ratios_are_taken_turn_by_turn(pair: ModelPair) -> None:
    runners, asked = fakes()
    cells = {cell.side: cell for cell in take_turns(runners, [workload()], 3, pair)}
    assert len(asked) == 3 * 4
    assert cells["ours ngram"].ratios == pytest.approx([2.0, 1.0, 3.0])
    assert best_sides(list(cells.values()), 2) == ["ours ngram"]
    rows = {row["side"]: row for row in build_records(list(cells.values()), {})}
    assert rows["ours ngram"]["ratio_to_plain"] == pytest.approx(2.0)
    assert rows["ours ngram"]["tokens_per_second"] == pytest.approx(20.0)
    assert rows["ours ngram"]["tokens_per_second_q3"] == pytest.approx(25.0)
    assert rows[REFERENCE]["ratio_to_plain"] == pytest.approx(0.5)
    shares = [rows[PLAIN][f"{part}_share"] for part in ("draft", "verify", "other")]
    assert shares == pytest.approx([0.5, 0.25, 0.25])
    assert rows[PLAIN]["accepted_length"] == pytest.approx(1.0)
    assert rows[PLAIN]["identical"] == rows[PLAIN]["num_answers"] == 6


def test_an_answer_that_differs_is_counted(pair: ModelPair) -> None:
    runners, _ = fakes({"ours ngram": [7, 8, 1, 10]})
    cells = take_turns(runners, [workload()], 1, pair)
    rows = build_records(cells, {})
    told = {row["side"]: (row["identical"], row["num_answers"]) for row in rows}
    assert told == {PLAIN: (2, 2), REFERENCE: (2, 2), "ours ngram": (0, 2)}
    assert not all_ours_identical(rows)


def test_an_answer_that_parts_at_a_tie_is_one(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_tie", lambda judge, prompt, answer, other: True)
    runners, _ = fakes({"ours ngram": [7, 8, 1, 10]})
    rows = build_records(take_turns(runners, [workload()], 1, pair), {})
    assert [row["ties"] for row in rows] == [0, 2, 0]
    assert all_ours_identical(rows)


def test_a_peer_that_fails_is_left_out_and_ours_is_not(pair: ModelPair) -> None:
    runners, _ = fakes()
    runners[REFERENCE].rates.clear()
    cells = {cell.side: cell for cell in take_turns(runners, [workload()], 1, pair)}
    assert cells[REFERENCE].skipped is not None and cells[REFERENCE].num_answers == 0
    runners, _ = fakes()
    runners[PLAIN].rates.clear()
    with pytest.raises(IndexError):
        take_turns(runners, [workload()], 1, pair)


def test_all_sides_on_real_models(pair: ModelPair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Plan(("code",), NAMES, 1, 12, 1, (1, 3), (16, 40))
    told: list[str] = []
    found = measure(pair, pair, SETTINGS, made, Release(), lambda title, text: told.append(title))
    records = build_records(found.cells, describe(SETTINGS, None, found.cost))
    domains = [row for row in records if row["part"] == "domains"]
    assert [row["side"] for row in domains] == list(NAMES)
    assert all_ours_identical(records)
    for row in domains:
        if row["skipped"] is None:
            assert row["tokens_per_second"] > 0 and row["time_to_first_token_seconds"] > 0
            assert row["identical"] == row["num_answers"] == 1
            assert sum(row[f"{part}_share"] for part in ("draft", "verify", "other")) == pytest.approx(1)
    rows = {row["side"]: row for row in domains}
    assert rows["ours model fixed 4"]["accepted_length"] > 1 == rows[REFERENCE]["accepted_length"]
    assert rows["transformers assisted"]["draft_share"] > 0 == rows[REFERENCE]["draft_share"]
    grown = {(row["batch"], row["prompt_tokens"]) for row in records if row["part"] == "growth"}
    assert grown == {(1, 16), (3, 16), (1, 40)}
    assert {"domains", "growth"} < set(told)

    json.dumps(records)
    print_report(records)
    assert "token by token" in capsys.readouterr().out
    draw(records, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_rows_of_a_batch_share_their_steps(pair: ModelPair) -> None:
    side = next(side for side in OURS if side.name == "ours model fixed 2")
    runner = OurRunner(side, pair, SETTINGS.decoder, Release(), measured_cost(pair, SETTINGS, 2, None))
    turn = runner.run(TASK)
    runner.close()
    assert [len(answer) for answer in turn.tokens] == [8, 8]
    assert turn.num_row_steps < 16
    decode = turn.decode
    assert decode.draft_seconds is not None and decode.verify_seconds is not None
    assert 0 < decode.draft_seconds + decode.verify_seconds <= decode.seconds < turn.seconds
    assert 0 < decode.num_tokens < turn.num_tokens == 16


def test_an_adapter_goes_on_both_drafts(tmp_path: Path) -> None:
    mine, other = (pair_of(tiny_model(0), tiny_model(1), byte_tokenizer(), "tiny") for _ in range(2))
    before = mine.draft.model.layers[0].self_attn.q_proj.weight.detach().clone()
    adapted = get_peft_model(tiny_model(1), LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    adapted.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    put_on(SETTINGS, mine, other, None, tmp_path / "adapter")
    after = [pair.draft.model.layers[0].self_attn.q_proj.weight for pair in (mine, other)]
    assert not torch.equal(after[0], before) and torch.equal(after[0], after[1])
    with pytest.raises(SettingsError, match="either"):
        put_on(SETTINGS, mine, other, "1", tmp_path / "adapter")


def test_the_command_says_what_is_wrong_before_it_loads_anything(tmp_path: Path) -> None:
    for arguments, said in (
        (["--side", "vllm"], "No side"),
        (["--domain", "law"], "no prompts of law"),
        (["--json", str(tmp_path / "none" / "a.json")], "does not exist"),
        (["--chart", "a.jpg"], ".png"),
    ):
        result = CliRunner().invoke(cli.app, ["bench", *arguments])
        assert result.exit_code == 2 and said in " ".join(result.stderr.replace("│", "").split())


def step(request: str, batch_size: int) -> Step:
    return Step(request, "code", 0, 0, "model", 2, 1, 2, False, 1.0, 2.0, batch_size, (), None)  # type: ignore[arg-type]


def test_the_decode_phase_begins_when_every_row_has_a_token() -> None:
    heard = [
        (10.0, step("a", 1)),
        (20.0, step("a", 2)),
        (20.5, step("b", 2)),
        (26.0, step("a", 2)),
        (26.5, step("b", 2)),
    ]
    assert decode_phase(heard, 2) == DecodePhase(4, 6.0, 1.0, 2.0)
    assert decode_phase(heard[:3], 2) == DecodePhase()


def test_answers_end_with_their_end_token() -> None:
    assert until_end([5, 9, 9, 9], frozenset({9})) == [5, 9]
    assert until_end([5, 6], frozenset({9})) == [5, 6]


def test_workloads(pair: ModelPair) -> None:
    made = Plan(("math", "tools"), num_prompts=2, max_tokens=8, batches=(1, 4), prompt_lengths=(16, 64))
    domains, grown = domain_workloads(pair, made), growth_workloads(pair, made)
    assert [(w.domain, len(w.tasks)) for w in domains] == [("math", 2), ("tools", 2)]
    assert [(w.batch, w.prompt_tokens) for w in grown] == [(1, 16), (4, 16), (1, 64)]
    rows = grown[1].tasks[0].prompts
    assert {len(ids) for ids in rows} == {16} and len(set(rows)) == 4
    with pytest.raises(SettingsError, match="--prompt-tokens"):
        growth_workloads(pair, Plan(prompt_lengths=(4096,)))


def test_plans() -> None:
    assert plan() == Plan()
    quick = plan(quick=True, rounds=5, domains=(), growth=None)
    assert quick.rounds == 5 and not quick.growth and len(quick.domains) == 2
    with pytest.raises(SettingsError, match="choose of: code"):
        plan(domains=("law",))
    with pytest.raises(SettingsError, match="at least 1"):
        plan(batches=(0,))


def test_sides_are_chosen_by_part_of_their_name() -> None:
    assert choose(()) == NAMES
    assert choose(["ngram", "assisted"]) == (PLAIN, "ours ngram", "transformers assisted")
    assert set(PEERS) < set(NAMES) and len(set(NAMES)) == len(NAMES)
    with pytest.raises(SettingsError, match="vllm"):
        choose(["vllm"])


def test_what_keeps_a_chart_from_being_written_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    check_chart(Path("a.svg"))
    with pytest.raises(SettingsError, match=r"\.png"):
        check_chart(Path("a.jpg"))
    monkeypatch.setattr("adaptive_spec.bench.compare_chart.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="adaptive-spec\\[demo\\]"):
        check_chart(Path("a.svg"))
