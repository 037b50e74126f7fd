"""Which token a route needs, and whether the request has it.

By method and path alone, so that a route that is added is guarded without a word: what changes something needs
``admin``, what reads ``read`` where the operator wants that closed, ``/v1`` likewise ``api``.  Probes are open.
"""

import base64
import binascii
import ipaddress

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from adaptive_spec.serving.keyring import Keyring
from adaptive_spec.serving.origins import SAFE_METHODS, is_loopback
from adaptive_spec.serving.ports import Service
from adaptive_spec.serving.problems import refusal
from adaptive_spec.serving.tokens import Token

PROBES = ("/livez", "/readyz")


class Authorization:
    """Lets through what may pass, and notes in the request's state who the ``client`` is."""

    def __init__(self, app: ASGIApp, service: Service, keyring: Keyring) -> None:
        self._app = app
        self._service = service
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _given_token(Headers(scope=scope).get("authorization", ""))
        token = await self._keyring.find(given, self._service.settings.server.token) if given else None
        needed = needed_scope(scope["method"], scope["path"])
        if needed is not None and self._is_closed(needed) and not (token and token.allows(needed)):
            await _refused(token, needed, scope["path"])(scope, receive, send)
            return
        scope.setdefault("state", {})["client"] = f"token {token.id}" if token else _address(scope)
        await self._app(scope, receive, send)

    def _is_closed(self, needed: str) -> bool:
        server = self._service.settings.server
        if needed == "admin":
            return bool(server.token) or self._keyring.in_use or not is_loopback(server.host)
        return server.read_needs_token if needed == "read" else server.api_needs_token


def needed_scope(method: str, path: str) -> str | None:
    """The scope of a route; None: anybody may call it."""
    if path in PROBES:
        return None
    if path.startswith("/v1/"):
        return "api"
    return "read" if method in SAFE_METHODS else "admin"


def _refused(token: Token | None, needed: str, path: str) -> Response:
    if token is not None:
        return refusal(403, f"The token {token.name} has not the scope {needed}. Use one that has.")
    # Browsers ask for a password when they may; theirs is the token, under any user name.
    is_page = not path.startswith(("/api/", "/v1/", "/metrics"))
    scheme = 'Basic realm="adaptive-spec", charset="UTF-8"' if is_page else "Bearer"
    return refusal(
        401,
        f"This route needs the service's token, or one with the scope {needed}: send `Authorization: Bearer TOKEN`. "
        "`adaptive-spec tokens add` makes one.",
        {"WWW-Authenticate": scheme},
    )


def _given_token(authorization: str) -> str:
    scheme, _, credentials = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return credentials.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _address(scope: Scope) -> str:
    """The client's address; of IPv6 its network of 64 bits, since one machine has all of these."""
    host = scope["client"][0] if scope.get("client") else ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"address {host}"
    return f"address {ipaddress.ip_network((address, 64), strict=False) if address.version == 6 else address}"
