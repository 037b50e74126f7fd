"""How much one client, and all together, may ask of /v1.

Who the client is, ``authorization`` has noted in the request.  Everything here runs on the event loop, so nothing is
locked.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from adaptive_spec.errors import RateLimitError
from adaptive_spec.serving.problems import answer_of
from adaptive_spec.settings import LimitSettings

_KNOWN_CLIENTS = 10_000
_AGAIN_SECONDS = 1.0  # when a running request may have ended; nobody knows


_ROUNDING = 1e-6  # of an amount: whoever waits as long as told finds it there


class Bucket:
    """Fills evenly with what a minute brings, up to that much.  More may be taken than it holds: then it owes.

    Args:
        per_minute: 0: never empty.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def take(self, amount: float, now: float) -> None:
        """Take an amount, at ``now`` seconds."""
        if self._per_minute:
            self._level = self._level_at(now) - amount
            self._at = now

    def wait_seconds(self, amount: float, now: float) -> float:
        """How long until it holds an amount; 0: it does."""
        if not self._per_minute:
            return 0.0
        missing = amount - self._level_at(now)
        return missing * 60 / self._per_minute if missing > _ROUNDING else 0.0

    def _level_at(self, now: float) -> float:
        return min(self._per_minute, self._level + (now - self._at) * self._per_minute / 60)


@dataclass(slots=True)
class Client:
    """What is known of one client."""

    requests: Bucket
    tokens: Bucket
    num_running: int = 0


class Clients:
    """Admits requests of clients and counts those that run."""

    def __init__(self, settings: LimitSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._clients: OrderedDict[str, Client] = OrderedDict()  # the least recent first
        self._num_running = 0

    def admit(self, name: str) -> Client:
        """Begin a request of a client; ``release`` ends it.

        Raises:
            RateLimitError: it, or all together, ask for too much.
        """
        limits, now = self._settings, self._clock()
        client = self._client(name, now)
        if limits.concurrent_requests and self._num_running >= limits.concurrent_requests:
            raise RateLimitError(f"{self._num_running} requests are open, as many as may be. Try again in a moment.")
        if limits.client_requests and client.num_running >= limits.client_requests:
            raise RateLimitError(
                f"{client.num_running} requests of this client are open, as many as may be. Wait for one to end."
            )
        if wait := client.requests.wait_seconds(1, now):
            raise _too_many(f"{limits.client_requests_per_minute} requests", wait)
        # Nobody knows beforehand how long an answer gets: who is not in debt may ask, and then owes what it took.
        if wait := client.tokens.wait_seconds(1, now):
            raise _too_many(f"{limits.client_tokens_per_minute} tokens", wait)
        client.requests.take(1, now)
        client.num_running += 1
        self._num_running += 1
        return client

    def release(self, client: Client) -> None:
        """End a request."""
        client.num_running -= 1
        self._num_running -= 1

    def spend(self, client: Client, num_tokens: int) -> None:
        """Count tokens that a client's request took."""
        client.tokens.take(num_tokens, self._clock())

    def _client(self, name: str, now: float) -> Client:
        if name not in self._clients:
            self._make_room()
            limits = self._settings
            self._clients[name] = Client(
                Bucket(limits.client_requests_per_minute, now), Bucket(limits.client_tokens_per_minute, now)
            )
        self._clients.move_to_end(name)
        return self._clients[name]

    def _make_room(self) -> None:
        """Forget the client that was here longest ago, when there are many; none whose requests run."""
        if len(self._clients) >= _KNOWN_CLIENTS:
            gone = next((name for name, client in self._clients.items() if not client.num_running), None)
            if gone is not None:
                del self._clients[gone]


class Limits:
    """Admits the posts to /v1, or answers 429.  Leaves in the request's state ``spend``, which counts tokens."""

    def __init__(self, app: ASGIApp, settings: LimitSettings) -> None:
        self._app = app
        self._clients = Clients(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        try:
            client = self._clients.admit(scope["state"]["client"])
        except RateLimitError as error:
            await answer_of(error)(scope, receive, send)
            return
        scope["state"]["spend"] = lambda num_tokens: self._clients.spend(client, num_tokens)
        try:
            await self._app(scope, receive, send)
        finally:
            self._clients.release(client)


def _too_many(what: str, wait_seconds: float) -> RateLimitError:
    return RateLimitError(
        f"This client has had its {what} a minute. Try again in {math.ceil(wait_seconds)} seconds.", wait_seconds
    )
