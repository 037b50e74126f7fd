"""The rehearsal on the tiny pair: a sound bundle passes, and each thing that can be wrong is named."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from adaptive_spec.models.loading import ModelPair
from adaptive_spec.rehearsal import golden, golden_prompts, rehearse
from adaptive_spec.releases.bundle import write_bundle
from adaptive_spec.settings import Settings, load_settings
from tests.learning.toy import toy_traces

PROMPTS = [("a", (1, 7, 9)), ("b", (2, 7, 9, 30))]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(
        {
            "decoder": {"max_context_tokens": 64, "max_chain_length": 3},
            "records": {"url": f"sqlite:///{tmp_path / 'r.db'}", "folder": tmp_path / "traces"},
            "releases": {"folder": tmp_path / "releases", "golden_prompts": 3},
        }
    )


@pytest.fixture
def adapter(tmp_path: Path, pair: ModelPair) -> Path:
    """Of random weights: it changes what the draft proposes a lot."""
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(pair.draft), LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def bundle(root: Path, pair: ModelPair, adapter: Path, **more: Any) -> Path:
    given = {"provenance": {"parent": 0, "hashes": dict(pair.hashes)}, "vocabulary": range(200)} | more
    return write_bundle(root, 1, adapter=adapter, thresholds={}, domain_adapters={"b": adapter}, **given)


def test_a_sound_bundle_answers_as_the_target_alone(
    pair: ModelPair, settings: Settings, adapter: Path, tmp_path: Path
) -> None:
    ours = replace(pair, draft=copy.deepcopy(pair.draft))
    sound, answers = rehearse(ours, bundle(tmp_path / "r", pair, adapter), PROMPTS, settings)
    assert (sound.name, sound.passed) == ("integrity", True)
    assert (answers.name, answers.passed) == ("golden", True)
    assert answers.figures["num_prompts"] == 2 and answers.figures["num_tokens"] > 10


def test_another_answer_is_found(pair: ModelPair) -> None:
    prompts = [prompt for _, prompt in PROMPTS]
    answers = [
        pair.target.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=257)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]
    assert golden(pair, prompts, answers).passed
    answers[1][3] = (answers[1][3] + 1) % 200
    check = golden(pair, prompts, answers)
    assert not check.passed and check.figures["different"] == ["prompt 1 from token 3 on"]


@pytest.mark.parametrize("damage", ["nan", "flipped", "foreign", "vocabulary"])
def test_what_no_decoder_would_take_is_refused(
    pair: ModelPair, settings: Settings, adapter: Path, tmp_path: Path, damage: str
) -> None:
    weights = adapter / "adapter_model.safetensors"
    more: dict[str, Any] = {}
    if damage == "nan":
        tensors = load_file(weights)
        tensors[sorted(tensors)[0]][0, 0] = float("nan")
        save_file(tensors, weights)
    elif damage == "foreign":
        more = {"provenance": {"hashes": {**pair.hashes, "tokenizer": "another"}}}
    elif damage == "vocabulary":
        more = {"vocabulary": [1, 2, pair.draft.config.vocab_size]}
    folder = bundle(tmp_path / "r", pair, adapter, **more)
    if damage == "flipped":
        written = folder / "adapter" / weights.name
        content = bytearray(written.read_bytes())
        content[-1] ^= 1
        written.write_bytes(content)
    (check,) = rehearse(pair, folder, PROMPTS, settings)
    assert (check.name, check.passed) == ("integrity", False)
    named = {
        "nan": "not finite",
        "flipped": "damaged",
        "foreign": "other models",
        "vocabulary": "beyond the draft's own",
    }
    assert named[damage] in check.reason


def test_golden_prompts_take_domains_in_turn(settings: Settings) -> None:
    traces = [replace(row, domain="ab"[place > 0]) for place, row in enumerate(toy_traces(6, seed=0))]
    chosen = golden_prompts(traces, settings)
    assert [domain for domain, _ in chosen] == ["a", "b", "b"]
    assert all(prompt == traces[0].tokens[: len(prompt)] for domain, prompt in chosen if domain == "a")
    none = settings.model_copy(update={"releases": settings.releases.model_copy(update={"golden_prompts": 0})})
    assert golden_prompts(traces, none) == []
