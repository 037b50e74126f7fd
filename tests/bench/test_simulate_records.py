"""Simulating a database: which cost and thresholds it takes, what it says when it cannot, the command and its chart."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from typer.testing import CliRunner

from adaptive_spec import cli
from adaptive_spec.bench.simulate_records import find_cost, simulate_records
from adaptive_spec.bench.simulate_report import EXPLAINED, basis
from adaptive_spec.calibration.cost import CostModel, this_hardware
from adaptive_spec.core import POOLED, Step, StepCost, Thresholds
from adaptive_spec.errors import NotEnoughDataError, SettingsError
from adaptive_spec.records.calibrations import add_calibration, thresholds_of
from adaptive_spec.records.costs import save_cost
from adaptive_spec.records.database import Database
from adaptive_spec.records.releases import add_release, set_live
from adaptive_spec.settings import Settings
from tests.records.rows import make_step, record

KEY = f"{this_hardware()}|cpu|tiny|batch=1"
STEP = StepCost(0.1, tuple(1 + 0.01 * n for n in range(7)), KEY)
runner = CliRunner()


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path / 'records.db'}"
    monkeypatch.setenv("ADAPTIVE_SPEC_RECORDS__URL", url)
    (tmp_path / "empty.toml").write_text("")
    monkeypatch.setenv("ADAPTIVE_SPEC_CONFIG", str(tmp_path / "empty.toml"))
    database = Database(url)
    database.upgrade()
    yield database
    database.close()


def serve(database: Database, accepted: dict[str, float], *, num_requests: int = 20, release: int = 0) -> None:
    """Record traffic, domains in turn: ten explored steps of chains of six a request, each token kept by chance."""
    random = numpy.random.default_rng(0)
    record(
        database,
        *(
            explored_step(f"{domain}-{release}-{request}", index, domain, release, random, share)
            for request in range(num_requests)
            for domain, share in accepted.items()
            for index in range(10)
        ),
    )


def explored_step(
    request: str, index: int, domain: str, release: int, random: numpy.random.Generator, share: float
) -> Step:
    kept = int(numpy.cumprod(random.random(6) < share).sum())
    positions = tuple((share, share, place < kept) for place in range(min(kept + 1, 6)))
    return make_step(request, index, domain=domain, release=release, chain_length=6, positions=positions, explored=True)


def store(database: Database, key: str = KEY) -> None:
    step = StepCost(STEP.draft_seconds, STEP.verify_seconds, key)
    save_cost(database, key, CostModel({1: step}).to_dict())


def test_the_command_prints_tables_json_and_a_chart(database: Database, tmp_path: Path) -> None:
    serve(database, {"tiny": 0.3}, num_requests=3)
    serve(database, {"code": 0.95, "law": 0.3})
    store(database)
    chart = tmp_path / "chart.svg"
    result = runner.invoke(cli.app, ["simulate", "--chart", str(chart)])
    assert result.exit_code == 0, result.output
    for told in ("the mix", "steps of 10 later requests", "not judged: domain tiny", KEY, *EXPLAINED):
        assert told in result.stdout
    assert chart.read_text().count("oracle") >= 3
    found = json.loads(runner.invoke(cli.app, ["simulate", "--json"]).stdout)
    assert (found["release"], found["drafter"]) == (0, "model")
    by_domain = {part["domain"]: part for part in found["domains"]}
    assert set(by_domain) == {"code", "law"}
    best = {
        name: max(
            (one for one in part["outcomes"] if one["policy"].startswith(("fixed", "off")) and one["goodput"]),
            key=lambda one: one["goodput"],
        )["policy"]
        for name, part in by_domain.items()
    }
    assert best == {"code": "fixed 6", "law": "fixed 1"}
    only = json.loads(runner.invoke(cli.app, ["simulate", "--json", "--domain", "law"]).stdout)
    assert [part["domain"] for part in only["domains"]] == ["law"]
    assert only["mix"] == []
    assert only["domains"][0]["outcomes"] == by_domain["law"]["outcomes"]


def test_the_mix_weighs_domains_by_their_tokens(database: Database) -> None:
    serve(database, {"code": 0.95, "law": 0.3})
    store(database)
    before = simulate_records(database, Settings()).simulation
    plain = [make_step(f"plain-{number}", domain="law", chain_length=0, positions=()) for number in range(1000)]
    record(database, *plain)  # steps without a chain count as traffic, not as material
    after = simulate_records(database, Settings()).simulation
    assert after.domain("law").traffic_share > before.domain("law").traffic_share
    assert after.domain("law").outcomes == before.domain("law").outcomes
    assert after.mix_outcome("fixed 2").goodput < before.mix_outcome("fixed 2").goodput


def test_the_live_release_and_its_thresholds_are_simulated(database: Database) -> None:
    store(database)
    serve(database, {"code": 0.95})
    serve(database, {"code": 0.5}, release=2)
    for version, parent in ((1, 0), (2, 1)):
        add_release(database, version, f"release-{version}", parent, {})
        set_live(database, version, "test")
    one, two = Thresholds(max_chain_length=1, survival=(0.5,)), Thresholds(stop_below=0.0, max_chain_length=2)
    add_calibration(database, POOLED, Thresholds(max_chain_length=5), {}, 1)
    add_calibration(database, "code", one, {}, 1)
    assert thresholds_of(database, 2, {2: 1, 1: 0})["code"] == one
    add_calibration(database, "code", two, {}, 2)
    assert thresholds_of(database, 2, {2: 1, 1: 0}) == {"code": two, POOLED: Thresholds(max_chain_length=5)}
    assert thresholds_of(database, 0, {}) == {}
    found = simulate_records(database, Settings())
    assert found.release == 2
    part = found.simulation.domain("code")
    assert part.outcome("live thresholds").drafted_tokens == 2
    assert simulate_records(database, Settings(), release=0).simulation.domain("code").outcome("off").goodput == 1


def test_costs_are_those_of_this_machine_or_the_named_one(database: Database, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No cost of a step is stored"):
        find_cost(database, None)
    store(database, "elsewhere|batch=1")
    with pytest.raises(SettingsError, match="other machines; name one with --cost to simulate it: 'elsewhere"):
        find_cost(database, None)
    store(database)
    assert find_cost(database, None).step == STEP
    assert find_cost(database, "elsewhere|batch=1").step.key == "elsewhere|batch=1"
    store(database, KEY + "x")
    with pytest.raises(SettingsError, match="Several costs were measured on this machine"):
        find_cost(database, None)
    with pytest.raises(SettingsError, match="neither the key of a stored cost nor a file"):
        find_cost(database, "nowhere")
    step = {"draft_seconds": 0.1, "verify_seconds": list(STEP.verify_seconds), "key": KEY}
    for value in (step, CostModel({1: STEP}).to_dict(), {"provenance": {"cost": step}}):
        (tmp_path / "cost.json").write_text(json.dumps(value))
        assert find_cost(database, str(tmp_path / "cost.json")).step == STEP
    for value in ({}, step | {"draft_seconds": -1}, []):
        (tmp_path / "cost.json").write_text(json.dumps(value))
        with pytest.raises(SettingsError, match="cannot be read"):
            find_cost(database, str(tmp_path / "cost.json"))


def test_what_cannot_be_simulated_says_what_to_do(database: Database, tmp_path: Path) -> None:
    store(database)
    empty = runner.invoke(cli.app, ["simulate"])
    assert empty.exit_code == 2
    assert "no speculative step is on record" in empty.stderr and "serve more traffic" in empty.stderr
    serve(database, {"code": 0.9})
    serve(database, {"tiny": 0.9}, num_requests=3)
    for arguments, told in (
        (["--domain", "law"], "drafted nothing in domain 'law' yet; those with some: code"),
        (["--domain", "tiny"], "Domain 'tiny' has only"),
        (["--batch", "2"], "was measured for steps of 1 row only"),
        (["--release", "7"], "Release 7: Nothing can be judged"),
        (["--drafter", "ngram"], "an n-gram chain ends where its match ends"),
        (["--chart", str(tmp_path / "chart.txt")], "neither a .png nor an .svg"),
        (["--chart", str(tmp_path / "nowhere" / "chart.png")], "does not exist"),
    ):
        result = runner.invoke(cli.app, ["simulate", *arguments])
        assert result.exit_code == 2, arguments
        assert told in result.stderr.replace("\n", " "), result.stderr


def test_without_a_database_none_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTIVE_SPEC_RECORDS__URL", f"sqlite:///{tmp_path / 'none.db'}")
    result = runner.invoke(cli.app, ["simulate"])
    assert result.exit_code == 2 and "There is no database" in result.stderr
    assert not (tmp_path / "none.db").exists()


def test_every_domain_says_what_its_figures_rest_on(database: Database) -> None:
    store(database)
    serve(database, {"code": 0.9})
    part = simulate_records(database, Settings()).simulation.domain("code")
    assert (part.num_explored_steps, part.num_cut_short) == (100, 0)
    assert f"of 600 values {part.num_filled_values} were filled in" in basis(part)
    with pytest.raises(NotEnoughDataError):
        simulate_records(database, Settings(), split=0.9)
