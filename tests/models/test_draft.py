"""Cut drafts: what is stored, what is shared, what is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from adaptive_spec.errors import ModelError
from adaptive_spec.models.draft import CutDraft, cut_draft, load_cut_draft, save_draft
from tests.conftest import tiny_model


def saved(folder: Path) -> torch.nn.Module:
    target = tiny_model(0)
    draft = cut_draft(target, [1])
    save_draft(draft, folder, CutDraft("tiny", [1], target.config.vocab_size, target.config.hidden_size))
    return draft


def test_only_the_layers_are_stored_and_the_rest_is_the_targets(tmp_path: Path) -> None:
    saved(tmp_path)
    stored = load_file(tmp_path / "layers.safetensors")
    assert not any("embed_tokens" in name or "lm_head" in name for name in stored)
    target = tiny_model(0)
    draft = load_cut_draft(tmp_path, target)
    assert draft.get_input_embeddings() is target.get_input_embeddings()
    assert draft.get_output_embeddings() is target.get_output_embeddings()
    wanted = target.model.layers[1].self_attn.q_proj.weight.to(torch.bfloat16).float()
    assert torch.equal(draft.model.layers[0].self_attn.q_proj.weight, wanted)


def test_training_the_draft_leaves_the_targets_layers_alone() -> None:
    target = tiny_model(0)
    draft = cut_draft(target, [0])
    with torch.no_grad():
        draft.model.layers[0].self_attn.q_proj.weight.zero_()
    assert target.model.layers[0].self_attn.q_proj.weight.abs().sum() > 0


@pytest.mark.parametrize("layers", [[], [2], [-1]])
def test_layers_that_do_not_exist_are_refused(layers: list[int]) -> None:
    with pytest.raises(ModelError):
        cut_draft(tiny_model(0), layers)


def test_a_draft_of_another_target_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(ModelError, match="vocabulary"):
        load_cut_draft(tmp_path, tiny_model(0, vocab=300))


def test_damaged_drafts_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    weights = tmp_path / "layers.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-50])
    with pytest.raises(ModelError):
        load_cut_draft(tmp_path, tiny_model(0))
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ModelError, match="checksum"):
        load_cut_draft(tmp_path, tiny_model(0))
    weights.write_bytes(whole)
    description = json.loads((tmp_path / "draft.json").read_text())
    (tmp_path / "draft.json").write_text(json.dumps({**description, "layers": [0, 1]}))
    with pytest.raises(ModelError, match="lacks"):
        load_cut_draft(tmp_path, tiny_model(0))
