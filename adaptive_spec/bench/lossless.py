"""Is this pair lossless here?  Greedy identity and a z-test of sampling, on the user's own models.

Two z-tests.  If tokens really come from the target, then over positions these have mean zero, with a standard error
that follows from the same positions: the surplus log p(token) + H(p), which tokens from a sharper or flatter
distribution betray; and the excess of tokens that the draft q favours, 1[q(token) > p(token)] less the target's mass of
all such tokens, which anything of the draft that was left in betrays: a residual or a bonus token drawn wrongly.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from adaptive_spec.bench.corpora import DOMAINS, prompts
from adaptive_spec.core import Request, SamplingParams
from adaptive_spec.decoding.engine import Engine
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.settings import DecoderSettings

Z_LIMIT = 4.0
BATCHES = (32,)
_TIE = 1e-3  # logits closer than this are a tie in low precision


@dataclass(frozen=True, slots=True)
class LosslessReport:
    """Greedy: prompts compared; identical with and without speculation; different only at a tie.  Sampling: tokens,
    mean of log p(token) + H(p) and its z, and the z of the excess of tokens that the draft favours."""

    num_prompts: int
    num_identical: int
    num_ties: int
    num_sampled_tokens: int
    mean_surplus_nats: float
    z: float
    z_favoured: float
    first_difference: str | None

    @property
    def passed(self) -> bool:
        same = self.num_identical + self.num_ties == self.num_prompts
        return same and abs(self.z) < Z_LIMIT and abs(self.z_favoured) < Z_LIMIT

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def check_lossless(
    pair: ModelPair,
    num_prompts: int = 20,
    seed: int = 0,
    *,
    max_tokens: int = 48,
    chain_length: int | None = 4,
    drafter: str = "model",
    batches: Sequence[int] = BATCHES,
    progress: Callable[[str, str], None] = lambda phase, text: None,
) -> LosslessReport:
    """Compare the engine with the target alone.

    The greedy reference is transformers' own ``generate``, one prompt at a time; the engine decodes in batches, with
    speculation, and in the last size of batch without.

    Args:
        chain_length: None lets the length policy decide.
        drafter: who proposes: model, ngram or combined.
        batches: how many prompts are decoded together; all are decoded in each.
        progress: called with a phase and how far it is.
    """
    texts = [row.text for rows in zip(*(prompts(domain) for domain in DOMAINS), strict=False) for row in rows]
    encoded = [pair.encode(text) for text in (texts * (num_prompts // len(texts) + 1))[:num_prompts]]
    settings = DecoderSettings(
        max_context_tokens=max(map(len, encoded)) + max_tokens,
        queue_limit=max(1, num_prompts),
        max_chain_length=DecoderSettings().max_chain_length if chain_length is None else chain_length,
    )
    greedy = SamplingParams(max_tokens=max_tokens, chain_length=chain_length, drafter=drafter)
    sampled_params = replace(greedy, temperature=1.0, seed=seed, ignore_eos=True)
    said: list[list[list[int]]] = []  # by way of decoding, by prompt
    for batch in batches:
        engine = Engine(pair, settings.model_copy(update={"slots": batch}))
        engine.start()
        try:
            if chain_length is None:
                engine.price(engine.measure_cost("check", repeats=1))
            said.append(_decode(engine, encoded, greedy, partial(progress, f"greedy, batches of {batch}")))
            if batch == batches[-1]:
                off = replace(greedy, chain_length=0)
                said.append(_decode(engine, encoded, off, partial(progress, "greedy, no speculation")))
                scores = sampled_scores(pair, engine, encoded, sampled_params, partial(progress, "sampled"))
        finally:
            engine.stop()
    identical, ties, first = 0, 0, None
    for index, (prompt, *outputs) in enumerate(zip(encoded, *said, strict=True)):
        reference = greedy_reference(pair, prompt, max_tokens)
        different = [tokens for tokens in outputs if tokens != reference]
        if not different:
            identical += 1
        elif all(is_tie(pair, prompt, tokens, reference) for tokens in different):
            ties += 1
        elif first is None:
            first = f"prompt {index}: {different[0][:12]} … against {reference[:12]} …"
        progress("target alone", f"{index + 1} of {num_prompts}, {identical} identical")
    z, z_favoured = z_of(scores)
    mean = float(scores[:, 0].mean())
    return LosslessReport(num_prompts, identical, ties, len(scores), mean, z, z_favoured, first)


def sampled_scores(
    pair: ModelPair,
    engine: Engine,
    encoded: Sequence[tuple[int, ...]],
    params: SamplingParams,
    progress: Callable[[str], None] = lambda text: None,
) -> torch.Tensor:
    """Let an engine sample after each prompt; return surplus and excess of each token: [tokens, 2] float64."""
    sampled = _decode(engine, encoded, params, progress)
    return torch.cat([_scores(pair, p, t) for p, t in zip(encoded, sampled, strict=True)]).double()


def z_of(scores: torch.Tensor) -> tuple[float, float]:
    """How many standard errors the mean of each column of [tokens, 2] is from 0."""
    surplus, excess = (scores.mean(0) / (scores.std(0) / math.sqrt(len(scores)) + 1e-12)).tolist()
    return surplus, excess


def greedy_reference(pair: ModelPair, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """What transformers' greedy ``generate`` of the target says."""
    ids = torch.tensor([prompt], device=pair.device)
    output = pair.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=pair.eos_token_ids[0] if pair.eos_token_ids else None,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def _decode(
    engine: Engine, encoded: Sequence[tuple[int, ...]], params: SamplingParams, progress: Callable[[str], None]
) -> list[list[int]]:
    # Each prompt has its own seed: the z-test takes positions for independent, and one seed would tie them together.
    seeded = [params if params.seed is None else replace(params, seed=params.seed + i) for i in range(len(encoded))]
    streams = [engine.submit(Request(f"check-{i}", encoded[i], seeded[i])) for i in range(len(encoded))]
    outputs: list[list[int]] = []
    for stream in streams:
        outputs.append(stream.collect()[1])
        progress(f"{len(outputs)} of {len(streams)}")
    return outputs


@torch.inference_mode()
def is_tie(pair: ModelPair, prompt: tuple[int, ...], ours: list[int], reference: list[int]) -> bool:
    """Do the outputs part at a position where the target's two best logits are equal within its precision?"""
    at = next((i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b), None)
    if at is None:
        return False
    logits = pair.target(torch.tensor([[*prompt, *reference[:at]]], device=pair.device)).logits[0, -1].float()
    tolerance = _TIE if pair.target.dtype == torch.float32 else 0.1
    return abs(float(logits[ours[at]] - logits[reference[at]])) < tolerance


@torch.inference_mode()
def answer_logits(model: PreTrainedModel, prompt: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """What a model alone makes of an answer, in one forward: [tokens, vocab] float32."""
    ids = torch.tensor([[*prompt, *tokens]], device=model.device)
    return cast(torch.Tensor, model(ids).logits[0, len(prompt) - 1 : -1].float())


@torch.inference_mode()
def _scores(pair: ModelPair, prompt: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """Surplus and excess at each position: [tokens, 2]"""
    target, draft = (answer_logits(model, prompt, tokens) for model in (pair.target, pair.draft))
    log_probs, probs = target.log_softmax(-1), target.softmax(-1)
    chosen = torch.tensor(tokens, device=pair.device)[:, None]
    surplus = log_probs.gather(1, chosen).squeeze(1) - (probs * log_probs).sum(-1)
    favoured = (draft.softmax(-1) > probs).float()
    excess = favoured.gather(1, chosen).squeeze(1) - (favoured * probs).sum(-1)
    return torch.stack([surplus, excess], dim=-1).cpu()
