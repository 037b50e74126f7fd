"""Every verifier is timed on a real step, beside its forward, and each figure has its record."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from adaptive_spec import cli
from adaptive_spec.bench import verification_cost as module
from adaptive_spec.bench.verification_cost import CASES, measure, random_target, texts_of
from adaptive_spec.core import SIMILARITIES, VERIFIERS
from adaptive_spec.models.loading import ModelPair


def test_every_verifier_and_measure_is_timed(pair: ModelPair) -> None:
    costs = measure(pair.target, texts_of(pair.tokenizer, pair.vocab_size, 2), chain_length=3, rounds=2)
    by_name = {cost.case.name: cost for cost in costs}
    assert {cost.case.rule.verifier for cost in costs} == set(VERIFIERS)
    assert {cost.case.rule.similarity for cost in costs if cost.case.rule.verifier == "logits"} == set(SIMILARITIES)
    for cost in costs:
        assert len(cost.decision_seconds) == len(cost.forward_seconds) == 2
        assert all(0 < share < 1 for share in cost.shares)
        if "all kept" in cost.case.name:
            assert cost.num_kept == 2 * 3, cost.case.name
    exact = by_name["exact greedy"].num_kept
    assert exact < 2 * 3  # else the noise was none, and the cases would not differ
    # A relaxed rule never keeps less than exact would, and what the screen refuses is judged exactly.
    assert all(
        cost.num_kept >= exact for cost in costs if cost.case.rule.verifier != "exact" and cost.case.params.greedy
    )


def test_a_random_target_gets_random_prompts_and_distributions_with_a_peak() -> None:
    texts = texts_of(None, 500, 2)
    assert all(len(ids) == 160 and max(ids) < 500 for ids in texts)
    peaked = module._realistic(torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(0)) * 0.1)
    assert float(peaked.softmax(-1).amax(-1).mean()) == pytest.approx(0.5, abs=0.02)


def test_the_command_writes_a_record_per_case(pair: ModelPair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "load_pair", lambda settings: pair)
    monkeypatch.setattr(module, "random_target", lambda vocab: pair.target)
    threads = torch.get_num_threads()
    file = tmp_path / "costs.json"
    options = ["--vocab", "258", "--vocab", "200", "--chain-length", "2", "--batch", "2", "--rounds", "2"]
    result = CliRunner().invoke(cli.app, ["bench-verifiers", *options, "--json", str(file)])
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    records = json.loads(file.read_text())
    assert [(row["vocab"], row["case"]) for row in records] == [
        (vocab, case.name) for vocab in (258, 200) for case in CASES
    ]
    assert {row["target"] for row in records} == {"smollm2-135m", module.RANDOM_TARGET}
    for row in records:
        assert row["share_q1"] <= row["share"] <= row["share_q3"]
        assert row["command"] and row["machine"] and row["num_rounds"] == 2
    assert "Vocabulary 258" in result.output and "topk_relaxed" in result.output
    assert CliRunner().invoke(cli.app, ["bench-verifiers", "--json", "/nowhere/x.json"]).exit_code == 2


def test_the_large_target_has_the_shape_it_is_said_to_have() -> None:
    with torch.device("meta"):
        model = random_target(151_936)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(494e6, rel=0.01)
