"""Prompts become traces that a run could have recorded; bad lines cost no good ones; a killed import goes on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from typer.testing import CliRunner

from adaptive_spec import cli
from adaptive_spec.bench.corpora import DOMAINS
from adaptive_spec.core import Trace
from adaptive_spec.decoding.slot import Slot
from adaptive_spec.errors import ModelError, RequestError, SettingsError
from adaptive_spec.importing.answers import ImportReport, Writing, import_prompts
from adaptive_spec.importing.prompts import Prompt, read_prompts
from adaptive_spec.models.loading import ModelPair, pair_of
from adaptive_spec.records.database import Database
from adaptive_spec.records.traces import TraceStore
from adaptive_spec.settings import Settings, load_settings
from tests.conftest import byte_tokenizer, tiny_model

WRITING = Writing("sql", max_tokens=20)
BUNDLED = Path(cli.__file__).parents[1] / "bench" / "prompts"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(
        {
            "decoder": {"max_context_tokens": 96, "slots": 3, "prefill_chunk_tokens": 16},
            "records": {
                "url": f"sqlite:///{tmp_path / 'r.db'}",
                "folder": tmp_path / "traces",
                "trace_top_k": 8,
                "untraced_domains": ["law"],
            },
        }
    )


@pytest.fixture
def store(settings: Settings) -> Any:
    database = Database(settings.records.url)
    database.upgrade()
    yield TraceStore(database, settings.records.folder, settings.records.held_out_share)
    database.close()


def prompts_of(*texts: str) -> list[Prompt]:
    return [Prompt(line, text) for line, text in enumerate(texts, start=1)]


def run(store: TraceStore, pair: ModelPair, settings: Settings, prompts: Any, writing: Writing = WRITING) -> Any:
    said: list[str] = []
    report = import_prompts(store, pair, settings, prompts, writing, lambda title, text: said.append(text))
    assert isinstance(report, ImportReport)
    return report, said


def write(path: Path, *rows: Any) -> Path:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return path


def test_lines_are_read_and_bad_ones_are_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        {"id": "a", "prompt": "Hello"},
        b"{",
        b"",
        {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]},
        b'{"prompt": "\xff"}',
        ["prompt"],
        {"text": "x"},
        {"prompt": " "},
        {"prompt": 3},
        {"messages": [{"role": "robot", "content": "Hi"}]},
        {"messages": [{"role": "assistant", "content": "Hi"}]},
        {"prompt": "x", "messages": []},
        {"prompt": "Last"},
    )
    prompts, problems = read_prompts(path)
    asked = {"role": "user", "content": "Hi"}
    assert prompts == [
        Prompt(1, "Hello"),
        Prompt(4, ({"role": "system", "content": "Be brief."}, asked)),
        Prompt(5, (asked,)),
        Prompt(14, "Last"),
    ]
    assert [problem.line for problem in problems] == [2, 6, 7, 8, 9, 10, 11, 12, 13]
    assert all(problem.reason for problem in problems)
    with pytest.raises(RequestError, match=r"none\.jsonl"):
        read_prompts(tmp_path / "none.jsonl")


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_bundled_prompts_are_understood(domain: str) -> None:
    prompts, problems = read_prompts(BUNDLED / f"{domain}.jsonl")
    assert len(prompts) > 50 and problems == []


def test_traces_hold_what_the_target_says(store: TraceStore, pair: ModelPair, settings: Settings) -> None:
    messages = (
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "c"},
    )
    report, said = run(store, pair, settings, [*prompts_of("one", "another"), Prompt(3, messages)])
    traces = store.load()
    assert report.num_stored + report.num_dropped == 3 and report.num_stored == len(traces) > 0
    assert (report.num_known, report.problems) == (0, ())
    assert said[-1].startswith("3 of 3 prompts")
    heads = {"user: one\nassistant: ", "user: another\nassistant: ", "user: two\nassistant: 2\nuser: c\nassistant: "}
    assert {pair.tokenizer.decode(trace.tokens[: trace.prompt_tokens]) for trace in traces} <= heads
    for trace in traces:
        check_against_the_target(pair, trace)


def check_against_the_target(pair: ModelPair, trace: Trace) -> None:
    ids = torch.tensor([trace.tokens])
    with torch.inference_mode():
        logits = pair.target(ids).logits[0, trace.prompt_tokens - 1 : -1]
    log_probs = logits.float().log_softmax(-1)
    assert logits.argmax(-1).tolist() == list(trace.tokens[trace.prompt_tokens :])
    assert trace.top_ids.shape == (len(trace.tokens) - trace.prompt_tokens, 8)
    held = log_probs.gather(1, torch.from_numpy(trace.top_ids).long()).numpy()
    numpy.testing.assert_allclose(trace.top_log_probs, held, atol=1e-3)
    numpy.testing.assert_allclose(trace.tail_mass, 1 - numpy.exp(held).sum(1), atol=1e-4)
    assert (trace.domain, trace.release) == ("sql", 0)


def test_what_is_known_is_not_asked_again(store: TraceStore, pair: ModelPair, settings: Settings) -> None:
    first, _ = run(store, pair, settings, prompts_of("one", "another", "third"))
    stored = {trace.request_id for trace in store.load()}
    again, said = run(store, pair, settings, prompts_of("one", "another", "third", "one"))
    assert {trace.request_id for trace in store.load()} == stored
    assert again.num_stored == 0 and again.num_known == first.num_stored + 1
    assert len(said) == first.num_dropped  # only those that left no trace were asked again
    warm, _ = run(store, pair, settings, prompts_of("one"), replace(WRITING, temperature=1.0))
    assert warm.num_known == 0


def test_a_failure_keeps_what_was_written(
    store: TraceStore, pair: ModelPair, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = 0

    def tell(title: str, text: str) -> None:
        nonlocal told
        told += 1
        if told == 4:
            raise KeyboardInterrupt

    prompts = prompts_of(*"abcdefgh")
    with pytest.raises(KeyboardInterrupt):
        import_prompts(store, pair, settings, prompts, replace(WRITING, temperature=1.0), tell)
    assert len(store.load()) == 4
    report, _ = run(store, pair, settings, prompts, replace(WRITING, temperature=1.0))
    assert (report.num_known, report.num_stored) == (4, 4)


def test_prompts_that_the_target_fails_on_are_problems(
    store: TraceStore, pair: ModelPair, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Slot.keep_targets

    def fail_on_b(slot: Slot, *targets: torch.Tensor) -> None:
        if "b\n" in pair.tokenizer.decode(slot.request.prompt_ids):
            raise ValueError("broken")
        real(slot, *targets)

    monkeypatch.setattr(Slot, "keep_targets", fail_on_b)
    report, _ = run(store, pair, settings, prompts_of("a", "b", "c"), replace(WRITING, temperature=1.0))
    assert [problem.line for problem in report.problems] == [2]
    assert (report.num_stored, report.num_known) == (2, 0)


def test_prompts_that_do_not_fit_are_problems(store: TraceStore, pair: ModelPair, settings: Settings) -> None:
    report, _ = run(store, pair, settings, prompts_of("x" * 200, "fits", "y" * 70))
    (problem,) = report.problems
    assert problem.line == 1 and "the context holds 96" in problem.reason
    assert report.num_stored + report.num_dropped == 2
    assert all(len(trace.tokens) <= 96 for trace in store.load())


def test_raw_prompts_and_models_without_a_template(store: TraceStore, settings: Settings) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    bare = pair_of(tiny_model(0), tiny_model(1), tokenizer, "bare")
    with pytest.raises(ModelError, match="--raw"):
        run(store, bare, settings, prompts_of("once upon"))
    run(store, bare, settings, prompts_of("once upon"), replace(WRITING, raw=True, temperature=1.0))
    (trace,) = store.load()
    assert tokenizer.decode(trace.tokens[: trace.prompt_tokens]) == "once upon"


def test_domains_that_cannot_have_traces_are_refused(store: TraceStore, pair: ModelPair, settings: Settings) -> None:
    with pytest.raises(RequestError, match="not a name"):
        run(store, pair, settings, prompts_of("x"), Writing("a b"))
    with pytest.raises(SettingsError, match="untraced_domains"):
        run(store, pair, settings, prompts_of("x"), Writing("law"))


def test_the_command(tmp_path: Path, pair: ModelPair, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("URL", settings.records.url), ("FOLDER", settings.records.folder)):
        monkeypatch.setenv(f"ADAPTIVE_SPEC_RECORDS__{name}", str(value))
    monkeypatch.setattr("adaptive_spec.models.loading.load_pair", lambda _: pair)
    path = write(tmp_path / "p.jsonl", {"prompt": "one"}, b"nonsense", {"prompt": "two"})
    command = ["traces", "import", str(path), "--domain", "sql", "--max-tokens", "8", "--temperature", "1"]
    result = CliRunner().invoke(cli.app, [*command, "--json"])
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert (report["num_stored"], [problem["line"] for problem in report["problems"]]) == (2, [2])
    assert f"{path}:2: not JSON" in result.stderr
    path = write(tmp_path / "good.jsonl", {"prompt": "one"}, {"prompt": "two"})
    result = CliRunner().invoke(cli.app, ["traces", "import", str(path), *command[3:]])
    assert result.exit_code == 0, result.output
    assert "0 traces stored, 2 known already" in result.stdout
    assert CliRunner().invoke(cli.app, ["traces", "import", str(path), "--domain", "a b"]).exit_code == 2
