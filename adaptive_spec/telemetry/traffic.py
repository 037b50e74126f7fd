"""What this process decodes, counted where the decoder tells of it.

What vLLM measures too has vLLM's name and unit, with ``adaptive_spec_`` in the place of ``vllm:``: see its
``v1/metrics/loggers.py`` and ``v1/spec_decode/metrics.py``.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from adaptive_spec.core import FinishedRequest, Step
from adaptive_spec.telemetry.families import Histogram, counter, histogram
from adaptive_spec.telemetry.labels import DomainLabels

NO_DRAFTER = "none"  # label of steps that proposed nothing
MOST_RELEASES = 6  # the live one, the one on trial, and a few that were

_SOURCE = ("domain", "release", "drafter")


def _bounds(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split()))


_FIRST_TOKEN_SECONDS = _bounds(".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640")
_TOKEN_SECONDS = _bounds(".001 .0025 .005 .01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80")
_REQUEST_SECONDS = _bounds(".01 .05 .1 .3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920")
_STEP_SECONDS = _bounds(".0005 .001 .0025 .005 .01 .025 .05 .1 .25 .5 1 2.5")


class _Steps:
    """The steps of one domain under one release with one drafter."""

    __slots__ = ("accepted", "last", "num_divergent", "num_draft_tokens", "num_emitted")

    def __init__(self) -> None:
        self.last = 0.0  # when the last one was
        self.num_emitted = 0
        self.num_divergent = 0
        self.num_draft_tokens = 0
        self.accepted: list[int] = [0]  # [n]: steps that proposed, and of whose chain n tokens were accepted


class _Requests:
    """The requests of one domain."""

    __slots__ = ("decoding", "ended", "first_token", "latency", "num_cached", "per_token", "prefill", "prompt", "queue")

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.num_cached = 0
        self.prompt = 0  # tokens
        self.first_token = Histogram(_FIRST_TOKEN_SECONDS)
        self.per_token = Histogram(_TOKEN_SECONDS)
        self.latency, self.queue, self.prefill, self.decoding = (Histogram(_REQUEST_SECONDS) for _ in range(4))


class TrafficMetrics(Collector):
    """Hears of steps, on the engine's thread, and of ends of requests, on any."""

    def __init__(self, domains: DomainLabels) -> None:
        self._domains = domains
        self._steps: dict[tuple[str, int, str], _Steps] = {}  # never changed, but exchanged: others read it
        self._between: dict[str, Histogram] = {}  # pieces of an answer; by domain, and exchanged as well
        self._requests: dict[str, _Requests] = {}
        self._ending = threading.Lock()
        self._sent: dict[str, float] = {}  # request -> when its last piece came
        self._told_seconds = 0.0
        self._drafting, self._verifying = Histogram(_STEP_SECONDS), Histogram(_STEP_SECONDS)

    def on_step(self, step: Step) -> None:
        """Count a step of one row."""
        domain, now = self._domains.of(step.domain), time.perf_counter()
        key = (domain, step.release, step.drafter)
        steps = self._steps.get(key) or self._add(key)
        steps.last = now
        steps.num_emitted += step.num_emitted
        steps.num_divergent += step.num_divergent
        if step.chain_length:
            steps.num_draft_tokens += step.chain_length
            while len(steps.accepted) <= step.num_accepted:
                steps.accepted.append(0)
            steps.accepted[step.num_accepted] += 1
        if step.step_index:
            self._between[domain].observe(now - self._sent.get(step.request_id, now))
            if step.verify_seconds != self._told_seconds:  # every row of a step tells of the same seconds
                self._told_seconds = step.verify_seconds
                self._drafting.observe(step.draft_seconds)
                self._verifying.observe(step.verify_seconds)
        self._sent[step.request_id] = now

    def on_finish(self, request: FinishedRequest) -> None:
        """Count the end of a request, decoded or not."""
        self._sent.pop(request.request_id, None)
        latency = request.queue_seconds + request.decode_seconds
        with self._ending:
            its = self._requests.setdefault(self._domains.of(request.domain), _Requests())
            its.ended[request.finish_reason] += 1
            its.queue.observe(request.queue_seconds)
            its.latency.observe(latency)
            if request.policy == "cache":
                its.num_cached += 1
            elif request.completion_tokens:
                its.prompt += request.prompt_tokens
                its.first_token.observe(request.time_to_first_token_seconds)
                its.prefill.observe(request.time_to_first_token_seconds - request.queue_seconds)
                rest = latency - request.time_to_first_token_seconds
                its.decoding.observe(rest)
                if request.completion_tokens > 1:
                    its.per_token.observe(rest / (request.completion_tokens - 1))

    def collect(self) -> Iterator[Metric]:
        """Yield every metric.  On any thread."""
        yield from self._of_steps()
        yield from self._of_requests()

    def _of_steps(self) -> Iterator[Metric]:
        rows = [
            ((domain, str(release), drafter or NO_DRAFTER), steps)
            for (domain, release, drafter), steps in self._steps.items()
        ]
        chains = [(labels, steps, list(steps.accepted)) for labels, steps in rows if steps.num_draft_tokens]
        yield counter(
            "spec_decode_num_drafts",
            "Steps that proposed at least one token.",
            _SOURCE,
            [(labels, sum(accepted)) for labels, _, accepted in chains],
        )
        yield counter(
            "spec_decode_num_draft_tokens",
            "Proposed tokens.",
            _SOURCE,
            [(labels, steps.num_draft_tokens) for labels, steps, _ in chains],
        )
        yield counter(
            "spec_decode_num_accepted_tokens",
            "Proposed tokens that were accepted.",
            _SOURCE,
            [(labels, sum(n * number for n, number in enumerate(accepted))) for labels, _, accepted in chains],
        )
        yield counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by their place in the chain, from 0.",
            (*_SOURCE, "position"),
            [
                ((*labels, str(position)), sum(accepted[position + 1 :]))
                for labels, _, accepted in chains
                for position in range(len(accepted) - 1)
            ],
        )
        yield counter(
            "generation_tokens",
            "Tokens emitted, those that prompts end in included.",
            _SOURCE,
            [(labels, steps.num_emitted) for labels, steps in rows],
        )
        yield counter(
            "num_divergent_tokens",
            "Emitted tokens that exact verification would have refused.",
            _SOURCE,
            [(labels, steps.num_divergent) for labels, steps in rows],
        )
        yield histogram(
            "inter_token_latency_seconds",
            "Between two pieces of an answer; a piece is what a step emits.",
            ("domain",),
            [((domain,), between) for domain, between in self._between.items()],
        )
        phases = (("draft", self._drafting), ("verify", self._verifying))
        text = "Of a step over all its rows: drafting, and verification."
        yield histogram("step_seconds", text, ("phase",), [((phase,), seconds) for phase, seconds in phases])

    def _of_requests(self) -> Iterator[Metric]:
        with self._ending:
            rows = [((domain,), its) for domain, its in self._requests.items()]
            ended = [((*domain, reason), number) for domain, its in rows for reason, number in its.ended.items()]
        by_domain = ("domain",)
        yield counter("request_success", "Requests that ended, by reason.", (*by_domain, "finished_reason"), ended)
        text = "Requests answered out of the cache, without decoding."
        yield counter("num_cached_requests", text, by_domain, [(labels, its.num_cached) for labels, its in rows])
        text = "Prompt tokens of requests that were decoded, counted at their end."
        yield counter("prompt_tokens", text, by_domain, [(labels, its.prompt) for labels, its in rows])
        for name, text, attribute in (
            ("time_to_first_token_seconds", "From submission to the first token.", "first_token"),
            ("request_time_per_output_token_seconds", "Per token after the first, mean of a request.", "per_token"),
            ("e2e_request_latency_seconds", "From submission to the end.", "latency"),
            ("request_queue_time_seconds", "From submission to a row, or to an end without one.", "queue"),
            ("request_prefill_time_seconds", "From a row to the first token.", "prefill"),
            ("request_decode_time_seconds", "From the first token to the end.", "decoding"),
        ):
            yield histogram(name, text, by_domain, [(labels, getattr(its, attribute)) for labels, its in rows])

    def _add(self, key: tuple[str, int, str]) -> _Steps:
        """Begin to count a source.  When there are many releases, the one that served longest ago is forgotten."""
        domain, release, _ = key
        if domain not in self._between:
            self._between = {**self._between, domain: Histogram(_TOKEN_SECONDS)}
        last: dict[int, float] = {}
        for (_, other, _), steps in self._steps.items():
            last[other] = max(last.get(other, 0.0), steps.last)
        gone = min(last, key=last.__getitem__) if release not in last and len(last) >= MOST_RELEASES else None
        added = _Steps()
        self._steps = {of: steps for of, steps in self._steps.items() if of[1] != gone} | {key: added}
        return added
