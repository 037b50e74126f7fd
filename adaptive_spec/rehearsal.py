"""The dress rehearsal: a candidate's bundle from the disk, in a real decoder, in a process of its own.

``python -m adaptive_spec.rehearsal --settings FILE.json --bundle FOLDER --out FILE.json``

Started by the pipeline before the gate's verdict, so that a bundle that takes a process down takes down none that
serves.  Writes the checks ``integrity``, what every decoder will ask of the bundle, and ``golden``: held-out prompts
answered with the candidate must be, token by token, what the target alone says.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

import torch

from adaptive_spec.bench.lossless import answer_logits
from adaptive_spec.core import Release, Request, SamplingParams, Trace
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.errors import AdaptiveSpecError, ReleaseError
from adaptive_spec.models.loading import ModelPair, load_pair
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.releases.adapter import load_release
from adaptive_spec.releases.bundle import read_bundle
from adaptive_spec.releases.report import INTEGRITY, Check
from adaptive_spec.settings import Settings

GOLDEN = "golden"
_ANSWER_TOKENS = 32
_PROMPT_TOKENS = 256  # of the beginning of a held-out prompt
_CHAIN_LENGTH = 3
_DEADLINE_SECONDS = 600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Rehearse one bundle."""
    parser = argparse.ArgumentParser(prog="adaptive_spec.rehearsal")
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    settings = Settings.model_validate_json(given.settings.read_text(encoding="utf-8"))
    os.nice(settings.learning.nice)
    torch.set_num_threads(settings.learning.threads)
    database = Database(settings.records.url)
    try:
        store = TraceStore(database, settings.records.folder, settings.records.held_out_share)
        prompts = golden_prompts(store.load(held_out=True), settings)
    finally:
        database.close()
    checks = rehearse(load_pair(settings.model), given.bundle, prompts, settings)
    given.out.write_text(json.dumps([check.to_dict() for check in checks]), encoding="utf-8")
    return 0


def golden_prompts(held_out: Sequence[Trace], settings: Settings) -> list[tuple[str, tuple[int, ...]]]:
    """Choose ``releases.golden_prompts`` of the newest held-out prompts, domains in turn: (domain, prompt ids)."""
    longest = min(_PROMPT_TOKENS, settings.decoder.max_context_tokens - 2)
    by_domain: dict[str, dict[tuple[int, ...], None]] = {}
    for trace in reversed(held_out):
        by_domain.setdefault(trace.domain, {})[tuple(trace.tokens[: min(longest, trace.prompt_tokens)])] = None
    turns = zip_longest(*([(domain, prompt) for prompt in prompts] for domain, prompts in sorted(by_domain.items())))
    return [chosen for chosen in chain(*turns) if chosen is not None][: settings.releases.golden_prompts]


def rehearse(
    pair: ModelPair, bundle: Path, prompts: Sequence[tuple[str, tuple[int, ...]]], settings: Settings
) -> list[Check]:
    """Read the bundle as a decoder does; if it is sound, answer the prompts with it."""
    try:
        release = read_bundle(bundle, draft=pair.draft, hashes=pair.hashes)
    except ReleaseError as error:
        return [Check(INTEGRITY, False, str(error))]
    sound = Check(INTEGRITY, True, "files, models, tokenizer, shapes, values and vocabulary are as they must be")
    if not prompts:
        return [sound]
    try:
        answers = _answers(pair, release, prompts, settings)
    except AdaptiveSpecError as error:
        return [sound, Check(GOLDEN, False, f"the prompts could not be answered: {error}")]
    return [sound, golden(pair, [prompt for _, prompt in prompts], answers)]


@torch.inference_mode()
def golden(pair: ModelPair, prompts: Sequence[tuple[int, ...]], answers: Sequence[Sequence[int]]) -> Check:
    """Hold greedy answers against the target alone, which reads each of them in one forward of its own.

    An answer whose every token is the target's best after those before it is the target's greedy answer.  Two tokens
    whose logits are equal within the target's precision are both the best.
    """
    tolerance = 1e-3 if pair.target.dtype == torch.float32 else 0.1
    different = []
    for place, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        logits = answer_logits(pair.target, prompt, list(answer))
        chosen = logits.gather(1, torch.tensor(answer, device=logits.device)[:, None]).squeeze(1)
        wrong = (logits.amax(1) - chosen > tolerance).nonzero().flatten().tolist()
        if wrong:
            different.append(f"prompt {place} from token {wrong[0]} on")
    figures = {"num_prompts": len(prompts), "num_tokens": sum(map(len, answers)), "different": different}
    if different:
        return Check(GOLDEN, False, f"not what the target alone says: {', '.join(different)}", figures)
    return Check(GOLDEN, True, f"{len(prompts)} greedy answers are the target's own, token by token", figures)


def _answers(
    pair: ModelPair, release: Release, prompts: Sequence[tuple[str, tuple[int, ...]]], settings: Settings
) -> list[list[int]]:
    """Greedy answers under exact verification, with chains of the draft model whatever the thresholds say."""
    room = settings.decoder.max_context_tokens - max(len(prompt) for _, prompt in prompts)
    params = SamplingParams(
        max_tokens=min(_ANSWER_TOKENS, room),
        chain_length=min(_CHAIN_LENGTH, settings.decoder.max_chain_length),
        drafter="model",
        verifier="exact",
        record=False,
    )
    given = {"slots": len(prompts), "request_timeout_seconds": _DEADLINE_SECONDS, "answer_cache_tokens": 0}
    engine = Engine(pair, settings.decoder.model_copy(update=given))
    engine.start()
    try:
        engine.swap(load_release(release, pair.draft)).result()
        requests = [
            Request(f"golden-{place}", prompt, params, domain) for place, (domain, prompt) in enumerate(prompts)
        ]
        return [stream.collect()[1] for stream in [engine.submit(request) for request in requests]]
    finally:
        engine.stop()


if __name__ == "__main__":
    sys.exit(main())
