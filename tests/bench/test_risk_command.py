"""``adaptive-spec risk`` on a real database."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adaptive_spec import cli
from adaptive_spec.bench.risk import recorded_risk
from adaptive_spec.core import Thresholds
from adaptive_spec.errors import NotEnoughDataError
from adaptive_spec.records.calibrations import add_calibration
from adaptive_spec.records.database import Database
from adaptive_spec.records.releases import add_release, set_live
from adaptive_spec.settings import Settings, load_settings
from tests.calibration.evidence import planted
from tests.records.rows import make_evidence, record


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path / 'r.db'}")
    database.upgrade()
    yield database
    database.close()


def store(
    database: Database,
    domain: str,
    num_requests: int,
    *,
    release: int = 0,
    greedy: bool = True,
    temperature: float = 1.0,
) -> None:
    chains = planted(num_requests)
    record(
        database,
        *(
            make_evidence(
                f"{domain}-{release}-{request}",
                place,
                domain=domain,
                release=release,
                chain=(1,),
                strict=(bool(chains.strict[place, 0]),),
                similarities=(float(chains.similarities[place, 0]),),
                greedy=greedy,
                temperature=temperature,
            )
            for place, request in enumerate(chains.request_index.tolist())
        ),
    )


def relaxed(**verification: object) -> Settings:
    return load_settings({"verification": {"verifier": "logits", "divergence_budget": 0.1, **verification}})


def test_the_budget_is_kept_on_recorded_traffic(database: Database) -> None:
    store(database, "code", 300)
    store(database, "law", 40)
    store(database, "alone", 1)
    told: list[str] = []
    code, law = recorded_risk(database, relaxed(), num_samples=100, tell=lambda title, text: told.append(title))
    assert (code.domain, code.num_requests, code.num_chains, code.num_samples) == ("code", 300, 1500, 100)
    assert code.expected_exceeded_share <= 0.1 == pytest.approx(code.allowed_share)
    assert code.relaxed_share > 0.9 and code.tokens_per_step > code.tokens_per_step_exact > 1
    assert 0 < code.divergence_share < 0.1
    assert (law.domain, law.relaxed_share, law.divergence_share, law.exceeded_share) == ("law", 0, 0, 0)
    assert law.tokens_per_step == pytest.approx(law.tokens_per_step_exact, rel=0.05)
    assert told == []  # it was quick


def test_only_chains_of_the_draft_and_its_sampling_temperature_count(database: Database) -> None:
    store(database, "code", 30, greedy=False, temperature=2.0)
    store(database, "code", 20, release=1)
    add_release(database, 1, None, 0, {"passed": True})
    add_release(database, 2, None, 0, {"kind": "calibration"})
    add_calibration(database, "code", Thresholds(sampling_temperature=2.0), {}, 2)
    with pytest.raises(NotEnoughDataError, match="release 0"):
        recorded_risk(database, relaxed())  # release 0 draws at temperature 1
    set_live(database, 2, "test")
    assert recorded_risk(database, relaxed(), num_samples=1)[0].num_requests == 30
    assert recorded_risk(database, relaxed(), num_samples=1, release=1)[0].num_requests == 20
    with pytest.raises(NotEnoughDataError, match=r"verification\.evidence_share"):
        recorded_risk(database, load_settings())


def test_the_command(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTIVE_SPEC_RECORDS__URL", f"sqlite:///{tmp_path / 'r.db'}")
    monkeypatch.setenv("ADAPTIVE_SPEC_VERIFICATION__VERIFIER", "logits")
    runner = CliRunner()
    nothing = runner.invoke(cli.app, ["risk"])
    assert nothing.exit_code == 2 and "verification.evidence_share" in nothing.output
    store(database, "code", 30)
    shown = runner.invoke(cli.app, ["risk", "--samples", "3"])
    assert shown.exit_code == 0 and "code" in shown.output
    [found] = json.loads(runner.invoke(cli.app, ["risk", "--samples", "3", "--json"]).output)["domains"]
    assert (found["domain"], found["budget"], found["num_samples"]) == ("code", 0.02, 3)
