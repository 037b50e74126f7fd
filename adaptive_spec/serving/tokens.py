"""The tokens of a service: a file of their hashes, which ``adaptive-spec tokens`` writes and the service reads again
when it changes.

A token is ``as-ID-SECRET``.  The id is no secret: it names the one hash to compare with, so that a wrong token costs
no slow hash unless somebody knows an id.  On the standard library alone, so that commands start at once.
"""

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adaptive_spec.errors import SettingsError

SCOPES = ("admin", "read", "api")  # change by control routes, and read them; read them; /v1
MOST_NAME_CHARACTERS = 64
_PREFIX = "as"
# RFC 7914: 16 MiB and some 50 ms.  A made-up token has 256 bits anyway.
_SCRYPT = {"n": 2**14, "r": 8, "p": 1, "dklen": 32}


@dataclass(frozen=True, slots=True)
class Token:
    """What is kept of a token; salt and digest in hexadecimal."""

    id: str
    name: str
    scopes: tuple[str, ...]
    created_at: str
    salt: str = field(repr=False)
    digest: str = field(repr=False)

    def allows(self, scope: str) -> bool:
        """Whether it opens routes of this scope; who may change may read."""
        return scope in self.scopes or (scope == "read" and "admin" in self.scopes)

    def matches(self, given: str) -> bool:
        """Whether ``given`` is this token.  Slow on purpose."""
        return hmac.compare_digest(_digest(given, bytes.fromhex(self.salt)), bytes.fromhex(self.digest))


class TokenFile:
    """The file.

    Raises (every method):
        SettingsError: the file is damaged, or what is asked does not fit what it holds.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Token]:
        """All tokens, the oldest first; none when there is no file."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SettingsError(f"{self.path} cannot be read: {error.strerror}. Correct its permissions.") from error
        try:
            return [_token(entry) for entry in json.loads(text)["tokens"]]
        except (ValueError, TypeError, KeyError) as error:
            raise SettingsError(
                f"{self.path} is damaged. Restore it, or delete it and make new tokens with `adaptive-spec tokens add`."
            ) from error

    def add(self, name: str, scopes: Sequence[str]) -> str:
        """Make a token and return it; nothing else ever knows it whole."""
        if not 1 <= len(name) <= MOST_NAME_CHARACTERS:
            raise SettingsError(f"A token's name has 1 to {MOST_NAME_CHARACTERS} characters. Choose another.")
        with self._changing() as tokens:
            if any(token.name == name for token in tokens):
                raise SettingsError(f"There is a token {name} already. Revoke it first, or choose another name.")
            identity = secrets.token_hex(4)
            made = f"{_PREFIX}-{identity}-{secrets.token_urlsafe(32)}"
            salt = secrets.token_bytes(16)
            created = datetime.now(UTC).isoformat(timespec="seconds")
            digest = _digest(made, salt).hex()
            tokens.append(Token(identity, name, tuple(dict.fromkeys(scopes)), created, salt.hex(), digest))
        return made

    def revoke(self, name: str) -> None:
        """Forget a token.  The file stays, though empty: routes that needed one still do."""
        with self._changing() as tokens:
            kept = [token for token in tokens if token.name != name]
            if len(kept) == len(tokens):
                raise SettingsError(f"There is no token {name}. `adaptive-spec tokens list` shows them.")
            tokens[:] = kept

    @contextmanager
    def _changing(self) -> Iterator[list[Token]]:
        """Let one process at a time change the list; the file is replaced whole."""
        folder = self.path.absolute().parent
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f".{self.path.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tokens = self.read()
            yield tokens
            written = json.dumps({"tokens": [asdict(token) for token in tokens]}, indent=2) + "\n"
            handle, temporary = tempfile.mkstemp(prefix=f".{self.path.name}-", dir=folder)  # for the owner's eyes only
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as file:
                    file.write(written)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise


def token_id(given: str) -> str | None:
    """The id in a token that a client sent; None when it is none of ours."""
    prefix, _, rest = given.partition("-")
    identity, dash, _ = rest.partition("-")
    return identity if prefix == _PREFIX and dash else None


def _token(entry: dict[str, Any]) -> Token:
    token = Token(**{**entry, "scopes": tuple(entry["scopes"])})
    bytes.fromhex(token.salt + token.digest)
    return token


def _digest(given: str, salt: bytes) -> bytes:
    return hashlib.scrypt(given.encode(errors="surrogateescape"), salt=salt, **_SCRYPT)
