import os
import stat
import threading
from pathlib import Path

import anyio
import pytest

from adaptive_spec.errors import SettingsError
from adaptive_spec.serving import tokens
from adaptive_spec.serving.keyring import Keyring
from adaptive_spec.serving.tokens import Token, TokenFile


@pytest.fixture(autouse=True)
def quick_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tokens._SCRYPT, "n", 16)


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    return TokenFile(tmp_path / "tokens.json")


def found(keyring: Keyring, given: str, plain: str = "") -> Token | None:
    return anyio.run(keyring.find, given, plain)


def test_a_token_is_stored_as_a_salted_hash_for_the_owners_eyes(file: TokenFile) -> None:
    made = [file.add(name, ["admin"]) for name in ("one", "two")]
    text = file.path.read_text()
    assert not any(token.rpartition("-")[2] in text for token in made)
    one, two = file.read()
    assert one.salt != two.salt and one.matches(made[0]) and not one.matches(made[1])
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert one.digest not in repr(one) and one.salt not in repr(one)


def test_names_are_unique_and_revoked_once(file: TokenFile) -> None:
    file.add("one", ["admin"])
    with pytest.raises(SettingsError, match="already"):
        file.add("one", ["api"])
    file.revoke("one")
    with pytest.raises(SettingsError, match="no token one"):
        file.revoke("one")
    assert file.read() == []
    with pytest.raises(SettingsError, match="characters"):
        file.add("", ["api"])


def test_nothing_is_lost_when_several_change_it_at_once(file: TokenFile) -> None:
    threads = [threading.Thread(target=file.add, args=(f"t{number}", ["api"])) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {token.name for token in file.read()} == {f"t{number}" for number in range(8)}


def test_scopes() -> None:
    assert [_token("admin").allows(scope) for scope in ("admin", "read", "api")] == [True, True, False]
    assert [_token("read").allows(scope) for scope in ("admin", "read", "api")] == [False, True, False]
    assert [_token("api").allows(scope) for scope in ("admin", "read", "api")] == [False, False, True]


def _token(scope: str) -> Token:
    return Token("1", "one", (scope,), "", "", "")


def test_the_service_follows_the_file(file: TokenFile) -> None:
    keyring = Keyring(file.path)
    assert not keyring.in_use
    one = file.add("one", ["admin"])
    assert found(keyring, one).name == "one" and keyring.in_use
    two = file.add("two", ["api"])
    assert found(keyring, one).name == "one" and found(keyring, two).scopes == ("api",)
    file.revoke("one")
    assert found(keyring, one) is None and found(keyring, two).name == "two"
    file.revoke("two")
    assert found(keyring, two) is None and keyring.in_use, "a token is needed still"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"tokens": [{"id": "1"}]}', '{"tokens": 1}'])
def test_a_damaged_file_opens_nothing(file: TokenFile, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    keyring = Keyring(file.path)
    one = file.add("one", ["admin"])
    kept = file.path.read_text()
    assert found(keyring, one)
    file.path.write_text(damage)
    assert found(keyring, one) is None and keyring.in_use
    assert "damaged" in caplog.text
    file.path.write_text(kept)
    assert found(keyring, one)
    file.path.unlink()
    assert found(keyring, one) is None and keyring.in_use


def test_a_valid_token_pays_the_slow_hash_once_and_a_stranger_never(
    file: TokenFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = file.add("one", ["admin"])
    keyring, hashed = Keyring(file.path), []
    matches = Token.matches
    monkeypatch.setattr(Token, "matches", lambda token, given: hashed.append(given) or matches(token, given))
    for given in ("", "x", "as-", "as-0-x", "sk-1234", "as-ffffffff-" + "y" * 43, "\udcff"):
        assert found(keyring, given) is None
    assert hashed == []
    wrong = one[:-1] + ("A" if one[-1] != "A" else "B")
    assert found(keyring, wrong) is None and found(keyring, wrong) is None
    assert all(found(keyring, one).name == "one" for _ in range(5))
    assert hashed == [wrong, wrong, one]


def test_the_plain_token_has_every_scope(file: TokenFile) -> None:
    keyring = Keyring(file.path)
    token = found(keyring, "s3cret", plain="s3cret")
    assert token and all(token.allows(scope) for scope in ("admin", "read", "api"))
    assert found(keyring, "s3cre", plain="s3cret") is None


def test_the_real_hash_is_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    assert tokens._SCRYPT["n"] * tokens._SCRYPT["r"] * 128 == 16 << 20, "bytes of memory"
    file = TokenFile(tmp_path / "tokens.json")
    made = file.add("one", ["api"])
    assert file.read()[0].matches(made)
    assert set(os.listdir(tmp_path)) == {"tokens.json", ".tokens.json.lock"}, "no file is left half written"
