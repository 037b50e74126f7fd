"""A release judged on traces that another one served."""

import copy
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

from adaptive_spec.core import Release
from adaptive_spec.learning.counterfactual import judged_under
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.models.weights import DraftWeights
from tests.learning.toy import toy_traces


def random_adapter(pair: ModelPair, folder: Path) -> Path:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(pair.draft), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    model.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def test_a_release_is_judged_as_it_drafts_and_taken_off_again(pair: ModelPair, tmp_path: Path) -> None:
    adapter = random_adapter(pair, tmp_path / "adapter")
    weights = DraftWeights(copy.deepcopy(pair.draft))
    traces = [*toy_traces(6, seed=3), *toy_traces(6, seed=3, domain="sql")]
    base = judged_under(weights, Release(), traces)
    own = judged_under(weights, Release(1, domain_adapters={"sql": str(adapter)}), traces)
    assert [row.trace for row in own] == traces
    same = [mine.confidence == its.confidence for mine, its in zip(own, base, strict=True)]
    assert all(same[:6]) and not any(same[6:]), "the adapter of one domain serves that domain alone"
    assert [row.agrees for row in judged_under(weights, Release(), traces)] == [row.agrees for row in base]
    few = judged_under(weights, Release(1, vocabulary=(100,)), traces)
    assert not any(any(row.agrees) for row in few), "a draft that may not propose the right token never agrees"
