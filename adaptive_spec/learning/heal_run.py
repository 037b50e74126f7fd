"""Cut a draft and heal it, from a name to a folder.  Called by ``models cut-draft`` and ``make draft``.

The corpus the target wrote is kept beside the draft, so that a run that was interrupted trains without writing again.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from adaptive_spec.errors import SettingsError
from adaptive_spec.learning.heal import HealSettings, load_corpus, save_corpus, train, write_corpus
from adaptive_spec.models.draft import CutDraft, cut_draft, save_draft
from adaptive_spec.models.loading import resolve


def read_recipe(path: Path) -> HealSettings:
    """Read the settings of a heal from a JSON file.

    Raises:
        SettingsError: an unknown name or unreadable JSON.
    """
    try:
        given = json.loads(path.read_text())
        known = {field.name for field in fields(HealSettings)}
        if unknown := given.keys() - known:
            raise SettingsError(f"{path} names unknown settings {sorted(unknown)}; known: {', '.join(sorted(known))}.")
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        return HealSettings(**values)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} is not a readable recipe ({error}). Correct the file.") from error


def cut_and_heal(
    target: str, layers: list[int], out: Path, settings: HealSettings, progress: Callable[[str], None]
) -> None:
    """Write a healed draft of ``layers`` of ``target`` into ``out``; checkpoints replace it as training goes on."""
    folder = str(resolve(target))
    out.mkdir(parents=True, exist_ok=True)
    corpus_path = out / "corpus.safetensors"

    def tell(record: dict[str, object]) -> None:
        progress(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in record.items()))

    if not corpus_path.exists():
        writer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        corpus = write_corpus(writer, AutoTokenizer.from_pretrained(folder), settings, tell)
        partial = corpus_path.with_suffix(".partial")
        save_corpus(corpus, partial)
        partial.rename(corpus_path)
        del writer
    corpus = load_corpus(corpus_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    draft = cut_draft(model, layers)
    description = CutDraft(target, layers, model.config.vocab_size, model.config.hidden_size, asdict(settings))
    save_draft(draft, out, description)
    history = train(draft, corpus, settings, tell, lambda: save_draft(draft, out, description))
    save_draft(draft, out, replace(description, recipe={**asdict(settings), "history": history}))
