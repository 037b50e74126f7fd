import logging
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from adaptive_spec.errors import RecordsError, ReleaseError, SettingsError
from adaptive_spec.records.database import Database
from adaptive_spec.redaction import hide_secrets
from adaptive_spec.releases.store import BundleStore
from adaptive_spec.settings import load_settings

SECRET = "s3cr3t"
URLS = [
    f"postgresql://me:{SECRET}@db:5432/records",
    f"postgresql://me:p@/{SECRET}@db/records",
    f"postgresql://me@db/records?password={SECRET}&sslmode=require",
    f"postgresql://db/records?user=me&sslpassword={SECRET}",
    f"s3://key:{SECRET}@bucket/prefix",
    f"https://store.example/x?X-Amz-Signature={SECRET}",
]


@pytest.mark.parametrize("url", URLS)
def test_secrets_of_urls_are_hidden_wherever_they_stand(url: str) -> None:
    for around in ("{}", "cannot reach {}: timed out", '{{"url": "{}"}}'):
        hidden = hide_secrets(around.format(url))
        assert SECRET not in hidden and "***" in hidden
        assert hidden.startswith(around.partition("{}")[0].replace("{{", "{"))


@pytest.mark.parametrize(
    "plain",
    ["sqlite:////data/a.db", "postgresql://me@db:5432/records", "s3://bucket/a@b", "max_tokens 5", "http://[::1]:80/x"],
)
def test_what_is_no_secret_stays(plain: str) -> None:
    assert hide_secrets(plain) == plain


def test_settings_are_shown_without_secrets() -> None:
    settings = load_settings(
        {
            "server": {"token": SECRET},
            "records": {"url": URLS[2]},
            "releases": {"store": URLS[4]},
            "decoder": {"domain_drafters": {"token": "ngram"}},
        }
    )
    assert SECRET not in repr(settings) + str(settings.shown())
    assert settings.shown()["server"]["token"] == "***"
    assert settings.shown()["decoder"]["domain_drafters"] == {"token": "ngram"}
    assert load_settings().shown()["server"]["token"] == ""


@pytest.mark.parametrize("url", ["nonsense", *URLS[:4]])
def test_databases_that_cannot_be_used_keep_their_passwords(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = url.replace("@db:5432/", "@127.0.0.1:9/").replace("@db/", "@127.0.0.1:9/").replace("//db/", "//127.0.0.1:9/")
    with pytest.raises(RecordsError) as refused:
        Database(url if "://" in url else f"{url}:{SECRET}").check()
    assert SECRET not in str(refused.value) + caplog.text
    with pytest.raises(RecordsError) as refused:
        Database(f"mysql://me:{SECRET}@db/records")
    assert SECRET not in str(refused.value)


def test_errors_of_the_database_quote_no_rows(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'a.db'}")
    with pytest.raises(SQLAlchemyError) as refused, database.session_scope() as session:
        session.execute(text("INSERT INTO nothing VALUES (:value)"), {"value": SECRET})
    assert SECRET not in str(refused.value)
    database.close()


def test_stores_that_cannot_be_used_keep_their_passwords(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        BundleStore(tmp_path, f"nonsense://me:{SECRET}@host/x")
    assert SECRET not in str(refused.value)
    store = BundleStore(tmp_path, f"memory://me:{SECRET}@host/x")
    with pytest.raises(ReleaseError) as missing:
        store.fetch("release-000001")
    assert SECRET not in str(missing.value)


def test_bad_settings_do_not_quote_what_was_given(tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({"server": {"token": [SECRET], "port": SECRET, SECRET[:2]: SECRET}})
    assert SECRET not in str(refused.value)
