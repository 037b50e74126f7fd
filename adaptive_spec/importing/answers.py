"""Prompts from a file become traces: the target answers them, so that a domain can be trained before it has traffic.

Called by ``adaptive-spec traces import``; no service is needed and none is disturbed but by the load.  The decoder
writes without speculation, and what it keeps is what it keeps of a request that was served.  Answers are stored as they
end, under an id that prompt and options decide: a run that was killed goes on where it ended when it is started again.
"""

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from adaptive_spec.core import DOMAIN_NAME, FinishedRequest, Request, SamplingParams, Trace
from adaptive_spec.decoding.decoder import Decoder
from adaptive_spec.decoding.listeners import Listeners
from adaptive_spec.errors import ModelError, RequestError, SettingsError
from adaptive_spec.importing.prompts import Problem, Prompt
from adaptive_spec.models.loading import ModelPair
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import Settings

Tell = Callable[[str, str], None]
_STORED_TOGETHER = 16  # answers in a shard, at most


@dataclass(frozen=True, slots=True)
class Writing:
    """How the target writes.

    raw: texts are completed as they are, instead of being put to it as a user's message.
    """

    domain: str
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    raw: bool = False


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What became of a file's prompts.

    num_known: answered by an earlier import, or the same as another line.  num_dropped: answers that the store did not
    take, as loops or duplicates; ``adaptive-spec traces`` counts the reasons.
    """

    domain: str
    num_stored: int
    num_known: int
    num_dropped: int
    num_completion_tokens: int
    seconds: float
    problems: tuple[Problem, ...]


def import_prompts(
    store: TraceStore, pair: ModelPair, settings: Settings, prompts: Sequence[Prompt], writing: Writing, tell: Tell
) -> ImportReport:
    """Let the target answer prompts, and store the answers as traces of a domain.

    Raises:
        RequestError: the domain is not a name.
        SettingsError: the domain's requests are not to be recorded.
        ModelError: the target has no chat template and one is needed.
    """
    check_domain(writing.domain, settings)
    lines, requests, problems = _requests(pair, settings, prompts, writing)
    known = store.known_requests(list(requests))
    waiting = [request for name, request in requests.items() if name not in known]
    num_known = len(prompts) - len(problems) - len(waiting)
    began, num_stored, num_written, num_tokens = time.monotonic(), 0, 0, 0
    failed: list[str] = []
    pending: list[Trace] = []
    try:
        for trace in _answers(pair, settings, waiting, failed):
            pending.append(trace)
            num_written += 1
            num_tokens += len(trace.tokens) - trace.prompt_tokens
            if len(pending) == _STORED_TOGETHER:
                num_stored += store.add(pending)
                pending.clear()
            rate = num_tokens / max(1e-9, time.monotonic() - began)
            tell("import", f"{num_written} of {len(waiting)} prompts, {rate:.0f} tokens/s")
    finally:
        num_stored += store.add(pending)
    problems += [Problem(lines[name], "the target failed on it; the log tells why") for name in failed]
    return ImportReport(
        domain=writing.domain,
        num_stored=num_stored,
        num_known=num_known,
        num_dropped=num_written - num_stored,
        num_completion_tokens=num_tokens,
        seconds=time.monotonic() - began,
        problems=tuple(sorted(problems, key=lambda problem: problem.line)),
    )


def check_domain(domain: str, settings: Settings) -> None:
    """Refuse a domain that cannot have traces.

    Raises:
        RequestError: it is not a name.
        SettingsError: its requests are not to be recorded.
    """
    if not DOMAIN_NAME.fullmatch(domain):
        raise RequestError(f"Domain {domain!r} is not a name: use 1 to 64 of A-Z a-z 0-9 _ . : / -.")
    if domain in settings.records.untraced_domains:
        raise SettingsError(f"{domain} is in records.untraced_domains. Take it out, or name another domain.")


def _requests(
    pair: ModelPair, settings: Settings, prompts: Sequence[Prompt], writing: Writing
) -> tuple[dict[str, int], dict[str, Request], list[Problem]]:
    """Return request id -> line, request id -> request, and the lines that make none."""
    lines: dict[str, int] = {}
    requests: dict[str, Request] = {}
    problems = []
    for prompt in prompts:
        try:
            ids = _encode(prompt, pair.tokenizer, writing.raw)
        except (TemplateError, ValueError) as error:
            problems.append(Problem(prompt.line, f"the model's chat template refused it: {error}"))
            continue
        room = settings.decoder.max_context_tokens - len(ids)
        if not ids or room < 1:
            limit = settings.decoder.max_context_tokens
            problems.append(Problem(prompt.line, f"{len(ids)} tokens; the context holds {limit}, the answer included"))
            continue
        request = _request(ids, room, writing)
        lines.setdefault(request.request_id, prompt.line)
        requests.setdefault(request.request_id, request)
    return lines, requests, problems


def _encode(prompt: Prompt, tokenizer: Any, raw: bool) -> tuple[int, ...]:
    if raw and isinstance(prompt.content, str):
        return tuple(tokenizer(prompt.content)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError("The target has no chat template. Pass --raw and prompts that are texts.")
    asked = [{"role": "user", "content": prompt.content}] if isinstance(prompt.content, str) else list(prompt.content)
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _request(ids: tuple[int, ...], room: int, writing: Writing) -> Request:
    asked = [writing.domain, ids, writing.max_tokens, writing.temperature, writing.seed]
    digest = hashlib.sha256(json.dumps(asked).encode()).hexdigest()
    params = SamplingParams(
        max_tokens=min(writing.max_tokens, room),
        temperature=writing.temperature,
        seed=int(digest[:8], 16),
        chain_length=0,
    )
    return Request(f"import-{digest[:24]}", ids, params, writing.domain)


def _answers(pair: ModelPair, settings: Settings, requests: Sequence[Request], failed: list[str]) -> Iterator[Trace]:
    """Yield the traces of requests as they end; ``failed`` gets the ids of those that leave none."""
    finished: deque[Trace] = deque()

    def on_finish(request: FinishedRequest) -> None:
        if request.finish_reason not in ("stop", "length"):
            failed.append(request.request_id)

    listeners = Listeners(on_finish=on_finish, on_trace=finished.append, trace_top_k=settings.records.trace_top_k)
    decoder = Decoder(pair, settings.decoder.model_copy(update={"max_chain_length": 0}), listeners)
    for _ in decoder.decode(requests):
        while finished:
            yield finished.popleft()
