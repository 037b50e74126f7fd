"""The whole loop on a real model, through the front door: serve, measure, learn from traffic, measure again.

Starts the service as a process of its own with a fresh database in the output folder and talks to it with the OpenAI
client.  Draft quality is compared at one fixed chain length on the same held-out prompts before and after, paired by
prompt; speed is reported separately, under the length policy and with the target alone.  Held-out prompts leave no
trace, so nothing that is measured is ever trained on.
"""

import json
import os
import platform
import random
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from adaptive_spec.bench.corpora import DOMAINS, Prompt, split
from adaptive_spec.errors import RunError
from adaptive_spec.releases.gate import TraceScore, paired_gain

CHAIN_LENGTH = 2
MAX_TOKENS = 48
NUM_HELD_OUT = 8
NUM_SPEED_PROMPTS = 1
CONCURRENCY = 8
_TRAFFIC_SHARE, _TRAINING_SHARE = 0.30, 0.26  # of the time budget


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request showed."""

    prompt: Prompt
    text: str
    tokens: int
    steps: int
    proposed: int
    accepted: int
    releases: tuple[int, ...]
    seconds: float
    finished: float

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / max(1, self.steps)


def run_demo(output: Path, seed: int, time_budget_seconds: float) -> Path:
    """Run the demo and return the path of ``report.json``.

    Raises:
        RunError: the service did not start, or the training run did not end in a release.
    """
    state = output / "state"
    shutil.rmtree(state, ignore_errors=True)
    state.mkdir(parents=True)
    say = _Teller()
    say("models", "fetching the quickstart target (once)")
    from adaptive_spec.models.fetch import fetch

    fetch("smollm2-135m", lambda part: say("models", part))
    with _service(state, time_budget_seconds * _TRAINING_SHARE, say) as url:
        demo = _Demo(url, seed, say, time_budget_seconds)
        report = demo.run()
    report_path = output / "report.json"
    report_path.write_text(json.dumps(report, indent=2) + "\n")
    picture = output / "acceptance.png"
    _draw(report, picture)
    _table(report)
    print(f"\nreport:  {report_path.resolve()}\npicture: {picture.resolve()}")
    return report_path


class _Demo:
    """One run against a running service."""

    def __init__(self, url: str, seed: int, say: "_Teller", budget: float) -> None:
        from openai import OpenAI

        self.url = url
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)
        self.say = say
        self.random = random.Random(seed)
        self.seed = seed
        self.budget = budget
        self.parts = {domain: split(domain, NUM_HELD_OUT) for domain in DOMAINS}
        self.timeline: list[Answer] = []

    def run(self) -> dict[str, Any]:
        held_out = [prompt for domain in DOMAINS for prompt in self.parts[domain][1]]
        before = self._all(held_out, "held-out prompts, release 0", chain_length=CHAIN_LENGTH)
        self.timeline.extend(before)
        speed_before = self._speed("speed, release 0", [None])
        self._traffic()
        run = self._retrain()
        after = self._all(held_out, f"held-out prompts, release {run['release']}", chain_length=CHAIN_LENGTH)
        self.timeline.extend(after)
        speed_after = self._speed(f"speed, release {run['release']} and target alone", [None, 0])
        return self._report(before, after, speed_before, speed_after, run)

    def ask(self, prompt: Prompt, *, chain_length: int | None = None, record: bool = False) -> Answer:
        """Send one prompt through the OpenAI API."""
        began = time.monotonic()
        reply = self.client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": prompt.text}],
            max_tokens=MAX_TOKENS,
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

    def _all(self, prompts: Sequence[Prompt], title: str, *, chain_length: int) -> list[Answer]:
        answers: list[Answer] = []
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            futures = [pool.submit(self.ask, prompt, chain_length=chain_length) for prompt in prompts]
            for future in as_completed(futures):
                answers.append(future.result())
                self.say(title, self._line(answers, len(prompts)))
        self.say.done(title, self._line(answers, len(prompts)))
        return answers

    def _speed(self, title: str, chain_lengths: list[int | None]) -> dict[int | None, list[Answer]]:
        """One request at a time, the sides alternating."""
        found: dict[int | None, list[Answer]] = {length: [] for length in chain_lengths}
        for domain in DOMAINS:
            for prompt in self.parts[domain][1][:NUM_SPEED_PROMPTS]:
                for length in chain_lengths:
                    found[length].append(self.ask(prompt, chain_length=length))
                    self.say(title, f"{domain}: {found[length][-1].tokens / found[length][-1].seconds:.1f} tokens/s")
        self.say.done(title, "")
        return found

    def _traffic(self) -> None:
        """Recorded traffic, all domains mixed, until the prompts or the time share run out."""
        waiting = self._shuffled()
        total, ends = len(waiting), time.monotonic() + self.budget * _TRAFFIC_SHARE
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            futures = [pool.submit(self._drain, waiting, ends) for _ in range(CONCURRENCY)]
            while not all(future.done() for future in futures):
                time.sleep(0.5)
                self.say("traffic", self._line(self.timeline, total + NUM_HELD_OUT * len(DOMAINS)))
            for future in futures:
                future.result()
        self.say.done("traffic", self._line(self.timeline, total + NUM_HELD_OUT * len(DOMAINS)))

    def _shuffled(self) -> deque[Prompt]:
        rows = [prompt for domain in DOMAINS for prompt in self.parts[domain][0]]
        self.random.shuffle(rows)
        return deque(rows)

    def _drain(self, waiting: deque[Prompt], ends: float, enough: Callable[[], bool] = lambda: False) -> None:
        while time.monotonic() < ends and not enough():
            try:
                prompt = waiting.popleft()
            except IndexError:
                return
            self.timeline.append(self.ask(prompt, chain_length=CHAIN_LENGTH, record=True))

    def _retrain(self) -> dict[str, Any]:
        """Trigger a run and keep requests going until its release is live."""
        run_id = self._post("/api/retrain")["run_id"]
        finished: list[dict[str, Any]] = []
        waiting = self._shuffled()
        with ThreadPoolExecutor(1) as pool:
            live = pool.submit(self._drain, waiting, time.monotonic() + self.budget, lambda: bool(finished))
            while not finished:
                time.sleep(1)
                run = self._get(f"/api/runs/{run_id}")
                if run["state"] not in ("queued", "running"):
                    finished.append(run)
                progress = run.get("progress") or {}
                self.say("training while serving", " ".join(f"{k}={_short(v)}" for k, v in progress.items()))
            live.result()
        run = finished[0]
        if run["state"] != "passed":
            raise RunError(
                f"Run {run_id} ended as {run['state']}: {run.get('error') or run.get('report')}. See state/."
            )
        deadline = time.monotonic() + 30
        while not self.timeline or run["release"] not in self.timeline[-1].releases:
            if time.monotonic() > deadline:
                raise RunError(f"Release {run['release']} did not go live within 30 s. See state/service.log.")
            self.timeline.append(self.ask(self.parts[DOMAINS[0]][0][0], chain_length=CHAIN_LENGTH))
        self.say.done("training while serving", f"release {run['release']} passed the gate and is live")
        return run

    def _report(
        self,
        before: list[Answer],
        after: list[Answer],
        speed_before: dict[int | None, list[Answer]],
        speed_after: dict[int | None, list[Answer]],
        run: dict[str, Any],
    ) -> dict[str, Any]:
        texts = {answer.prompt.id: answer.text for answer in before}
        changed = [answer.prompt.id for answer in after if texts[answer.prompt.id] != answer.text]
        gains = paired_gain(_scores(before), _scores(after), self.seed)
        thresholds = self._get("/api/thresholds")
        return {
            "domains": [
                {
                    "domain": domain,
                    "num_prompts": gains[domain].n,
                    "acceptance_length_before": gains[domain].before,
                    "acceptance_length_after": gains[domain].after,
                    "gain_interval": [gains[domain].low, gains[domain].high],
                    "draft_acceptance_rate_before": _rate(_of(domain, before)),
                    "draft_acceptance_rate_after": _rate(_of(domain, after)),
                    "tokens_per_second_before": _tokens_per_second(_of(domain, speed_before[None])),
                    "tokens_per_second_after": _tokens_per_second(_of(domain, speed_after[None])),
                    "tokens_per_second_target_alone": _tokens_per_second(_of(domain, speed_after[0])),
                    "chain_length_chosen": _mean_chain(_of(domain, speed_after[None])),
                }
                for domain in DOMAINS
            ],
            "chain_length": CHAIN_LENGTH,
            "num_traffic_requests": len(self.timeline) - len(before) - len(after),
            "outputs_changed_by_release": changed,
            "release": run["release"],
            "gate": run.get("report"),
            "thresholds": thresholds,
            "timeline": [
                {
                    "domain": answer.prompt.domain,
                    "acceptance_length": answer.acceptance_length,
                    "releases": answer.releases,
                }
                for answer in self.timeline
            ],
            "versions": {name: version(name) for name in ("adaptive-spec", "torch", "transformers", "peft")},
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            "seed": self.seed,
        }

    def _line(self, answers: Sequence[Answer], total: int) -> str:
        recent = list(answers)
        shown = " ".join(
            f"{domain} {statistics.fmean(a.acceptance_length for a in rows):.2f}"
            for domain in DOMAINS
            if (rows := _of(domain, recent)[-20:])
        )
        window = recent[-3 * CONCURRENCY :]
        rate = 0.0
        if len(window) > 1:
            rate = sum(a.tokens for a in window[1:]) / max(1e-9, window[-1].finished - window[0].finished)
        return f"{len(recent)}/{total} requests · tokens a step: {shown} · {rate:.0f} tokens/s"

    def _get(self, path: str) -> dict[str, Any]:
        import httpx2

        reply = httpx2.get(self.url + path, timeout=60)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found

    def _post(self, path: str) -> dict[str, Any]:
        import httpx2

        reply = httpx2.post(self.url + path, json={}, timeout=60)
        reply.raise_for_status()
        found: dict[str, Any] = reply.json()
        return found


class _Teller:
    """Progress: one line rewritten on a terminal, a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._last = 0.0
        self._terminal = sys.stdout.isatty()

    def __call__(self, title: str, text: str) -> None:
        now = time.monotonic()
        if now - self._last < (0.3 if self._terminal else 10):
            return
        self._last = now
        line = f"[{now - self._began:4.0f} s] {title}: {text}"
        print(f"\r\x1b[2K{line[:150]}" if self._terminal else line, end="" if self._terminal else "\n", flush=True)

    def done(self, title: str, text: str) -> None:
        """End a phase with a line that stays."""
        self._last = 0.0
        start = "\r\x1b[2K" if self._terminal else ""
        print(f"{start}[{time.monotonic() - self._began:4.0f} s] {title}: {text or 'done'}", flush=True)


@contextmanager
def _service(state: Path, training_seconds: float, say: _Teller) -> Iterator[str]:
    """Run ``adaptive-spec serve`` on a free port with everything it writes below ``state``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores = os.cpu_count() or 2
    settings = {
        "MODEL__THREADS": max(1, cores // 2),
        "RECORDS__URL": f"sqlite:///{(state / 'demo.db').resolve()}",
        "RECORDS__FOLDER": str((state / "traces").resolve()),
        "RELEASES__FOLDER": str((state / "releases").resolve()),
        "LEARNING__TIME_LIMIT_SECONDS": round(training_seconds, 1),
        "LEARNING__THREADS": max(1, cores // 2),
        "DECODER__SLOTS": CONCURRENCY,
        "SCHEDULE__RETRAIN_HOURS": 0,
        "SCHEDULE__CALIBRATE_HOURS": 0,
        "SERVER__PORT": port,
    }
    environment = {**os.environ, **{f"ADAPTIVE_SPEC_{name}": str(value) for name, value in settings.items()}}
    url = f"http://127.0.0.1:{port}"
    with open(state / "service.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "adaptive_spec.cli", "serve"], stdout=log, stderr=log, env=environment
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


def _wait_ready(url: str, process: "subprocess.Popen[bytes]", log: Path, say: _Teller) -> None:
    import httpx2

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


def _of(domain: str, answers: Sequence[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.prompt.domain == domain]


def _scores(answers: Sequence[Answer]) -> list[TraceScore]:
    return [TraceScore(a.prompt.domain, a.prompt.id, _rate([a]), _rate([a]), a.acceptance_length) for a in answers]


def _rate(answers: Sequence[Answer]) -> float:
    return sum(a.accepted for a in answers) / max(1, sum(a.proposed for a in answers))


def _mean_chain(answers: Sequence[Answer]) -> float:
    return sum(a.proposed for a in answers) / max(1, sum(a.steps for a in answers))


def _tokens_per_second(answers: Sequence[Answer]) -> float:
    return statistics.median(a.tokens / a.seconds for a in answers)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Held-out prompts, chains of {report['chain_length']}: release 0 against {report['release']}")
    for heading in (
        "domain",
        "prompts",
        "tokens/step before",
        "after",
        "gain, 95 % interval",
        "tokens/s before",
        "after",
        "target alone",
        "chain chosen",
    ):
        table.add_column(heading, justify="left" if heading == "domain" else "right")
    for row in report["domains"]:
        gain = row["acceptance_length_after"] - row["acceptance_length_before"]
        low, high = row["gain_interval"]
        table.add_row(
            row["domain"],
            str(row["num_prompts"]),
            f"{row['acceptance_length_before']:.2f}",
            f"{row['acceptance_length_after']:.2f}",
            f"{gain:+.2f} [{low:+.2f}, {high:+.2f}]",
            f"{row['tokens_per_second_before']:.1f}",
            f"{row['tokens_per_second_after']:.1f}",
            f"{row['tokens_per_second_target_alone']:.1f}",
            f"{row['chain_length_chosen']:.1f}",
        )
    Console(width=140).print(table)
    slower = [
        r["domain"] for r in report["domains"] if r["tokens_per_second_after"] < r["tokens_per_second_target_alone"]
    ]
    if slower:
        print(
            f"Speculation does not pay on this machine for: {', '.join(slower)}. On a CPU a verification of several "
            "tokens costs well over one plain step; see README, 'What to expect'."
        )
    if report["outputs_changed_by_release"]:
        print(f"WARNING: outputs changed for {report['outputs_changed_by_release']}; run adaptive-spec check-lossless.")
    else:
        print(
            "Every held-out answer is identical before and after the release: the draft decides speed, never content."
        )


def _draw(report: dict[str, Any], path: Path) -> None:
    """Acceptance over requests, one line per domain, a marker where the release went live."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), dpi=120)
    timeline = report["timeline"]
    for domain in DOMAINS:
        points = [(i, row["acceptance_length"]) for i, row in enumerate(timeline) if row["domain"] == domain]
        if not points:
            continue
        places, values = zip(*points, strict=True)
        smooth = [float(np.mean(values[max(0, i - 9) : i + 1])) for i in range(len(values))]
        (line,) = axes.plot(places, smooth, label=domain)
        axes.plot(places, values, ".", markersize=3, alpha=0.35, color=line.get_color())
    switched = next((i for i, row in enumerate(timeline) if report["release"] in row["releases"]), None)
    if switched is not None:
        axes.axvline(switched, color="black", linestyle="--", linewidth=1)
        axes.annotate(f"release {report['release']}", (switched, axes.get_ylim()[1]), ha="right", va="top", rotation=90)
    axes.set_xlabel("request")
    axes.set_ylabel(f"tokens per step (chains of {report['chain_length']})")
    axes.set_title("Acceptance over requests, mean of the last ten requests of a domain")
    axes.legend(loc="upper left", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
