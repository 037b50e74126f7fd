"""What the sides are measured on: the prompts of each domain, then growing batches and prompts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from adaptive_spec.bench.corpora import DOMAINS, prompts, require_known
from adaptive_spec.bench.sides import Task, choose
from adaptive_spec.errors import SettingsError
from adaptive_spec.models.loading import ModelPair


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    domains: tuple[str, ...] = DOMAINS
    sides: tuple[str, ...] = choose(())
    num_prompts: int = 2  # per domain
    max_tokens: int = 20
    rounds: int = 2  # counted ones; a warm-up round goes before
    batches: tuple[int, ...] = (1, 4, 8)
    prompt_lengths: tuple[int, ...] = (128, 1024, 4096)  # tokens
    growth: bool = True


_QUICK = {"domains": ("code", "tools"), "num_prompts": 1, "max_tokens": 12, "growth": False}


def plan(*, quick: bool = False, **given: Any) -> Plan:
    """Return the default or the quick plan, changed by what was given; None and empty sequences change nothing.

    Raises:
        SettingsError: an unknown domain, or numbers below 1.
    """
    chosen = {name: value for name, value in given.items() if value not in (None, (), [])}
    made = Plan(**{**(_QUICK if quick else {}), **chosen})
    require_known(made.domains)
    numbers = (made.num_prompts, made.max_tokens, made.rounds, *made.batches, *made.prompt_lengths)
    if min(numbers) < 1:
        raise SettingsError(f"Every number of {', '.join(f.name for f in fields(Plan)[2:7])} must be at least 1.")
    return made


@dataclass(frozen=True, slots=True)
class Workload:
    """One cell of the comparison: tasks of one domain, batch and prompt length."""

    part: str  # domains | growth
    domain: str
    batch: int
    prompt_tokens: int  # the median of the prompts
    tasks: tuple[Task, ...]


def domain_workloads(pair: ModelPair, made: Plan, batch: int = 1) -> list[Workload]:
    """So many prompts at a time, as chat turns; an answer may end by itself.

    Raises:
        SettingsError: the prompts of a domain do not make whole batches.
    """
    encoded = {
        domain: [pair.encode(prompt.text) for prompt in prompts(domain)[: made.num_prompts]] for domain in made.domains
    }
    context = max(len(ids) for rows in encoded.values() for ids in rows) + made.max_tokens
    _check_context(pair, context)
    for domain, rows in encoded.items():
        if len(rows) % batch:
            raise SettingsError(f"{len(rows)} prompts of {domain} make no whole batches of {batch}; change --prompts.")
    return [
        Workload(
            "domains",
            domain,
            batch,
            sorted(map(len, rows))[len(rows) // 2],
            tuple(
                Task(domain, tuple(rows[first : first + batch]), made.max_tokens, False, context)
                for first in range(0, len(rows), batch)
            ),
        )
        for domain, rows in encoded.items()
    ]


def growth_workloads(pair: ModelPair, made: Plan) -> list[Workload]:
    """Every batch at the shortest prompts, then every prompt length at the smallest batch.

    The rows are stretches of the first domain's prompts, cut to length; the end token is ignored, so that all answers
    are equally long.
    """
    lengths, batches = sorted(set(made.prompt_lengths)), sorted(set(made.batches))
    shapes = [(batch, lengths[0]) for batch in batches] + [(batches[0], length) for length in lengths[1:]]
    domain = made.domains[0]
    texts = [prompt.text for prompt in prompts(domain)]
    workloads = []
    for batch, length in shapes:
        context = length + made.max_tokens
        _check_context(pair, context)
        rows = tuple(_stretch(pair, texts[row:] + texts[:row], length) for row in range(batch))
        task = Task(domain, rows, made.max_tokens, True, context)
        workloads.append(Workload("growth", domain, batch, length, (task,)))
    return workloads


def _stretch(pair: ModelPair, texts: Sequence[str], length: int) -> tuple[int, ...]:
    """The first ``length`` tokens of the texts, one after the other and over again."""
    ids: list[int] = []
    while len(ids) < length:
        for text in texts:
            ids += pair.tokenizer.encode(text + "\n\n", add_special_tokens=False)
            if len(ids) >= length:
                break
    return tuple(ids[:length])


def _check_context(pair: ModelPair, tokens: int) -> None:
    limit = getattr(pair.target.config, "max_position_embeddings", tokens)
    if tokens > limit:
        raise SettingsError(
            f"Prompt and answer need {tokens} tokens, the target's context has {limit}. "
            "Lower --prompt-tokens or --max-tokens."
        )
