"""The whole loop on a real model, through the front door: serve, measure, learn from traffic, measure again.

Starts the service as a process of its own with a fresh database in the output folder and talks to it with the OpenAI
client.  Draft quality is compared at one fixed chain length on the same held-out prompts before and after, paired by
prompt; speed is reported separately, under the length policy and with the target alone.  Held-out prompts leave no
trace, so nothing that is measured is ever trained on.
"""

import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from adaptive_spec.bench.corpora import DOMAINS, Prompt, split
from adaptive_spec.bench.demo_report import Answer, Findings, build_report, draw, print_table
from adaptive_spec.bench.progress import Teller
from adaptive_spec.errors import RunError
from adaptive_spec.models.fetch import fetch

CHAIN_LENGTH = 2
NUM_HELD_OUT = 12  # prompts a domain
MIN_HELD_OUT = 6  # prompts a domain, however slow the machine is
CONCURRENCY = 32
_MAX_CONTEXT_TOKENS = 768
_HELD_OUT_TOKENS, _TRAFFIC_TOKENS, _PROBE_TOKENS, _SPEED_TOKENS = 48, 96, 48, 32
_SHOWN = 8  # latest requests of a domain behind the figure on screen
_HELD_OUT_SHARE, _TRAFFIC_SHARE, _TRAINING_SHARE = 0.11, 0.34, 0.28  # of the time budget


def run_demo(output: Path, seed: int, time_budget_seconds: float) -> Path:
    """Run the demo and return the path of ``report.json``.

    Raises:
        RunError: the service did not start, or the training run did not end in a release.
    """
    state = output / "state"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    say = Teller()
    say("models", "fetching the quickstart target (once)")
    fetch("smollm2-135m", lambda part: say("models", part))
    with _service(state, time_budget_seconds * _TRAINING_SHARE, say) as url:
        report = build_report(_Demo(url, seed, say, time_budget_seconds).run())
    report_path, picture = output / "report.json", output / "acceptance.png"
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    draw(report, picture)
    print_table(report)
    print(f"\nreport:  {report_path.resolve()}\npicture: {picture.resolve()}")
    return report_path


class _Demo:
    """One run against a running service."""

    def __init__(self, url: str, seed: int, say: Teller, budget: float) -> None:
        from openai import OpenAI

        self.url = url
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
        self.say = say
        self.random = random.Random(seed)
        self.seed = seed
        self.budget = budget
        self.parts = {domain: split(domain, NUM_HELD_OUT) for domain in DOMAINS}
        self.timeline: list[Answer] = []

    def run(self) -> Findings:
        """Measure, serve traffic, learn from it, measure again."""
        rounds = zip(*(self.parts[domain][1] for domain in DOMAINS), strict=True)
        held_out = [prompt for prompts in rounds for prompt in prompts]
        before = self._held_out(held_out, "held-out prompts, release 0", self.budget * _HELD_OUT_SHARE)
        speed_before = self._speed("speed, release 0", [None])
        self._traffic()
        run = self._retrain()
        after = self._held_out([answer.prompt for answer in before], f"held-out prompts, release {run['release']}")
        speed_after = self._speed(f"speed, release {run['release']} and target alone", [None, 0])
        return Findings(
            before,
            after,
            speed_before,
            speed_after,
            self.timeline,
            run,
            thresholds=self._get("/api/thresholds"),
            chain_length=CHAIN_LENGTH,
            seed=self.seed,
        )

    def ask(self, prompt: Prompt, chain_length: int | None, max_tokens: int, *, record: bool = False) -> Answer:
        """Send one prompt through the OpenAI API."""
        began = time.monotonic()
        reply = self.client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": prompt.text}],
            max_tokens=max_tokens,
            temperature=0,
            metadata={"domain": prompt.domain},
            extra_body={"speculation": {"chain_length": chain_length, "record": record}},
        )
        ended = time.monotonic()
        usage: Any = reply.usage
        details = usage.completion_tokens_details
        shown: dict[str, Any] = (reply.model_extra or {})["speculation"]
        return Answer(
            prompt=prompt,
            text=reply.choices[0].message.content or "",
            tokens=usage.completion_tokens,
            steps=shown["num_spec_steps"],
            proposed=details.accepted_prediction_tokens + details.rejected_prediction_tokens,
            accepted=details.accepted_prediction_tokens,
            releases=tuple(shown["releases"]),
            seconds=ended - began,
            finished=ended,
        )

    def _held_out(self, prompts: Sequence[Prompt], title: str, seconds: float = float("inf")) -> list[Answer]:
        """Every prompt, at the fixed chain length; on a slow machine fewer, but at least ``MIN_HELD_OUT`` a domain."""
        first, ends, waiting = len(self.timeline), time.monotonic() + seconds, deque(enumerate(prompts))

        def drain() -> None:
            while waiting:
                index, prompt = waiting.popleft()
                if index >= MIN_HELD_OUT * len(DOMAINS) and time.monotonic() > ends:
                    return
                self.timeline.append(self.ask(prompt, CHAIN_LENGTH, _HELD_OUT_TOKENS))

        with _pool(CONCURRENCY) as pool:
            self._watch([pool.submit(drain) for _ in range(CONCURRENCY)], title, first)
        self.say.done(title, self._line(first))
        place = {prompt.id: index for index, prompt in enumerate(prompts)}
        answers = sorted(self.timeline[first:], key=lambda answer: place[answer.prompt.id])
        self.timeline[first:] = answers  # they ended in the order of their acceptance
        return answers

    def _speed(self, title: str, chain_lengths: list[int | None]) -> dict[int | None, list[Answer]]:
        """One request at a time, the sides alternating."""
        found: dict[int | None, list[Answer]] = {length: [] for length in chain_lengths}
        for domain in DOMAINS:
            prompt = self.parts[domain][1][0]
            for length in chain_lengths:
                found[length].append(self.ask(prompt, length, _SPEED_TOKENS))
                self.say(title, f"{domain}: {found[length][-1].tokens / found[length][-1].seconds:.1f} tokens/s")
        self.say.done(title, "")
        return found

    def _traffic(self) -> None:
        """Recorded traffic, all domains mixed, until the prompts or the time share run out.

        Waves of plain decoding, because speculation does not pay at this batch size on a CPU: a verification yields
        the target's distributions whether or not a chain was drafted.  After each wave one request a domain
        speculates, so that acceptance is seen as it is.
        """
        ends = time.monotonic() + self.budget * _TRAFFIC_SHARE
        waiting, first = self._shuffled(), len(self.timeline)
        with _pool(CONCURRENCY) as pool:
            while waiting and time.monotonic() < ends:
                probes = [waiting.popleft() for _ in range(min(len(DOMAINS), len(waiting)))]
                wave = [waiting.popleft() for _ in range(min(CONCURRENCY, len(waiting)))]
                plan = ((wave, 0, _TRAFFIC_TOKENS), (probes, CHAIN_LENGTH, _PROBE_TOKENS))
                for prompts, length, tokens in plan:
                    workers = [pool.submit(self._serve, prompt, length, tokens) for prompt in prompts]
                    self._watch(workers, "traffic", first)
        self.say.done("traffic", self._line(first))

    def _serve(self, prompt: Prompt, chain_length: int, max_tokens: int) -> None:
        self.timeline.append(self.ask(prompt, chain_length, max_tokens, record=True))

    def _shuffled(self) -> deque[Prompt]:
        """Rounds of one prompt a domain, each domain in its own random order."""
        orders = [self.random.sample(rows, len(rows)) for rows, _ in self.parts.values()]
        return deque(prompt for prompts in zip(*orders, strict=True) for prompt in prompts)

    def _retrain(self) -> dict[str, Any]:
        """Trigger a run and keep requests going until its release is live."""
        title = "training while serving"
        run_id = self._post("/api/retrain")["run_id"]
        waiting, first = self._shuffled(), len(self.timeline)
        with _pool(1) as pool:
            worker = pool.submit(lambda: None)
            while (run := self._get(f"/api/runs/{run_id}"))["state"] in ("queued", "running"):
                if worker.done():
                    worker.result()
                    worker = pool.submit(self._serve, waiting.popleft(), CHAIN_LENGTH, _PROBE_TOKENS)
                    waiting = waiting or self._shuffled()
                self.say(title, " ".join(f"{k}={_short(v)}" for k, v in (run.get("progress") or {}).items()))
                time.sleep(1)
            if run["state"] != "passed":
                raise RunError(
                    f"Run {run_id} ended as {run['state']}: {run.get('error') or run.get('report')}. See state/."
                )
            worker.result()
            deadline = time.monotonic() + 60
            while run["release"] not in self.timeline[-1].releases:
                if time.monotonic() > deadline:
                    raise RunError(f"Release {run['release']} did not go live within 60 s. See state/service.log.")
                self._serve(waiting.popleft(), CHAIN_LENGTH, _PROBE_TOKENS)
        served = len(self.timeline) - first
        self.say.done(title, f"release {run['release']} passed the gate and is live; {served} requests meanwhile")
        return run

    def _watch(self, workers: Sequence["Future[None]"], title: str, first: int) -> None:
        """Show progress until all have ended; ``first``: where the phase begins in the timeline."""
        while not all(worker.done() for worker in workers):
            time.sleep(0.2)
            self.say(title, self._line(first))
        for worker in workers:
            worker.result()

    def _line(self, first: int) -> str:
        answers = list(self.timeline)
        latest = {
            domain: [a.acceptance_length for a in answers if a.prompt.domain == domain and a.proposed][-_SHOWN:]
            for domain in DOMAINS
        }
        shown = " ".join(f"{domain} {statistics.fmean(values):.2f}" for domain, values in latest.items() if values)
        rate = _recent_rate(answers[first:])
        return f"{len(answers) - first} answers · tokens a step: {shown or '…'} · {rate:.0f} tokens/s"

    def _get(self, path: str) -> dict[str, Any]:
        reply = httpx2.get(self.url + path, timeout=60)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    def _post(self, path: str) -> dict[str, Any]:
        reply = httpx2.post(self.url + path, json={}, timeout=60)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found


@contextmanager
def _pool(size: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that an interruption does not wait for: their requests fail when the service ends."""
    pool = ThreadPoolExecutor(size)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


@contextmanager
def _service(state: Path, training_seconds: float, say: Teller) -> Iterator[str]:
    """Run ``adaptive-spec serve`` on a free port with everything it writes below ``state``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = os.cpu_count() or 2
    settings = {
        "RECORDS__URL": f"sqlite:///{(state / 'demo.db').resolve()}",
        "RECORDS__FOLDER": str((state / "traces").resolve()),
        "RELEASES__FOLDER": str((state / "releases").resolve()),
        "LEARNING__TIME_LIMIT_SECONDS": round(training_seconds, 1),
        "LEARNING__THREADS": max(1, cores // 2),
        "DECODER__SLOTS": CONCURRENCY,
        "DECODER__MAX_CONTEXT_TOKENS": _MAX_CONTEXT_TOKENS,
        "SCHEDULE__RETRAIN_HOURS": 0,
        "SCHEDULE__CALIBRATE_HOURS": 0,
        "SERVER__PORT": port,
    }
    environment = {**os.environ, **{f"ADAPTIVE_SPEC_{name}": str(value) for name, value in settings.items()}}
    url = f"http://127.0.0.1:{port}"
    with open(state / "service.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "adaptive_spec.cli", "serve"],
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends the service
        )
    try:
        _wait_ready(url, process, state / "service.log", say)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _wait_ready(url: str, process: "subprocess.Popen[bytes]", log: Path, say: Teller) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = log.read_text(errors="replace").strip().splitlines()[-3:]
            raise RunError(f"The service ended while starting: {' | '.join(tail)}. The whole log: {log}")
        try:
            if httpx2.get(f"{url}/readyz", timeout=2).status_code == 200:
                say.done("service", f"ready at {url}")
                return
        except httpx2.HTTPError:
            pass
        say("service", "starting")
        time.sleep(0.5)
    raise RunError(f"The service was not ready after 180 s. Its log: {log}")


def _recent_rate(answers: Sequence[Answer]) -> float:
    """Completion tokens per second from the oldest of the latest answers' starts to their last end."""
    recent = answers[-CONCURRENCY:]
    if not recent:
        return 0.0
    began = min(answer.finished - answer.seconds for answer in recent)
    return sum(answer.tokens for answer in recent) / max(1e-9, max(answer.finished for answer in recent) - began)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
