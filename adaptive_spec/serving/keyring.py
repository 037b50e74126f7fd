"""Who sends a request: the holder of a token, or an address.  Keeps up with the token file while the service runs."""

import hashlib
import hmac
import logging
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread

from adaptive_spec.errors import SettingsError
from adaptive_spec.serving.tokens import SCOPES, Token, TokenFile, token_id

logger = logging.getLogger(__name__)

_PLAIN = Token("server.token", "server.token", SCOPES, "", "", "")
_Stamp = tuple[int, int, int] | None  # modification time, size and inode of the file; None: there is none


@dataclass(slots=True)
class _Tokens:
    """One state of the file, and the tokens that were found valid under it, by their SHA-256."""

    by_id: dict[str, Token] = field(default_factory=dict)
    seen: dict[bytes, Token] = field(default_factory=dict)


class Keyring:
    """Recognises tokens.

    A file that cannot be read, or that vanishes, opens nothing: its tokens are valid no more, and where there has been
    one, tokens stay required.
    """

    def __init__(self, path: Path) -> None:
        self._file = TokenFile(path)
        self._tokens = _Tokens()
        self._stamp: _Stamp = None
        self._was_there = False
        self._one_at_a_time = anyio.CapacityLimiter(1)  # wrong tokens must not take more than one core

    @property
    def in_use(self) -> bool:
        """Whether there are tokens, or were."""
        self._keep_up()
        return self._was_there

    async def find(self, given: str, plain: str) -> Token | None:
        """The token that a client sent; None when it is not valid.

        Args:
            plain: the setting ``server.token``, which has every scope; empty: there is none.
        """
        fingerprint = hashlib.sha256(given.encode(errors="surrogateescape")).digest()
        if plain and hmac.compare_digest(fingerprint, hashlib.sha256(plain.encode()).digest()):
            return _PLAIN
        self._keep_up()
        tokens = self._tokens
        if fingerprint in tokens.seen:
            return tokens.seen[fingerprint]
        token = tokens.by_id.get(token_id(given) or "")
        if token is None or not await anyio.to_thread.run_sync(token.matches, given, limiter=self._one_at_a_time):
            return None
        tokens.seen[fingerprint] = token  # of this state: what a later one revokes was not seen under it
        return token if tokens is self._tokens else await self.find(given, plain)

    def _keep_up(self) -> None:
        stamp = self._look()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        self._was_there = self._was_there or stamp is not None
        try:
            self._tokens = _Tokens({token.id: token for token in self._file.read()})
        except SettingsError as error:
            self._tokens = _Tokens()
            logger.error("no token of the file is valid: %s", error)

    def _look(self) -> _Stamp:
        try:
            found = self._file.path.stat()
        except FileNotFoundError:
            return None
        except OSError:
            return 0, 0, 0  # reading it will say why
        return found.st_mtime_ns, found.st_size, found.st_ino
