"""Drafts cut out of a target: the target's own first layers, embeddings and head shared, healed by distillation.

A *cut draft* is a folder with ``draft.json`` (which layers, which target, the recipe, a checksum) and
``layers.safetensors`` (the layers and the last norm only, bfloat16).  Embeddings and head are never stored: they are
the target's tensors.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from adaptive_spec.errors import ModelError

_SHARED = ("model.embed_tokens.", "lm_head.")


@dataclass(frozen=True, slots=True)
class CutDraft:
    """What ``draft.json`` says."""

    target: str
    layers: list[int]
    vocab_size: int
    hidden_size: int
    sha256: str = ""  # of layers.safetensors; ``save_draft`` fills it in
    recipe: dict[str, Any] = field(default_factory=dict)


def cut_draft(target: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """Return a new model of ``layers`` of ``target`` that shares its embeddings and head.

    Raises:
        ModelError: the target has no ``model.layers``, or a layer number it does not have.
    """
    decoder_layers = getattr(getattr(target, "model", None), "layers", None)
    if decoder_layers is None:
        raise ModelError("Drafts can be cut out of Llama-like models (model.layers) only; pass a draft model instead.")
    if not layers or not all(0 <= layer < len(decoder_layers) for layer in layers):
        raise ModelError(f"Layers {layers} do not exist in a target of {len(decoder_layers)} layers; choose others.")
    draft = _hollow_draft(target, len(layers))
    for index, layer in enumerate(layers):
        draft.model.layers[index].load_state_dict(decoder_layers[layer].state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    return draft


def save_draft(draft: PreTrainedModel, folder: Path, description: CutDraft) -> None:
    """Write the layers and their description."""
    folder.mkdir(parents=True, exist_ok=True)
    own = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in draft.state_dict().items()
        if not name.startswith(_SHARED)
    }
    save_file(own, folder / "layers.safetensors", metadata={"format": "pt"})
    described = asdict(replace(description, sha256=_sha256(folder / "layers.safetensors")))
    (folder / "draft.json").write_text(json.dumps(described, indent=2) + "\n")


def read_description(folder: Path) -> CutDraft:
    """Read ``draft.json``.

    Raises:
        ModelError: the folder holds no cut draft, or a damaged one.
    """
    try:
        return CutDraft(**json.loads((folder / "draft.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(folder, error) from error


def load_cut_draft(folder: Path, target: PreTrainedModel) -> PreTrainedModel:
    """Load a cut draft on top of the target it was cut from.

    Raises:
        ModelError: damaged files, or a target of another shape.
    """
    description = read_description(folder)
    try:
        if _sha256(folder / "layers.safetensors") != description.sha256:
            raise ValueError("layers.safetensors has not the checksum that draft.json records")
        own = load_file(folder / "layers.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise _unreadable(folder, error) from error
    shape = (target.config.vocab_size, target.config.hidden_size)
    if shape != (description.vocab_size, description.hidden_size):
        raise ModelError(
            f"The draft in {folder} was cut from {description.target} (vocabulary {description.vocab_size}, hidden "
            f"{description.hidden_size}); this target has {shape[0]}, {shape[1]}. Use its own target or cut another."
        )
    draft = _hollow_draft(target, len(description.layers))
    missing, unexpected = draft.load_state_dict(own, strict=False)
    missing = [name for name in missing if not name.startswith(_SHARED)]
    if missing or unexpected:
        raise ModelError(
            f"The draft in {folder} lacks {missing[:3]} or has foreign tensors {unexpected[:3]}. Cut it again."
        )
    return draft


def _unreadable(folder: Path, error: Exception) -> ModelError:
    return ModelError(f"{folder} is not a readable draft ({error}). Cut it again: adaptive-spec models cut-draft.")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hollow_draft(target: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    config = AutoConfig.for_model(**target.config.to_dict())
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    draft = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    draft.set_input_embeddings(target.get_input_embeddings())
    head = target.get_output_embeddings()
    assert isinstance(head, nn.Module)
    draft.set_output_embeddings(head)
    return draft.to(target.device).eval()
