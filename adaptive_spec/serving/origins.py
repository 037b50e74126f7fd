"""What a browser sends on behalf of a page elsewhere is refused.

Any page can make a browser post to 127.0.0.1 (CSRF), or let its own name point there and then read as well (DNS
rebinding).  The first shows in ``Origin``, the second in ``Host``; pages can forge neither.
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from adaptive_spec.serving.problems import refusal
from adaptive_spec.settings import ServerSettings

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")  # RFC 9110: they change nothing


class Origins:
    """Refuses names that are not this service's, and changes that pages elsewhere ask for."""

    def __init__(self, app: ASGIApp, server: ServerSettings) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = self._objection(scope) if scope["type"] == "http" else None
        if told is None:
            await self._app(scope, receive, send)
        else:
            await refusal(403, told)(scope, receive, send)

    def _objection(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_ours(host):
            return f"This service is not called {host}. Use its address, or add the name to server.allowed_hosts."
        if origin is None or scope["method"] in SAFE_METHODS or origin in self._server.allowed_origins:
            return None
        if origin.partition("://")[2] == host:
            return None
        return (
            f"Requests from pages of {origin} are refused. Call the route from its own origin, or add this one to "
            "server.allowed_origins."
        )

    def _is_ours(self, host: str) -> bool:
        """Bound to loopback, only this machine's own names are; elsewhere all, unless the operator lists them."""
        allowed = self._server.allowed_hosts
        if not host or not (allowed or is_loopback(self._server.host)):
            return True
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or name in (each.lower() for each in allowed)


def is_loopback(host: str) -> bool:
    """Whether a host names this machine for itself alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
