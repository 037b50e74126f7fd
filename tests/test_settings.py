"""Settings: defaults < TOML < environment < flags, and every mistake is named."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from adaptive_spec.errors import SettingsError
from adaptive_spec.settings import CONFIG_VARIABLE, Settings, load_settings, placed_at

TOML = '[decoder]\nslots = 2\nqueue_limit = 20\nmax_chain_length = 3\n\n[server]\nhost = "::1"\n'


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, no variable of the machine that runs the tests."""
    for name in [name for name in os.environ if name.startswith("ADAPTIVE_SPEC_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_defaults() -> None:
    settings = load_settings()
    assert settings.decoder.slots == 8
    assert settings.server.port == 8000
    assert settings.records.url.startswith("sqlite:///")


def test_each_source_beats_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adaptive-spec.toml").write_text(TOML)
    monkeypatch.setenv("ADAPTIVE_SPEC_DECODER__QUEUE_LIMIT", "30")
    monkeypatch.setenv("ADAPTIVE_SPEC_DECODER__MAX_CHAIN_LENGTH", "5")
    settings = load_settings({"decoder": {"max_chain_length": 6}})
    assert settings.decoder.max_context_tokens == 1024  # default
    assert settings.decoder.slots == 2  # TOML
    assert settings.decoder.queue_limit == 30  # environment
    assert settings.decoder.max_chain_length == 6  # flag
    assert settings.server.host == "::1"


def test_flags_that_were_not_given_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "adaptive-spec.toml").write_text(TOML)
    settings = load_settings({"decoder": {"slots": None}, "server": {"host": None, "port": 0}})
    assert (settings.decoder.slots, settings.server.host, settings.server.port) == (2, "::1", 0)


def test_the_file_may_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adaptive-spec.toml").write_text("[decoder]\nslots = 1\n")
    (tmp_path / "other.toml").write_text("[decoder]\nslots = 4\n")
    monkeypatch.setenv(CONFIG_VARIABLE, str(tmp_path / "other.toml"))
    assert load_settings().decoder.slots == 4
    monkeypatch.setenv(CONFIG_VARIABLE, "absent.toml")
    with pytest.raises(SettingsError, match=r"absent\.toml, which does not exist"):
        load_settings()


@pytest.mark.parametrize("text", ["[decoder]\nslotz = 1\n", "[decodr]\nslots = 1\n"])
def test_unknown_names_in_the_file_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "adaptive-spec.toml").write_text(text)
    with pytest.raises(SettingsError, match=r"slotz|decodr"):
        load_settings()


def test_unknown_names_in_the_environment_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAPTIVE_SPEC_DECODER__SLOTZ", "1")
    with pytest.raises(SettingsError, match=r"decoder\.slotz"):
        load_settings()


def test_unknown_flags_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"decoder\.slotz"):
        load_settings({"decoder": {"slotz": 1}})
    with pytest.raises(SettingsError, match="decodr"):
        load_settings({"decodr": {"slots": 1}})


def test_every_bad_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"decoder\.slots.*server\.port.*docs/quickstart\.md"):
        load_settings({"decoder": {"slots": 0}, "server": {"port": 70_000}})


@pytest.mark.parametrize("text", ["[decoder\n", "slots = = 1\n"])
def test_bad_toml_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    (tmp_path / "adaptive-spec.toml").write_text(text)
    with pytest.raises(SettingsError, match=r"adaptive-spec\.toml is not valid TOML.*line"):
        load_settings()


def test_settings_are_frozen_and_survive_json(tmp_path: Path) -> None:
    settings = load_settings({"decoder": {"slots": 3}})
    with pytest.raises(ValidationError):
        settings.decoder.slots = 4
    (tmp_path / "adaptive-spec.toml").write_text(TOML)  # a child process in the same folder keeps what it was given
    again = Settings.model_validate_json(settings.model_dump_json())
    assert again.model_dump() == settings.model_dump()  # where each comes from is this process's own matter


def test_the_token_stays_out_of_logs() -> None:
    assert "secret" not in repr(load_settings({"server": {"token": "secret"}}))


def test_records_are_taken_from_a_url_a_file_or_a_folder(tmp_path: Path) -> None:
    assert load_settings(placed_at("postgresql://host/name")).records.url == "postgresql://host/name"
    (tmp_path / "service.db").touch()
    (tmp_path / "traces").mkdir()
    default = load_settings()
    for reference in (str(tmp_path), str(tmp_path / "service.db"), f"sqlite:///{tmp_path / 'service.db'}"):
        settings = load_settings(placed_at(reference))
        assert settings.records.url == f"sqlite:///{tmp_path / 'service.db'}"
        assert settings.records.folder == tmp_path / "traces"
        assert settings.releases.folder == default.releases.folder, "there are none beside it"


def test_records_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no database"):
        placed_at(str(tmp_path / "absent.db"))
    with pytest.raises(SettingsError, match="0 databases"):
        placed_at(str(tmp_path))
    for name in ("one.db", "two.db"):
        (tmp_path / name).touch()
    with pytest.raises(SettingsError, match="2 databases"):
        placed_at(str(tmp_path))
